"""INT8 quantization of rows, a scale each, one Triton kernel for activations and weights, one pass over memory.

And weights from INT8 to floats, for a patch (LoRA) of a streamed one.
"""

import torch
import triton
import triton.language as tl

from ..launching.launching import Layout, contiguous, dense
from ..operators import Tensors
from .rows import (
    INFINITY_BITS,
    LARGEST_GROUP,
    ROUND_TO_EVEN,
    SMALLEST_SCALE_CONSTEXPR,
    input_offsets,
    magnitude_bits,
    rotate_row,
    row_blocks,
    row_launcher,
    store_quantized,
    store_scale,
    transformed,
)

# Seven rounds of Philox pass the statistical tests that its authors ran (Salmon et al. 2011); the default is ten.
_PHILOX_ROUNDS = tl.constexpr(7)
_DEQUANTIZED_BLOCK = 4096


@triton.jit
def _load_prepared(x_row, smooth, start, K, ROUNDING: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """BLOCK channels of one row from `start` on in float32, smoothed and rotated; zeros beyond K."""
    offsets = input_offsets(start, BLOCK, GROUP)
    values = tl.load(x_row + offsets, mask=offsets < K, other=0.0).to(tl.float32)
    if smooth is not None and (ROUNDING == "weight" or ROUNDING == "stochastic"):
        values *= tl.load(smooth + offsets, mask=offsets < K, other=1.0).to(tl.float32)
        return transformed(values, None, offsets, K, BLOCK, GROUP)
    else:
        return transformed(values, smooth, offsets, K, BLOCK, GROUP)


@triton.jit
def _store_channel_scale(scale, largest):
    """As `store_scale` for a weight, whose scale is 0 where float32 does not hold it with all its bits. Returns it."""
    broken = largest >= INFINITY_BITS
    channel_scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    channel_scale = tl.where(channel_scale < SMALLEST_SCALE_CONSTEXPR, 0.0, channel_scale)
    tl.store(scale, tl.where(broken, float("nan"), channel_scale))
    return channel_scale, broken


@triton.jit
def _store_rounded(q_row, first, values, scale, broken, offsets, seed, K, ROUNDING: tl.constexpr):
    """Store a part of one row, whose first value has the index `first`, as int8 steps. `scale` is what was returned
    with `broken`; a weight's is the divisor, and makes zeros where it is 0."""
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
    further; "weight" for a channel; or "stochastic" for one that `seed` rounds.
    A row with a NaN or Inf gets the scale NaN and q = 0, so that its whole output row is NaN and no other row is
    touched. A row in registers is a HEAD and a TAIL of powers of two, which wastes fewer lanes than the next power of
    two above K would; a longer row is walked in chunks of HEAD, once for absmax and once to quantize.
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
    """The launch on checked, non-empty rows and factors like these; None for a group that no kernel rotates. `rounding`
    is the kernel's ROUNDING."""
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
    """The launch on x and smooth like these."""
    return _layout(tensors, rotation_group, "remainder" if activation_bits == 16 else "nearest")


def launch_requantize_weight(tensors: Tensors, rotation_group: int | None, seed: int | None) -> Layout | None:
    """The launch on w and smooth like these."""
    return _layout(tensors, rotation_group, "weight" if seed is None else "stochastic", seed or 0)


def launch_dequantize_weight(tensors: Tensors, rotation_group: int | None, dtype: torch.dtype) -> Layout | None:
    """The launch on checked, non-empty q, its scale and smooth like these; None for a group that no kernel rotates."""
    (q, scale, smooth), group = tensors, rotation_group or 1
    if group > LARGEST_GROUP:
        return None
    rows, channels = q.shape
    block = max(group, min(_DEQUANTIZED_BLOCK, 1 << (channels - 1).bit_length()))
    form = (smooth is not None, block, group, max(1, min(8, block // 512)))
    numbers = (channels, 0 if scale.numel() == 1 else 1)
    return Layout(_DEQUANTIZER, form, (rows, -(-channels // block)), numbers, tensors, contiguous)
