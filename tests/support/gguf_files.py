"""GGUF files as users have them, written with `gguf` and not by the pack's own writer.

Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import torch
from comfy.quant_ops import TensorWiseINT8Layout
from comfy_kitchen.tensor import TensorCoreConvRotW4A4Layout as ConvRotW4A4

from int8_dit.kernels import GGUF_FORMATS, quantize_gguf
from support.file_formats import encoded

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
    part: tuple[int, int] | None = None,
) -> str:
    """Write a GGUF file and return its path as the loaders want it. `shapes` are shapes to store tensors in instead of
    their own, which then are in the metadata. `part` is what llama.cpp says of a part of a split model: its number,
    from 0, and of how many; of parts joined again they are 0."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, number in zip(("no", "count"), part or (), strict=False):
        writer.add_uint16(f"split.{key}", number)
    for name, tensor in tensors.items():
        kind = choose(name, tuple(tensor.shape))
        stored = tensor.reshape(shapes.get(name, tensor.shape))
        if name in shapes:
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(size) for size in tensor.shape])
        writer.add_tensor(name, stored_bytes(stored, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
    _write(writer)
    return str(path)


def _write(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_q8_cr(
    path: Path,
    tensors: Mapping[str, torch.Tensor],
    layers: Collection[str],
    group: int | None = 64,
    choose: Choose | None = None,
    four_bits: Collection[str] = (),
    **said: object,
) -> dict[str, torch.Tensor]:
    """A GGUF file as molbal's ComfyUI-GGUF writes it: some linears in native INT8, or in W4A4 (`four_bits`, Q4_CR),
    each with what it says of them in the metadata; `said` changes that, None takes it out. Returns what the file
    stands for, in float32.

    comfy-kitchen quantizes. `group` channels are rotated together, None of them with None.
    """
    writer, values = gguf.GGUFWriter(path, "sd3"), {}
    for name, tensor in tensors.items():
        tensor, layer = tensor.float(), name.removesuffix(".weight")
        if layer not in layers:
            kind = (choose or linears_in("F16"))(name, tuple(tensor.shape))
            writer.add_tensor(name, stored_bytes(tensor, kind), raw_dtype=gguf.GGMLQuantizationType[kind])
            values[name] = tensor.half().float() if kind == "F16" else tensor
            continue
        if layer in four_bits:
            q, held = ConvRotW4A4.quantize(tensor, convrot_groupsize=group or 256)
            scale = held.scale.half()
            values[name] = ConvRotW4A4.dequantize(q, replace(held, scale=scale.float())).float()
            config = {"format": "int4_cr", "backing": "w4a4", "orig_shape": list(tensor.shape), "quant_group_size": 64}
            config = {**config, "convrot_groupsize": group or 256, **said}
        else:
            rotation = {} if group is None else {"convrot": True, "convrot_groupsize": group}
            q, held = TensorWiseINT8Layout.quantize(tensor, per_channel=True, **rotation)
            scale, values[name] = held.scale.float().reshape(-1, 1), TensorWiseINT8Layout.dequantize(q, held).float()
            config = {"format": "int8_tensorwise", "convrot": False, "weight_rotated": group is not None}
            config = {**config, "per_row": True, **rotation, **said}
            config = {key: value for key, value in config.items() if value is not None}
        writer.add_tensor(name, q.numpy(), raw_dtype=gguf.GGMLQuantizationType.I8)
        writer.add_tensor(f"{name}_scale", scale.numpy())
        writer.add_string(f"comfy.gguf.quant.{name}", json.dumps(config))
    _write(writer)
    return values


def read_as_its_maker(path: str | Path) -> dict[str, torch.Tensor]:
    """The state dict that molbal's ComfyUI-GGUF gives ComfyUI's operations for native INT8 (its loader.py, 07700e1): a
    weight that its metadata name is int8, its scale float32, and what they say of it is the weight's quant config.
    Rotation counts where the weight is marked as rotated, and its group divides the width."""
    reader, read = gguf.GGUFReader(path), {}
    for tensor in reader.tensors:
        values = torch.from_numpy(tensor.data.copy())
        if tensor.tensor_type not in (gguf.GGMLQuantizationType.I8, gguf.GGMLQuantizationType.F32):
            values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        read[tensor.name] = values.reshape([int(size) for size in reversed(tensor.shape)])
    for key, field in reader.fields.items():
        if not key.startswith("comfy.gguf.quant."):
            continue
        name, config = key.removeprefix("comfy.gguf.quant."), json.loads(field.contents())
        assert config["format"] == "int8_tensorwise"
        assert read[name].dtype == torch.int8 and read[f"{name}_scale"].dtype == torch.float32
        fits = read[name].shape[-1] % config.get("convrot_groupsize", 256) == 0
        if config.get("convrot") and not (config.get("weight_rotated", False) and fits):
            config["convrot"] = False
            config.pop("convrot_groupsize", None)
        read[f"{name.removesuffix('weight')}comfy_quant"] = encoded(config)
    return read


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
