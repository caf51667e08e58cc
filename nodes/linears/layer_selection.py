"""The choice of the linears that are quantized, by names and sizes, for every architecture."""

import re
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.ops import CastWeightBiasOp

from ..comfyui.compiling import is_compiled
from ..comfyui.layer_choices import is_attention_choice
from ..comfyui.patcher import DIFFUSION_MODEL, weight_below_patches
from .patched_weights import patched_shape, possibly_patched

# Modulation, embedders of time, text and guidance, and the like: small, and their outputs scale or shift whole blocks.
# A word of the path must match in full.
_SENSITIVE = re.compile(
    r"(mod(?!el|ule).*|adaln|norm|emb|embed|embedder|embedding|time|timestep|tproj|tmlp|guidance|caption)\d*"
)
# Outside the repeated blocks only a projection this large (Ideogram 4's text projection has 245 M weights) is worth it.
_LARGE_PROJECTION = 1 << 26
# Below this the quantization costs more than the product saves, and a scale covers too few values.
_SMALLEST_SIDE = 64


def is_quantizable(name: str, shape: tuple[int, ...]) -> bool:
    """Whether a linear of a dotted module path, with a weight of this shape [N, K], becomes INT8: one in a repeated
    block, which has a number in its path, that is not sensitive."""
    if len(shape) != 2 or min(shape) < _SMALLEST_SIDE:
        return False
    if any(_SENSITIVE.fullmatch(word) for word in name.lower().replace(".", "_").split("_")):
        return False
    in_a_block = any(part.isdigit() for part in name.split(".")[:-1])
    return in_a_block or shape[0] * shape[1] >= _LARGE_PROJECTION


def root_of(model: ModelPatcher) -> tuple[torch.nn.Module, str]:
    """Return the root of the linears, a MODEL's diffusion model or all of a CLIP, and its prefix in ComfyUI's names."""
    return (model.model, "") if model.is_clip else (model.model.diffusion_model, DIFFUSION_MODEL)


def class_patch(model: ModelPatcher, name: str) -> str:
    """Return the name under which a MODEL or CLIP patches the class of a part, given its path in the root."""
    return f"{root_of(model)[1]}{name}.__class__"


def keeps_exact(patch: Any) -> bool:
    """Whether an object patch is the class of a block whose attention stays exact."""
    return getattr(patch, "keeps_exact_attention", False) is True


def linears(model: ModelPatcher) -> dict[str, CastWeightBiasOp]:
    """Return all linears of a MODEL, by path in the diffusion model, or of a CLIP's text encoders."""
    return _linears_in(root_of(model)[0], "")


def _linears_in(part: torch.nn.Module, path: str) -> dict[str, CastWeightBiasOp]:
    return {
        name: module
        for name, module in part.named_modules(prefix=path)
        # ComfyUI's mixed-precision Linear is no torch.nn.Linear. A bank of experts has input features, too, and a newer
        # ComfyUI holds one in INT8 as the rows of all experts, with two axes.
        if isinstance(module, CastWeightBiasOp)
        and hasattr(module, "in_features")
        and not hasattr(module, "num_experts")
        and getattr(module.weight, "ndim", None) == 2
    }


def quantizable_linears(model: ModelPatcher) -> dict[str, CastWeightBiasOp]:
    """Return those of `linears` that would become INT8."""
    return quantizable_in(root_of(model)[0])


def quantizable_in(part: torch.nn.Module, path: str = "") -> dict[str, CastWeightBiasOp]:
    """The same of a part of a diffusion model, which is at `path` in it."""
    found = _linears_in(part, path)
    return {name: module for name, module in found.items() if is_quantizable(name, tuple(module.weight.shape))}


def quantizable_shapes(model: ModelPatcher) -> set[tuple[int, int]]:
    """Return the shapes [N, K] of their weights."""
    return {tuple(module.weight.shape) for module in quantizable_linears(model).values()}


def check_runs_as_stored(model: ModelPatcher) -> None:
    """Raise ValueError for a MODEL that no file can hold: with injections (a bypass LoRA), which are in no weight, or
    with patches that give a layer more outputs, which no loader builds."""
    if model.injections:
        raise ValueError(
            f"this MODEL carries something that is not in its weights ({', '.join(model.injections)}) and would be "
            "lost. Load a bypass LoRA with the ordinary LoRA loader, or connect that node after this one"
        )
    for name in sorted(possibly_patched(model)):
        if patched_shape(model, name)[:1] != weight_below_patches(model, DIFFUSION_MODEL + name).shape[:1]:
            raise ValueError(
                f"a LoRA gives {name} more outputs (those for fewer steps of MiniMax H3 do), which no model file can "
                "hold. Take it off here, and connect it where the result is sampled"
            )


def quantization_targets(model: ModelPatcher) -> dict[str, CastWeightBiasOp]:
    """Return the linears to quantize. Raises ValueError if there are none, or if the MODEL does not run them."""
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
