"""One real forward of a MODEL, timed and split into linears, attention and the rest; its blocks on fused kernels."""

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from comfy.model_management import throw_exception_if_processing_interrupted as check_cancelled
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP
from comfy.quant_ops import QuantizedTensor, get_layout_class

from ...kernels import interruptible, quantize_weight, settle
from ...kernels.benchmark import (
    AttentionShape,
    AttentionSizes,
    BlockCalls,
    Calls,
    ForwardSplit,
    LinearShape,
    Stopwatch,
    longest,
)
from ..attention.attention_kinds import read_call
from ..attention.attention_override import AttentionObserver
from ..comfyui.attention import comfyuis_attention
from ..comfyui.patcher import passing
from ..comfyui.quantized import NATIVE_LAYOUT, forwarded
from ..deferred.install import deferred_call
from ..host.sampling import empty_latent, sample_euler
from ..host.work import make_room
from ..linears.apply_kernel import fused_class
from ..linears.layer_selection import quantizable_in, quantizable_linears
from .made_up_prompt import FAILURES, made_up_prompt

_KEY = "int8_dit_benchmark"
_PIXELS, _SMALL_PIXELS = 1024, 128
# A forward is compared, and two load what it launches. Then three are timed as they are, and one with a clock at each
# block, linear and attention.
_BEFORE, _STEPS = 3, 7
_MOST_ATTENTION_CALLS = 4
_ROUNDS = 2
_WARM = 3
# A card takes its time to find the clocks that a load lets it have: INT8 draws less power than bf16, and runs faster.
_SETTLING, _WINDOW = 500.0, 500.0  # milliseconds
# An INT8 copy, what quantizing takes, and a float copy of the rest, per weight.
_BYTES_PER_WEIGHT = 8
# A model of more weights keeps a CPU for minutes.
_MOST_WEIGHTS_ON_CPU = 100e6
_TORCHS_OWN = frozenset(vars(torch.nn.Module()))
"""The attributes of every module: its tensors and modules, and its hooks."""


class NoForward(Exception):
    """No forward of this MODEL can be measured here; the message says why, and what to do."""


def measure_forward(model: ModelPatcher, positive: list | None, latent: dict | None) -> ForwardSplit:
    """Sample a few steps of a MODEL, which is left unchanged, and time the last ones.

    Without `positive` the model runs with a made-up prompt, or none; without `latent` at 1024 px, on a CPU at 128.
    Raises NoForward where that fails, ComfyUI's interrupt on cancel.
    """
    weights = sum(parameter.numel() for parameter in model.model.diffusion_model.parameters())
    if model.load_device.type == "cpu" and weights > _MOST_WEIGHTS_ON_CPU:
        raise NoForward("a forward of a model of this size takes too long on a CPU")
    known = positive is not None and latent is not None
    if positive is None:
        tried = empty_latent(model, _SMALL_PIXELS) if latent is None else latent
        positive = made_up_prompt(model, tried)
    if latent is None:
        latent = empty_latent(model, _SMALL_PIXELS if model.load_device.type == "cpu" else _PIXELS)
    with passing(model.clone()) as watched:
        clock = _Clock(watched)
        watched.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, clock.call)
        try:
            sample_euler(watched, positive, latent, _STEPS, lambda *_: check_cancelled())
        except FAILURES as error:
            if known:
                raise
            raise NoForward(
                f"connect positive and latent_image to measure a forward of this model ({error})"
            ) from error
        return clock.split()


class _Clock:
    """Times calls of a MODEL: some undisturbed, then one with every block, linear and attention watched."""

    def __init__(self, model: ModelPatcher) -> None:
        self._linears = quantizable_linears(model)
        lists = block_lists(model.model.diffusion_model)
        self._notes: list[tuple[torch.nn.Module, Callable[..., None]]] = [
            *((block, partial(self._note_block, path)) for path, blocks in lists.items() for block in blocks),
            *((module, partial(self._note_linear, name)) for name, module in self._linears.items()),
        ]
        self._device, self._watch = model.load_device, Stopwatch(model.load_device)
        self._whole: list[Any] = []
        self._products: dict[tuple[int, int, int], tuple[str, list]] = {}
        self._attention: dict[AttentionSizes | None, list] = {}
        self._called: dict[str, tuple[list, tuple]] = {}  # the blocks of a list, and what one was called with
        self._blocks: list[BlockCalls] = []
        self._watches, self._working_bytes = False, 0
        AttentionObserver(model, _KEY, self._attend)

    def call(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        self._watches = len(self._whole) == _STEPS - 1
        with ExitStack() as undo:
            for linear in self._linears.values() if self._watches else ():
                undo.enter_context(forwarded(linear))
            for module, note in self._notes if self._watches else ():
                self._time(module, undo, note)
            if on_gpu := self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
                self._working_bytes = -torch.cuda.memory_allocated(self._device)
            self._whole.append(self._watch.begin())
            output = executor(*args, **kwargs)
            self._watch.end(self._whole[-1])
            if on_gpu:
                self._working_bytes += torch.cuda.max_memory_allocated(self._device)
        self._watches = False
        for path, (spans, (block, args, kwargs)) in self._called.items():
            speedup = fused_speedup(block, f"{path}.0", args, kwargs, self._device)
            self._blocks.append(BlockCalls(len(spans), self._total(spans), path, speedup))
        self._called.clear()
        return output

    def _time(self, module: torch.nn.Module, undo: ExitStack, note: Callable[..., None]) -> None:
        """Call `note` after each call of a module until `undo`: with its span, the module, arguments and output."""
        begun: list[Any] = []

        def end(module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
            self._watch.end(begun[-1])
            note(begun.pop(), module, args, kwargs, output)

        undo.enter_context(module.register_forward_pre_hook(lambda *_: begun.append(self._watch.begin())))
        undo.enter_context(module.register_forward_hook(end, with_kwargs=True))

    def _note_block(self, path: str, span: Any, module: Any, args: tuple, kwargs: dict, output: Any) -> None:
        spans, _ = self._called.get(path, ([], ()))
        self._called[path] = [*spans, span], (module, args, kwargs)

    def _note_linear(self, name: str, span: Any, module: Any, args: tuple, kwargs: dict, output: torch.Tensor) -> None:
        n = output.shape[-1]
        product = output.numel() // n, n, module.in_features  # its input may be wider, and activated by it
        self._products.setdefault(product, (label(name), []))[1].append(span)

    def _attend(self, attend: Callable, *args: Any, **kwargs: Any) -> Any:
        if not self._watches:
            return attend(*args, **kwargs)
        spans = self._attention.setdefault(attention_call(*args, **kwargs), [])  # before containers are emptied
        spans.append(self._watch.begin())
        output = attend(*args, **kwargs)
        self._watch.end(spans[-1])
        return output

    def _total(self, spans: list) -> float:
        return sum(map(self._watch.milliseconds, spans))

    def split(self) -> ForwardSplit:
        """Return the split of the forward. Raises NoForward where the sampling called no linear."""
        if not self._products:
            raise NoForward("no linear of this model was called")
        attention = {call: self._total(spans) for call, spans in self._attention.items()}
        calls = [call for call in longest(attention, _MOST_ATTENTION_CALLS) if call is not None]
        return ForwardSplit(
            statistics.median(map(self._watch.milliseconds, self._whole[_BEFORE : _STEPS - 1])),
            self._watch.milliseconds(self._whole[_STEPS - 1]),
            {
                LinearShape(name, n, k, m): Calls(len(spans), self._total(spans))
                for (m, n, k), (name, spans) in self._products.items()
            },
            sum(attention.values()),
            all(type(module.weight) is torch.nn.Parameter for module in self._linears.values()),
            self._blocks,
            [dataclasses.replace(call, count=len(self._attention[call])) for call in calls],
            self._working_bytes,
        )


def attention_call(*args: Any, **keywords: Any) -> AttentionSizes | None:
    """Return the sizes of a call of ComfyUI's attention functions, None where it is unusual."""
    call = read_call(comfyuis_attention, *args, **keywords)
    if not call.q.ndim == call.k.ndim == 4:
        return None
    (batch, _, tokens, width), (_, key_heads, keys, _) = call.q.shape, call.k.shape
    name = "attention" if tokens == keys else "cross attention"
    return AttentionSizes(
        name, call.heads, AttentionShape(tokens, keys, width, call.mask is not None), key_heads, batch
    )


def block_lists(model: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """Return the outermost lists of a diffusion model's blocks with linears that become INT8, by module path."""
    found: dict[str, list[torch.nn.Module]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, torch.nn.ModuleList) and not inside and len(module) > 1:
            blocks = [block for index, block in enumerate(module) if quantizable_in(block, f"{name}.{index}")]
            if blocks:
                found[name] = blocks
    return found


def fused_speedup(block: torch.nn.Module, path: str, args: tuple, kwargs: dict, device: torch.device) -> float | None:
    """Return how many times as fast as a block at `path` an INT8 copy of it is with these arguments.

    None where it cannot be copied, or its copy does not run.
    """
    make_room(device, _BYTES_PER_WEIGHT * sum(parameter.numel() for parameter in block.parameters()))
    try:
        fused = partial(deferred_call, partial(int8_copy(block, path, device), *args, **kwargs))
        calls: list[Callable[[], Any]] = [partial(block, *args, **kwargs), fused]
        for call in _WARM * calls:
            check_cancelled()
            call()
        with interruptible(check_cancelled):
            settle(fused, device)
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    watch, totals = Stopwatch(device), [0.0, 0.0]
    for number, call in enumerate(_ROUNDS * calls):
        milliseconds = watch.mean(call, 2)
        for window in (_SETTLING, _WINDOW):
            check_cancelled()
            milliseconds = watch.mean(call, math.ceil(window / milliseconds))
        totals[number % 2] += milliseconds
    return totals[0] / totals[1]


def int8_copy(block: torch.nn.Module, path: str, device: torch.device) -> torch.nn.Module:
    """Copy a block of a MODEL, at `path`, to a device, with its linears on the fused kernel.

    Weights are quantized plainly, per channel. Raises ValueError for one that is no float.
    """
    linears: dict[str, Any] = quantizable_in(block, path)
    held = [linear.weight for linear in linears.values()]
    if any(isinstance(weight, QuantizedTensor) or not weight.is_floating_point() for weight in held):
        raise ValueError("the block is quantized already")
    # The linears' own weights are quantized from the original, and not copied first. Of a module's attributes only
    # parameters and modules are copied: dynamic VRAM's objects free the MODEL's memory when a copy of them goes, and
    # its tensors lie in memory of the card that may be taken from them.
    memo: dict[int, Any] = {id(weight): weight for weight in held}
    for module in block.modules():
        others = (value for name, value in vars(module).items() if name not in _TORCHS_OWN)
        memo |= {id(value): value for value in others if not isinstance(value, (torch.nn.Parameter, torch.nn.Module))}
    copied = copy.deepcopy(block, memo)
    for name, linear in linears.items():
        weight = linear.weight
        q, scale = quantize_weight(weight.to(device))
        form = get_layout_class(NATIVE_LAYOUT).Params(scale[:, None], weight.dtype, tuple(q.shape))
        quantized = QuantizedTensor(q, NATIVE_LAYOUT, form)
        replaced: Any = copied.get_submodule(name.removeprefix(path).removeprefix("."))
        replaced.weight = torch.nn.Parameter(quantized, requires_grad=False)
        replaced.__class__ = fused_class(type(replaced), "fused int8")
    return copied.to(device)


def label(name: str) -> str:
    """Return a module path without the block's number."""
    return ".".join(part for part in name.split(".")[1:] if not part.isdigit()) or name
