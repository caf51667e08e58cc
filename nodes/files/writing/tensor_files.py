"""Writing safetensors and GGUF files tensor by tensor: bounded memory, a cancel between tensors, a new file or none.

The package safetensors serializes all tensors at once: a second copy of a model in memory, and no moment at which the
user's cancel is heard. The package gguf would write the values from one dict of arrays, so it makes only the header.
"""

import json
import math
from collections.abc import Iterable, Mapping
from functools import partial
from io import BytesIO
from typing import NamedTuple

import torch

from ....kernels import ChannelTransform
from ..reading.gguf_package import ORIGINAL_SHAPE, gguf_package
from .new_file import Make, write_new_file

_READ = ("config", "format", "tae_latent_channels", "_quantization_metadata")  # by ComfyUI, of a model file
_MOST_HEADER_BYTES = 100_000_000  # safetensors refuses to read more
DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.float8_e8m0fnu: "U8",  # as files have MXFP8's scales: not all of ComfyUI's readers know F8_E8M0
    torch.bool: "BOOL",
}

_MOST_NAME_BYTES = 127  # readers written in C keep a name in 128 bytes
_MOST_DIMENSIONS = 4
_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")  # as safetensors calls them, too


def with_workflow(own: Mapping[str, str], workflow: Mapping[str, str]) -> dict[str, str]:
    """Return the metadata of a new file: the pack's entries, and those of a workflow, which may have any keys.

    Keys that mean something to a loader get a prefix, and so do all with a dot, as GGUF's own have
    (`general.alignment`).
    """
    entries = {}
    for key, text in workflow.items():
        is_read = key in own or key in _READ or key.startswith("int8_dit_") or "." in key
        # JSON may have half a character in a key, and no file can.
        entries[(f"workflow.{key}" if is_read else key).encode(errors="replace").decode()] = text
    return {**entries, **own}


class PendingTensor:
    """Stands in for a tensor in a state dict: like another in shape and dtype, with values that `make` gives once, when
    it is written."""

    def __init__(self, like: "torch.Tensor | PendingTensor", make: Make) -> None:
        self.shape, self.dtype, self._make = like.shape, like.dtype, make

    def to(self, device: str) -> torch.Tensor:
        return self._make().to(device)


Tensors = dict[str, torch.Tensor | PendingTensor]
"""A state dict that is about to be written."""


def write_safetensors(
    destination: str | Iterable[str],
    tensors: Mapping[str, torch.Tensor | PendingTensor],
    metadata: dict[str, str],
) -> str:
    """Write `tensors` to a new safetensors file, one at a time, and return its path.

    A tensor is moved to host memory, or computed, only when its turn comes. `destination` and the OSErrors are
    `write_new_file`'s. Raises ValueError for a dtype the format lacks, and for a header that readers refuse.
    """
    header: dict[str, dict] = {"__metadata__": metadata}
    made, end = {}, 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPE_NAMES:
            raise ValueError(f"{name} is {tensor.dtype}, which safetensors files cannot hold")
        begin, end = end, end + tensor.shape.numel() * tensor.dtype.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        made[name] = end - begin, partial(tensor.to, "cpu")
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    if len(encoded) > _MOST_HEADER_BYTES:
        sizes = {f"its metadata entry {key!r}": len(json.dumps(text)) for key, text in metadata.items()}
        sizes["the list of its tensors"] = len(encoded) - sum(sizes.values())
        largest = max(sizes, key=sizes.__getitem__)
        raise ValueError(
            f"the file's header would have {len(encoded) / 1e6:.1f} MB, and readers take "
            f"{_MOST_HEADER_BYTES / 1e6:g} MB. Most of it is {largest} ({sizes[largest] / 1e6:.1f} MB). Make that "
            "smaller; a workflow is left out where ComfyUI runs with --disable-metadata. Nothing was saved"
        )
    return write_new_file(destination, len(encoded).to_bytes(8, "little") + encoded, made)


class PendingGGUF(NamedTuple):
    """A tensor that is about to be written."""

    shape: tuple[int, ...]  # as the model has it
    type: str  # ggml's name of it, such as Q4_K or F16
    make: Make  # gives its values once: uint8 blocks, or numbers of that type
    transform: ChannelTransform | None = None  # of an INT8 weight, what was done to its channels


def plain_type(dtype: torch.dtype) -> str:
    """Return GGUF's name of a dtype. Raises ValueError for one that it lacks."""
    name = DTYPE_NAMES.get(dtype)
    if name not in _PLAIN:
        raise ValueError(f"it is {dtype}, which GGUF files cannot hold")
    return name


def write_gguf(
    destination: str | Iterable[str],
    tensors: Mapping[str, PendingGGUF],
    architecture: str,
    file_type: str | None,
    metadata: Mapping[str, str],
) -> str:
    """Write `tensors` to a new GGUF file, one at a time, and return its path.

    `file_type` is llama.cpp's name of what most tensors are, such as MOSTLY_Q8_0, or None where it has none. `metadata`
    become strings under their own keys, which are none of GGUF's. `destination` and the OSErrors are
    `write_new_file`'s. Raises ValueError for a name that readers cannot hold, ImportError where the package gguf is
    missing.
    """
    gguf = gguf_package()
    writer, header, made = gguf.GGUFWriter(None, architecture), BytesIO(), {}
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if file_type is not None:
        writer.add_file_type(gguf.LlamaFileType[file_type])
    for key, value in metadata.items():
        writer.add_key_value(key, value, gguf.GGUFValueType.STRING)
    for name, tensor in tensors.items():
        if len(name.encode()) > _MOST_NAME_BYTES:
            raise ValueError(
                f"the tensor name {name!r} has {len(name.encode())} bytes, and GGUF readers take "
                f"{_MOST_NAME_BYTES}; this model cannot be saved as GGUF"
            )
        kind, shape = gguf.GGMLQuantizationType[tensor.type], tensor.shape
        weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(shape)
        if count % weights or (weights > 1 and shape[-1] % weights):
            raise ValueError(f"{name}: rows of {shape[-1]} weights do not divide into blocks of {weights}")
        size = count // weights * block_bytes
        if len(shape) > _MOST_DIMENSIONS:
            writer.add_array(ORIGINAL_SHAPE + name, shape)
            shape = (shape[0], math.prod(shape[1:]))
        writer.add_tensor_info(name, shape, None, size, kind)
        made[name] = size, tensor.make
    writer.fout, writer.state = [header], gguf.WriterState.EMPTY  # as if it had opened a file
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.write_padding(header, header.tell())
    return write_new_file(destination, header.getvalue(), made, writer.data_alignment)
