"""Patches that are LoRAs and nothing else: a product needs no patched weight to be right."""

from collections.abc import Sequence
from typing import Any

import torch
from comfy.model_management import cast_to_device
from comfy.model_patcher import LowVramPatch

from ...kernels import LowRank
from ..comfyui.patcher import LoRAFactors, key_of, lora_factors
from ..files.holding import is_stored


class StoredLoRA(LowVramPatch):
    """The plain LoRAs of a stored weight.

    Attributes:
        low_rank: all of them, on the device where the MODEL runs: they are small, and every product reads them.
        scale: float32 [N, 1], how much larger they make what each row is scaled by as INT8.
    """

    def __init__(self, key: str, patches: Sequence[tuple], low_rank: LowRank, scale: torch.Tensor) -> None:
        super().__init__(key, {key: patches})
        self.low_rank = low_rank
        self.scale = scale


def stored_lora(weight: Any, functions: list) -> StoredLoRA | None:
    """What changes a weight in use, if that is plain LoRAs of a stored weight and nothing else."""
    if not functions or not isinstance(functions[0], StoredLoRA) or not is_stored(weight):
        return None
    return functions[0] if len(each_once(functions)) == 1 else None


def add_lora(output: torch.Tensor, input: torch.Tensor, lora: LoRAFactors) -> None:
    """Add input @ (factor up @ down)^T to the output, where it is: two thin products."""
    up, down = (cast_to_device(t, input.device, input.dtype) for t in (lora.up, lora.down))
    rows = torch.nn.functional.linear(input, down).flatten(0, -2)
    output.view(-1, output.shape[-1]).addmm_(rows, up.t(), alpha=lora.factor)


def plain_loras(patches: Sequence[tuple], shape: Sequence[int]) -> list[LoRAFactors]:
    """The patches of a linear's weight of this shape, as a ModelPatcher has them, where all are plain LoRAs that fit;
    else nothing."""
    loras = [lora for lora in map(lora_factors, patches) if lora is not None and lora.fits(*shape)]
    return loras if len(loras) == len(patches) else []


def loras_of(functions: list, shape: Sequence[int]) -> list[LoRAFactors]:
    """What changes a weight of this shape in use, where all of it is plain LoRAs, which need no new weight; else
    nothing."""
    if not all(isinstance(function, LowVramPatch) for function in functions):
        return []
    return plain_loras([patch for function in functions for patch in function.patches[function.key]], shape)


def each_once(functions: list) -> list:
    """What changes a weight in use, without a patch that ComfyUI attached a second time when it unloaded a part."""
    kept: dict[object, object] = {}
    for function in functions:
        kept.setdefault(key_of(function) or function, function)
    return list(kept.values())
