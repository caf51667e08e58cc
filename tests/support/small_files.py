"""Small model files of six kinds, in bytes, which the tests damage.

Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

import torch
from comfy.quant_ops import TensorWiseINT8Layout
from safetensors.torch import save

from int8_dit.kernels import ChannelTransform
from int8_dit.nodes.files.quant_config import QUANT_CONFIG, SCALE, SMOOTH, as_metadata, encode_config
from support import glyph_dit
from support.file_formats import fp8_scaled


def _own() -> dict[str, torch.Tensor]:
    """Smoothed, every other layer rotated too, and every third with 16-bit activations."""
    tensors = glyph_dit.tensors()
    for number, layer in enumerate(glyph_dit.LINEARS):
        weight = tensors[f"{layer}.weight"].float()
        smooth = torch.linspace(0.5, 2.0, weight.shape[1])
        options = {"convrot": True, "convrot_groupsize": 64} if number % 2 else {}
        q, params = TensorWiseINT8Layout.quantize(weight * smooth, per_channel=True, **options)
        transform = ChannelTransform(smooth, 64 if number % 2 else None)
        mark = encode_config(transform, 16 if number % 3 == 0 else 8)
        tensors |= {f"{layer}.weight": q, f"{layer}.{SCALE}": params.scale, f"{layer}.{QUANT_CONFIG}": mark}
        tensors[f"{layer}.{SMOOTH}"] = smooth
    return tensors


def _fp8() -> dict[str, torch.Tensor]:
    tensors = glyph_dit.tensors()
    return fp8_scaled(tensors, list(glyph_dit.LINEARS))


def _unmarked() -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in glyph_dit.native_int8().items() if not key.endswith(f".{QUANT_CONFIG}")}


def base_files() -> dict[str, bytes]:
    """Small files of six kinds."""
    own = _own()
    return {
        "native INT8": save(glyph_dit.native_int8()),
        "ConvRot": save(glyph_dit.native_int8(rotation_group=64)),
        "this pack's": save(own, {"int8_dit_recipe": '{"method": "smooth"}', **as_metadata(own)}),
        "FP8 scaled": save(_fp8()),
        "bf16": save(glyph_dit.tensors()),
        "older pack's": save(_unmarked()),
    }
