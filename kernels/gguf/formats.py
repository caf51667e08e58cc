"""GGUF's block formats: a table of their sizes, how they are read, and how they are made."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from .decoding import decode_legacy, decode_q2_k, decode_q3_k, decode_q6_k, decode_q8_0, decode_q45_k
from .quantizing import quantize_q6_k, quantize_q8_0, quantize_q45_k


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
    "Q4_0": GGUFFormat(32, 18, 2, partial(decode_legacy, bits=4, middle=8)),
    "Q4_1": GGUFFormat(32, 20, 3, partial(decode_legacy, bits=4)),
    "Q5_0": GGUFFormat(32, 22, 6, partial(decode_legacy, bits=5, middle=16)),
    "Q5_1": GGUFFormat(32, 24, 7, partial(decode_legacy, bits=5)),
    "Q8_0": GGUFFormat(32, 34, 8, decode_q8_0, quantize_q8_0),
    "Q2_K": GGUFFormat(256, 84, 10, decode_q2_k),
    "Q3_K": GGUFFormat(256, 110, 11, decode_q3_k),
    "Q4_K": GGUFFormat(256, 144, 12, partial(decode_q45_k, bits=4), partial(quantize_q45_k, bits=4)),
    "Q5_K": GGUFFormat(256, 176, 13, partial(decode_q45_k, bits=5), partial(quantize_q45_k, bits=5)),
    "Q6_K": GGUFFormat(256, 210, 14, decode_q6_k, quantize_q6_k),
}
