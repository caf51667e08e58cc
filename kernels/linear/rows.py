"""Rows of channels to INT8, a scale each: smoothed, rotated and rounded in registers, in one pass over memory.

All kernels that quantize share the functions. One kernel does only that, to activations and to weights. Another makes
floats of INT8 weights, for a patch (LoRA) of a streamed one.
"""

import os
from typing import Any

import torch
import triton
import triton.language as tl

from ..launching.launching import Launcher, Layout, constant_launcher, contiguous, dense
from ..operators import Tensors
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
# Whether Triton's interpreter runs the kernels: fixed when they are defined.
INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")

# Longer rows do not fit one program's registers and are read twice, the second time from cache.
LONGEST_ROW_IN_REGISTERS = 32768
_CHUNK, _CHUNK_WARPS = 8192, 32
# Channels of the largest rotation that the kernels do.
LARGEST_GROUP = 4096
# Seven rounds of Philox pass the statistical tests that its authors ran (Salmon et al. 2011); the default is ten.
_PHILOX_ROUNDS = tl.constexpr(7)
_DEQUANTIZED_BLOCK = 4096


@triton.jit
def input_offsets(start, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Return where to load each of BLOCK channels from `start` on, for `transformed` to rotate groups of GROUP.

    A rotation ends with the group reversed. Whole runs of channels of one thread trade places here, where that costs
    nothing; the channels of a run trade theirs in registers.
    """
    offsets = tl.arange(0, BLOCK)
    if GROUP > 8:
        offsets = tl.max_contiguous(tl.multiple_of(offsets ^ (GROUP - 8), 8), 8)
    return start + offsets


@triton.jit
def rotate_row(values, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Rotate each GROUP neighbours of `values` [BLOCK], loaded from `input_offsets`: a regular Hadamard rotation.

    The matrix of a base-4 digit of the channel's number is J - 2P, with P the reversal, over 2. As J P = J it is
    (J - 2I) P: after the reversal of all digits, each becomes its sum minus twice itself. Sums over neighbours stay in
    a warp, which is quicker than a product on tensor cores: that would go through shared memory four times.
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
    """Return where token `row` of [B, T, K] begins."""
    return (row // T).to(tl.int64) * sample_stride + (row % T).to(tl.int64) * token_stride


@triton.jit
def modulation_offset(row, T, rows, sample_stride, row_stride):
    """Return where the modulation of token `row` of [B, T, K] begins: its own, or the one that `rows` [T] chooses."""
    place = row % T
    if rows is not None:
        place = tl.load(rows + place)
    return (row // T).to(tl.int64) * sample_stride + place.to(tl.int64) * row_stride


@triton.jit
def reciprocal(values):
    """Return 1 / values for float32, off by one unit in the last place at most: one instruction instead of ten."""
    if INTERPRETED:
        return tl.div_rn(1.0, values)
    else:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )


@triton.jit
def transformed(values, smooth, offsets, K, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Smooth and rotate a part of one row, float32 [BLOCK] from `input_offsets`."""
    if smooth is not None:
        factors = tl.load(smooth + offsets, mask=offsets < K, other=1.0).to(tl.float32)
        values *= reciprocal(factors)
    if GROUP > 1:
        values = rotate_row(values, BLOCK, GROUP)
    return values


@triton.jit
def magnitude_bits(values):
    """Return the bits of float32 |values| as integers, which order like them; NaNs are the largest."""
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

    Compiled without fused multiply-adds, it rounds products and sums apart, as the reference does.
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
    """Return a `constant_launcher` of a kernel that rounds once after a product and once after a sum, as its reference
    does."""
    return constant_launcher(kernel, num_stages=2, enable_fp_fusion=False)


def row_blocks(channels: int, group: int) -> tuple[int, int, bool, int]:
    """Return HEAD, TAIL, IN_REGISTERS and the number of warps for rows of this length (measured on an H200)."""
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
    """Return whether a program can hold rows of this length and rotate them so."""
    return channels <= LONGEST_ROW_IN_REGISTERS and group <= LARGEST_GROUP


def token_strides(tensor: torch.Tensor | None) -> tuple[int, int]:
    """Return the strides of samples and tokens of [B, T, K] or [T, K]; 0 for an axis of size 1, and for None."""
    if tensor is None:
        return 0, 0
    strides = [stride if size > 1 else 0 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)]
    return (0, strides[0]) if tensor.ndim == 2 else (strides[0], strides[1])


@triton.jit
def _load_prepared(x_row, smooth, start, K, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Load BLOCK channels of one row from `start` on in float32, smoothed and rotated; zeros beyond K."""
    offsets = input_offsets(start, BLOCK, GROUP)
    values = tl.load(x_row + offsets, mask=offsets < K, other=0.0).to(tl.float32)
    if smooth is not None and (ROUNDING == "weight" or ROUNDING == "stochastic"):
        values *= tl.load(smooth + offsets, mask=offsets < K, other=1.0).to(tl.float32)
        return transformed(values, None, offsets, K, BLOCK, GROUP)
    else:
        return transformed(values, smooth, offsets, K, BLOCK, GROUP)


@triton.jit
def _store_channel_scale(scale, largest):
    """Store and return a weight's scale, as `store_scale` does; 0 where float32 does not hold it with all its bits."""
    broken = largest >= INFINITY_BITS
    channel_scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    channel_scale = tl.where(channel_scale < SMALLEST_SCALE_CONSTEXPR, 0.0, channel_scale)
    tl.store(scale, tl.where(broken, float("nan"), channel_scale))
    return channel_scale, broken


@triton.jit
def _store_rounded(q_row, first, values, scale, broken, offsets, seed, K, ROUNDING: tl.constexpr):
    """Store a part of one row, whose first value has the index `first`, as int8 steps. `scale` came with `broken`; a
    weight's is the divisor, and makes zeros where it is 0."""
    if ROUNDING == "weight" or ROUNDING == "stochastic":
        divisor = tl.where(scale > 0, scale, 1.0)
        if ROUNDING == "stochastic":
            inverse = tl.where(scale > 0, tl.div_rn(1.0, divisor), 0.0)
            steps = tl.floor(values * inverse + tl.rand(seed, first + offsets, n_rounds=_PHILOX_ROUNDS))
            rounded = tl.minimum(tl.maximum(steps, -127.0), 127.0).to(tl.int32)
        else:
            rounded = (tl.div_rn(values, divisor) + ROUND_TO_EVEN).to(tl.int32, bitcast=True)
        tl.store(q_row + offsets, tl.where(broken, 0, rounded).to(tl.int8), mask=offsets < K)
    else:
        store_quantized(q_row, values, scale, broken, offsets, K, ROUNDING == "remainder")


@triton.jit(do_not_specialize=["seed"])
def quantize_rows_kernel(
    x,
    smooth,
    q,
    scale,
    K,
    stride_x,
    seed,
    HAS_SMOOTH: tl.constexpr,
    ROUNDING: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program quantizes one token: scale = absmax / 127, q = round(x' 127 / absmax), x' = rotate(x / smooth). Or
    one output channel of a weight: q = round(x' / scale), x' = rotate(x smooth).

    ROUNDING is "nearest" for a token; "remainder", with which a second int8 number for each first one follows K
    further; "weight" for a channel; or "stochastic" for one that `seed` rounds. A row with a NaN or Inf gets the scale
    NaN and q = 0, so that its whole output row is NaN and no other row is touched. A row in registers is a HEAD and a
    TAIL of powers of two: fewer lanes are wasted than with the next power of two above K. A longer row is walked in
    chunks of HEAD, once for absmax and once to quantize.
    """
    row = tl.program_id(0).to(tl.int64)
    smooth = smooth if HAS_SMOOTH else None
    x_row = x + row * stride_x
    first = row * (2 * K if ROUNDING == "remainder" else K)
    q_row = q + first
    head_offsets = tl.arange(0, HEAD)

    if IN_REGISTERS:
        head = _load_prepared(x_row, smooth, 0, K, ROUNDING, HEAD, GROUP)
        largest = tl.max(magnitude_bits(head), axis=0)
        if TAIL > 0:
            tail = _load_prepared(x_row, smooth, HEAD, K, ROUNDING, TAIL, GROUP)
            largest = tl.maximum(largest, tl.max(magnitude_bits(tail), axis=0))
    else:
        bits = tl.zeros((HEAD,), dtype=tl.int32)
        for start in range(0, K, HEAD):
            values = _load_prepared(x_row, smooth, start, K, ROUNDING, HEAD, GROUP)
            bits = tl.maximum(bits, magnitude_bits(values))
        largest = tl.max(bits, axis=0)

    if ROUNDING == "weight" or ROUNDING == "stochastic":
        step, broken = _store_channel_scale(scale + row, largest)
    else:
        step, broken = store_scale(scale + row, largest)
    if IN_REGISTERS:
        _store_rounded(q_row, first, head, step, broken, head_offsets, seed, K, ROUNDING)
        if TAIL > 0:
            _store_rounded(q_row, first, tail, step, broken, HEAD + tl.arange(0, TAIL), seed, K, ROUNDING)
    else:
        for start in range(0, K, HEAD):
            values = _load_prepared(x_row, smooth, start, K, ROUNDING, HEAD, GROUP)
            _store_rounded(q_row, first, values, step, broken, start + head_offsets, seed, K, ROUNDING)


@triton.jit
def _dequantize_kernel(
    q,
    scale,
    smooth,
    out,
    K,
    stride_scale,
    HAS_SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program makes BLOCK values of a row: rotate(q) scale / smooth, in float32."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    sources = input_offsets(start, BLOCK, GROUP)
    values = tl.load(q + row * K + sources, mask=sources < K, other=0).to(tl.float32)
    if GROUP > 1:
        values = rotate_row(values, BLOCK, GROUP)
    offsets = start + tl.arange(0, BLOCK)
    inside = offsets < K
    values *= tl.load(scale + row * stride_scale)
    if HAS_SMOOTH:
        values = tl.div_rn(values, tl.load(smooth + offsets, mask=inside, other=1.0).to(tl.float32))
    tl.store(out + row * K + offsets, values.to(out.dtype.element_ty), mask=inside)


_QUANTIZER = row_launcher(quantize_rows_kernel)
_DEQUANTIZER = row_launcher(_dequantize_kernel)


def _layout(tensors: Tensors, rotation_group: int | None, rounding: str, seed: int = 0) -> Layout | None:
    """Return the launch of the kernel's ROUNDING; None for a group that no kernel rotates."""
    (x, smooth), group = tensors, rotation_group or 1
    if group > LARGEST_GROUP:
        return None
    rows, channels = x.shape
    *blocks, warps = row_blocks(channels, group)
    form = (smooth is not None, rounding, *blocks, group, warps)
    # 31 bits, so that all seeds are one type to Triton.
    numbers = (channels, x.stride(0) if x.stride(1) == 1 else channels, seed & 0x7FFFFFFF)
    return Layout(_QUANTIZER, form, (rows, 1), numbers, tensors, dense)


def launch_quantize_activations(tensors: Tensors, rotation_group: int | None, activation_bits: int) -> Layout | None:
    return _layout(tensors, rotation_group, "remainder" if activation_bits == 16 else "nearest")


def launch_requantize_weight(tensors: Tensors, rotation_group: int | None, seed: int | None) -> Layout | None:
    return _layout(tensors, rotation_group, "weight" if seed is None else "stochastic", seed or 0)


def launch_dequantize_weight(tensors: Tensors, rotation_group: int | None, dtype: torch.dtype) -> Layout | None:
    (q, scale, smooth), group = tensors, rotation_group or 1
    if group > LARGEST_GROUP:
        return None
    rows, channels = q.shape
    block = max(group, min(_DEQUANTIZED_BLOCK, 1 << (channels - 1).bit_length()))
    form = (smooth is not None, block, group, max(1, min(8, block // 512)))
    numbers = (channels, 0 if scale.numel() == 1 else 1)
    return Layout(_DEQUANTIZER, form, (rows, -(-channels // block)), numbers, tensors, contiguous)
