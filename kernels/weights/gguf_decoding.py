"""GGUF's blocks inside of kernels: their weights in float32, and how these are rounded to INT8.

A program works on some blocks side by side. It loads each packed byte once for the two weights, or more, of which it
holds bits: a tile [blocks, runs, 16] of bytes makes two tiles of weights of that shape. Compiled without fused
multiply-adds, it rounds products and sums apart, as PyTorch does.
"""

import triton
import triton.language as tl

from ..linear.rows import INTERPRETED, ROUND_TO_EVEN, SMALLEST_SCALE_CONSTEXPR

# 2^23, above which float32 counts in ones, and its bits.
_ONES = tl.constexpr(8388608.0)
_EXPONENT_OF_ONES = tl.constexpr(0x4B000000)


@triton.jit
def _half(bits):
    """Return the fp16 in the lowest 16 bits of an integer as float32."""
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _load_half(at, inside):
    """Load the fp16 at byte pointers as float32."""
    return tl.load(at.to(tl.pointer_type(tl.float16), bitcast=True), mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _load_word(at, inside):
    """Load the four bytes at byte pointers as int32."""
    return tl.load(at.to(tl.pointer_type(tl.int32), bitcast=True), mask=inside, other=0)


@triton.jit
def _load_short(at, inside):
    """Load the two bytes at byte pointers as int32."""
    return tl.load(at.to(tl.pointer_type(tl.uint16), bitcast=True), mask=inside, other=0).to(tl.int32)


@triton.jit
def _load_bytes(at, inside):
    return tl.load(at, mask=inside, other=0).to(tl.int32)


@triton.jit
def as_float(bits, MIDDLE: tl.constexpr):
    """Return integers in 0..65535, less MIDDLE, as float32: as the low bits of 2^23 they need no conversion, which
    would take four times as long."""
    return (bits | _EXPONENT_OF_ONES).to(tl.float32, bitcast=True) - (_ONES + MIDDLE)


@triton.jit
def _decode_small(at, lane, inside, FORMAT: tl.constexpr):
    """Decode a format of 32 weights a block: the first half of a block's weights, and the second."""
    d = _load_half(at, inside)
    if FORMAT == "Q8_0":
        q = at + 2 + lane
        first = as_float(_load_bytes(q, inside) ^ 128, 128) * d
        second = as_float(_load_bytes(q + 16, inside) ^ 128, 128) * d
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
        first = as_float(low, MIDDLE) * d
        second = as_float(high, 16 * MIDDLE) * (d * 0.0625)
        if HAS_MINIMUM:
            m = _load_half(at + 2, inside)
            first += m
            second += m
    return first, second


@triton.jit
def _scale_and_minimum(d, dmin, low, middle, high, sub):
    """Return d sc and dmin m of sub-block `sub` of Q4_K and Q5_K, out of their three words of packed scales."""
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
    first_weight = first_size * as_float(first, 0) - first_offset
    second_weight = second_size * 0.0625 * as_float(second, 0) - second_offset
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
    first = as_float(low & 15 | high & 48, 32)
    second = as_float(low & 240 | high & 768, 16 * 32)
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
    first = d * (first_scale & 15).to(tl.float32) * as_float(packed & 3, 0)
    second = d * (second_scale & 15).to(tl.float32) * 0.0625 * as_float(packed & 48, 0)
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
    first = as_float(packed & 3 | third >> 2 & 4, 4)
    second = as_float(packed & 48 | third & 64, 16 * 4)
    return d * first_scale.to(tl.float32) * first, d * second_scale.to(tl.float32) * 0.0625 * second


@triton.jit
def decode(at, inside, FORMAT: tl.constexpr, RUNS: tl.constexpr):
    """Decode the blocks at byte pointers [BLOCKS, 1, 1], where they are `inside`: two float32 tiles [BLOCKS, RUNS, 16],
    whose places `places_within` has."""
    run = tl.arange(0, RUNS)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
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
    return first, second


@triton.jit
def places_within(run, lane, FORMAT: tl.constexpr, WEIGHTS: tl.constexpr):
    """Return where in their block the first tile of `decode` stands, and how far behind it the second."""
    if WEIGHTS == 32:
        return lane + run * 0, 16
    elif FORMAT == "Q4_K" or FORMAT == "Q5_K":
        return (run >> 1) * 64 + (run & 1) * 16 + lane, 32
    else:
        return (run >> 2) * 128 + (run & 3) * 16 + lane, 64


@triton.jit
def _quotient(values, divisor, inverse, rest):
    """Return values / divisor, rounded as float32 division rounds it, in half of its instructions.

    `inverse` is 1 / divisor so rounded, and `rest` what it lacks. Their quotient is off by less than a unit in the last
    place. By Markstein's theorem one step of remainder and correction rounds it correctly.
    """
    if INTERPRETED:
        return tl.div_rn(values, divisor)  # the interpreter's fma rounds twice
    else:
        quotient = tl.fma(values, inverse, values * rest)
        return tl.fma(tl.fma(quotient, -divisor, values), inverse, quotient)


@triton.jit
def divisors(scale):
    """Return what `rounded` divides by for scales of rows: the divisor, its inverse, what that lacks, and the largest
    value. All values become 0 for a scale that is none."""
    usable = (scale >= SMALLEST_SCALE_CONSTEXPR) & (scale < float("inf"))
    divisor = tl.where(usable, scale, 1.0)
    inverse = tl.div_rn(1.0, divisor)
    rest = tl.fma(inverse, -divisor, 1.0) * inverse
    most = tl.where(usable, 127.0 * divisor, 0.0)
    return divisor, inverse, rest, most


@triton.jit
def rounded(values, by):
    """Return int8: values, clamped to -most..most, over the divisor, to the nearest integer, ties to even."""
    divisor, inverse, rest, most = by
    clamped = tl.minimum(tl.maximum(values, -most), most)
    steps = _quotient(clamped, divisor, inverse, rest)
    return (steps + ROUND_TO_EVEN).to(tl.int32, bitcast=True).to(tl.int8)
