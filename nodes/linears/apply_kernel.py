"""The fused kernel for a MODEL or CLIP that ComfyUI's own loaders have loaded as native INT8, W4A8 or W6A8."""

import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ...kernels import FUSED, choose_path
from ..comfyui.patcher import let_patches_act, undo_object_patches
from ..comfyui.quantized import FORWARDED_LAYOUT, NATIVE_LAYOUT, held_weight, is_native_int8, native_int8_as
from ..deferred.install import defer, deferring_class
from ..files.holding import is_stored
from ..host import notices
from .compile_ahead import compile_linears
from .fused_forward import INT8Linear
from .int8_weight import is_int8
from .layer_selection import class_patch, linears, quantizable_shapes, root_of
from .linear_call import arguments_of, name_linears, refuse_unknown
from .patched_weights import show_whole
from .stored_weights import put_hooked
from .weight_form import weight_form

_CALLBACK_KEY = "int8_dit_apply"


def apply_fused_kernel(model: ModelPatcher, kernel: str) -> ModelPatcher:
    """Return a clone of a MODEL whose native INT8 linears, also those in 4 or 6 bits, run on the fused kernel.

    Layers whose quant configs ask for full precision get activations of 16 bits. `kernel` is "auto" or "fused int8".
    Where `auto` finds no card that the kernel is known to win on, the clone runs as before, with a warning. A MODEL of
    this pack runs the kernel already and stays as it is.

    Raises ValueError for a MODEL without INT8 linears, RuntimeError where "fused int8" cannot run.
    """
    undo_object_patches(model)
    names = _comfyui_int8(model)
    weights = (getattr(module, "weight", None) for module in root_of(model)[0].modules())
    if not names and not any(is_int8(weight) or is_stored(weight) for weight in weights):
        raise ValueError(
            "this MODEL holds no INT8 linears. Load a native INT8 file before this node, or use Load INT8 DiT, "
            "which quantizes other files while loading"
        )
    patched = _running_fused(model, names, kernel)
    if names:
        dtype = model.model.get_dtype_inference()
        compile_linears(model.model.diffusion_model, kernel, dtype, model.load_device)
        warn = partial(_warn, kernel, "Apply Fused INT8 Kernel")
        patched.add_callback_with_key(CallbacksMP.ON_PRE_RUN, _CALLBACK_KEY, warn)
        defer(patched)
    return patched


def apply_to_text_encoder(clip: Any, kernel: str) -> Any:
    """Return a clone of a CLIP whose native INT8 linears run on the fused kernel, all with activations of 16 bits.

    ComfyUI multiplies floats in text encoders, whose activations have large outliers. `kernel` is as for a MODEL.

    Raises ValueError for a CLIP that is none or has no INT8 linears, RuntimeError where "fused int8" cannot run.
    """
    encoder = getattr(clip, "patcher", None)
    if encoder is None:
        raise ValueError("this CLIP is empty: its file holds no text encoder. Load one with Load CLIP")
    undo_object_patches(encoder)
    names = _comfyui_int8(encoder)
    if not names:
        raise ValueError(
            "this CLIP holds no INT8 linears. Load a text encoder in native INT8 before this node, or leave this node "
            "out"
        )
    patched = _running_fused(encoder, names, kernel)
    for name in _outermost(encoder, names):
        patch = class_patch(patched, name)
        own = patched.get_model_object(patch)
        patched.add_object_patch(patch, deferring_class(own, patched.load_device))
    # ComfyUI calls nothing back before each prompt, so the user hears it here.
    _warn(kernel, "Apply Fused INT8 Kernel (Text Encoder)", patched)
    clone = clip.clone()
    clone.patcher = patched
    return clone


def _outermost(encoder: ModelPatcher, names: Sequence[str]) -> set[str]:
    """Return the paths of the outermost modules with a forward of their own around these linears."""
    modules = dict(encoder.model.named_modules())
    parents = ([".".join(name.split(".")[:depth]) for depth in range(1, name.count(".") + 1)] for name in names)
    own = torch.nn.Module.forward
    return {next(path for path in paths if type(modules[path]).forward is not own) for paths in parents if paths}


def _comfyui_int8(model: ModelPatcher) -> list[str]:
    """Return the paths of linears that ComfyUI's own loaders hold in INT8: no other layers, such as embeddings."""
    forms = {name: weight_form(linear.weight, linear) for name, linear in linears(model).items()}
    return [name for name, form in forms.items() if form is not None and not form.own]


def _running_fused(model: ModelPatcher, names: Sequence[str], kernel: str) -> ModelPatcher:
    """Return a clone whose linears of these names run fused. Those in floats get the class too, for hooks."""
    fuses = choose_path(model.load_device, kernel).kind == FUSED  # raises where it cannot be
    patched = model.clone()
    # The class of each module is patched: ComfyUI sets it when it loads the MODEL, and the old one with the next MODEL.
    # Unlike a patched function it is right for a copy of the module on another GPU, too.
    classes: dict[type, type] = {}
    for name in [name for name, linear in linears(model).items() if names and hasattr(linear, "set_weight")]:
        patch, weight = class_patch(model, name), f"{root_of(model)[1]}{name}.weight"
        found = model.get_model_object(patch)  # also while an earlier clone is in place
        own = getattr(found, "replaced", found)  # below the kernel that another node has applied
        patched.add_object_patch(patch, classes.setdefault(own, fused_class(own, kernel, model.is_clip, fuses)))
        layout = f"{weight}._layout_cls"
        patched.object_patches.pop(layout, None)
        if fuses and is_native_int8(model.get_model_object(weight)):
            patched.add_object_patch(layout, FORWARDED_LAYOUT)
    if names:
        # By this ComfyUI knows whose weights are loaded: in the other layout they are not this clone's.
        patched.patches_uuid = uuid.uuid5(model.patches_uuid, FORWARDED_LAYOUT if fuses else NATIVE_LAYOUT)
        let_patches_act(patched, show_whole)
        # Once their classes are in place.
        patched.add_callback_with_key(CallbacksMP.ON_LOAD, _CALLBACK_KEY, lambda m, *_: name_linears(root_of(m)[0]))
    return patched


def _warn(kernel: str, node: str, model: ModelPatcher) -> None:
    summary, so = "The fused INT8 kernel is not applied", " The model runs as ComfyUI runs it."
    advice = f"Set kernel on {node} to 'fused int8' to apply it anyway."
    shapes = quantizable_shapes(model)
    notices.warn_of_fallback("not-applied", model.load_device, kernel, shapes, summary, advice, so)


def fused_class(own: Any, kernel: str, encodes: bool = False, forwards: bool = True) -> type:
    """Return a subclass of `own`, ComfyUI's class of linears, whose INT8 weights the fused kernel multiplies by; for a
    text encoder with activations of 16 bits. Behind 0.39 ComfyUI's `linear_input_act` asks whether it `forwards`."""

    class FusedINT8Linear(INT8Linear, own):
        int8_kernel = kernel
        comfy_force_forward = forwards
        of_encoder = encodes
        own_arguments = arguments_of(own.forward)
        replaced = own

        def set_weight(self, weight, inplace_update=False, seed=None, return_weight=False, **others):
            if return_weight or not inplace_update:
                return held_weight(super().set_weight(weight, seed=seed, return_weight=return_weight, **others))
            refuse_unknown(self, others)
            return put_hooked(self, weight, seed)  # by a hook, which ComfyUI's own cannot take

        def unfused(self, *call: Any) -> torch.Tensor:
            with native_int8_as(NATIVE_LAYOUT, self):  # the name by which ComfyUI's own product knows INT8
                return super().unfused(*call)

    return FusedINT8Linear
