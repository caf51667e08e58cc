"""MODELs: what patches change in them, and what a MODEL is besides its weights."""

from typing import NamedTuple

import torch
from comfy.model_patcher import LowVramPatch, ModelPatcher, get_key_weight

try:
    from comfy.weight_adapter.lora import LoRAAdapter
except ImportError:
    LoRAAdapter = None

DIFFUSION_MODEL = "diffusion_model."
"""What ComfyUI puts before the names of a diffusion model's parts, in patches and backups."""


def weight_below_patches(model: ModelPatcher, key: str) -> torch.Tensor:
    """What is stored, whatever patches do to it; `key` is its name in the BaseModel ("diffusion_model.X.weight")."""
    return model.backup[key].weight if key in model.backup else get_key_weight(model.model, key)[0]


class LoRAFactors(NamedTuple):
    """What a plain LoRA adds to a weight [N, K]: factor up @ down, of [N, rank] and [rank, K]."""

    up: torch.Tensor
    down: torch.Tensor
    factor: float

    def fits(self, n: int, k: int) -> bool:
        return self.up.shape == (n, len(self.down)) and self.down.shape[1] == k


def lora_factors(patch: tuple) -> LoRAFactors | None:
    """The factors of a patch that is a plain LoRA; None for any other: DoRA, a convolution's, one of a part."""
    if len(patch) != 5:
        return None
    strength, adapter, strength_model, offset, change = patch
    if type(adapter) is not LoRAAdapter or strength_model != 1.0 or offset is not None or change is not None:
        return None
    up, down, alpha, *others = adapter.weights  # others: of convolutions, DoRA, and another shape
    if any(other is not None for other in others):
        return None
    up, down = up.flatten(1), down.flatten(1)
    factor = 1.0 if alpha is None else float(alpha) / down.shape[0]
    return LoRAFactors(up, down, strength * factor)


def key_of(function: object) -> str | None:
    """The weight that a function which changes one in use patches; None for a function that is no patch."""
    return getattr(function, "key", None) if isinstance(function, LowVramPatch) else None


def is_patch(function: object) -> bool:
    """Whether a function that changes a weight in use was attached by ComfyUI for a patch."""
    return getattr(function, "is_lowvram_patch", False)


def clone_around(model: ModelPatcher, built: ModelPatcher, key: str) -> ModelPatcher:
    """A clone of a MODEL, its sampling settings, wrappers and hooks, with the weights of another, freshly built one,
    and the callbacks that this one has under `key` in the place of its own."""
    clone = model.clone(model_override=(built.model, ({}, {}, {}, set())))
    clone.size = 0  # measured again: INT8 is smaller
    clone.parent = None  # ComfyUI falls back to a clone's parent, which here is another model
    clone.patches = {}  # the weight patches are in the weights now
    clone.object_patches |= built.object_patches
    clone.patches_uuid = built.patches_uuid
    clone.hook_mode = built.hook_mode
    if hasattr(built, "fast_disk"):  # where the weights can be read again from: those of another file, or of none
        clone.fast_disk = built.fast_disk
    # By this ComfyUI finds the copies of a MODEL on other GPUs, and those of the original are none of this one.
    clone.clone_base_uuid = built.clone_base_uuid
    for kind in {*clone.callbacks, *built.callbacks}:
        clone.remove_callbacks_with_key(kind, key)
        for function in built.get_callbacks(kind, key):
            clone.add_callback_with_key(kind, key, function)
    return clone


def on_other_gpus_again(model: ModelPatcher) -> ModelPatcher:
    """A MODEL with as many copies on other GPUs as the one had that it was cloned of."""
    copies = model.get_additional_models_with_key("multigpu")
    if not copies:
        return model
    model.remove_additional_models("multigpu")
    try:
        from comfy.multigpu import create_multigpu_deepclones
    except ImportError:
        return model
    return create_multigpu_deepclones(model, 1 + len(copies))
