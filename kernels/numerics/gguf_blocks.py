"""Weights in GGUF's block formats, in PyTorch: what a GGUF loader turns back into floats in front of each product.

A row is cut into blocks. A block holds small integers and what they are multiplied by, in the byte layout of ggml
(`ggml-common.h` of llama.cpp).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

_FP16_BYTES = 2
_SUB_BLOCKS, _SUB_BLOCK = 8, 32  # of Q4_K
_SCALE_BYTES = 12
_MOST_SCALE = 63  # 6 bits


@dataclass(frozen=True)
class BlockFormat:
    """A block format.

    Attributes:
        weights: how many weights a block holds; K must be a multiple.
        bytes: what a block takes.
        quantize: [N, K] floating point -> uint8 [N, blocks, bytes].
        dequantize: (uint8 [N, blocks, bytes], dtype) -> [N, K] in that dtype.
    """

    weights: int
    bytes: int
    quantize: Callable[[torch.Tensor], torch.Tensor]
    dequantize: Callable[[torch.Tensor, torch.dtype], torch.Tensor]


def _quantize_q8_0(weight: torch.Tensor) -> torch.Tensor:
    """q = round(w / d) in int8, halves away from zero, with d = absmax / 127 kept in fp16; 32 weights a block."""
    blocks = weight.float().unflatten(1, (-1, 32))
    d = blocks.abs().amax(-1, keepdim=True) / 127
    scaled = blocks * torch.where(d > 0, 1 / d, 0)
    q = (scaled.sign() * (scaled.abs() + 0.5).floor()).to(torch.int8)
    return torch.cat([d.half().view(torch.uint8), q.view(torch.uint8)], -1)


def _dequantize_q8_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    d = blocks[..., :_FP16_BYTES].contiguous().view(torch.float16).to(dtype)
    return (blocks[..., _FP16_BYTES:].view(torch.int8) * d).flatten(1)


def _quantize_q4_k(weight: torch.Tensor) -> torch.Tensor:
    """w = d sc q - dmin m: 4 bits q per weight, 6 bits sc and m per 32 of them, fp16 d and dmin per 256.

    sc and m follow from the least and largest weight. llama.cpp searches for better ones.
    """
    groups = weight.float().unflatten(1, (-1, _SUB_BLOCKS, _SUB_BLOCK))
    lowest = (-groups.amin(-1)).clamp(min=0)
    step = (groups.amax(-1) + lowest).clamp(min=0) / 15
    d, dmin = (values.amax(-1, keepdim=True) / _MOST_SCALE for values in (step, lowest))
    sc, m = (torch.where(top > 0, values / top, 0).round() for top, values in ((d, step), (dmin, lowest)))
    d, dmin = d.half(), dmin.half()
    size, offset = ((top.float() * small)[..., None] for top, small in ((d, sc), (dmin, m)))
    q = torch.where(size > 0, (groups + offset) / size, 0).round().clamp(0, 15).to(torch.uint8)
    pairs = q.unflatten(-2, (_SUB_BLOCKS // 2, 2))
    packed = (pairs[..., 0, :] | pairs[..., 1, :] << 4).flatten(-2)
    sc, m = sc.to(torch.uint8), m.to(torch.uint8)
    scales = torch.cat(
        [
            sc[..., :4] | (sc[..., 4:] >> 4) << 6,
            m[..., :4] | (m[..., 4:] >> 4) << 6,
            sc[..., 4:] & 15 | (m[..., 4:] & 15) << 4,
        ],
        -1,
    )
    return torch.cat([d.view(torch.uint8), dmin.view(torch.uint8), scales, packed], -1)


def _dequantize_q4_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    tops, scales, packed = blocks.split([2 * _FP16_BYTES, _SCALE_BYTES, 4 * _SUB_BLOCK], -1)
    d, dmin = tops.contiguous().view(torch.float16).to(dtype).unsqueeze(-2).unbind(-1)
    low, middle, high = scales.unflatten(-1, (3, 4)).unbind(-2)
    sc = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    m = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    pairs = packed.unflatten(-1, (_SUB_BLOCKS // 2, 1, _SUB_BLOCK))
    q = torch.cat([pairs & 15, pairs >> 4], -2).flatten(-3, -2)
    return ((d * sc)[..., None] * q - (dmin * m)[..., None]).flatten(1)


Q8_0 = BlockFormat(32, 34, _quantize_q8_0, _dequantize_q8_0)
Q4_K = BlockFormat(256, 144, _quantize_q4_k, _dequantize_q4_k)
