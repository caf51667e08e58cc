"""Patches that are LoRAs and nothing else: a product needs no patched weight to be right."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from comfy.model_management import cast_to_device
from comfy.model_patcher import LowVramPatch
from comfy.weight_adapter.lora import LoRAAdapter


@dataclass(frozen=True)
class PlainLoRA:
    """What a patch adds to a linear's weight: factor up @ down, [N, rank] @ [rank, K]."""

    up: torch.Tensor
    down: torch.Tensor
    factor: float

    def add_to(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Add input @ (factor up @ down)^T to the output, where it is: two thin products."""
        up, down = (cast_to_device(t, input.device, input.dtype) for t in (self.up, self.down))
        rows = torch.nn.functional.linear(input, down).flatten(0, -2)
        output.view(-1, output.shape[-1]).addmm_(rows, up.t(), alpha=self.factor)


def plain_loras(patches: Iterable[tuple], shape: Sequence[int]) -> list[PlainLoRA]:
    """The patches of a linear's weight of this shape, as a ModelPatcher has them, where all are plain LoRAs that fit;
    else nothing."""
    loras = []
    for strength, adapter, strength_model, offset, change in patches:
        if type(adapter) is not LoRAAdapter or strength_model != 1.0 or offset is not None or change is not None:
            return []
        up, down, alpha, *others = adapter.weights  # others: of convolutions, DoRA, and another shape
        if any(other is not None for other in others):
            return []
        up, down = up.flatten(1), down.flatten(1)
        if (up.shape[0], down.shape[1]) != tuple(shape) or up.shape[1] != down.shape[0]:
            return []
        factor = 1.0 if alpha is None else float(alpha) / down.shape[0]
        loras.append(PlainLoRA(up, down, strength * factor))
    return loras


def loras_of(functions: Iterable, shape: Sequence[int]) -> list[PlainLoRA]:
    """What changes a weight of this shape in use, where all of it is plain LoRAs, which need no new weight; else
    nothing."""
    patches: list[tuple] = []
    for function in functions:
        if not isinstance(function, LowVramPatch):
            return []
        patches += function.patches[function.key]
    return plain_loras(patches, shape)


def each_once(functions: list) -> list:
    """What changes a weight in use, without a patch that ComfyUI attached a second time when it unloaded a part."""
    keys: set[str] = set()
    kept = []
    for function in functions:
        key = function.key if isinstance(function, LowVramPatch) else None
        if key is None or key not in keys:
            kept.append(function)
            keys |= set() if key is None else {key}
    return kept
