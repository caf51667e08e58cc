"""GGUF files as users have them, written with `gguf` and not by the pack's own writer.

Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import torch

from int8_dit.kernels import GGUF_FORMATS, quantize_gguf

Choose = Callable[[str, tuple[int, ...]], str]
"""(tensor name, shape) -> the name of its GGUF type."""


def linears_in(kind: str) -> Choose:
    """Matrices in one format where its blocks fit, F32 for vectors, F16 for the rest."""

    def choose(name: str, shape: tuple[int, ...]) -> str:
        weights, _ = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        if len(shape) == 2 and shape[1] % weights == 0:
            return kind
        return "F32" if len(shape) < 2 else "F16"

    return choose


def write_gguf(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    choose: Choose,
    architecture: str = "sd3",
    shapes: Mapping[str, tuple[int, ...]] = {},
) -> str:
    """Write a GGUF file and return its path as the loaders want it. `shapes` are shapes to store tensors in instead of
    their own, which then are in the metadata."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, tensor in tensors.items():
        kind = choose(name, tuple(tensor.shape))
        stored = tensor.reshape(shapes.get(name, tensor.shape))
        if name in shapes:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in tensor.shape])
        writer.add_tensor(name, stored_bytes(stored, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return str(path)


def stored_bytes(tensor: torch.Tensor, kind: str) -> np.ndarray:
    """A tensor as it lies in a file in this GGUF type."""
    if kind in ("F32", "F16"):
        return tensor.to({"F32": torch.float32, "F16": torch.float16}[kind]).numpy()
    if kind == "BF16":
        return tensor.bfloat16().contiguous().view(torch.uint8).numpy()
    if kind == "IQ4_NL":
        return _iq4_nl(tensor.float())
    if kind not in GGUF_FORMATS or GGUF_FORMATS[kind].quantize is None:
        return gguf.quants.quantize(tensor.float().numpy(), gguf.GGMLQuantizationType[kind])
    return quantize_gguf(tensor.float(), kind).numpy()


def _iq4_nl(weight: torch.Tensor) -> np.ndarray:
    """[N, K] in IQ4_NL, which gguf decodes and cannot make: an fp16 scale and the nearest of 16 values, 32 a block."""
    values = torch.tensor(gguf.quants.IQ4_NL.kvalues, dtype=torch.float32)
    blocks = weight.unflatten(1, (-1, 32))
    scale = (blocks.abs().amax(dim=2, keepdim=True) / 113).half()
    codes = (blocks / scale.float().clamp_min(1e-30)).unsqueeze(-1).sub(values).abs().argmin(dim=-1).to(torch.uint8)
    nibbles = codes[..., :16] | codes[..., 16:] << 4
    return torch.cat([scale.view(torch.uint8), nibbles], dim=2).flatten(1).numpy()
