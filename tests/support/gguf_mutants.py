"""Damaged copies of small GGUF files: seeded mutants.

A mutation is `free` where it changes plain values, which no loader can tell from right ones. After any other a loader
has to refuse the file or compute what it computes for the base file. Imported only once ComfyUI and the pack can
be.
"""

from __future__ import annotations

import math
import random
import struct
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import gguf

from support import glyph_dit
from support.gguf_files import linears_in, write_gguf

ALIGNMENT = 32
RESHAPED = "x_embedder.proj.weight"  # a convolution, which one of the files has as a matrix
_STRING, _ARRAY = 8, 9
_ORIGINAL = b"comfy.gguf.orig_shape."
_NUMBERS = (0, 1, 2, 3, 5, 7, 33, 1 << 20, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, (1 << 63) - 1, (1 << 64) - 1)
_SCALE_PLACES = {"Q8_0": (0,), "Q4_K": (0, 2), "IQ4_NL": (0,)}  # of the fp16 scales in a block
_TEXTS = ("", "{", "[]", "7", "null", "[" * 100_000, '{"a":' * 50_000, "\x00", '"' + "x" * 999_999)


# The files


TYPES = ("Q8_0", "Q4_K", "IQ4_NL", "F16")


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

    @property
    def kind(self) -> str:
        return gguf.GGMLQuantizationType(self.type).name


@dataclass
class File:
    """A GGUF file taken apart. `places` are its numbers: kind -> offset in the file and struct's letter."""

    values: list[tuple[bytes, int, bytes]] = field(default_factory=list)
    tensors: list[Tensor] = field(default_factory=list)
    places: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    header: int = 0

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
        file.header = note(at, *[("dimension", "Q", 0)] * len(dims), ("tensor type", "I", 0), ("offset", "Q", 0))
        held = data[tensor.data_offset : tensor.data_offset + int(tensor.n_bytes)]
        file.tensors.append(Tensor(name, dims, int(tensor.tensor_type), held))
    return file


# Mutations


Mutation = Callable[[random.Random, bytes], tuple[bytes, bool]]
"""-> the damaged file, and whether the mutation is free."""


def _flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _number(kind: str, *others: int) -> Mutation:
    """One of the numbers of a kind becomes another; a near one in a third of all cases."""

    def mutate(rng: random.Random, data: bytes) -> tuple[bytes, bool]:
        at, letter = rng.choice(taken_apart(data).places[kind])
        (before,) = struct.unpack_from(f"<{letter}", data, at)
        most = 1 << 8 * struct.calcsize(letter)
        near = (before - 1, before + 1, before + 32, before * 2, before // 2)
        choices = near if rng.random() < 0.33 else (others or _NUMBERS)
        after = rng.choice([number for number in choices if number != before and 0 <= number < most] or [before + 1])
        changed = bytearray(data)
        struct.pack_into(f"<{letter}", changed, at, after)
        return bytes(changed), kind == "tensor type" and {before, after} in _ALIKE

    return mutate


_TYPES = {name: int(gguf.GGMLQuantizationType[name]) for name in gguf.GGMLQuantizationType.__members__}
# Types whose values are equally long: nothing in a file tells which of them was meant.
_ALIKE = [
    {_TYPES[one], _TYPES[other]}
    for one, other in (("F16", "BF16"), *combinations(("Q4_K", "Q4_0", "IQ4_NL", "NVFP4"), 2), ("Q5_K", "Q5_0"))
]


def _rebuilt(change: Callable[[random.Random, File], bool | None]) -> Mutation:
    """Of a file that is taken apart, changed and written again; `change` tells whether it is free."""

    def mutate(rng: random.Random, data: bytes) -> tuple[bytes, bool]:
        file = taken_apart(data)
        free = bool(change(rng, file))
        return file.written(), free

    return mutate


def _one(
    change: Callable[[random.Random, Tensor], dict[str, object]], kinds: Collection[str] = (), free: bool = False
) -> Mutation:
    """Change these parts of one tensor, of one of these types where the file has any."""

    def changed(rng: random.Random, file: File) -> bool:
        fitting = [number for number, tensor in enumerate(file.tensors) if not kinds or tensor.kind in kinds]
        number = rng.choice(fitting or range(len(file.tensors)))
        file.tensors[number] = replace(file.tensors[number], **change(rng, file.tensors[number]))
        return free

    return _rebuilt(changed)


def _duplicated(rng: random.Random, file: File) -> None:
    tensor = rng.choice(file.tensors)
    name = rng.choice((tensor.name, b"copy_of_" + tensor.name, tensor.name + b".copy"))
    file.tensors.insert(rng.randrange(len(file.tensors)), replace(tensor, name=name))


def _swapped(rng: random.Random, file: File) -> bool:
    """The names of two tensors; free where they have one shape, of whatever type."""
    a, b = rng.sample(range(len(file.tensors)), 2)
    one, other = file.tensors[a], file.tensors[b]
    file.tensors[a], file.tensors[b] = replace(one, name=other.name), replace(other, name=one.name)
    return one.dims == other.dims


def _reshaped(rng: random.Random, tensor: Tensor) -> dict[str, object]:
    count = math.prod(tensor.dims)
    shapes = [
        *(tensor.dims[::-1], (*tensor.dims, 1), (1, *tensor.dims), (count,), (count, 1), (1, count), (2, count // 2)),
        *((), (0, count), (1 << 40, 0), (count, *[1] * 9)),
    ]
    dims = rng.choice([other for other in shapes if other != tensor.dims])
    return {"dims": dims, "data": tensor.data if math.prod(dims) == count else b""}


_HUGE = ((1 << 40,), (1 << 20, 1 << 20), (1 << 32, 1 << 32), (1 << 62, 4), (256, 1 << 50), (1 << 63, 2))


def _original_shape(rng: random.Random, file: File) -> None:
    """The entry for a tensor's real shape: another list, or of another type."""
    tensor = file.tensors[file.index(RESHAPED) if rng.random() < 0.5 else rng.randrange(len(file.tensors))]
    count = math.prod(tensor.dims)
    shape = rng.choice(((count,), (1, count), (count, 1), tensor.dims, (-1, -count), (0,), (1,) * 40, (count + 1,), ()))
    letter, type = rng.choice((("i", 5), ("i", 5), ("q", 11), ("f", 6)))
    entry = _ARRAY, struct.pack(f"<IQ{len(shape)}{letter}", type, len(shape), *shape)
    file.put(_ORIGINAL + tensor.name, *((_STRING, _string(b"[1]")) if rng.random() < 0.2 else entry))


def _alignment(rng: random.Random, file: File) -> None:
    """An entry that moves all tensors."""
    number = rng.choice((0, 1, 3, 8, 16, 48, 64, 4096, 1 << 31))
    type, letter = (4, "<I") if rng.random() < 0.8 else (10, "<Q")
    file.put(b"general.alignment", type, struct.pack(letter, number))


def _not_a_number(rng: random.Random, tensor: Tensor) -> dict[str, object]:
    """NaN or Inf as a scale of one block, or of all; or in a tensor of floats."""
    value, letter = rng.choice((math.nan, math.inf, -math.inf)), "f" if tensor.kind == "F32" else "e"
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(tensor.type)]
    place = rng.choice(_SCALE_PLACES.get(tensor.kind, (0,)))
    data, blocks = bytearray(tensor.data), range(len(tensor.data) // size)
    for block in blocks if tensor.kind in _SCALE_PLACES and rng.random() < 0.3 else (rng.choice(blocks),):
        struct.pack_into(f"<{letter}", data, block * size + place, value)
    return {"data": bytes(data)}


def _architecture(rng: random.Random, file: File) -> None:
    """Of another model, of none, or no text: ComfyUI looks at the tensors, so that the file may load."""
    text = rng.choice((b"llama", b"t5", b"flux", b"", b"\xff\xfe", b"x" * 100_000, None, 7))
    file.values = [value for value in file.values if value[0] != b"general.architecture"]
    if text is not None:
        entry = (_STRING, _string(text)) if isinstance(text, bytes) else (4, struct.pack("<I", text))
        file.values.insert(0, (b"general.architecture", *entry))


def _metadata(rng: random.Random, file: File) -> None:
    key = rng.choice((b"int8_dit_recipe", b"int8_dit_marks", b"_quantization_metadata", b"config", b"workflow"))
    file.put(key, _STRING, _string(rng.choice(_TEXTS).encode()))
    if rng.random() < 0.1:
        file.values.append(file.values[-1])
    elif rng.random() < 0.2:  # arrays in arrays
        file.values[-1] = key, _ARRAY, struct.pack("<IQ", _ARRAY, 1) * 10_000


MUTATIONS: dict[str, Mutation] = {
    "a bit of the header": lambda rng, data: (_flipped(data, rng.randrange(8 * taken_apart(data).header)), False),
    "magic, version or counts": _number("start"),
    "a text's length": _number("length"),
    "a value's type": _number("value type", *range(16)),
    "another dimension": _number("dimension"),
    "another number of dimensions": _number("dimensions"),
    "another type": _number("tensor type", *range(42)),
    "another offset": _number("offset"),
    "truncated": lambda rng, data: (data[: rng.randrange(len(data))], False),
    "too long": lambda rng, data: (data + bytes(rng.randrange(1, 100)), False),
    "a tensor removed": _rebuilt(lambda rng, file: file.tensors.remove(rng.choice(file.tensors))),
    "a tensor duplicated": _rebuilt(_duplicated),
    "two tensors swapped": _rebuilt(_swapped),
    "another shape": _one(_reshaped),
    "a huge shape": _one(lambda rng, tensor: {"dims": rng.choice(_HUGE)}),
    "another original shape": _rebuilt(_original_shape),
    "another alignment": _rebuilt(_alignment),
    "NaN or Inf as a block's scale": _one(_not_a_number, _SCALE_PLACES),
    "NaN or Inf in a float tensor": _one(_not_a_number, ("F32", "F16")),
    "a bit of the values": _one(
        lambda rng, tensor: {"data": _flipped(tensor.data, rng.randrange(8 * len(tensor.data)))}, free=True
    ),
    "another architecture": _rebuilt(_architecture),
    "damaged metadata": _rebuilt(_metadata),
}


class Mutant(NamedTuple):
    """A damaged file: of what base, by what kind of mutation, and whether that is free."""

    base: str
    kind: str
    free: bool
    data: bytes


def mutants(files: Mapping[str, bytes], count: int) -> Iterator[Mutant]:
    """As many mutants of these files, the same each time: kinds of mutation in turns, each round on the next file."""
    rng = random.Random(0)
    for number in range(count):
        round_, place = divmod(number, len(MUTATIONS))
        kind, base = list(MUTATIONS)[place], list(files)[(place + round_) % len(files)]
        data, free = MUTATIONS[kind](rng, files[base])
        yield Mutant(base, kind, free, data)
