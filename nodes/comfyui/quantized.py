"""Quantized weights as ComfyUI carries them: QuantizedTensors of comfy-kitchen's, with layouts that are registered."""

import mmap
import sys
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import cycle
from typing import Any, TypeGuard

import numpy
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor, get_layout_class, register_layout_class
from comfy_kitchen.tensor import BaseLayoutParams

from ...kernels import LazyTensor
from .file_slices import read_into

NATIVE_FORMAT = "int8_tensorwise"
"""ComfyUI's own INT8, by the name that files have."""

NATIVE_LAYOUT: str = QUANT_ALGOS[NATIVE_FORMAT]["comfy_tensor_layout"]
"""The layout that ComfyUI's own loaders hold it in."""

FORWARDED_LAYOUT = "ForwardedINT8Layout"
"""NATIVE_LAYOUT under another name. Up to 0.38 ComfyUI's `linear_input_act` multiplies by weights of NATIVE_LAYOUT past
the forward of their linear, and calls the forward of any other."""
_NATIVE_LAYOUTS = NATIVE_LAYOUT, FORWARDED_LAYOUT
register_layout_class(FORWARDED_LAYOUT, type(FORWARDED_LAYOUT, (get_layout_class(NATIVE_LAYOUT),), {}))

# Beside threads that compile, a part waits milliseconds, whatever its size: with 16 MB a load took up to twice as long.
_BUFFER_BYTES = 64 << 20
_COPIES_AT_ONCE = 2  # beside one a load took 1.3 to 1.7 times as long: new memory of the host is what takes it
_OWN_MAPPING_BYTES = 1 << 20
_COPIED_AT_ONCE = 1 << 16  # bytes of pageable memory for which nobody waits
_HOST = torch.device("cpu")

NATIVE_GROUPED_LAYOUT = "AsymW4A8Int8Layout"
"""The layout of W4A8 and W6A8 weights in a ComfyUI that knows them. Its parameters have the scales of groups (`scale`),
`s_channel`, `codebook`, `group_size` and `convrot_groupsize`."""


def stored(weight: QuantizedTensor) -> torch.Tensor:
    """The integers, bytes or small floats that a quantized weight consists of."""
    return weight._qdata


def layout_of(weight: QuantizedTensor) -> str:
    """The name of a quantized weight's layout."""
    return weight._layout_cls


def has_layout(weight: Any, layout: str) -> TypeGuard[QuantizedTensor]:
    """Whether a tensor is quantized with this layout."""
    return isinstance(weight, QuantizedTensor) and weight._layout_cls == layout


def is_native_int8(weight: Any) -> TypeGuard[QuantizedTensor]:
    """Whether a weight is a linear's in ComfyUI's own INT8, as ComfyUI's loaders hold it."""
    return isinstance(weight, QuantizedTensor) and weight._layout_cls in _NATIVE_LAYOUTS and weight.ndim == 2


@contextmanager
def native_int8_as(layout: str, linear: Any) -> Iterator[None]:
    """Hold the weight of a linear in this of its two layouts inside the context, if it is native INT8."""
    before = linear.weight._layout_cls if is_native_int8(linear.weight) else layout
    if before != layout:
        _rename(linear, layout)
    try:
        yield
    finally:
        if before != layout:
            _rename(linear, before)  # it may hold another weight now


def _rename(linear: Any, layout: str) -> None:
    for weight in (linear.weight, getattr(linear, "_v_weight", None)):  # the copy that dynamic VRAM keeps on the card
        if is_native_int8(weight):
            weight._layout_cls = layout


@contextmanager
def forwarded(linear: Any) -> Iterator[None]:
    """Let ComfyUI call the forward of a linear inside the context, past which `linear_input_act` would multiply by
    weights in INT8 or fp16. In the forward the weight has its own layout, by which ComfyUI's product knows INT8."""
    with ExitStack() as undo:
        if not getattr(linear, "comfy_force_forward", False):  # else Apply, ComfyUI or another observer does it
            linear.comfy_force_forward = True
            undo.callback(delattr, linear, "comfy_force_forward")
        if has_layout(linear.weight, NATIVE_LAYOUT):
            undo.enter_context(native_int8_as(FORWARDED_LAYOUT, linear))
            calls = undo.enter_context(ExitStack())  # a cancel is no Exception: no hook is called behind it
            undo.enter_context(
                linear.register_forward_pre_hook(lambda *_: calls.enter_context(native_int8_as(NATIVE_LAYOUT, linear)))
            )
            undo.enter_context(linear.register_forward_hook(lambda *_: calls.close(), always_call=True))
        yield


def is_plain_grouped(weight: QuantizedTensor) -> bool:
    """Whether a weight of NATIVE_GROUPED_LAYOUT is codes and scales as in files, with nothing added to its groups."""
    form = weight._params
    packed = getattr(form, "mma_packed", False) or getattr(form, "transposed", False)
    return not packed and getattr(form, "correction", None) is None


def storage_shape(weight: QuantizedTensor, shape: tuple[int, int]) -> tuple[int, ...] | None:
    """The shape in which a weight's layout stores weights of this shape [N, K]; None where only the layout knows."""
    layout = weight.layout_cls
    if hasattr(layout, "get_storage_shape"):
        return tuple(layout.get_storage_shape(shape))
    if weight._layout_cls == "TensorCoreConvRotW4A4Layout":  # which has no such method
        return shape[0], shape[1] // 2
    return shape if weight._qdata.is_floating_point() or is_native_int8(weight) else None


class HeldWeight(QuantizedTensor):
    """A module's quantized weight for ComfyUI's hooks, which copy it, change it, and copy back into its `data`.

    `data` of a plain QuantizedTensor has copies of the scales: the weight would keep those of its patched self. Here
    `to` goes through pinned buffers between the host and a GPU where the caller waits, as when a MODEL is loaded into a
    GPU or unloaded. What stays on its device is not copied for a hook, which puts another tensor in its place
    (stored_weights.put_hooked): ComfyUI may have pinned this memory, so it has to live on.
    """

    @property
    def data(self) -> "HeldWeight":
        return HeldWeight(self._qdata, self._layout_cls, self._params)

    def detach(self) -> "HeldWeight":
        return self.data  # a Parameter is made of this

    def half(self) -> torch.Tensor:  # ComfyUI's LoRA extraction writes what this gives into a file
        return self.dequantize().half()

    def to(self, *args, copy: bool = False, **kwargs) -> QuantizedTensor:
        device = kwargs.get("device", args[0] if args else None)  # or a dtype
        for_device = isinstance(device, torch.device)
        waits = not kwargs.get("non_blocking") and not any(argument is True for argument in args)
        there = self
        if waits and for_device and _crosses_slowly(self._qdata, device):
            there = to_device(self, device)
        moved = QuantizedTensor.to(there, *args, **kwargs)
        stays = for_device and not isinstance(self._qdata, LazyTensor)
        return moved.clone() if copy and moved._qdata is self._qdata and not stays else moved

    def _copy_with(self, *args, **kwargs) -> "HeldWeight":
        return held_weight(super()._copy_with(*args, **kwargs))

    @classmethod
    def __tensor_unflatten__(cls, *parts) -> "HeldWeight":
        """Return a weight of this class: PyTorch 2.15 compares it with that of the weight that it stands for."""
        rebuilt = QuantizedTensor.__tensor_unflatten__(*parts)
        return cls(rebuilt._qdata, rebuilt._layout_cls, rebuilt._params)


def held_weight(weight: Any) -> Any:
    """Return ComfyUI's plain QuantizedTensor as a HeldWeight; anything else as it is."""
    return HeldWeight(weight._qdata, weight._layout_cls, weight._params) if type(weight) is QuantizedTensor else weight


@dataclass(frozen=True)
class HeldParams(BaseLayoutParams):
    """What belongs to the integers of a weight. ComfyUI pins these, and none of its tensors, in the ordinary memory
    mode."""

    def copy_from(self, src: BaseLayoutParams, non_blocking: bool = False) -> None:
        """Copy as BaseLayoutParams does, but large tensors through pinned memory of their own: CUDA copies pageable
        memory when all copies before it have ended, and the caller waits."""
        if non_blocking and self.scale.is_cuda:
            tensors = ((name, getattr(src, name)) for name in src._tensor_fields())
            large = {name: t for name, t in tensors if type(t) is torch.Tensor and t.nbytes > _COPIED_AT_ONCE}
            with suppress(RuntimeError):  # no memory can be pinned
                src = replace(src, **{name: t.pin_memory() for name, t in large.items() if not t.is_cuda})
        super().copy_from(src, non_blocking)


def _crosses_slowly(x: torch.Tensor, device: torch.device) -> bool:
    """Whether a copy would run between a GPU and pages of the host that are not pinned."""
    if isinstance(x, LazyTensor):  # it is computed on the GPU
        return False
    return {x.device.type, device.type} == {"cpu", "cuda"} and x.is_contiguous() and not x.is_pinned()


def _copied(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    if not _crosses_slowly(x, device):
        return x.to(device=device)
    copy = torch.empty(x.shape, dtype=x.dtype, device=device)
    if not read_into(copy, x):
        _fill(copy, x)
    return copy


def to_device(weight: Any, device: torch.device, copied: Callable[..., torch.Tensor] = _copied) -> Any:
    """Return a tensor, quantized or not, on a device, as `copied` puts it there; not copied where it is there."""
    if not isinstance(weight, QuantizedTensor):
        return copied(weight, device)
    return weight._copy_with(copied(weight._qdata, device), weight._params.to_device(device))


def new_in_host(x: torch.Tensor) -> torch.Tensor:
    """Return new memory of the host for numbers like these, in pages of 2 MB where the system has them: those took a
    third of the time to fill.

    On Linux a large piece is a mapping of its own, which the system gets back with it. glibc keeps what lay in pieces
    below 32 MB, and most weights are smaller.
    """
    if not x.numel():
        return torch.empty(x.shape, dtype=x.dtype)
    if sys.platform == "linux" and x.nbytes >= _OWN_MAPPING_BYTES:
        memory = mmap.mmap(-1, x.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # of a system without such pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = numpy.empty(x.nbytes, numpy.uint8)
    return torch.frombuffer(memory, dtype=x.dtype).view(x.shape)


def _fill(copy: torch.Tensor, x: torch.Tensor) -> None:
    try:
        buffers = torch.empty(2, _BUFFER_BYTES, dtype=torch.uint8, pin_memory=True)
    except RuntimeError:  # no memory can be pinned
        copy.copy_(x)
    else:
        copy_through(buffers, x, copy)


def copy_through(buffers: torch.Tensor, x: torch.Tensor, copy: torch.Tensor) -> None:
    """Copy a contiguous tensor between the host and a GPU into one like it, through two buffers of the host, uint8
    [2, bytes].

    A GPU reads or writes a pinned buffer at the speed of the bus, while several threads of the host fill or empty the
    other. In a plain copy one thread does it all. On the host of an H100 that copied 10 GB/s instead of 45 from pages
    of a file, and 2 instead of 20 into new memory.
    """
    if not x.numel():
        return
    crossing: deque[tuple] = deque()  # parts of both on the bus, at most one a buffer

    def settle() -> None:
        buffer, its, event = crossing.popleft()
        if event is not None:
            event.synchronize()
        if not copy.is_cuda:
            its.copy_(buffer)

    gpu = next((each.device for each in (x, copy) if each.is_cuda), None)
    given, taken = (each.reshape(-1).view(torch.uint8).split(buffers.shape[1]) for each in (x, copy))
    for some, its, buffer in zip(given, taken, cycle(buffers), strict=False):
        if len(crossing) == len(buffers):
            settle()
        held = buffer[: len(some)].copy_(some, non_blocking=True)
        if copy.is_cuda:
            its.copy_(held, non_blocking=True)
        crossing.append((held, its, None if gpu is None else torch.cuda.current_stream(gpu).record_event()))
    while crossing:
        settle()


class HostCopies:
    """Copies weights into the host's memory on background threads, a few at a time.

    Copies are complete after `wait`; until then their weights stay on the GPU. The threads end with this object.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_COPIES_AT_ONCE, "INT8 DiT copies weights")
        self._under_way: deque[Future[None]] = deque()

    def __call__(self, weight: Any) -> Any:
        """Return a tensor, quantized or not, in the host's memory, to be filled. Raises what an earlier copy did."""
        self._settle(_COPIES_AT_ONCE - 1)
        return to_device(weight, _HOST, self._begun)

    def _begun(self, x: torch.Tensor, host: torch.device) -> torch.Tensor:
        if not _crosses_slowly(x, host):
            return x.to(host)
        copy = new_in_host(x)
        ready = torch.cuda.current_stream(x.device).record_event() if x.is_cuda else None
        self._under_way.append(self._threads.submit(_fill_beside, copy, x, ready))
        return copy

    def wait(self) -> None:
        """Wait until all copies are complete. Raises what a thread did."""
        self._settle(0)

    def _settle(self, most: int) -> None:
        while len(self._under_way) > most:
            self._under_way.popleft().result()


def _fill_beside(copy: torch.Tensor, x: torch.Tensor, ready: Any) -> None:
    """Fill on this thread, on a stream of its own, after the event `ready`; it is None on a CPU."""
    with torch.inference_mode():  # each thread has to enter it, and ComfyUI's nodes make tensors in it
        if ready is None:
            return _fill(copy, x)
        with torch.cuda.stream(torch.cuda.Stream(x.device)):
            ready.wait()
            _fill(copy, x)


HeldWeight.__name__ = QuantizedTensor.__name__  # ComfyUI knows by this name whose memory it can pin
