"""A model's repeated blocks: which they are, and how much faster one is on the fused kernels."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor, get_layout_class

from ...kernels import quantize_weight
from ...kernels.benchmark import Stopwatch
from ..comfyui.quantized import NATIVE_LAYOUT
from ..deferred.install import deferred_call
from ..host.work import make_room
from ..layers.input_groups import group_inputs
from ..layers.layer_selection import quantizable_in
from ..patching.apply_kernel import running_fused

_ROUNDS = 2
_WARM = 3
# A card takes its time to find the clocks that a load lets it have: INT8 draws less power than bf16, and runs faster.
_SETTLING, _WINDOW = 500.0, 500.0  # milliseconds
# An INT8 copy, what quantizing takes, and a float copy of the rest, per weight.
_BYTES_PER_WEIGHT = 8


def block_lists(model: torch.nn.Module) -> dict[str, list[torch.nn.Module]]:
    """The outermost lists of a diffusion model whose entries have linears that become INT8, by module path."""
    found: dict[str, list[torch.nn.Module]] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other}.") for other in found)
        if isinstance(module, torch.nn.ModuleList) and not inside and len(module) > 1:
            blocks = [block for index, block in enumerate(module) if quantizable_in(block, f"{name}.{index}")]
            if blocks:
                found[name] = blocks
    return found


def fused_speedup(
    block: torch.nn.Module, path: str, args: tuple, kwargs: dict, device: torch.device, check: Callable[[], None]
) -> float | None:
    """How many times as fast as the block an INT8 copy of it is with these arguments.

    None where it cannot be copied, or its copy does not run. `path` is where it stands; `check` may raise to stop.
    """
    make_room(device, _BYTES_PER_WEIGHT * sum(parameter.numel() for parameter in block.parameters()))
    try:
        fused = partial(deferred_call, partial(int8_copy(block, path, device), *args, **kwargs))
        calls: list[Callable[[], Any]] = [partial(block, *args, **kwargs), fused]
        for call in _WARM * calls:
            check()
            call()
    except (RuntimeError, TypeError, ValueError, AttributeError):
        return None
    watch, totals = Stopwatch(device), [0.0, 0.0]
    for number, call in enumerate(_ROUNDS * calls):
        milliseconds = watch.mean(call, 2)
        for window in (_SETTLING, _WINDOW):
            check()
            milliseconds = watch.mean(call, math.ceil(window / milliseconds))
        totals[number % 2] += milliseconds
    return totals[0] / totals[1]


def int8_copy(block: torch.nn.Module, path: str, device: torch.device) -> torch.nn.Module:
    """A copy of a block of a MODEL on a device, its linears on the fused kernel.

    `path` is where it stands. Weights are quantized plainly, per channel. Raises ValueError for one that is no float.
    """
    # The linears' own weights are quantized from the original, and not copied first.
    linears: dict[str, Any] = quantizable_in(block, path)
    memo: dict[int, Any] = {id(linear.weight): linear.weight for linear in linears.values()}
    copied = copy.deepcopy(block, memo)
    classes: dict[type, type] = {}
    for name, linear in linears.items():
        weight = linear.weight
        if isinstance(weight, QuantizedTensor) or not weight.is_floating_point():
            raise ValueError("the block is quantized already")
        q, scale = quantize_weight(weight.to(device))
        form = get_layout_class(NATIVE_LAYOUT).Params(scale[:, None], weight.dtype, tuple(q.shape))
        held = QuantizedTensor(q, NATIVE_LAYOUT, form)
        replaced: Any = copied.get_submodule(name.removeprefix(path).removeprefix("."))
        replaced.weight = torch.nn.Parameter(held, requires_grad=False)
        own = type(replaced)
        replaced.__class__ = classes.get(own) or classes.setdefault(own, running_fused(own, "fused int8"))
    copied.to(device)
    group_inputs(copied)
    return copied
