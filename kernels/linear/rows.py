"""Rows of channels in a program's registers: smoothed, rotated, rounded to INT8. The kernels of this room share it."""

import os
from typing import Any

import torch
import triton
import triton.language as tl

from ..launching.launching import Launcher, constant_launcher
from .linear_reference import REMAINDER_STEPS, SMALLEST_SCALE

# 1.5 * 2^23: added to |v| < 2^22 in float32 it rounds v to the nearest integer, ties to even, and leaves that integer
# in the low bits of the sum.
ROUND_TO_EVEN = tl.constexpr(12582912.0)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# Without the sign, float32 bits order like the numbers, with Inf and then the NaNs above them all.
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
SMALLEST_SCALE_CONSTEXPR = tl.constexpr(SMALLEST_SCALE)
_REMAINDER_STEPS = tl.constexpr(float(REMAINDER_STEPS))
# Whether Triton's interpreter runs the kernels: so it decides where they are defined.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Compilation options: there is one rounding after a product and one after a sum, as in the reference.
ROUNDED_APART = {"num_stages": 2, "enable_fp_fusion": False}
# Longer rows do not fit one program's registers and are read twice, the second time from cache.
LONGEST_ROW_IN_REGISTERS = 32768
_CHUNK, _CHUNK_WARPS = 8192, 32
# Channels of the largest rotation that the kernels do.
LARGEST_GROUP = 4096


@triton.jit
def input_offsets(start, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """From where each of BLOCK channels from `start` on is loaded if `transformed` is to rotate groups of GROUP.

    A rotation ends with the group reversed. Whole runs of channels that lie in one thread trade places here, where that
    costs nothing; the channels of a run trade theirs in registers.
    """
    offsets = tl.arange(0, BLOCK)
    if GROUP > 8:
        offsets = tl.max_contiguous(tl.multiple_of(offsets ^ (GROUP - 8), 8), 8)
    return start + offsets


@triton.jit
def rotate_row(values, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Regular Hadamard rotation of each GROUP neighbours of `values` [BLOCK], loaded from `input_offsets`.

    The matrix of a base-4 digit of the channel's number is J - 2P, with P the reversal, over 2. As J P = J it is
    (J - 2I) P: after the reversal of all digits, each becomes its sum minus twice itself. Sums over neighbours stay in
    a warp, which makes this quicker than a product on tensor cores: that would go through shared memory four times.
    """
    bits = values.to(tl.int32, bitcast=True)
    for bit in tl.static_range(0, 3):  # pyright: ignore[reportGeneralTypeIssues]
        if (2 << bit) <= GROUP:
            pairs = tl.reshape(bits, (BLOCK >> (bit + 1), 2, 1 << bit))
            bits = tl.reshape(tl.sum(pairs, axis=1, keep_dims=True) - pairs, (BLOCK,))
    values = bits.to(tl.float32, bitcast=True)
    for digit in tl.static_range(0, 12, 2):  # pyright: ignore[reportGeneralTypeIssues]
        if (4 << digit) <= GROUP:
            values *= 0.5
            quads = tl.reshape(values, (BLOCK >> (digit + 2), 4, 1 << digit))
            total = tl.broadcast_to(tl.sum(quads, axis=1, keep_dims=True), quads.shape)
            values = tl.reshape(tl.fma(quads, -2.0, total), (BLOCK,))
    return values


@triton.jit
def token_offset(row, T, sample_stride, token_stride):
    """Where token `row` of [B, T, K] begins."""
    return (row // T).to(tl.int64) * sample_stride + (row % T).to(tl.int64) * token_stride


@triton.jit
def modulation_offset(row, T, rows, sample_stride, row_stride):
    """Where the modulation of token `row` of [B, T, K] begins: the token's own, or the one that `rows` [T] chooses."""
    place = row % T
    if rows is not None:
        place = tl.load(rows + place)
    return (row // T).to(tl.int64) * sample_stride + place.to(tl.int64) * row_stride


@triton.jit
def reciprocal(values):
    """1 / values for float32, off by one unit in the last place at most, in one instruction instead of ten."""
    if INTERPRETED:
        return tl.div_rn(1.0, values)
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def transformed(values, smooth, offsets, K, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """A part of one row, float32 [BLOCK] from `input_offsets`, smoothed and rotated."""
    if smooth is not None:
        factors = tl.load(smooth + offsets, mask=offsets < K, other=1.0).to(tl.float32)
        values *= reciprocal(factors)
    if GROUP > 1:
        values = rotate_row(values, BLOCK, GROUP)
    return values


@triton.jit
def magnitude_bits(values):
    """The bits of float32 |values| as integers, which order like them; NaNs are the largest."""
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS


@triton.jit
def store_scale(scale, largest):
    """Store the scale of a row whose largest magnitude has these bits, NaN for one that is not finite.

    Returns the steps per unit, and whether the row is broken.
    """
    broken = largest >= INFINITY_BITS
    absmax = largest.to(tl.float32, bitcast=True)
    tl.store(scale, tl.where(broken, float("nan"), tl.div_rn(absmax, 127.0)))
    # The minimum keeps 0 * inverse_scale a zero in rows so small that the reciprocal overflows.
    inverse_scale = tl.minimum(tl.div_rn(127.0, tl.where(absmax > 0, absmax, 1.0)), _FLOAT32_MAX)
    return inverse_scale, broken


@triton.jit
def store_quantized(q_row, values, inverse_scale, broken, offsets, K, REMAINDER: tl.constexpr):
    """Store a part of one row as int8 steps, zeros for a broken one; with REMAINDER what they rounded away K further.

    Products and sums are rounded apart, as in the reference: it is compiled without fused multiply-adds.
    """
    steps = values * inverse_scale
    rounded = steps + ROUND_TO_EVEN
    inside = offsets < K
    tl.store(q_row + offsets, tl.where(broken, 0, rounded.to(tl.int32, bitcast=True)).to(tl.int8), mask=inside)
    if REMAINDER:
        rest = (steps - (rounded - ROUND_TO_EVEN)) * _REMAINDER_STEPS + ROUND_TO_EVEN
        rest_bits = tl.where(broken, 0, rest.to(tl.int32, bitcast=True))
        tl.store(q_row + K + offsets, rest_bits.to(tl.int8), mask=inside)


def row_launcher(kernel: Any) -> Launcher:
    """A `constant_launcher` of a kernel that rounds products and sums apart."""
    return constant_launcher(kernel, **ROUNDED_APART)


def row_blocks(channels: int, group: int) -> tuple[int, int, bool, int]:
    """HEAD, TAIL, IN_REGISTERS and the number of warps for rows of this length (measured on an H200)."""
    if channels > LONGEST_ROW_IN_REGISTERS:
        return max(_CHUNK, group), 0, False, _CHUNK_WARPS
    head = 1 << (channels.bit_length() - 1)
    tail = 1 << (channels - head - 1).bit_length() if channels > head else 0
    values = max(1, (head + tail) // 1024)
    warps = min(16, 1 << (values.bit_length() - 1))
    if tail and 1 < group <= 256:
        tail = max(tail, group * warps)  # whole groups a warp, whose sums then stay in it
    return head, tail, True, warps


def fits_registers(channels: int, group: int) -> bool:
    """Whether a program can hold rows of this length and rotate them so."""
    return channels <= LONGEST_ROW_IN_REGISTERS and group <= LARGEST_GROUP


def token_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """How far apart the samples and the tokens of [B, T, K] or [T, K] lie; 0 along an axis of size 1, and for None."""
    if tensor is None:
        return 0, 0
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return (0, strides[0]) if tensor.ndim == 2 else (strides[0], strides[1])
