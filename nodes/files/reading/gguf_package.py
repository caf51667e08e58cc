"""The package gguf, which reads GGUF's containers and decodes its blocks; and what ComfyUI-GGUF adds to files. The pack
loads without the package."""

from types import ModuleType

import numpy as np
import torch

ORIGINAL_SHAPE = "comfy.gguf.orig_shape."
"""With a tensor's name behind it, the key of its real shape, where the file has another."""
INT8_CONFIG = "comfy.gguf.quant."
"""With a weight's name behind it, the key of what molbal's ComfyUI-GGUF says of it, where it is no GGUF type."""
_SLICE_ELEMENTS = 1 << 24  # as many weights are decoded at a time: gguf holds two float32 copies of them


def gguf_package() -> ModuleType:
    """Return the package gguf. Raises ImportError that says how to install it."""
    try:
        import gguf
    except ImportError as error:
        raise ImportError(
            "GGUF files need the Python package gguf: run `pip install gguf` with ComfyUI's Python"
        ) from error
    return gguf


def can_decode(gguf_format: str) -> bool:
    """Whether gguf decodes a block format that it has a name for. One block is decoded to know it."""
    gguf = gguf_package()
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[gguf_format]]
    try:
        decode_gguf(torch.zeros(1, size, dtype=torch.uint8), gguf_format)
    except NotImplementedError:
        return False
    return True


def decode_gguf(blocks: torch.Tensor, gguf_format: str, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return the weight [N, K] of blocks, uint8 [N, bytes of a row], where they are; gguf computes it in float32 on the
    CPU. Raises NotImplementedError for a format that gguf has a name for and cannot decode."""
    gguf = gguf_package()
    from gguf import quants

    kind = gguf.GGMLQuantizationType[gguf_format]
    weights, size = gguf.GGML_QUANT_SIZES[kind]
    channels = blocks.shape[1] // size * weights
    out = torch.empty(blocks.shape[0], channels, dtype=dtype, device=blocks.device)
    step = max(1, _SLICE_ELEMENTS // max(1, channels))
    for start in range(0, blocks.shape[0], step):
        rows = slice(start, start + step)
        with np.errstate(all="ignore"):  # whoever asked for the weight looks for a NaN
            out[rows] = torch.from_numpy(quants.dequantize(blocks[rows].cpu().numpy(), kind))
    return out
