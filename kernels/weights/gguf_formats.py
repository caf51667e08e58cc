"""GGUF's block formats: how they are turned to floats in PyTorch, and a table of them.

A row is cut into blocks of small integers and their scales, in the byte layout of ggml (`ggml-common.h` of llama.cpp).
A decoder takes uint8 [N, blocks, bytes] and the dtype in which it computes, and returns [N, K]. In float32 the order of
operations is that of the `gguf` package, whose results these are bit for bit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from .gguf_quantizing import quantize_q6_k, quantize_q8_0, quantize_q45_k


def _halves(blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the fp16 values in bytes [..., 2 n] as n tensors [..., 1]."""
    return blocks.contiguous().view(torch.float16).to(dtype).split(1, -1)


def _fields(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the fields of so many bits in bytes [..., bytes]: [..., 8 / bits, bytes], from the lowest bits up."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return packed.unsqueeze(-2) >> shifts[:, None] & (1 << bits) - 1


def _decode_legacy(blocks: torch.Tensor, dtype: torch.dtype, bits: int, middle: int | None = None) -> torch.Tensor:
    """Q4_0 and Q5_0 with the `middle` of their integers; without one Q4_1 and Q5_1, which have a minimum."""
    tops, high, packed = blocks.split([2 if middle else 4, 4 if bits == 5 else 0, 16], -1)
    d, *minimum = _halves(tops, dtype)
    q = _fields(packed, 4).flatten(-2)
    if bits == 5:  # the fifth ones, from the lowest of each byte up
        q = q | _fields(high, 1).transpose(-1, -2).flatten(-2) << 4
    if middle:
        return (d * (q.view(torch.int8) - middle)).flatten(1)
    return (d * q + minimum[0]).flatten(1)


def _decode_q8_0(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    top, q = blocks.split([2, 32], -1)
    (d,) = _halves(top, dtype)
    return (q.view(torch.int8) * d).flatten(1)


def _decode_q2_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    scales, packed, tops = blocks.split([16, 64, 4], -1)
    d, dmin = _halves(tops, dtype)
    sc, m = _fields(scales, 4).unbind(-2)
    q = _fields(packed.unflatten(-1, (2, 32)), 2).flatten(-3).unflatten(-1, (16, 16))
    return ((d * sc)[..., None] * q - (dmin * m)[..., None]).flatten(1)


def _decode_q3_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    mask, packed, low, high, top = blocks.split([32, 64, 8, 4, 2], -1)
    (d,) = _halves(top, dtype)
    sc = (_fields(low, 4).flatten(-2) | _fields(high, 2).flatten(-2) << 4).view(torch.int8) - 32
    fields = _fields(packed.unflatten(-1, (2, 32)), 2).flatten(-3)
    q = (fields | _fields(mask, 1).flatten(-2) << 2).view(torch.int8) - 4
    return ((d * sc)[..., None] * q.unflatten(-1, (16, 16))).flatten(1)


def _decode_q45_k(blocks: torch.Tensor, dtype: torch.dtype, bits: int) -> torch.Tensor:
    tops, scales, fifth, packed = blocks.split([4, 12, 32 if bits == 5 else 0, 128], -1)
    d, dmin = _halves(tops, dtype)
    low, middle, high = scales.unflatten(-1, (3, 4)).unbind(-2)  # of 6 bits, eight of each kind
    sc = torch.cat([low & 63, high & 15 | low >> 6 << 4], -1)
    m = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], -1)
    q = _fields(packed.unflatten(-1, (4, 32)), 4).flatten(-3, -2)
    if bits == 5:
        q = q | _fields(fifth, 1) << 4
    return ((d * sc)[..., None] * q - (dmin * m)[..., None]).flatten(1)


def _decode_q6_k(blocks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    low, high, scales, top = blocks.split([128, 64, 16, 2], -1)
    (d,) = _halves(top, dtype)
    lower = _fields(low.unflatten(-1, (2, 64)), 4).flatten(-3)
    upper = _fields(high.unflatten(-1, (2, 32)), 2).flatten(-3)
    q = ((lower | upper << 4).view(torch.int8) - 32).unflatten(-1, (16, 16))
    return ((d * scales.view(torch.int8))[..., None] * q).flatten(1)


@dataclass(frozen=True)
class GGUFFormat:
    """A block format.

    Attributes:
        weights: how many weights a block holds; K must be a multiple.
        bytes: what a block takes.
        ggml_type: its number in GGUF files, as in `gguf.GGMLQuantizationType`.
        decode: (uint8 [N, blocks, bytes], dtype) -> [N, K], computed in that dtype.
        quantize: float32 [N, K] -> uint8 [N, blocks, bytes]; None for a format that is only read.
    """

    weights: int
    bytes: int
    ggml_type: int
    decode: Callable[[torch.Tensor, torch.dtype], torch.Tensor]
    quantize: Callable[[torch.Tensor], torch.Tensor] | None = None


GGUF_FORMATS = {
    "Q4_0": GGUFFormat(32, 18, 2, partial(_decode_legacy, bits=4, middle=8)),
    "Q4_1": GGUFFormat(32, 20, 3, partial(_decode_legacy, bits=4)),
    "Q5_0": GGUFFormat(32, 22, 6, partial(_decode_legacy, bits=5, middle=16)),
    "Q5_1": GGUFFormat(32, 24, 7, partial(_decode_legacy, bits=5)),
    "Q8_0": GGUFFormat(32, 34, 8, _decode_q8_0, quantize_q8_0),
    "Q2_K": GGUFFormat(256, 84, 10, _decode_q2_k),
    "Q3_K": GGUFFormat(256, 110, 11, _decode_q3_k),
    "Q4_K": GGUFFormat(256, 144, 12, partial(_decode_q45_k, bits=4), partial(quantize_q45_k, bits=4)),
    "Q5_K": GGUFFormat(256, 176, 13, partial(_decode_q45_k, bits=5), partial(quantize_q45_k, bits=5)),
    "Q6_K": GGUFFormat(256, 210, 14, _decode_q6_k, quantize_q6_k),
}
