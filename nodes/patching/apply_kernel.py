"""The fused kernel under a MODEL that one of ComfyUI's own loaders has loaded as native INT8, W4A8 or W6A8."""

from functools import partial
from typing import Any

import torch

from ...kernels import choose_path, runs_fused
from ..blocks.install import fuse_blocks
from ..comfyui.layers import run_every_op
from ..comfyui.patcher import CallbacksMP, ModelPatcher
from ..comfyui.quantized import QuantizedTensor
from ..comfyui.residency import keep_patched
from ..files.holding.stored_weight import is_stored
from ..host import notices
from ..layers.fused_forward import INT8Linear, class_patch, form_of, fused_forward, is_comfyui_int8
from ..layers.input_groups import group_inputs
from ..layers.int8_weight import is_int8

_CALLBACK_KEY = "int8_dit_apply"


def apply_fused_kernel(model: ModelPatcher, kernel: str) -> ModelPatcher:
    """A clone of a MODEL whose native INT8 linears, also those in 4 or 6 bits, run on the fused kernel. Layers whose
    quant configs ask for full precision get activations of 16 bits.

    `kernel` is "auto" or "fused int8". Where `auto` finds no card that the kernel is known to win on, the clone runs as
    before, with a warning. A MODEL of this pack runs the kernel already and stays as it is.

    Raises ValueError for a MODEL without INT8 linears, RuntimeError where "fused int8" cannot run.
    """
    modules = {name: module for name, module in model.model.diffusion_model.named_modules() if name}
    weights = {name: getattr(module, "weight", None) for name, module in modules.items()}
    names = [name for name, weight in weights.items() if is_comfyui_int8(weight, modules[name])]
    if not names and not any(is_int8(weight) or is_stored(weight) for weight in weights.values()):
        raise ValueError(
            "this MODEL holds no INT8 linears. Load a native INT8 file before this node, or use Load INT8 DiT, "
            "which quantizes other files while loading"
        )
    choose_path(model.load_device, kernel)  # raises where it cannot be
    patched = model.clone()
    # ComfyUI puts a patched attribute in place when it loads the MODEL, and the old one back with the next MODEL: the
    # module's class is one. Unlike a function it is right for a copy of the module on another GPU, too.
    classes: dict[type, type] = {}
    for name in names:
        found = model.get_model_object(class_patch(name))  # also while an earlier clone is in place
        own = getattr(found, "replaced", found)  # below the kernel that another node has applied
        patched.add_object_patch(class_patch(name), classes.setdefault(own, running_fused(own, kernel)))
    if names:
        patched.add_callback_with_key(CallbacksMP.ON_LOAD, _CALLBACK_KEY, _group_inputs)
        patched.add_callback_with_key(CallbacksMP.ON_PRE_RUN, _CALLBACK_KEY, partial(_warn_of_fallback, kernel))
        keep_patched(patched)
        fuse_blocks(patched)
    return patched


def _warn_of_fallback(kernel: str, model: ModelPatcher) -> None:
    compute = choose_path(model.load_device, kernel)
    if compute.fallback:
        notices.warn(
            "not-applied",
            "The fused INT8 kernel is not applied",
            f"{compute.reason}. The model runs as ComfyUI runs it.",
            "" if compute.blocked else "Set kernel on Apply Fused INT8 Kernel to 'fused int8' to apply it anyway.",
        )


def _group_inputs(model: ModelPatcher, *_: object) -> None:
    group_inputs(model.model.diffusion_model)


def running_fused(own: Any, kernel: str) -> type:
    """A class of linears like `own`, one of ComfyUI's, with the product of INT8 weights replaced."""

    class FusedINT8Linear(INT8Linear, own):
        int8_kernel = kernel
        replaced = own

        def forward(self, input, *args, **kwargs):
            form = form_of(self)
            if form is None or form.own:
                return super().forward(input, *args, **kwargs)
            fused = runs_fused(input.device, kernel, self.out_features, self.in_features, form.native)
            if not fused or (input.requires_grad and torch.is_grad_enabled()):
                return super().forward(input, *args, **kwargs)
            run_every_op()
            return fused_forward(self, input.dequantize() if isinstance(input, QuantizedTensor) else input)

    return FusedINT8Linear
