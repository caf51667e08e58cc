"""GGUF's blocks to INT8, to per-channel scales and to floats, one Triton kernel each.

A program works on some blocks side by side, wherever rows begin. It loads each packed byte once for the two weights,
or more, of which it holds bits: a tile [blocks, runs, 16] of bytes makes two tiles of weights of that shape. Products
and sums are rounded apart, as in PyTorch: all is compiled without fused multiply-adds.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..gguf.formats import BlockFormat
from ..numerics.weights import SMALLEST_SCALE
from .launching import RepeatedLaunch, on_device, remembered
from .rows import INFINITY_BITS, ROUND_TO_EVEN, magnitude_bits

_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)
# 2^23, above which float32 counts in ones, and its bits.
_ONES = tl.constexpr(8388608.0)
_EXPONENT_OF_ONES = tl.constexpr(0x4B000000)


@triton.jit
def _half(bits):
    """The fp16 in the lowest 16 bits of an integer, as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_half(at, inside):
    """The fp16 at byte pointers, as float32."""
    return tl.load(at.to(tl.pointer_type(tl.float16), bitcast=True), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_word(at, inside):
    """The four bytes at byte pointers, as int32."""
    return tl.load(at.to(tl.pointer_type(tl.int32), bitcast=True), mask=inside, other=0)


@triton.jit
def _load_short(at, inside):
    """The two bytes at byte pointers, as int32."""
    return tl.load(at.to(tl.pointer_type(tl.uint16), bitcast=True), mask=inside, other=0).to(tl.int32)


@triton.jit
def _load_bytes(at, inside):
    return tl.load(at, mask=inside, other=0).to(tl.int32)


@triton.jit
def _float(bits, MIDDLE: tl.constexpr):
    """Integers in 0..65535, less MIDDLE, as float32: as the low bits of 2^23 an integer needs no conversion, which
    would take four times as long."""
    return (bits | _EXPONENT_OF_ONES).to(tl.float32, bitcast=True) - (_ONES + MIDDLE)


@triton.jit
def _decode_small(at, lane, inside, FORMAT: tl.constexpr):
    """Formats of 32 weights a block: the first half of a block's weights and the second."""
    d = _load_half(at, inside)
    if FORMAT == "Q8_0":
        q = at + 2 + lane
        first = _float(_load_bytes(q, inside) ^ 128, 128) * d
        second = _float(_load_bytes(q + 16, inside) ^ 128, 128) * d
    else:
        HAS_MINIMUM: tl.constexpr = FORMAT == "Q4_1" or FORMAT == "Q5_1"
        FIVE: tl.constexpr = FORMAT == "Q5_0" or FORMAT == "Q5_1"
        MIDDLE: tl.constexpr = 0 if HAS_MINIMUM else 16 if FIVE else 8
        HEAD: tl.constexpr = 4 if HAS_MINIMUM else 2
        packed = _load_bytes(at + (HEAD + 4 if FIVE else HEAD) + lane, inside)
        low = packed & 15
        high = packed & 240
        if FIVE:
            low |= _load_short(at + HEAD, inside) << 4 >> lane & 16
            high |= _load_short(at + HEAD + 2, inside) << 8 >> lane & 256
        first = _float(low, MIDDLE) * d
        second = _float(high, 16 * MIDDLE) * (d * 0.0625)
        if HAS_MINIMUM:
            m = _load_half(at + 2, inside)
            first += m
            second += m
    return first, second


@triton.jit
def _scale_and_minimum(d, dmin, low, middle, high, sub):
    """d sc and dmin m of sub-block `sub` of Q4_K and Q5_K, out of their three words of packed scales."""
    shift = (sub & 3) * 8
    low = low >> shift
    middle = middle >> shift
    high = high >> shift
    sc = tl.where(sub < 4, low & 63, high & 15 | (low >> 2 & 48))
    m = tl.where(sub < 4, middle & 63, (high >> 4 & 15) | (middle >> 2 & 48))
    return d * sc.to(tl.float32), dmin * m.to(tl.float32)


@triton.jit
def _decode_q45_k(at, run, lane, inside, FORMAT: tl.constexpr):
    """Q4_K and Q5_K: sub-blocks 2 p and 2 p + 1 of 32 weights lie in the same 32 bytes."""
    tops = _load_word(at, inside)
    d = _half(tops)
    dmin = _half(tops >> 16)
    low = _load_word(at + 4, inside)
    middle = _load_word(at + 8, inside)
    high = _load_word(at + 12, inside)
    pair = run >> 1
    first_size, first_offset = _scale_and_minimum(d, dmin, low, middle, high, pair * 2)
    second_size, second_offset = _scale_and_minimum(d, dmin, low, middle, high, pair * 2 + 1)
    HEAD: tl.constexpr = 48 if FORMAT == "Q5_K" else 16
    packed = _load_bytes(at + HEAD + run * 16 + lane, inside)
    first = packed & 15
    second = packed & 240
    if FORMAT == "Q5_K":
        fifth = _load_bytes(at + 16 + (run & 1) * 16 + lane, inside) << 7 >> pair * 2
        first |= fifth >> 3 & 16
        second |= fifth & 256
    first_weight = first_size * _float(first, 0) - first_offset
    second_weight = second_size * 0.0625 * _float(second, 0) - second_offset
    return first_weight, second_weight


@triton.jit
def _decode_q6_k(at, run, lane, inside):
    """Of 128 weights, quarters 0 and 2 lie in the same 32 bytes, 1 and 3 in the next."""
    d = _load_half(at + 208, inside)
    scales = (at + 192 + (run >> 2) * 8 + (run & 3)).to(tl.pointer_type(tl.int8), bitcast=True)
    first_size = d * tl.load(scales, mask=inside, other=0).to(tl.float32)
    second_size = d * tl.load(scales + 4, mask=inside, other=0).to(tl.float32)
    low = _load_bytes(at + run * 16 + lane, inside)
    high = _load_bytes(at + 128 + (run >> 2) * 32 + (run & 1) * 16 + lane, inside) << 4 >> (run & 2)
    first = _float(low & 15 | high & 48, 32)
    second = _float(low & 240 | high & 768, 16 * 32)
    return first_size * first, second_size * 0.0625 * second


@triton.jit
def _decode_q2_k(at, run, lane, inside):
    """As Q6_K without its lower bits: all quarters lie in the same 32 bytes."""
    tops = _load_word(at + 80, inside)
    d = _half(tops)
    dmin = _half(tops >> 16)
    scales = at + (run >> 2) * 8 + (run & 3)
    first_scale = _load_bytes(scales, inside)
    second_scale = _load_bytes(scales + 4, inside)
    packed = _load_bytes(at + 16 + (run >> 2) * 32 + (run & 1) * 16 + lane, inside) >> (run & 2)
    first = d * (first_scale & 15).to(tl.float32) * _float(packed & 3, 0)
    second = d * (second_scale & 15).to(tl.float32) * 0.0625 * _float(packed & 48, 0)
    return first - dmin * (first_scale >> 4).to(tl.float32), second - dmin * (second_scale >> 4).to(tl.float32)


@triton.jit
def _decode_q3_k(at, run, lane, inside):
    """As Q2_K with a third bit, of a mask of 32 bytes whose bit is the number of 32 weights."""
    d = _load_half(at + 108, inside)
    half = run >> 2
    low = at + 96 + (run & 3)
    high = _load_bytes(at + 104 + (run & 3), inside) >> half * 4
    first_scale = (_load_bytes(low, inside) >> half * 4 & 15 | (high & 3) << 4) - 32
    second_scale = (_load_bytes(low + 4, inside) >> half * 4 & 15 | (high >> 2 & 3) << 4) - 32
    packed = _load_bytes(at + 32 + half * 32 + (run & 1) * 16 + lane, inside) >> (run & 2)
    third = _load_bytes(at + (run & 1) * 16 + lane, inside) << 4 >> half * 4 + (run >> 1 & 1)
    first = _float(packed & 3 | third >> 2 & 4, 4)
    second = _float(packed & 48 | third & 64, 16 * 4)
    return d * first_scale.to(tl.float32) * first, d * second_scale.to(tl.float32) * 0.0625 * second


@triton.jit
def _decode(blocks, start, count, FORMAT: tl.constexpr, BYTES: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr):
    """Blocks from `start` on, as far as there are `count`: which there are [BLOCKS, 1, 1], and their weights in
    float32, two tiles [BLOCKS, RUNS, 16] whose places `_places` knows."""
    block = tl.arange(0, BLOCKS)[:, None, None]
    run = tl.arange(0, RUNS)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    inside = start + block < count
    at = blocks + start.to(tl.int64) * BYTES + block * BYTES
    if FORMAT == "Q4_K" or FORMAT == "Q5_K":
        first, second = _decode_q45_k(at, run, lane, inside, FORMAT)  # pyright: ignore[reportGeneralTypeIssues]
    elif FORMAT == "Q6_K":
        first, second = _decode_q6_k(at, run, lane, inside)  # pyright: ignore[reportGeneralTypeIssues]
    elif FORMAT == "Q2_K":
        first, second = _decode_q2_k(at, run, lane, inside)  # pyright: ignore[reportGeneralTypeIssues]
    elif FORMAT == "Q3_K":
        first, second = _decode_q3_k(at, run, lane, inside)  # pyright: ignore[reportGeneralTypeIssues]
    else:
        first, second = _decode_small(at, lane, inside, FORMAT)  # pyright: ignore[reportGeneralTypeIssues]
    return inside, first, second


@triton.jit
def _places(start, FORMAT: tl.constexpr, WEIGHTS: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr):
    """Where the weights of the two tiles of `_decode` stand in the whole tensor."""
    block = tl.arange(0, BLOCKS)[:, None, None]
    run = tl.arange(0, RUNS)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    if WEIGHTS == 32:
        within = lane
        gap = 16
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        within = (run >> 1) * 64 + (run & 1) * 16 + lane
        gap = 32
    else:
        within = (run >> 2) * 128 + (run & 3) * 16 + lane
        gap = 64
    first = start.to(tl.int64) * WEIGHTS + (block * WEIGHTS + within)
    return first, first + gap


@triton.jit
def _quotient(values, divisor, inverse, rest, INTERPRETED: tl.constexpr):
    """values / divisor, rounded as float32 division rounds it, in half of its instructions.

    `inverse` is 1 / divisor so rounded, and `rest` what it lacks. The two make a quotient that is off by less than a
    unit in the last place. By Markstein's theorem one step of remainder and correction rounds such a one correctly.
    """
    if INTERPRETED:
        return tl.div_rn(values, divisor)  # the interpreter's fma rounds twice
    else:
        quotient = tl.fma(values, inverse, values * rest)
        return tl.fma(tl.fma(quotient, -divisor, values), inverse, quotient)


@triton.jit
def _rounded(values, divisor, inverse, rest, most, INTERPRETED: tl.constexpr):
    """values / divisor to the nearest integer, ties to even, of values clamped to -most..most; int8."""
    clamped = tl.minimum(tl.maximum(values, -most), most)
    steps = _quotient(clamped, divisor, inverse, rest, INTERPRETED)
    return (steps + ROUND_TO_EVEN).to(tl.int32, bitcast=True).to(tl.int8)


@triton.jit
def expand_kernel(
    blocks,
    scale,
    out,
    count,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program expands BLOCKS of `count` blocks to int8: round(w / scale of the row)."""
    start = tl.program_id(0) * BLOCKS
    inside, first, second = _decode(blocks, start, count, FORMAT, BYTES, BLOCKS, RUNS)  # pyright: ignore[reportGeneralTypeIssues]
    first_place, second_place = _places(start, FORMAT, WEIGHTS, BLOCKS, RUNS)
    row = (start + tl.arange(0, BLOCKS)[:, None, None]) // ROW_BLOCKS
    row_scale = tl.load(scale + row, mask=inside, other=0.0)
    usable = (row_scale >= _SMALLEST_SCALE) & (row_scale < float("inf"))
    divisor = tl.where(usable, row_scale, 1.0)
    inverse = tl.div_rn(1.0, divisor)
    rest = tl.fma(inverse, -divisor, 1.0) * inverse
    most = tl.where(usable, 127.0 * divisor, 0.0)
    tl.store(out + first_place, _rounded(first, divisor, inverse, rest, most, INTERPRETED), mask=inside)
    tl.store(out + second_place, _rounded(second, divisor, inverse, rest, most, INTERPRETED), mask=inside)


@triton.jit
def dequantize_kernel(
    blocks,
    out,
    count,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """One program turns BLOCKS of `count` blocks into floats."""
    start = tl.program_id(0) * BLOCKS
    inside, first, second = _decode(blocks, start, count, FORMAT, BYTES, BLOCKS, RUNS)  # pyright: ignore[reportGeneralTypeIssues]
    first_place, second_place = _places(start, FORMAT, WEIGHTS, BLOCKS, RUNS)
    tl.store(out + first_place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + second_place, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scales_kernel(
    blocks,
    scale,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
):
    """One program finds absmax / 127 of one row; NaN for a row with a NaN or Inf."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCKS, RUNS, 16), dtype=tl.int32)
    for block in range(0, ROW_BLOCKS, BLOCKS):
        start, end = row * ROW_BLOCKS + block, (row + 1) * ROW_BLOCKS
        _, first, second = _decode(blocks, start, end, FORMAT, BYTES, BLOCKS, RUNS)
        largest = tl.maximum(largest, tl.maximum(magnitude_bits(first), magnitude_bits(second)))
    bits = tl.max(tl.reshape(largest, (BLOCKS * RUNS * 16,)), axis=0)
    row_scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    row_scale = tl.where(row_scale < _SMALLEST_SCALE, 0.0, row_scale)
    tl.store(scale + row, tl.where(bits >= INFINITY_BITS, float("nan"), row_scale))


# By all that Triton compiles for and the grid.
_launches: dict[tuple, RepeatedLaunch] = {}
_WARPS = 8
OPTIONS = {"num_warps": _WARPS, "num_stages": 2, "enable_fp_fusion": False}
# Bytes that a thread loads at once: all that a load can, where blocks begin on 16 bytes.
_ALIGNED_BYTES, _BYTES = 16, 8


def decoder_constants(name: str, form: BlockFormat, vector: int = _BYTES) -> dict[str, Any]:
    """What all kernels are compiled for, with a tile of `vector` packed bytes a thread."""
    runs = 1 if form.weights == 32 else 8
    blocks = _WARPS * 32 * vector // (16 * runs)
    return {"FORMAT": name, "BYTES": form.bytes, "WEIGHTS": form.weights, "BLOCKS": blocks, "RUNS": runs}


def expander_constants(name: str, form: BlockFormat, row_blocks: int, interpreted: bool) -> dict[str, Any]:
    """The expander's constants, for rows of so many blocks."""
    common = decoder_constants(name, form, _BYTES if form.bytes % 16 else _ALIGNED_BYTES)
    return {**common, "ROW_BLOCKS": row_blocks, "INTERPRETED": interpreted}


def scales_constants(name: str, form: BlockFormat, row_blocks: int) -> dict[str, Any]:
    """The constants of the kernel that finds scales, for rows of so many blocks."""
    return {**decoder_constants(name, form), "ROW_BLOCKS": row_blocks}


def _aligned(blocks: torch.Tensor) -> torch.Tensor:
    """The same, contiguous, and beginning where the widest load may."""
    blocks = blocks.contiguous()
    return blocks.clone() if blocks.data_ptr() % 16 else blocks


def launch_expander(blocks: torch.Tensor, name: str, form: BlockFormat, scale: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on checked, non-empty arguments: uint8 [N, row bytes], contiguous scale [N] -> int8 [N, K]."""
    blocks = _aligned(blocks)
    rows, row_blocks = blocks.shape[0], blocks.shape[1] // form.bytes
    out = torch.empty(rows, row_blocks * form.weights, dtype=torch.int8, device=blocks.device)

    def prepare() -> RepeatedLaunch:
        constants = expander_constants(name, form, row_blocks, interpreted=not blocks.is_cuda)
        return RepeatedLaunch(expand_kernel, (-(-rows * row_blocks // constants["BLOCKS"]), 1), constants, OPTIONS)

    tensors = (blocks, scale, out)
    with on_device(blocks.device):
        key = ("expand", blocks.device, name, rows, row_blocks)
        remembered(_launches, key, tensors, prepare)(*tensors, rows * row_blocks)
    return out


def launch_dequantizer(blocks: torch.Tensor, name: str, form: BlockFormat, dtype: torch.dtype) -> torch.Tensor:
    """Launch the kernel on checked, non-empty blocks: uint8 [N, row bytes] -> [N, K] in `dtype`."""
    blocks = _aligned(blocks)
    rows, row_blocks = blocks.shape[0], blocks.shape[1] // form.bytes
    out = torch.empty(rows, row_blocks * form.weights, dtype=dtype, device=blocks.device)

    def prepare() -> RepeatedLaunch:
        constants = decoder_constants(name, form)
        return RepeatedLaunch(dequantize_kernel, (-(-rows * row_blocks // constants["BLOCKS"]), 1), constants, OPTIONS)

    tensors = (blocks, out)
    with on_device(blocks.device):
        key = ("dequantize", blocks.device, name, rows, row_blocks, dtype)
        remembered(_launches, key, tensors, prepare)(*tensors, rows * row_blocks)
    return out


def launch_scales(blocks: torch.Tensor, name: str, form: BlockFormat) -> torch.Tensor:
    """Launch the kernel on checked, non-empty blocks: uint8 [N, row bytes] -> float32 scale [N]."""
    blocks = _aligned(blocks)
    rows, row_blocks = blocks.shape[0], blocks.shape[1] // form.bytes
    scale = torch.empty(rows, dtype=torch.float32, device=blocks.device)

    def prepare() -> RepeatedLaunch:
        return RepeatedLaunch(scales_kernel, (rows, 1), scales_constants(name, form, row_blocks), OPTIONS)

    tensors = (blocks, scale)
    with on_device(blocks.device):
        remembered(_launches, ("scales", blocks.device, name, rows, row_blocks), tensors, prepare)(*tensors)
    return scale
