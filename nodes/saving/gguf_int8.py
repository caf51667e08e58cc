"""Q8_CR: native INT8 inside of a GGUF file, as molbal's ComfyUI-GGUF has it. A linear is int8, its scale per row is a
float32 tensor beside it, and an entry of the metadata says how it is rotated.
"""

import functools
import json
from collections.abc import Mapping
from typing import Any

import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from ...kernels import ChannelTransform, requantize_weight, rotation_group_of
from ..comfyui.patcher import DIFFUSION_MODEL, weight_below_patches
from ..comfyui.quantized import NATIVE_FORMAT
from ..files import quant_config
from ..files.holding import is_gguf
from ..files.reading.gguf_package import INT8_CONFIG
from ..files.writing.tensor_files import PendingGGUF
from ..linears.layer_selection import is_quantizable, linears
from ..linears.patched_weights import patched_shape, patched_weight
from ..linears.weight_form import WeightForm, weight_form

Q8_CR = "Q8_CR"
KNOWN_ARCHITECTURES = ("krea2", "minimax_h3")
"""What it names as ComfyUI does, beside those of every ComfyUI-GGUF."""


def int8_pieces(model: ModelPatcher) -> dict[str, dict[str, PendingGGUF]]:
    """Return the int8 and the scales, by name, of each linear's weight that is INT8 in the file, by its own name.

    Those are INT8 in the MODEL, in fewer bits too, or all that would become INT8 where none is. One that nothing
    patches stays what it is. Others are rotated and rounded: floats, GGUF's blocks, and what has smoothing factors,
    which the format cannot say. As it knows no activations of 16 bits, weights with these are left out.
    """
    layers = {f"{name}.weight": layer for name, layer in linears(model).items()}
    held: dict[str, Any] = {name: weight_below_patches(model, DIFFUSION_MODEL + name) for name in layers}
    forms = {name: weight_form(held[name], layer) for name, layer in layers.items()}
    any_int8 = any(form is not None and not is_gguf(held[name]) for name, form in forms.items())

    def becomes_int8(name: str, form: WeightForm | None) -> bool:
        if form is None:
            return not any_int8 and is_quantizable(name.removesuffix(".weight"), tuple(held[name].shape))
        return form.unsmoothed.activation_bits == 8

    return {name: _pieces(model, name, held[name], form) for name, form in forms.items() if becomes_int8(name, form)}


def _pieces(model: ModelPatcher, name: str, held: Any, form: WeightForm | None) -> dict[str, PendingGGUF]:
    rows, channels = patched_shape(model, name)
    as_held = None if form is None or form.smoothed or is_gguf(held) else form
    transform = as_held.unsmoothed.transform if as_held else ChannelTransform(None, rotation_group_of(channels))
    key, scale_name = DIFFUSION_MODEL + name, f"{name}_scale"

    @functools.cache
    def made() -> dict[str, torch.Tensor]:
        if as_held is None or key in model.patches:
            # A patch may change less than a step: rounded to the nearest it would be lost.
            seed = comfy.utils.string_to_seed(key) if key in model.patches else None
            q, scale = requantize_weight(patched_weight(model, name), transform, seed)
            if not bool(torch.isfinite(scale).all()):
                raise ValueError("it has a NaN or Inf, which its patches (a LoRA?) may have made")
        else:
            q, scale = as_held.operands(held if as_held.kind is None else held.to(model.load_device))
        return {name: q.cpu(), scale_name: scale.float().reshape(-1, 1).expand(rows, 1).cpu()}

    weight = PendingGGUF((rows, channels), "I8", lambda: made().pop(name), transform)
    return {name: weight, scale_name: PendingGGUF((rows, 1), "F32", lambda: made().pop(scale_name))}


def int8_metadata(tensors: Mapping[str, PendingGGUF]) -> dict[str, str]:
    """Return what a file's metadata say of its INT8 weights, which are among these tensors by their names there."""
    transforms = {name: tensor.transform for name, tensor in tensors.items() if tensor.transform is not None}
    said, configs = {}, {}
    for name, transform in transforms.items():
        group = transform.rotation_group
        config = {"format": NATIVE_FORMAT, "convrot": group is not None, "weight_rotated": group is not None}
        config |= {"per_row": True} | ({} if group is None else {"convrot_groupsize": group})
        said[INT8_CONFIG + name] = json.dumps(config)
        key = f"{name.removesuffix('.weight')}.{quant_config.QUANT_CONFIG}"
        configs[key] = quant_config.encode_config(transform)
    return said | quant_config.as_metadata(configs) if said else {}
