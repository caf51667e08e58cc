"""Weights that stay in GGUF's blocks while a MODEL runs, and what patches (LoRAs) do to them.

No block holds a patched weight as exactly as INT8 does, so ComfyUI never writes one back. Patches act in each product:
a plain LoRA as two thin products beside it.
"""

from dataclasses import replace
from typing import Any

import torch
from comfy.model_management import cast_to_device
from comfy.model_patcher import LowVramPatch, ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.quant_ops import QuantizedTensor
from comfy.weight_adapter.lora import LoRAAdapter

from ..files.gguf_weight import GGUF_LAYOUT, is_gguf, with_scales
from .int8_weight import HeldWeight
from .residency import CALLBACK_KEY

SMALLEST_STORED = 1 << 16
"""Bytes below which a weight becomes INT8 all the same: ComfyUI patches small weights where they are."""


def stored_weight(weight: QuantizedTensor, dtype: torch.dtype, becomes_int8: bool) -> QuantizedTensor:
    """A weight that was read of a GGUF file, as a linear holds it that takes and gives floats of `dtype`.

    Its product is INT8's, or else that of the floats that its blocks stand for. Raises ValueError where a row holds a
    NaN or Inf.
    """
    scaled = with_scales(weight)
    params = replace(scaled._params if becomes_int8 else weight._params, orig_dtype=dtype)
    return HeldWeight(weight._qdata.clone(), GGUF_LAYOUT, params)  # nobody reads the file once it is loaded


def patch_outputs(model: ModelPatcher) -> None:
    """Let patches act in the products of a MODEL's stored weights, in every memory mode."""
    model.add_callback_with_key(CallbacksMP.ON_LOAD, CALLBACK_KEY, _patch_outputs)


def _patch_outputs(model: ModelPatcher, *_: object) -> None:
    for name, module in model.model.named_modules():
        key = f"{name}.weight"
        if key not in model.patches or not is_gguf(getattr(module, "weight", None)):
            continue
        model.backup.pop(key, None)  # of a weight that `set_weight` left as it was
        others = [f for f in module.weight_function if not getattr(f, "is_lowvram_patch", False)]
        patches = [_on_device(patch, model.load_device, module.weight.dtype) for patch in model.patches[key]]
        module.weight_function = [LowVramPatch(key, {key: patches}), *others]
        module.weight_lowvram_function = None  # where dynamic VRAM would write a patched weight


def _on_device(patch: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """A patch with the factors of a plain LoRA on the device: they are small, and every product reads them."""
    strength, adapter, *rest = patch
    if type(adapter) is not LoRAAdapter:
        return patch
    weights = [cast_to_device(w, device, dtype) if isinstance(w, torch.Tensor) else w for w in adapter.weights]
    return (strength, LoRAAdapter(adapter.loaded_keys, tuple(weights)), *rest)
