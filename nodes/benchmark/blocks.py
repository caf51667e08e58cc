"""A model's repeated blocks: how much of a forward they are, and how much faster one of each kind is in this pack's."""

import copy
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...kernels import quantize_weight
from ...kernels.benchmark import BlockCalls, Stopwatch
from ..comfyui.quantized import QuantizedTensor, native_weight
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


@dataclass
class BlockList:
    """The blocks of one list of a diffusion model, and what its calls showed.

    Attributes:
        name: module path of the list.
        blocks: in the order of the list.
        spans: of the calls, as a Stopwatch has them.
        arguments: of one of the calls.
    """

    name: str
    blocks: list[torch.nn.Module]
    spans: list[Any] = field(default_factory=list)
    arguments: tuple[torch.nn.Module, tuple, dict] | None = None

    def watch(self, watch: Stopwatch) -> list[Callable[[], None]]:
        """Time all calls from now on; what ends it."""
        undo = []
        for block in self.blocks:
            begun: list[Any] = []

            def begin(module, args, kwargs, begun=begun):
                self.arguments = module, args, kwargs
                begun.append(watch.begin())

            def end(module, args, output, begun=begun):
                watch.end(begun[-1])
                self.spans.append(begun.pop())

            undo.append(block.register_forward_pre_hook(begin, with_kwargs=True).remove)
            undo.append(block.register_forward_hook(end).remove)
        return undo

    def measured(self, watch: Stopwatch, device: torch.device, check: Callable[[], None]) -> BlockCalls | None:
        """What the calls took, and how many times as fast an INT8 copy of a block is; None where none was called.

        The speed is None where the block cannot be copied, or its copy does not run.
        """
        if self.arguments is None:
            return None
        total = sum(map(watch.milliseconds, self.spans))
        return BlockCalls(self.name, len(self.spans), total, self._speedup(watch, device, check))

    def _speedup(self, watch: Stopwatch, device: torch.device, check: Callable[[], None]) -> float | None:
        assert self.arguments is not None
        block, args, kwargs = self.arguments
        make_room(device, _BYTES_PER_WEIGHT * sum(parameter.numel() for parameter in block.parameters()))
        try:
            fused = int8_copy(block, f"{self.name}.0", device)
            calls = {
                "own": lambda: block(*args, **kwargs),
                "fused": partial(deferred_call, partial(fused, *args, **kwargs)),
            }
            for _ in range(_WARM):
                for call in calls.values():
                    check()
                    call()
        except (RuntimeError, TypeError, ValueError, AttributeError):
            return None
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(_ROUNDS):
            for name, call in calls.items():
                once = _milliseconds(watch, call, 2)
                for window in (_SETTLING, _WINDOW):
                    check()
                    milliseconds = _milliseconds(watch, call, math.ceil(window / once))
                times[name].append(milliseconds)
        return statistics.median(times["own"]) / statistics.median(times["fused"])


def _milliseconds(watch: Stopwatch, call: Callable[[], object], times: int) -> float:
    """Of one call among `times` of them, back to back."""
    span = watch.begin()
    for _ in range(times):
        call()
    watch.end(span)
    return watch.milliseconds(span) / times


def block_lists(model: torch.nn.Module) -> list[BlockList]:
    """The outermost lists of a diffusion model whose entries have linears that become INT8."""
    found: list[BlockList] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{other.name}.") for other in found)
        if isinstance(module, torch.nn.ModuleList) and not inside and len(module) > 1:
            blocks = [block for index, block in enumerate(module) if quantizable_in(block, f"{name}.{index}")]
            if blocks:
                found.append(BlockList(name, blocks))
    return found


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
        held = native_weight(q, scale[:, None], weight.dtype)
        replaced: Any = copied.get_submodule(name.removeprefix(path).removeprefix("."))
        replaced.weight = torch.nn.Parameter(held, requires_grad=False)
        own = type(replaced)
        replaced.__class__ = classes.get(own) or classes.setdefault(own, running_fused(own, "fused int8"))
    copied.to(device)
    group_inputs(copied)
    return copied
