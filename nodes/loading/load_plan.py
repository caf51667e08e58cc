"""Load plans: what the linears of a MODEL hold, and how it is made, decided before ComfyUI builds the MODEL."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from ...kernels import (
    BF16,
    FUSED,
    WAYS,
    choose_path,
    expand_codes,
    gguf_to_int8,
    naming_layer,
    quantize_weight,
    runs_fused,
)
from ..comfyui.file_slices import forget_source
from ..comfyui.quantized import HostCopies, stored, to_device
from ..files import quant_config
from ..files.holding import can_stay, channel_scale, grouped_codes, is_gguf, is_grouped, plain_floats, stored_kind
from ..files.reading.importers import Checkpoint
from ..files.reading.values import WEIGHT_DTYPES, check_finite
from ..host.work import Progress, make_room_to_quantize
from ..linears.compile_ahead import compile_planned
from ..linears.int8_weight import int8_weight
from ..linears.layer_selection import is_quantizable
from ..linears.patched_weights import float_weight
from ..linears.weight_form import known_form
from .lazy_weights import lazy_floats, lazy_int8
from .memory_choice import InFloats, can_be_stored, keeps_floats

Make = Callable[[str, Any, torch.Tensor | None], Any]
"""(module path of a linear; its weight as it was read: float, meta or quantized; what its input is multiplied by, if
anything) -> the weight to hold, or None for the one that was read."""


@dataclass
class LoadPlan:
    """How the linears of one MODEL come to hold their weights."""

    kernel: str  # one of kernels.KERNEL_CHOICES: what INT8 linears compute with, decided for the device of each input
    compute_dtype: torch.dtype  # of everything that is not INT8
    make: Make  # what linears hold that are not INT8 in the state dict; its numbers are there after `wait`
    in_floats: InFloats = lambda n, k, native: False
    file: str = ""  # whose tensors these are; empty for those of another MODEL
    unexplained: Mapping[str, torch.dtype] = field(default_factory=dict)  # of its tensors that no weight has
    # Returns when all that was made is there; raises what went wrong.
    wait: Callable[[], None] = lambda: None
    progress: Progress | None = None  # of what is made
    # What the state dict lacks of the whole model, and holds beside it; set by the loading.
    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()

    def release(self) -> None:
        """Wait for what was made, fill the progress bar, and forget what weights are made of: the MODEL's layers keep
        the plan."""
        self.wait()
        self.wait, self.make = lambda: None, lambda name, weight, input_scale: None
        if self.progress is not None:
            self.progress.finish()


def floats_where_faster(kernel: str, devices: Sequence[torch.device], fits: bool) -> InFloats:
    """Return which linears are held in floats: where the whole model `fits` in them, those that all devices on which it
    may run would compute in floats."""

    def in_floats(n: int, k: int, native: bool) -> bool:
        ways = WAYS if native else (FUSED, BF16)
        return fits and all(choose_path(at, kernel, (n, k), ways).kind == BF16 for at in devices)

    return in_floats


def checkpoint_plan(
    checkpoint: Checkpoint,
    kernel: str,
    compute_dtype: torch.dtype,
    device: torch.device,
    in_floats: InFloats,
    as_stored: bool,
    lazy: bool,
) -> LoadPlan:
    """Return the plan for a checkpoint, whose layers that become INT8 are quantized per channel.

    Weights are computed on `device`, and kept in host memory. Those that stay as they are stored are read only
    where no product would check them. Other GGUF weights become floats, here where no linear holds them, and other
    codes of 4 or 6 bits the INT8 weight that they stand for. Raises ValueError naming a weight that holds what none
    has.

    Args:
        in_floats: which linears are held in floats, such as those of `floats_where_faster`.
        as_stored: whether weights in fewer bits that a kernel reads stay what they are.
        lazy: whether what such weights become is computed where ComfyUI copies it, and not kept in host memory.
    """
    tensors, to_host = checkpoint.tensors, HostCopies()
    configs = quant_config.configs_in(tensors)
    whole = keeps_floats(tensors, configs)

    def planned(name: str, weight: Any) -> tuple[str | None, Make, bool] | None:
        """Return what is done to a weight, in the file or as ComfyUI read it, what does it, and whether products are
        INT8 then; None for a weight that is held as it was read. What is done is None where that takes no time."""
        kind = stored_kind(weight)
        stays = as_stored and can_be_stored(weight)
        linear = is_quantizable(name, tuple(weight.shape))
        int8 = (
            linear
            and not (whole and not is_gguf(weight))
            and not in_floats(weight.shape[0], weight.shape[1], not stays)
        )
        if stays and kind is not None and kind.held is not None:
            hold, is_int8 = kind.held, int8 or is_grouped(weight)
            checked = is_int8 and runs_fused(device, kernel, weight.shape[0], weight.shape[1], False)
            check_on = None if is_grouped(weight) or checked else device
            doing = None if check_on is None else "reading"
            return doing, lambda name, weight, _: hold(weight, compute_dtype, int8, check_on), is_int8
        if lazy and can_stay(weight) and (int8 or is_grouped(weight)):
            of_file = checkpoint.name
            return None, lambda name, weight, _: lazy_int8(of_file, name, weight, device, compute_dtype), True
        if is_grouped(weight):
            return "reading", expanded, True
        if int8:
            return "quantizing", quantized, True
        return ("decoding", decoded, False) if linear and kind is not None else None

    def quantized(name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        weight = to_device(weight, device)
        if is_gguf(weight) and can_stay(weight) and input_scale is None:
            q, scale = gguf_to_int8(stored(weight), weight.params.gguf_format)
        else:
            q, scale = quantize_weight(float_weight(weight, input_scale))
        check_finite(f"{name}.weight", 127 * scale)  # 127 of it is the largest value
        return int8_weight(q, scale, compute_dtype)

    def expanded(name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        """Return the INT8 weight that codes of 4 or 6 bits stand for, exactly."""
        weight = to_device(weight, device)
        q, scale = expand_codes.at_once(grouped_codes(weight)), channel_scale(weight)
        return int8_weight(q, scale, compute_dtype, *known_form(weight).unsmoothed)

    def decoded(name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        values = float_weight(to_device(weight, device), input_scale)
        check_finite(f"{name}.weight", values)
        return values.to(compute_dtype)

    def make(name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        # Asked again: ComfyUI joins weights, and reads several values out of a byte.
        if (way := planned(name, weight)) is None:
            return None
        doing, made, _ = way
        with naming_layer(name):
            held = made(name, weight, input_scale)
        if doing is None:
            return held
        if progress is not None:
            progress.step(f"{doing} layer")
        return to_host(held)

    weights = {key: t for key, t in tensors.items() if key.endswith(".weight")}
    ways = {key: way for key, weight in weights.items() if (way := planned(key.removesuffix(".weight"), weight))}
    if not all(as_stored and can_be_stored(weights[key]) for key in ways):
        forget_source(tensors.values())
    for key in [key for key, weight in weights.items() if lazy and key not in ways and can_stay(weight)]:
        tensors[key] = lazy_floats(checkpoint.name, key, tensors[key], device, compute_dtype)
    others = [key for key, tensor in tensors.items() if is_gguf(tensor) and key not in ways]
    work = [key for key, (doing, _, _) in ways.items() if doing is not None]
    sizes = [tensors[key].shape.numel() for key in (*work, *others)]
    progress = Progress(len(sizes)) if sizes else None  # a file that needs no work is loaded as fast as any
    if ways:  # before any of that work, which takes as long
        multiply = [key.removesuffix(".weight") for key, (_, _, is_int8) in ways.items() if is_int8]
        compile_planned(tensors, multiply, kernel, compute_dtype, device)
    if progress is not None:
        make_room_to_quantize(device, max(sizes))
        for key in others:
            values = plain_floats(to_device(tensors[key], device))
            check_finite(key, values)
            tensors[key] = to_host(values.to(compute_dtype))
            progress.step("decoding layer")
        to_host.wait()  # ComfyUI may copy them
    unexplained = {name: t.dtype for name, t in tensors.items() if _odd(t) and name.rpartition(".")[0] not in configs}
    return LoadPlan(kernel, compute_dtype, make, in_floats, checkpoint.name, unexplained, to_host.wait, progress)


def _odd(tensor: torch.Tensor) -> bool:
    """Whether no weight has a tensor's dtype, and it is no JSON: newer ComfyUIs have options of modules in files."""
    if tensor.dtype in WEIGHT_DTYPES or is_gguf(tensor):
        return False
    if tensor.dtype == torch.uint8 and tensor.ndim == 1 and tensor.numel() <= 1 << 16:
        with suppress(RecursionError, ValueError):
            json.loads(tensor.numpy().tobytes())
            return False
    return True
