"""The linears of a MODEL, and which of them are quantized: one rule by name and size, for every architecture."""

import re
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.ops import CastWeightBiasOp

from ..comfyui.attention import is_attention_choice
from ..comfyui.compiling import is_compiled
from ..comfyui.patcher import DIFFUSION_MODEL

# Modulation, embedders of time, text and guidance, and the like: small, and what leaves them scales or shifts whole
# blocks. A word of the path must match in full.
_SENSITIVE = re.compile(
    r"(mod(?!el|ule).*|adaln|norm|emb|embed|embedder|embedding|time|timestep|tproj|tmlp|guidance|caption)\d*"
)
# Outside the repeated blocks only a projection this large (Ideogram 4's text projection has 245 M weights) is worth it.
_LARGE_PROJECTION = 1 << 26
# Below this the quantization costs more than the product saves, and a scale covers too few values.
_SMALLEST_SIDE = 64


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the linear `name` (dotted module path) with a weight of this shape [N, K] becomes INT8.

    The linears of the repeated blocks do, that is, those with a number in their path, except the sensitive ones.
    """
    if len(shape) != 2 or min(shape) < _SMALLEST_SIDE:
        return False
    path = name.split(".")
    if any(_SENSITIVE.fullmatch(word) for word in name.lower().replace(".", "_").split("_")):
        return False
    in_a_block = any(part.isdigit() for part in path[:-1])
    return in_a_block or shape[0] * shape[1] >= _LARGE_PROJECTION


def root_of(model: ModelPatcher) -> tuple[torch.nn.Module, str]:
    """The module whose linears compute, and what ComfyUI puts before the names of its parts: a MODEL's diffusion model,
    or all that a CLIP holds."""
    return (model.model, "") if model.is_clip else (model.model.diffusion_model, DIFFUSION_MODEL)


def class_patch(model: ModelPatcher, name: str) -> str:
    """Under which name a MODEL or CLIP patches the class of a part, given its path in what `root_of` says."""
    return f"{root_of(model)[1]}{name}.__class__"


def keeps_exact(patch: Any) -> bool:
    """Whether an object patch of a MODEL is the class of a block whose attention INT8 leaves out."""
    return getattr(patch, "keeps_exact_attention", False) is True


def linears(model: ModelPatcher) -> dict[str, CastWeightBiasOp]:
    """All linears of a MODEL, by module path inside the diffusion model; or those of a CLIP's text encoders."""
    return _linears_in(root_of(model)[0], "")


def _linears_in(part: torch.nn.Module, path: str) -> dict[str, CastWeightBiasOp]:
    return {
        name: module
        for name, module in part.named_modules(prefix=path)
        # ComfyUI's mixed-precision Linear is no torch.nn.Linear; what else has input features and a weight (a bank of
        # experts) is excluded by the weight's shape.
        if isinstance(module, CastWeightBiasOp)
        and hasattr(module, "in_features")
        and module.weight is not None
        and module.weight.ndim == 2
    }


def quantizable_linears(model: ModelPatcher) -> dict[str, CastWeightBiasOp]:
    """Those of `linears` that would become INT8."""
    return quantizable_in(root_of(model)[0])


def quantizable_in(part: torch.nn.Module, path: str = "") -> dict[str, CastWeightBiasOp]:
    """The same of a part of a diffusion model that stands at `path` in it."""
    found = _linears_in(part, path)
    return {name: module for name, module in found.items() if is_quantizable(name, tuple(module.weight.shape))}


def check_runs_as_stored(model: ModelPatcher) -> None:
    """Raise ValueError for a MODEL with injections (a bypass LoRA): they act on its modules when it samples, and are in
    no weight that could be quantized or saved."""
    found = model.injections
    if found:
        raise ValueError(
            f"this MODEL carries something that is not in its weights ({', '.join(found)}) and would be "
            "lost. Load a bypass LoRA with the ordinary LoRA loader, or connect that node after this one"
        )


def quantization_targets(model: ModelPatcher) -> dict[str, CastWeightBiasOp]:
    """The linears to quantize. Raises ValueError if there are none, or if they are not what the MODEL runs."""
    check_runs_as_stored(model)
    targets = quantizable_linears(model)
    patches = model.object_patches.items()
    replaced = (key for key, patch in patches if not (is_attention_choice(patch) or keeps_exact(patch)))
    if is_compiled(model) or any(f"{key}.".startswith(DIFFUSION_MODEL) for key in replaced):
        raise ValueError(
            "the layers of this MODEL are already replaced (torch.compile or a similar node); connect that node after "
            "Quantize to INT8"
        )
    if not targets:
        raise ValueError("this MODEL has no linear layers in repeated blocks, so there is nothing to quantize")
    return targets
