"""Rows of channels in a program's registers: smoothed, rotated, rounded to INT8. The kernels of this room share it."""

import torch
import triton
import triton.language as tl

from ..reference import REMAINDER_STEPS
from ..transform import ChannelTransform

# 1.5 * 2^23: added to |v| < 2^22 in float32 it rounds v to the nearest integer, ties to even, and leaves that integer
# in the low bits of the sum.
ROUND_TO_EVEN = tl.constexpr(12582912.0)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# Without the sign, float32 bits order like the numbers, with Inf and then the NaNs above them all.
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
INFINITY_BITS = tl.constexpr(0x7F800000)
_REMAINDER_STEPS = tl.constexpr(float(REMAINDER_STEPS))

# Longer rows do not fit one program's registers and are read twice, the second time from cache.
LONGEST_ROW_IN_REGISTERS = 32768
_CHUNK, _CHUNK_WARPS = 8192, 32
# A rotation is one or two Hadamard matrices of sizes that the tensor cores multiply with.
HADAMARD_FACTORS = {1: (1, 1), 4: (1, 4), 16: (1, 16), 64: (1, 64), 256: (16, 16), 1024: (16, 64), 4096: (64, 64)}


@triton.jit
def _hadamard(SIZE: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr):
    """[SIZE, SIZE] with the normalized regular Hadamard matrix of GROUP = 4 ** n along its diagonal, exact in `dtype`.

    An entry is negative where an odd number of base-4 digits of row and column add up to three.
    """
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    mirrored = row ^ column ^ (GROUP - 1)
    negative = tl.zeros((SIZE, SIZE), tl.int32)
    VALUE: tl.constexpr = 0.5 if GROUP == 4 else 0.25 if GROUP == 16 else 0.125
    for digit in tl.static_range(0, 6, 2):
        if (1 << digit) < GROUP:
            negative = negative ^ (((mirrored >> digit) & 3) == 0).to(tl.int32)
    signed = tl.where(negative > 0, -VALUE, VALUE)
    return tl.where(row // GROUP == column // GROUP, signed, 0.0).to(dtype)


@triton.jit
def _upper_half(values):
    """float32 -> its upper 16 bits as bf16, and the rest, exactly."""
    upper = values.to(tl.int32, bitcast=True) & -65536
    return (upper >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), values - upper.to(tl.float32, bitcast=True)


@triton.jit
def _exact_dot(a, b, acc, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter multiplies bf16 as the integers that hold it
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc)
    else:
        return tl.dot(a, b, acc=acc)


@triton.jit
def _times_hadamard(
    values,
    BATCH: tl.constexpr,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """H @ values for `values` [BATCH, SIZE, any], summed in float32.

    bf16 and fp16 go to the tensor cores as they are; float32 as PARTS bf16 numbers. It is the sum of three. Two miss
    2^-15 of it at most, which is finer than a 16-bit float that it was computed from, and than a step of INT8.
    """
    zeros = tl.zeros(values.shape, tl.float32)  # Triton 3.2 cannot hand None on to tl.dot
    if values.dtype == tl.float32:
        h = tl.broadcast_to(_hadamard(SIZE, GROUP, tl.bfloat16)[None, :, :], (BATCH, SIZE, SIZE))
        high, rest = _upper_half(values)
        if PARTS == 3:
            middle, rest = _upper_half(rest)
            low, rest = _upper_half(rest)
            product = _exact_dot(h, low, zeros, INTERPRETED)
            product = _exact_dot(h, middle, product, INTERPRETED)
        else:
            product = _exact_dot(h, rest.to(tl.bfloat16), zeros, INTERPRETED)
        return _exact_dot(h, high, product, INTERPRETED)
    else:
        h = tl.broadcast_to(_hadamard(SIZE, GROUP, values.dtype)[None, :, :], (BATCH, SIZE, SIZE))
        return _exact_dot(h, values, zeros, INTERPRETED)


@triton.jit
def rotate(
    values,
    BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Regular Hadamard rotation of each LEFT * RIGHT neighbours of `values` [BLOCK], in float32.

    A group X [LEFT, RIGHT] becomes H_LEFT X H_RIGHT, computed as H_LEFT (H_RIGHT X^T)^T: so the first product leaves
    the tensor cores in the layout in which the second one enters them.
    """
    if LEFT == 1:
        SIZE: tl.constexpr = 16 if RIGHT == 4 else RIGHT  # pyright: ignore[reportAssignmentType]
        # The warps share a batch of products out among themselves, and each would compute all of a single product. Each
        # product of a batch has a matrix of its own in shared memory; all together may take 64 KB.
        BATCH: tl.constexpr = min(BLOCK // (16 * SIZE), 32768 // (SIZE * SIZE))  # pyright: ignore[reportAssignmentType]
        columns = tl.permute(tl.reshape(values, (BATCH, BLOCK // (BATCH * SIZE), SIZE)), (0, 2, 1))
        rotated = tl.permute(_times_hadamard(columns, BATCH, SIZE, RIGHT, PARTS, INTERPRETED), (0, 2, 1))
    else:
        GROUPS: tl.constexpr = BLOCK // (LEFT * RIGHT)
        groups = tl.reshape(values, (GROUPS, LEFT, RIGHT))
        right = _times_hadamard(tl.permute(groups, (0, 2, 1)), GROUPS, RIGHT, RIGHT, PARTS, INTERPRETED)
        rotated = _times_hadamard(tl.permute(right, (0, 2, 1)), GROUPS, LEFT, LEFT, PARTS, INTERPRETED)
    return tl.reshape(rotated, (BLOCK,))


@triton.jit
def token_offset(row, T, sample_stride, token_stride):
    """Where token `row` of [B, T, K] begins."""
    return (row // T).to(tl.int64) * sample_stride + (row % T).to(tl.int64) * token_stride


@triton.jit
def reciprocal(values, INTERPRETED: tl.constexpr):
    """1 / values for float32, off by one unit in the last place at most, in one instruction instead of ten."""
    if INTERPRETED:
        return tl.div_rn(1.0, values)
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def transformed(
    values,
    smooth,
    offsets,
    K,
    HAS_SMOOTH: tl.constexpr,
    PARTS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """A part of one row [BLOCK], smoothed and rotated, in float32."""
    if HAS_SMOOTH:
        factors = tl.load(smooth + offsets, mask=offsets < K, other=1.0)
        values = values.to(tl.float32) * reciprocal(factors, INTERPRETED)
    if RIGHT > 1:
        values = rotate(values, BLOCK, LEFT, RIGHT, PARTS, INTERPRETED)
    return values.to(tl.float32)


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


def smallest_block(group: int) -> int:
    """The fewest values that can be rotated in groups of this size at once."""
    # A rotation by one factor multiplies a matrix of at least 16 columns.
    return max(16 * max(16, group), 1024) if 1 < group <= 64 else group


def row_blocks(channels: int, group: int) -> tuple[int, int, bool, int]:
    """HEAD, TAIL, IN_REGISTERS and the number of warps for rows of this length (measured on an H200)."""
    smallest = smallest_block(group)
    if channels > LONGEST_ROW_IN_REGISTERS:
        return max(_CHUNK, smallest), 0, False, _CHUNK_WARPS
    head = max(smallest, 1 << (channels.bit_length() - 1))
    tail = max(smallest, 1 << (channels - head - 1).bit_length()) if channels > head else 0
    values = max(1, (head + tail) // 1024)
    return head, tail, True, min(16, 1 << (values.bit_length() - 1))


def fits_registers(channels: int, transform: ChannelTransform) -> bool:
    """Whether a program can hold rows of this length and rotate them so."""
    return channels <= LONGEST_ROW_IN_REGISTERS and (transform.rotation_group or 1) in HADAMARD_FACTORS


def token_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """How far apart the samples and the tokens of [B, T, K] or [T, K] lie; 0 along an axis of size 1, and for None."""
    if tensor is None:
        return 0, 0
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return (0, strides[0]) if tensor.ndim == 2 else (strides[0], strides[1])


def dense_channels(tensor: torch.Tensor) -> torch.Tensor:
    """The same with neighbouring channels side by side in memory, copied only where they are not."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()
