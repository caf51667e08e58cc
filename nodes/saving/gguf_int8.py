"""Q8_CR: native INT8 inside of a GGUF file, as molbal's ComfyUI-GGUF has it. A linear's weight is int8, a tensor beside
it its scale per row in float32, and an entry of the metadata says how it is rotated.
"""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
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
from ..linears.patched_weights import patched_weight
from ..linears.weight_form import WeightForm, weight_form

Q8_CR = "Q8_CR"
KNOWN_ARCHITECTURES = ("krea2", "minimax_h3")
"""What it names as ComfyUI does, beside those of every ComfyUI-GGUF."""


@dataclass(frozen=True, kw_only=True)
class _PendingINT8(PendingGGUF):
    """An INT8 weight that is about to be written, and what was done to its channels."""

    transform: ChannelTransform


def int8_pieces(model: ModelPatcher) -> dict[str, dict[str, PendingGGUF]]:
    """What the weights of linears become that are INT8 in the file, by their names in the diffusion model: int8 and
    scales, by name.

    Those of a MODEL that are INT8, in fewer bits too, or all that would become INT8 where none is. One that nothing
    patches stays what it is. Others are rotated and rounded: floats, GGUF's blocks, and what has smoothing factors,
    which the format cannot say. As it knows no activations of 16 bits, weights with these are left out.
    """
    layers = {f"{name}.weight": layer for name, layer in linears(model).items()}
    held: dict[str, Any] = {name: weight_below_patches(model, DIFFUSION_MODEL + name) for name in layers}
    forms = {name: weight_form(held[name], layer) for name, layer in layers.items()}
    any_int8 = any(form is not None and not is_gguf(held[name]) for name, form in forms.items())
    found = {}
    for name, form in forms.items():
        if form is None:
            becomes = not any_int8 and is_quantizable(name.removesuffix(".weight"), tuple(held[name].shape))
        else:
            becomes = form.unsmoothed.activation_bits == 8
        if becomes:
            found[name] = _pieces(model, name, held[name], form)
    return found


def _pieces(model: ModelPatcher, name: str, held: Any, form: WeightForm | None) -> dict[str, PendingGGUF]:
    rows, channels = held.shape
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

    weight = _PendingINT8((rows, channels), "I8", lambda: made().pop(name), transform=transform)
    return {name: weight, scale_name: PendingGGUF((rows, 1), "F32", lambda: made().pop(scale_name))}


def int8_metadata(tensors: Mapping[str, PendingGGUF]) -> dict[str, str]:
    """What a file's metadata say of its INT8 weights, which are tensors by their names there."""
    said, configs = {}, {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, _PendingINT8):
            continue
        group = tensor.transform.rotation_group
        config = {"format": NATIVE_FORMAT, "convrot": group is not None, "weight_rotated": group is not None}
        config |= {"per_row": True} | ({} if group is None else {"convrot_groupsize": group})
        said[INT8_CONFIG + name] = json.dumps(config)
        key = f"{name.removesuffix('.weight')}.{quant_config.QUANT_CONFIG}"
        configs[key] = quant_config.encode_config(tensor.transform)
    return said | quant_config.as_metadata(configs) if said else {}
