"""Small GGUF files, taken apart and put together again. Imported only once ComfyUI and the pack can be."""

from __future__ import annotations

import struct
import tempfile
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import gguf

from support import glyph_dit
from support.gguf_files import linears_in, write_gguf

ALIGNMENT = 32
RESHAPED = "x_embedder.proj.weight"  # a convolution, which one of the files has as a matrix
_STRING, _ARRAY = 8, 9


@cache
def file_in(type: str) -> bytes:
    """A GGUF file of the glyph model in one of these types, in bytes; the package gguf writes it."""
    tensors = {name: tensor.float() for name, tensor in glyph_dit.tensors().items()}
    shapes = {RESHAPED: tuple(tensors[RESHAPED].flatten(1).shape)} if type == "Q4_K" else {}
    with tempfile.TemporaryDirectory() as folder:
        return Path(write_gguf(Path(folder, "file"), tensors, linears_in(type), shapes=shapes)).read_bytes()


@dataclass(frozen=True)
class Tensor:
    """A tensor of a file: its dimensions as they stand there, its type's number, its bytes."""

    name: bytes
    dims: tuple[int, ...]
    type: int
    data: bytes


@dataclass
class File:
    """A GGUF file taken apart. `places` are its numbers: kind -> offset in the file and struct's letter."""

    values: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    places: dict[str, list[tuple[int, str]]] = field(default_factory=dict)

    def written(self) -> bytes:
        parts = [struct.pack("<4sIQQ", b"GGUF", 3, len(self.tensors), len(self.values))]
        for key, type, raw in self.values:
            parts += [_string(key), struct.pack("<I", type), raw]
        offset = 0
        for tensor in self.tensors:
            dims = struct.pack(f"<I{len(tensor.dims)}Q", len(tensor.dims), *tensor.dims)
            parts += [_string(tensor.name), dims, struct.pack("<IQ", tensor.type, offset)]
            offset += len(_padded(tensor.data))
        return _padded(b"".join(parts)) + b"".join(_padded(tensor.data) for tensor in self.tensors)

    def index(self, name: str) -> int:
        return next(i for i, tensor in enumerate(self.tensors) if tensor.name == name.encode())

    def put(self, key: bytes, type: int, raw: bytes) -> None:
        """Add an entry of the metadata, in the place of one of that name."""
        self.values = [value for value in self.values if value[0] != key] + [(key, type, raw)]


def _string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % ALIGNMENT)


def taken_apart(data: bytes) -> File:
    """A GGUF file's parts, by the package gguf; `written` puts them together again."""
    file = File(places={"start": [(0, "I"), (4, "I"), (8, "Q"), (16, "Q")]})
    with tempfile.NamedTemporaryFile() as copy:
        copy.write(data)
        copy.flush()
        reader = gguf.GGUFReader(copy.name)

    def note(at: int, *numbers: tuple[str, str, int]) -> int:
        """Note where numbers stand, each by its kind, struct's letter and the bytes behind it; where the last ends."""
        for kind, letter, behind in numbers:
            file.places.setdefault(kind, []).append((at, letter))
            at += struct.calcsize(letter) + behind
        return at

    for key, entry in reader.fields.items():
        if not key.startswith("GGUF."):
            begin = note(entry.offset, ("length", "Q", len(entry.parts[1])), ("value type", "I", 0))
            type = int(entry.parts[2][0])
            note(begin, *{_STRING: [("length", "Q", 0)], _ARRAY: [("array", "I", 0), ("array", "Q", 0)]}.get(type, []))
            end = entry.offset + sum(part.nbytes for part in entry.parts)
            file.values.append((bytes(entry.parts[1]), type, data[begin:end]))
    for tensor in reader.tensors:
        name, dims = bytes(tensor.field.parts[1]), tuple(map(int, tensor.shape))
        at = note(tensor.field.offset, ("length", "Q", len(name)), ("dimensions", "I", 0))
        note(at, *[("dimension", "Q", 0)] * len(dims), ("tensor type", "I", 0), ("offset", "Q", 0))
        held = data[tensor.data_offset : tensor.data_offset + int(tensor.n_bytes)]
        file.tensors.append(Tensor(name, dims, int(tensor.tensor_type), held))
    return file
