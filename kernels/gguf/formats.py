"""GGUF's block formats: a table of their sizes, how they are read, and how they are made."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from . import decoding, quantizing


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
    "Q4_0": GGUFFormat(32, 18, 2, decoding.decode_q4_0),
    "Q4_1": GGUFFormat(32, 20, 3, decoding.decode_q4_1),
    "Q5_0": GGUFFormat(32, 22, 6, decoding.decode_q5_0),
    "Q5_1": GGUFFormat(32, 24, 7, decoding.decode_q5_1),
    "Q8_0": GGUFFormat(32, 34, 8, decoding.decode_q8_0, quantizing.quantize_q8_0),
    "Q2_K": GGUFFormat(256, 84, 10, decoding.decode_q2_k),
    "Q3_K": GGUFFormat(256, 110, 11, decoding.decode_q3_k),
    "Q4_K": GGUFFormat(256, 144, 12, decoding.decode_q4_k, quantizing.quantize_q4_k),
    "Q5_K": GGUFFormat(256, 176, 13, decoding.decode_q5_k, quantizing.quantize_q5_k),
    "Q6_K": GGUFFormat(256, 210, 14, decoding.decode_q6_k, quantizing.quantize_q6_k),
}
