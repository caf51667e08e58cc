"""Damaged copies of small model files: seeded mutants, and what became of loading one.

Imported only once ComfyUI and the pack can be. A mutation is `free` where it changes plain values, which no loader can
tell from right ones; after any other a loader has to refuse the file or compute what it computes for the base file.
"""

from __future__ import annotations

import json
import math
import random
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import TensorWiseINT8Layout
from safetensors.torch import save

from int8_dit.kernels import ChannelTransform
from int8_dit.nodes.files.quant_config import QUANT_CONFIG, SCALE, SMOOTH, as_metadata, encode_config
from support import glyph_dit
from support.file_formats import fp8_scaled
from support.tensors import relative_error

NOISE = 1e-3  # of float32: whoever takes a value for another one is off by far more

_DTYPES = {1: ("I8", "U8", "F8_E4M3", "F8_E5M2"), 2: ("BF16", "F16", "I16"), 4: ("F32", "I32", "U32")}
_EXTREMES = (0.0, -1.0, math.nan, math.inf, -math.inf, 1e-42, 1e30)
TEXTS = ("", "{", "[]", "7", "null", "[" * 100_000, '{"a":' * 50_000, "\x00", '"' + "x" * 999_999)


# Whole files


def _own() -> dict[str, torch.Tensor]:
    """Smoothed, every other layer rotated too, and every third with 16-bit activations."""
    tensors = glyph_dit.tensors()
    for number, layer in enumerate(glyph_dit.LINEARS):
        weight = tensors[f"{layer}.weight"].float()
        smooth = torch.linspace(0.5, 2.0, weight.shape[1])
        options = {"convrot": True, "convrot_groupsize": 64} if number % 2 else {}
        q, params = TensorWiseINT8Layout.quantize(weight * smooth, per_channel=True, **options)
        transform = ChannelTransform(smooth, 64 if number % 2 else None)
        mark = encode_config(transform, 16 if number % 3 == 0 else 8)
        tensors |= {f"{layer}.weight": q, f"{layer}.{SCALE}": params.scale, f"{layer}.{QUANT_CONFIG}": mark}
        tensors[f"{layer}.{SMOOTH}"] = smooth
    return tensors


def _fp8() -> dict[str, torch.Tensor]:
    tensors = glyph_dit.tensors()
    return fp8_scaled(tensors, list(glyph_dit.LINEARS))


def _unmarked() -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in glyph_dit.native_int8().items() if not key.endswith(f".{QUANT_CONFIG}")}


def base_files() -> dict[str, bytes]:
    """Small files of six kinds."""
    own = _own()
    return {
        "native INT8": save(glyph_dit.native_int8()),
        "ConvRot": save(glyph_dit.native_int8(rotation_group=64)),
        "this pack's": save(own, {"int8_dit_recipe": '{"method": "smooth"}', **as_metadata(own)}),
        "FP8 scaled": save(_fp8()),
        "bf16": save(glyph_dit.tensors()),
        "older pack's": save(_unmarked()),
    }


# Mutations


@dataclass
class File:
    """A safetensors file taken apart: of each tensor its dtype, shape and bytes."""

    tensors: dict[str, tuple[str, list[int], bytes]]
    metadata: dict[str, str] = field(default_factory=dict)

    def written(self) -> bytes:
        header: dict[str, object] = {"__metadata__": self.metadata} if self.metadata else {}
        end = 0
        for key, (dtype, shape, data) in self.tensors.items():
            header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
            end += len(data)
        encoded = json.dumps(header).encode()
        return struct.pack("<Q", len(encoded)) + encoded + b"".join(data for _, _, data in self.tensors.values())


def taken_apart(data: bytes) -> File:
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    body = data[8 + length :]
    ordered = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
    return File({k: (e["dtype"], e["shape"], body[slice(*e["data_offsets"])]) for k, e in ordered}, metadata)


@dataclass(frozen=True)
class Mutant:
    """A damaged file: of what base, by what kind of mutation and where, and whether it changed plain values only."""

    base: str
    kind: str
    where: str
    free: bool
    data: bytes


Mutation = Callable[[random.Random, bytes], tuple[bytes, str, bool]]
"""-> the damaged file, where it is damaged, whether the mutation is free."""


def flipped(data: bytes, bit: int) -> bytes:
    """The data with one bit changed."""
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _some(rng: random.Random, file: File, *endings: str) -> str | None:
    keys = [key for key in file.tensors if key.endswith(endings)]
    return rng.choice(keys) if keys else None


def header_bit(rng: random.Random, data: bytes) -> tuple[bytes, str, bool]:
    (length,) = struct.unpack("<Q", data[:8])
    bit = rng.randrange(8 * (8 + length))
    return flipped(data, bit), f"bit {bit}", False


def _bit_of(*endings: str, free: bool) -> Mutation:
    def mutate(rng: random.Random, data: bytes) -> tuple[bytes, str, bool]:
        file = taken_apart(data)
        key = _some(rng, file, *endings)
        if key is None:
            return header_bit(rng, data)
        dtype, shape, values = file.tensors[key]
        file.tensors[key] = dtype, shape, flipped(values, rng.randrange(8 * len(values)))
        return file.written(), key, free

    return mutate


def cut(rng: random.Random, data: bytes) -> tuple[bytes, str, bool]:
    left = rng.randrange(len(data))
    return data[:left], f"{left} bytes left", False


def longer(rng: random.Random, data: bytes) -> tuple[bytes, str, bool]:
    return data + bytes(rng.randrange(1, 100)), "", False


def on_tensors(change: Callable[[random.Random, Any], tuple[str, bool]], apart: Callable = taken_apart) -> Mutation:
    """A mutation of a file that is taken apart, changed and written again; `change` tells where, and whether free."""

    def mutate(rng: random.Random, data: bytes) -> tuple[bytes, str, bool]:
        file = apart(data)
        where, free = change(rng, file)
        return file.written(), where, free

    return mutate


def _removed(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(list(file.tensors))
    del file.tensors[key]
    return key, False


def _removed_part(rng: random.Random, file: File) -> tuple[str, bool]:
    key = _some(rng, file, QUANT_CONFIG, SCALE, SMOOTH)
    if key is None:
        return _removed(rng, file)
    del file.tensors[key]
    return key, False


def _renamed(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(list(file.tensors))
    place = rng.randrange(len(key))
    file.tensors[key[:place] + rng.choice("abxyz019._") + key[place + 1 :]] = file.tensors.pop(key)
    return key, False


def _duplicated(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(list(file.tensors))
    file.tensors[f"copy_of_{key}" if rng.random() < 0.5 else f"{key}.copy"] = file.tensors[key]
    return key, False


def _swapped(rng: random.Random, file: File) -> tuple[str, bool]:
    a, b = rng.sample(list(file.tensors), 2)
    same_form = file.tensors[a][:2] == file.tensors[b][:2]
    file.tensors[a], file.tensors[b] = file.tensors[b], file.tensors[a]
    return f"{a} and {b}", same_form


def _reshaped(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(list(file.tensors))
    dtype, shape, values = file.tensors[key]
    count = math.prod(shape)
    shapes = [shape[::-1], [count], [1, count], [count, 1], [*shape, 1], [1, *shape]]
    shapes.append([0, count, 0][: rng.randrange(1, 4)])
    new = rng.choice([other for other in shapes if other != shape])
    file.tensors[key] = dtype, new, values if math.prod(new) == count else b""
    return f"{key} {new}", False


def _huge_and_empty(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(list(file.tensors))
    file.tensors[key] = file.tensors[key][0], rng.choice([[1 << 40, 0], [0, 1 << 40], [1 << 20, 0, 1 << 20]]), b""
    return key, False


def _retyped(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(list(file.tensors))
    dtype, shape, values = file.tensors[key]
    width = len(values) // math.prod(shape)
    new = rng.choice([other for other in _DTYPES[width] if other != dtype])
    file.tensors[key] = new, shape, values
    # Two floats of one width are told apart by nothing, nor FP8 from INT8 where no mark says which it is.
    unmarked = f"{key.removesuffix('.weight')}.{QUANT_CONFIG}" not in file.tensors
    return f"{key} {new}", unmarked and {dtype, new} <= {"BF16", "F16", "F8_E4M3", "F8_E5M2"}


def _mark_text(rng: random.Random, file: File) -> tuple[str, bool]:
    key = _some(rng, file, QUANT_CONFIG)
    if key is None:
        key = f"{rng.choice([k for k in file.tensors if k.endswith('.weight')]).removesuffix('.weight')}.{QUANT_CONFIG}"
        mark = {}
    else:
        mark = json.loads(file.tensors[key][2])
    others = ("int8_tensorwise", "int8_smoothquant", "int8_act16", "float8_e4m3fn", "float8_e5m2", "nvfp4", "mxfp8")
    other = rng.choice((*others, "x", None))
    harmless = other == "int8_act16" and mark.get("format") == "int8_tensorwise"
    mark["format"] = other if other != mark.get("format") else "convrot_w4a4"
    as_mark = rng.random() < 0.5
    text = json.dumps(mark).encode() if as_mark else rng.choice(TEXTS).encode()[:100_000]
    file.tensors[key] = "U8", [len(text)], text
    return key, as_mark and harmless  # a layer computes more exactly than it was meant to


def _mark_option(rng: random.Random, file: File) -> tuple[str, bool]:
    key = _some(rng, file, QUANT_CONFIG)
    if key is None:
        return _mark_text(rng, file)
    mark = json.loads(file.tensors[key][2])
    groups = (0, 3, 48, -64, 1 << 70, 64.5, "64", None, math.inf, [64], 1024)
    options = {"convrot_groupsize": rng.choice(groups)} if mark.get("convrot") else {"convrot_groupsize": 64}
    if rng.random() < 0.3:
        options = {"convrot": rng.choice(("yes", 1, []))}
    text = json.dumps(mark | options).encode()
    file.tensors[key] = "U8", [len(text)], text
    return f"{key} {options}", False


def _rotation(rng: random.Random, file: File) -> tuple[str, bool]:
    """A mark that lost its rotation, or got one: still as some legitimate file has it."""
    key = _some(rng, file, QUANT_CONFIG)
    if key is None or b"float8" in file.tensors[key][2]:
        return _mark_text(rng, file)
    mark = json.loads(file.tensors[key][2])
    rotated = mark.pop("convrot", False)
    mark.pop("convrot_groupsize", None)
    text = json.dumps(mark if rotated else {**mark, "convrot": True, "convrot_groupsize": 64}).encode()
    file.tensors[key] = "U8", [len(text)], text
    return key, False


def _extreme(rng: random.Random, file: File) -> tuple[str, bool]:
    """One value or all of a scale; of a plain tensor where the file has no scales."""
    key = _some(rng, file, SCALE, SMOOTH) or rng.choice(list(file.tensors))
    dtype, shape, values = file.tensors[key]
    extremes = _EXTREMES if dtype == "F32" else (math.nan, math.inf, -math.inf, 1e30)
    code = struct.pack("<f", value := rng.choice(extremes))[0 if dtype == "F32" else 2 :]
    place = rng.randrange(len(values) // len(code)) * len(code)
    everywhere = rng.random() < 0.3
    new = code * (len(values) // len(code)) if everywhere else values[:place] + code + values[place + len(code) :]
    file.tensors[key] = dtype, shape, new
    return f"{key} {value}", False


def _added(rng: random.Random, file: File) -> tuple[str, bool]:
    """A tensor of a quantized form beside a layer that has none of that kind."""
    layer = rng.choice([k for k in file.tensors if k.endswith(".weight")]).removesuffix(".weight")
    part = rng.choice(("weight_scale", "scale_weight", "weight_scale_2", "weight_smooth", "pre_quant_scale", "unknown"))
    file.tensors.setdefault(f"{layer}.{part}", ("F32", [1], struct.pack("<f", 0.5)))
    return f"{layer}.{part}", False


def _metadata(rng: random.Random, file: File) -> tuple[str, bool]:
    key = rng.choice(("int8_dit_recipe", "int8_dit_marks", "_quantization_metadata", "config", "format", "unknown"))
    file.metadata[key] = rng.choice(TEXTS)
    return f"{key} {file.metadata[key][:20]!r}", False


MUTATIONS: dict[str, Mutation] = {
    "a bit of the header": header_bit,
    "a bit of a weight": _bit_of(".weight", free=True),
    "a bit of a scale": _bit_of(SCALE, SMOOTH, free=True),
    "a bit of a mark": _bit_of(QUANT_CONFIG, free=False),
    "truncated": cut,
    "too long": longer,
    "a tensor removed": on_tensors(_removed),
    "a mark or scale removed": on_tensors(_removed_part),
    "a tensor renamed": on_tensors(_renamed),
    "a tensor duplicated": on_tensors(_duplicated),
    "two tensors swapped": on_tensors(_swapped),
    "another shape": on_tensors(_reshaped),
    "huge and empty": on_tensors(_huge_and_empty),
    "another dtype": on_tensors(_retyped),
    "another mark": on_tensors(_mark_text),
    "another option in a mark": on_tensors(_mark_option),
    "another rotation in a mark": on_tensors(_rotation),
    "an extreme value": on_tensors(_extreme),
    "a scale added": on_tensors(_added),
    "damaged metadata": on_tensors(_metadata),
}


def mutants(
    files: Mapping[str, bytes], count: int, seed: int = 0, mutations: Mapping[str, Mutation] = MUTATIONS
) -> Iterator[Mutant]:
    """As many mutants of these files, kinds of mutation in turns, each round on the next file."""
    rng = random.Random(seed)
    for number in range(count):
        round_, place = divmod(number, len(mutations))
        kind, base = list(mutations)[place], list(files)[(place + round_) % len(files)]
        data, where, free = mutations[kind](rng, files[base])
        yield Mutant(base, kind, where, free, data)


def is_known_gap(mutant: Mutant) -> bool:
    """Whether nothing says that a file is damaged: those of others say nowhere which layers were rotated and how, and
    files in which some are and others are not are legitimate."""
    return mutant.kind in ("another rotation in a mark", "a bit of a mark") and mutant.base in (
        "native INT8",
        "ConvRot",
    )


# What becomes of them


def outcome(mutant: Mutant, load: Callable[[], ModelPatcher], expected: torch.Tensor, name: str) -> tuple[str, str]:
    """What became of a mutant in two words, and what was said or how far the output is off.

    Args:
        mutant: of the file that is loaded.
        load: loads it.
        expected: the output of the base file with the same loader.
        name: of the file, which a clear error names.
    """
    try:
        output = glyph_dit.forward(load())
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        clear = isinstance(error, (ValueError, OSError)) and name in str(error)
        return ("refused clearly" if clear else "unclear error"), said
    error = relative_error(output, expected)
    if error < NOISE:
        return "loads right", f"{error:.1e}"
    return ("differs legitimately" if mutant.free and math.isfinite(error) else "silently wrong"), f"{error:.1e}"
