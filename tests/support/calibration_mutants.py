"""Damaged copies of calibrations: seeded mutants, in the terms of mutants.py. Imported only once the pack can be."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator

from support import json_mutants, mutants
from support.mutants import File, Mutant, flipped, on_tensors

KEY = "int8_dit_calibration"
_EXTREMES = (-1.0, math.nan, math.inf, -math.inf, 1e30, 1e13)
_OF_ANY_FILE = (
    *("truncated", "too long", "a tensor removed", "a tensor renamed", "a tensor duplicated"),
    *("two tensors swapped", "another shape", "huge and empty"),
)


def _extreme(rng: random.Random, file: File) -> tuple[str, bool]:
    """One value of a tensor, or all of them. A row may have any sign."""
    key = rng.choice(list(file.tensors))
    dtype, shape, values = file.tensors[key]
    width = {"F32": 4, "BF16": 2}[dtype]
    value = rng.choice(_EXTREMES)
    code = struct.pack("<f", value)[4 - width :]
    place = rng.randrange(len(values) // width) * width
    everywhere = code * (len(values) // width)
    file.tensors[key] = dtype, shape, rng.choice((everywhere, values[:place] + code + values[place + width :]))
    return f"{key} {value}", value == -1 and key.endswith(".rows")


def _bit(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(list(file.tensors))
    dtype, shape, values = file.tensors[key]
    bit = rng.randrange(8 * len(values))
    file.tensors[key] = dtype, shape, flipped(values, bit)
    return f"{key} bit {bit}", True


def _retyped(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(list(file.tensors))
    dtype, shape, values = file.tensors[key]
    new = rng.choice({"F32": ("I32", "U32"), "BF16": ("F16", "I16", "U16")}[dtype])
    file.tensors[key] = new, shape, values
    return f"{key} {new}", new == "F16"  # rows in it are as legitimate


def _metadata(rng: random.Random, file: File) -> tuple[str, bool]:
    kind = rng.choice(list(json_mutants.MUTATIONS))
    file.metadata[KEY] = json_mutants.MUTATIONS[kind](rng, file.metadata[KEY])
    return kind, True  # another number of calls, say


def _header_bit(rng: random.Random, data: bytes) -> tuple[bytes, str, bool]:
    changed, where, _ = mutants.header_bit(rng, data)
    return changed, where, True  # a digit of the metadata's numbers


MUTATIONS = {
    "a bit of the header": _header_bit,
    **{kind: mutants.MUTATIONS[kind] for kind in _OF_ANY_FILE},
    "an extreme value": on_tensors(_extreme),
    "a bit of the values": on_tensors(_bit),
    "another dtype": on_tensors(_retyped),
    "damaged metadata": on_tensors(_metadata),
}


def damaged(data: bytes, count: int, seed: int = 0) -> Iterator[Mutant]:
    """As many mutants of a calibration's bytes, kinds of mutation in turns."""
    return mutants.mutants({"calibration": data}, count, seed, MUTATIONS)
