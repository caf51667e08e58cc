"""MODELs: their patches, whatever ComfyUI loads and unloads meanwhile, their clones, and their copies on other GPUs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
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
    """The stored weight, without patches; `key` is its name in the BaseModel ("diffusion_model.X.weight")."""
    return model.backup[key].weight if key in model.backup else get_key_weight(model.model, key)[0]


def undo_object_patches(model: ModelPatcher) -> None:
    """Put back what the object patches of the clone that was loaded last replaced in the weights' module, which clones
    share. ComfyUI leaves them there, and puts a MODEL's own in place each time it is loaded."""
    model.unpatch_model(unpatch_weights=False)


@contextmanager
def passing(clone: ModelPatcher) -> Iterator[ModelPatcher]:
    """Yield a clone of a MODEL that is of no use after the context. The weights that both share stay pinned: ComfyUI
    (0.30 to 0.33) unpins them with the first clone that goes, and then the MODEL streams from pageable memory."""
    try:
        yield clone
    finally:
        clone.pinned = set()


class LoRAFactors(NamedTuple):
    """What a plain LoRA adds to a weight [N, K]: factor up @ down, of [N, rank] and [rank, K]."""

    up: torch.Tensor
    down: torch.Tensor
    factor: float


def lora_factors(patch: tuple, shape: Sequence[int]) -> LoRAFactors | None:
    """The factors of a patch that is a plain LoRA of a weight of this shape [N, K]; None for any other: DoRA, a
    convolution's, one of a part."""
    if len(patch) != 5:
        return None
    strength, adapter, strength_model, offset, change = patch
    if type(adapter) is not LoRAAdapter or strength_model != 1.0 or offset is not None or change is not None:
        return None
    up, down, alpha, *others = adapter.weights  # others: of convolutions, DoRA, and another shape
    if any(other is not None for other in others):
        return None
    up, down = up.flatten(1), down.flatten(1)
    if up.shape != (shape[0], len(down)) or down.shape[1] != shape[1]:
        return None
    return LoRAFactors(up, down, strength * (1.0 if alpha is None else float(alpha) / len(down)))


def key_of(function: object) -> str | None:
    """The key of the weight that a function patches in use; None for a function that is no patch."""
    return getattr(function, "key", None) if isinstance(function, LowVramPatch) else None


def is_patch(function: object) -> bool:
    """Whether ComfyUI attached a function to a module for a patch of its weight."""
    return getattr(function, "is_lowvram_patch", False)


def clone_around(model: ModelPatcher, built: ModelPatcher) -> ModelPatcher:
    """Return a clone of a MODEL, its sampling settings, wrappers and hooks, with the weights of another, freshly built
    one, and the pack's callbacks of that one."""
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
        clone.remove_callbacks_with_key(kind, CALLBACK_KEY)
        for function in built.get_callbacks(kind, CALLBACK_KEY):
            clone.add_callback_with_key(kind, CALLBACK_KEY, function)
    return clone


def copy_to_other_gpus(model: ModelPatcher) -> ModelPatcher:
    """Return a clone with as many copies on other GPUs as its original has."""
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
    """Apply a MODEL's patches once each, and each clone's own alone, also where models take turns on a card. `on_clone`
    gets it and its clones."""
    if EnumHookMode is not None:  # the other mode cannot put floats back into quantized weights
        model.hook_mode = EnumHookMode.MinVram
    model.add_callback_with_key(CallbacksMP.ON_LOAD, CALLBACK_KEY, _patch_once)
    model.add_callback_with_key(CallbacksMP.ON_LOAD, CALLBACK_KEY, _keep_schedule)
    model.add_callback_with_key(CallbacksMP.ON_PREPARE_STATE, CALLBACK_KEY, _load_again)
    model.add_callback_with_key(CallbacksMP.ON_CLONE, CALLBACK_KEY, on_clone)
    on_clone(model, model)


def _patch_once(model: ModelPatcher, *_: object) -> None:
    """Detach patches from weights that hold them already: ComfyUI (0.30 to 0.33) attaches them again where it loads a
    MODEL with less room, and a LoRA acts twice."""
    for module in model.model.modules():
        if getattr(module, "comfy_patched_weights", False):
            for name in ("weight_function", "bias_function"):
                functions = getattr(module, name, [])
                if any(map(is_patch, functions)):
                    setattr(module, name, [function for function in functions if not is_patch(function)])


def _keep_schedule(model: ModelPatcher, *_: object) -> None:
    """Leave the sigmas to the sampling that they are of: with dynamic VRAM ComfyUI (0.30 to 0.33) puts them back by
    name at the next load, into the sampling of whichever clone is loaded then, which draws another picture."""
    for name in [name for name in getattr(model, "backup_buffers", ()) if name.startswith("model_sampling.")]:
        del model.backup_buffers[name]  # ComfyUI has put equal ones in their place, on the card


def _load_again(model: ModelPatcher, *_: object) -> None:
    """Load a MODEL whose room another one took with no room at all: it streams from pinned memory, and is patched. A
    guider of two models (ComfyUI 0.30 to 0.33) would compute from pageable memory, and without patches."""
    loaded = model.model.current_weight_patches_uuid
    if not model.is_dynamic() and loaded != model.patches_uuid:
        model.partially_load(model.load_device, 0)
