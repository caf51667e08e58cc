"""MODELs: what patches change in them, whatever ComfyUI loads and unloads around it, and what else a MODEL is."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from comfy.model_patcher import LowVramPatch, ModelPatcher, get_key_weight
from comfy.patcher_extension import CallbacksMP

try:
    from comfy.weight_adapter.lora import LoRAAdapter
except ImportError:
    LoRAAdapter = None
try:
    from comfy.hooks import EnumHookMode
except ImportError:
    EnumHookMode = None

DIFFUSION_MODEL = "diffusion_model."
"""What ComfyUI puts before the names of a diffusion model's parts, in patches and backups."""

CALLBACK_KEY = "int8_dit"
"""Of callbacks that clones of a MODEL inherit."""


def weight_below_patches(model: ModelPatcher, key: str) -> torch.Tensor:
    """The stored weight, whatever patches do to it; `key` is its name in the BaseModel ("diffusion_model.X.weight")."""
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


def let_patches_act(model: ModelPatcher, on_clone: Callable[[ModelPatcher, ModelPatcher], None]) -> None:
    """Let a MODEL compute with its patches, once each, on cards where models take turns. `on_clone` hears of it and of
    each clone. Hooks work on quantized weights: their other mode cannot put floats back into those."""
    if EnumHookMode is not None:
        model.hook_mode = EnumHookMode.MinVram
    for kind, callback in (*_CALLBACKS.items(), (CallbacksMP.ON_CLONE, on_clone)):
        model.add_callback_with_key(kind, CALLBACK_KEY, callback)
    on_clone(model, model)


def _patch_once(model: ModelPatcher, *_: object) -> None:
    """Where a MODEL is loaded again with less room, ComfyUI (0.30 to 0.33) also lets the weights be patched in use that
    stay on the device and are patched already: a LoRA then acts twice."""
    for module in model.model.modules():
        if getattr(module, "comfy_patched_weights", False):
            for name in ("weight_function", "bias_function"):
                functions = getattr(module, name, [])
                if any(map(is_patch, functions)):
                    setattr(module, name, [function for function in functions if not is_patch(function)])


def _load_again(model: ModelPatcher, *_: object) -> None:
    """A guider of two models (ComfyUI 0.30 to 0.33) computes on with the first when the second has taken its room: from
    pageable memory, and without its patches. Loaded with no room at all, it streams from pinned memory and is patched.
    """
    loaded = model.model.current_weight_patches_uuid
    if not model.is_dynamic() and loaded != model.patches_uuid:
        model.partially_load(model.load_device, 0)


_CALLBACKS = {CallbacksMP.ON_LOAD: _patch_once, CallbacksMP.ON_PREPARE_STATE: _load_again}
