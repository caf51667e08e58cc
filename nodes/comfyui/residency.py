"""A MODEL's weights as its patches make them, whatever ComfyUI loads and unloads around it.

All of it goes through the ModelPatcher's callbacks, which clones inherit.
"""

from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

try:
    from comfy.hooks import EnumHookMode
except ImportError:
    EnumHookMode = None

CALLBACK_KEY = "int8_dit"


def keep_patched(model: ModelPatcher) -> None:
    """Let a MODEL compute with its patches, once each, on cards where models take turns."""
    for kind, callback in _CALLBACKS.items():
        model.add_callback_with_key(kind, CALLBACK_KEY, callback)


def let_patches_act(model: ModelPatcher) -> None:
    """`keep_patched`, and hooks that work on quantized weights: their other mode keeps patched weights as floats, and
    cannot put those back into quantized ones."""
    if EnumHookMode is not None:
        model.hook_mode = EnumHookMode.MinVram
    keep_patched(model)


def _patch_once(model: ModelPatcher, *_: object) -> None:
    """Where a MODEL is loaded again with less room, ComfyUI (0.30 to 0.33) also lets the weights be patched in use that
    stay on the device and are patched already: a LoRA then acts twice."""
    for module in model.model.modules():
        if getattr(module, "comfy_patched_weights", False):
            for name in ("weight_function", "bias_function"):
                functions = getattr(module, name, [])
                if any(getattr(function, "is_lowvram_patch", False) for function in functions):
                    setattr(module, name, [f for f in functions if not getattr(f, "is_lowvram_patch", False)])


def _load_again(model: ModelPatcher, *_: object) -> None:
    """A guider of two models (ComfyUI 0.30 to 0.33) computes on with the first when the second has taken its room: from
    pageable memory, and without its patches. Loaded with no room at all, it streams from pinned memory and is patched.
    """
    loaded = model.model.current_weight_patches_uuid
    if not model.is_dynamic() and loaded != model.patches_uuid:
        model.partially_load(model.load_device, 0)


_CALLBACKS = {CallbacksMP.ON_LOAD: _patch_once, CallbacksMP.ON_PREPARE_STATE: _load_again}
