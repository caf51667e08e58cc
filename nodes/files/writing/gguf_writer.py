"""Writing a GGUF file tensor by tensor: bounded memory, a cancel between tensors, and a new file or none.

The package gguf says how types are numbered. It would write the values from one dict of arrays, and what stands in
front of them only to a file. Here that is made in memory, by the format's specification: magic, version, number of
tensors and of metadata entries (uint32, uint64), the entries, and of each tensor name, dimensions, type and offset.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import math
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch

from ..reading.gguf_package import ORIGINAL_SHAPE, gguf_package
from .new_file import Make, write_new_file
from .safetensors_writer import DTYPE_NAMES

_VERSION = 3
_ALIGNMENT = 32  # GGUF's default
_MOST_NAME_BYTES = 127  # readers written in C keep a name in 128 bytes
_MOST_DIMENSIONS = 4
_PLAIN = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8")  # as safetensors calls them, too


@dataclass(frozen=True)
class PendingGGUF:
    """A tensor that is about to be written.

    Attributes:
        shape: as the model has it.
        type: ggml's name of the type, such as Q4_K or F16.
        make: gives its values once: uint8 blocks, or numbers of that type.
    """

    shape: tuple[int, ...]
    type: str
    make: Make


def plain_type(dtype: torch.dtype) -> str:
    """The name of a type that is not made of blocks. Raises ValueError for a dtype that GGUF lacks."""
    name = DTYPE_NAMES.get(dtype)
    if name not in _PLAIN:
        raise ValueError(f"it is {dtype}, which GGUF files cannot hold")
    return name


def write_gguf(
    destination: str | Iterable[str],
    tensors: Mapping[str, PendingGGUF],
    architecture: str,
    file_type: str,
    metadata: Mapping[str, str],
    on_tensor: Callable[[], None],
) -> str:
    """Write `tensors` to a new GGUF file, one at a time, and return its path.

    `file_type` is llama.cpp's name of what most tensors are, such as MOSTLY_Q8_0. `metadata` become strings under their
    own keys, which are none of GGUF's. `on_tensor` is called after each tensor and may raise to stop. `destination` and
    the OSErrors are `write_new_file`'s.

    Raises ValueError for a name that readers cannot hold, ImportError where the package gguf is missing.
    """
    gguf = gguf_package()
    kinds, text = gguf.GGUFValueType, struct.pack("<I", gguf.GGUFValueType.STRING)
    values = {
        "general.architecture": text + _string(architecture),
        "general.quantization_version": struct.pack("<II", kinds.UINT32, gguf.GGML_QUANT_VERSION),
        "general.file_type": struct.pack("<II", kinds.UINT32, gguf.LlamaFileType[file_type]),
        **{key: text + _string(value) for key, value in metadata.items()},
    }
    entries, made, offset = [], {}, 0
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
            values[ORIGINAL_SHAPE + name] = struct.pack(
                f"<IIQ{len(shape)}i", kinds.ARRAY, kinds.INT32, len(shape), *shape
            )
            shape = (shape[0], math.prod(shape[1:]))
        dimensions = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        entries.append(_string(name) + dimensions + struct.pack("<IQ", kind, offset))
        made[name] = size, tensor.make
        offset += size + -size % _ALIGNMENT
    counts = struct.pack("<4sIQQ", b"GGUF", _VERSION, len(entries), len(values))
    header = b"".join([counts, *(_string(key) + value for key, value in values.items()), *entries])
    header += bytes(-len(header) % _ALIGNMENT)
    return write_new_file(destination, header, made, on_tensor, _ALIGNMENT)


def _string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded
