"""Plain LoRAs: patches that need no patched weight, since a product can take them as thin factors."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from comfy.model_management import cast_to_device
from comfy.model_patcher import LowVramPatch

from ...kernels import LowRank
from ..comfyui.patcher import LoRAFactors, key_of, lora_factors
from ..files.holding import is_stored


class StoredLoRA(LowVramPatch):
    """The plain LoRAs of a stored weight."""

    def __init__(self, key: str, patches: Sequence[tuple], low_rank: LowRank, scale: torch.Tensor) -> None:
        super().__init__(key, {key: patches})
        self.low_rank = low_rank  # all factors, on the MODEL's device: they are small, and every product reads them
        self.scale = scale  # float32 [N, 1], what they add to the scale of each row as INT8


def stored_lora(weight: Any, functions: list) -> StoredLoRA | None:
    """Return the plain LoRAs among a weight's functions, if it is a stored one and nothing else changes it."""
    if not functions or not isinstance(functions[0], StoredLoRA) or not is_stored(weight):
        return None
    return functions[0] if len(each_once(functions)) == 1 else None


def add_lora(output: torch.Tensor, input: torch.Tensor, lora: LoRAFactors) -> None:
    """Add input @ (factor up @ down)^T to the output in place, by two thin products."""
    up, down = (cast_to_device(t, input.device, input.dtype) for t in (lora.up, lora.down))
    rows = torch.nn.functional.linear(input, down).flatten(0, -2)
    output.view(-1, output.shape[-1]).addmm_(rows, up.t(), alpha=lora.factor)


def plain_loras(patches: Sequence[tuple], shape: Sequence[int]) -> list[LoRAFactors]:
    """Return the factors of a ModelPatcher's patches of a weight if all are plain LoRAs that fit, else none."""
    loras = [lora_factors(patch, shape) for patch in patches]
    return [] if None in loras else cast("list[LoRAFactors]", loras)


def loras_of(functions: list, shape: Sequence[int]) -> list[LoRAFactors]:
    """Return the factors of a weight's functions, if all are plain LoRAs of its shape; else none."""
    if not all(isinstance(function, LowVramPatch) for function in functions):
        return []
    return plain_loras([patch for function in functions for patch in function.patches[function.key]], shape)


def each_once(functions: list) -> list:
    """Return a weight's functions without patches that ComfyUI attached twice, when it unloaded a part of a model."""
    kept: dict[object, object] = {}
    for function in functions:
        kept.setdefault(key_of(function) or function, function)
    return list(kept.values())
