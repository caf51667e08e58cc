"""A weight in GGUF's blocks as ComfyUI carries it: a layout of its QuantizedTensor.

Its tensor has the shape of the weight, so that ComfyUI recognises a model by it. What ComfyUI does to it that no block
knows gives the floats that it stands for.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class
from comfy_kitchen.tensor import BaseLayoutParams

from ....kernels import GGUF_FORMATS, dequantize_gguf, gguf_channel_scales, quantize_gguf
from ...comfyui.quantized import HeldWeight, has_layout, stored
from ..reading.gguf_package import decode_gguf

GGUF_LAYOUT = "GGUFBlocksLayout"
_NO_SCALES = torch.empty((0, 1), dtype=torch.float32)


class GGUFLayout(QuantizedLayout):
    """uint8 [N, bytes of a row], the name of a block format, and float32 [N, 1]: what each row is scaled by as INT8.

    A weight that was only read, or that computes in floats, has no scales: [0, 1].
    """

    @dataclass(frozen=True)
    class Params(BaseLayoutParams):
        gguf_format: str = ""

    @classmethod
    def quantize(
        cls, tensor, scale=None, stochastic_rounding=0, inplace_ops=False, gguf_format="", computes_in_floats=False
    ) -> tuple[torch.Tensor, "GGUFLayout.Params"]:
        """Float weight -> blocks and parameters. The scales are always computed anew."""
        blocks = quantize_gguf(tensor, gguf_format)
        scales = _NO_SCALES.to(tensor.device) if computes_in_floats else _scales(blocks, gguf_format)
        return blocks, cls.Params(scales, tensor.dtype, tuple(tensor.shape), gguf_format)

    @classmethod
    def dequantize(cls, qdata, params) -> torch.Tensor:
        """The weight in `params.orig_dtype`, made by the package gguf where no kernel knows the format."""
        decode = dequantize_gguf if params.gguf_format in GGUF_FORMATS else decode_gguf
        return decode(qdata, params.gguf_format, params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor) -> tuple[torch.Tensor, torch.Tensor]:
        return stored(qtensor), qtensor.params.scale

    @classmethod
    def state_dict_tensors(cls, qdata, params) -> dict[str, torch.Tensor]:
        return {"": qdata, "_scale": params.scale}

    @classmethod
    def requantize_kwargs(cls, qtensor) -> dict:
        return {"gguf_format": qtensor.params.gguf_format, "computes_in_floats": not has_scales(qtensor)}


register_layout_class(GGUF_LAYOUT, GGUFLayout)


def read_weight(blocks: torch.Tensor, gguf_format: str, shape: tuple[int, int]) -> QuantizedTensor:
    """A weight of this shape [N, K] as it was read: uint8 blocks [N, bytes of a row] of a format of GGUF_FORMATS, or of
    one that only the package gguf decodes."""
    form = GGUFLayout.Params(_NO_SCALES, torch.float32, shape, gguf_format)
    return QuantizedTensor(blocks, GGUF_LAYOUT, form)


def is_gguf(weight: Any) -> TypeGuard[QuantizedTensor]:
    """Whether a tensor is a weight in GGUF's blocks."""
    return has_layout(weight, GGUF_LAYOUT)


def has_scales(weight: QuantizedTensor) -> bool:
    """Whether a weight in GGUF's blocks can become INT8 for a product."""
    return weight.params.scale.numel() > 0


def held_gguf(weight: QuantizedTensor, dtype: torch.dtype, becomes_int8: bool, device: torch.device) -> HeldWeight:
    """A weight that was read, as a linear holds it that takes and gives floats of `dtype`: in no file any more.

    Its product is INT8's, or else that of the floats that its blocks stand for. Scales are found on `device`. Raises
    ValueError where a row holds a NaN or Inf.
    """
    blocks, form = stored(weight), replace(weight.params, orig_dtype=dtype)
    scales = _scales(blocks.to(device), form.gguf_format)
    broken = ~torch.isfinite(scales.flatten())
    if bool(broken.any()):
        raise ValueError(f"weight has a NaN or Inf in output channel {int(broken.nonzero()[0])}")
    if becomes_int8:
        form = replace(form, scale=scales.to(blocks.device))
    return HeldWeight(blocks.clone(), GGUF_LAYOUT, form)


def _scales(blocks: torch.Tensor, gguf_format: str) -> torch.Tensor:
    return gguf_channel_scales(blocks, gguf_format)[:, None].contiguous()
