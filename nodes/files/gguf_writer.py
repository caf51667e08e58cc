"""Writing a GGUF file tensor by tensor: bounded memory, a cancel between tensors, and a new file or none.

The package gguf makes all that stands in front of the tensors' values. It would write those from one dict of arrays.
"""

import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from .gguf_package import ORIGINAL_SHAPE, gguf_package
from .new_file import write_new_file

_MOST_NAME_BYTES = 127  # readers written in C keep a name in 128 bytes
_MOST_DIMENSIONS = 4
_PLAIN = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
}


@dataclass(frozen=True)
class PendingGGUF:
    """A tensor that is about to be written.

    Attributes:
        shape: as the model has it.
        type: ggml's name of the type, such as Q4_K or F16.
        pieces: gives its values once, in consecutive parts: uint8 blocks, or numbers of that type.
    """

    shape: tuple[int, ...]
    type: str
    pieces: Callable[[], Iterator[torch.Tensor]]


def plain_type(dtype: torch.dtype) -> str:
    """The name of a type that is not made of blocks. Raises ValueError for a dtype that GGUF lacks."""
    if dtype not in _PLAIN:
        raise ValueError(f"it is {dtype}, which GGUF files cannot hold")
    return _PLAIN[dtype]


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
    own keys. `on_tensor` is called after each tensor and may raise to stop. `destination` and the OSErrors are
    `write_new_file`'s.

    Raises ValueError for a name that readers cannot hold, ImportError where the package gguf is missing.
    """
    header, sizes = _header(tensors, architecture, file_type, metadata)

    def chunks() -> Iterator[memoryview | bytes]:
        yield header
        for name, tensor in tensors.items():
            written = 0
            for piece in tensor.pieces():
                data = piece.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
                del piece
                written += len(data)
                yield data
                del data
            if written != sizes[name]:
                raise ValueError(f"{name} has {written} bytes and was announced with {sizes[name]}")
            yield bytes(_padding(written))
            on_tensor()

    total = len(header) + sum(size + _padding(size) for size in sizes.values())
    return write_new_file(destination, total, chunks())


def _header(
    tensors: Mapping[str, PendingGGUF], architecture: str, file_type: str, metadata: Mapping[str, str]
) -> tuple[bytes, dict[str, int]]:
    """All that stands in front of the values, and how many bytes each tensor has."""
    gguf = gguf_package()
    writer = gguf.GGUFWriter(None, architecture)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    for key, text in metadata.items():
        writer.add_string(key, text)
    sizes = {}
    for name, tensor in tensors.items():
        if len(name.encode()) > _MOST_NAME_BYTES:
            raise ValueError(
                f"the tensor name {name!r} has {len(name.encode())} bytes, and GGUF readers take "
                f"{_MOST_NAME_BYTES}; this model cannot be saved as GGUF"
            )
        kind = gguf.GGMLQuantizationType[tensor.type]
        weights, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        count = math.prod(tensor.shape)
        if count % weights or (weights > 1 and tensor.shape[-1] % weights):
            raise ValueError(f"{name}: rows of {tensor.shape[-1]} weights do not divide into blocks of {weights}")
        sizes[name] = count // weights * block_bytes
        shape = tensor.shape
        if len(shape) > _MOST_DIMENSIONS:
            writer.add_array(ORIGINAL_SHAPE + name, list(shape))
            shape = (shape[0], math.prod(shape[1:]))
        # Of this dtype only whether it is uint8 would matter.
        writer.add_tensor_info(name, shape, torch.empty(0).numpy().dtype, sizes[name], kind)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "header")
        writer.write_header_to_file(path)
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        with open(path, "rb") as file:
            header = file.read()
    return header + bytes(_padding(len(header))), sizes


def _padding(size: int) -> int:
    """How many bytes are missing to GGUF's default alignment."""
    return -size % 32
