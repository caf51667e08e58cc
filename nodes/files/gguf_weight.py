"""A weight in GGUF's blocks as ComfyUI carries it: a layout of its QuantizedTensor.

Its tensor has the shape of the weight, so that ComfyUI recognises a model by it. What ComfyUI does to it that no block
knows gives the floats that it stands for.
"""

from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class
from comfy_kitchen.tensor import BaseLayoutParams

from ...kernels import channel_scales, dequantize_blocks, quantize_blocks

GGUF_LAYOUT = "GGUFBlocksLayout"


class GGUFBlocksLayout(QuantizedLayout):
    """uint8 [N, bytes of a row], the name of a block format, and float32 [N, 1]: what each row is scaled by as INT8.

    A weight that was only read has no scales yet: [0, 1].
    """

    @dataclass(frozen=True)
    class Params(BaseLayoutParams):
        block_format: str = ""

    @classmethod
    def quantize(
        cls, tensor, scale=None, stochastic_rounding=0, inplace_ops=False, block_format=""
    ) -> tuple[torch.Tensor, "GGUFBlocksLayout.Params"]:
        """Float weight -> blocks and parameters. The scales are always computed anew."""
        blocks = quantize_blocks(tensor, block_format)
        return blocks, _params(blocks, block_format, tensor.dtype, tuple(tensor.shape))

    @classmethod
    def dequantize(cls, qdata, params) -> torch.Tensor:
        """The weight in `params.orig_dtype`."""
        return dequantize_blocks(qdata, params.block_format, params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor) -> tuple[torch.Tensor, torch.Tensor]:
        return qtensor._qdata, qtensor._params.scale

    @classmethod
    def state_dict_tensors(cls, qdata, params) -> dict[str, torch.Tensor]:
        return {"": qdata, "_scale": params.scale}

    @classmethod
    def requantize_kwargs(cls, qtensor) -> dict:
        return {"block_format": qtensor._params.block_format}


register_layout_class(GGUF_LAYOUT, GGUFBlocksLayout)


def read_weight(blocks: torch.Tensor, block_format: str, shape: tuple[int, int]) -> QuantizedTensor:
    """A weight of this shape [N, K] as it was read: uint8 blocks [N, bytes of a row] of a format of GGUF_FORMATS."""
    scale = torch.empty((0, 1), dtype=torch.float32)
    params = GGUFBlocksLayout.Params(scale, torch.float32, shape, block_format)
    return QuantizedTensor(blocks, GGUF_LAYOUT, params)


def is_gguf(weight: Any) -> TypeGuard[QuantizedTensor]:
    """Whether a tensor is a weight in GGUF's blocks."""
    return isinstance(weight, QuantizedTensor) and weight._layout_cls == GGUF_LAYOUT


def with_scales(weight: QuantizedTensor, dtype: torch.dtype) -> tuple[torch.Tensor, "GGUFBlocksLayout.Params"]:
    """Blocks and parameters of a weight that was read, to be computed with in `dtype`.

    Raises ValueError where a row holds a NaN or Inf.
    """
    params = _params(weight._qdata, weight._params.block_format, dtype, tuple(weight.shape))
    broken = ~torch.isfinite(params.scale.flatten())
    if bool(broken.any()):
        raise ValueError(f"weight has a NaN or Inf in output channel {int(broken.nonzero()[0])}")
    return weight._qdata, params


def with_blocks(weight: QuantizedTensor, blocks: torch.Tensor) -> QuantizedTensor:
    """Other rows in the form of a weight that was read."""
    shape = (blocks.shape[0], weight.shape[1])
    return QuantizedTensor(blocks, GGUF_LAYOUT, replace(weight._params, orig_shape=shape))


def _params(
    blocks: torch.Tensor, block_format: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> "GGUFBlocksLayout.Params":
    scale = channel_scales(blocks, block_format)
    return GGUFBlocksLayout.Params(scale[:, None].contiguous(), dtype, shape, block_format)
