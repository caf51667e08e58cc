"""Per-token dynamic INT8 quantization of activations: one Triton kernel."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl

from .rotation import rotation_digits

# 1.5 * 2^23: added to |v| < 2^22 in float32 it rounds v to the nearest integer, ties to even, and leaves that integer in
# the low bits of the sum.
_ROUND_TO_EVEN = tl.constexpr(12582912.0)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _rotate(values, BLOCK: tl.constexpr, GROUP: tl.constexpr, DIGITS: tl.constexpr):
    """Regular Hadamard rotation of each GROUP neighbours of `values` [BLOCK]; the same recursion as `rotation.rotate`."""
    for _ in tl.static_range(DIGITS):
        quads = tl.reshape(values, (BLOCK // GROUP, 4, GROUP // 4))
        quads = tl.permute(quads, (0, 2, 1))
        quads = tl.reshape(quads, (BLOCK // GROUP, GROUP // 4, 2, 2))
        even, odd = tl.split(quads)
        v0, v2 = tl.split(even)
        v1, v3 = tl.split(odd)
        total = (v0 + v1) + (v2 + v3)
        even = tl.join(total - 2.0 * v3, total - 2.0 * v1)
        odd = tl.join(total - 2.0 * v2, total - 2.0 * v0)
        values = tl.reshape(tl.join(even, odd), (BLOCK,))
    return values * (1.0 / (1 << DIGITS))


@triton.jit
def _load_prepared(
    x_row, smooth, offsets, K, HAS_SMOOTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, DIGITS: tl.constexpr
):
    """A chunk of one row in float32, smoothed and rotated; zeros beyond K."""
    inside = offsets < K
    values = tl.load(x_row + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_SMOOTH:
        values = tl.div_rn(values, tl.load(smooth + offsets, mask=inside, other=1.0))
    if DIGITS > 0:
        values = _rotate(values, BLOCK, GROUP, DIGITS)
    return values


@triton.jit
def _quantize_rows_kernel(
    x,
    smooth,
    q,
    scale,
    K,
    stride_x,
    HAS_SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    DIGITS: tl.constexpr,
):
    """One program quantizes one token: scale = absmax / 127, q = round(x' / scale), x' = rotate(x / smooth).

    A token with a NaN or Inf gets the scale NaN and q = 0, so that its whole output row is NaN and no other row is
    touched. The row is read twice, the second time from cache: chunks that fit K waste fewer lanes than one block of the
    next power of two would.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * stride_x
    q_row = q + row * K
    chunk = tl.arange(0, BLOCK)

    largest = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        values = _load_prepared(x_row, smooth, start + chunk, K, HAS_SMOOTH, BLOCK, GROUP, DIGITS)
        largest = tl.maximum(largest, tl.abs(values), propagate_nan=tl.PropagateNan.ALL)
    # The reduction may drop NaNs, so it is asked separately whether any lane is NaN or Inf.
    broken = tl.max((largest <= _FLOAT32_MAX).to(tl.int32) ^ 1, axis=0) > 0
    row_scale = tl.div_rn(tl.max(largest, axis=0), 127.0)
    row_scale = tl.where(broken, float("nan"), row_scale)
    tl.store(scale + row, row_scale)

    divisor = tl.zeros((BLOCK,), dtype=tl.float32) + tl.where(row_scale > 0, row_scale, 1.0)
    for start in range(0, K, BLOCK):
        values = _load_prepared(x_row, smooth, start + chunk, K, HAS_SMOOTH, BLOCK, GROUP, DIGITS)
        quotient = tl.minimum(tl.maximum(tl.div_rn(values, divisor), -127.0), 127.0)
        rounded = (quotient + _ROUND_TO_EVEN).to(tl.int32, bitcast=True)
        tl.store(q_row + start + chunk, tl.where(broken, 0, rounded).to(tl.int8), mask=start + chunk < K)


def _chunk_and_warps(channels: int, group: int) -> tuple[int, int]:
    """Elements of a row in flight and warps that share them: long rows need more of both, since there are few of them."""
    chunk = 1024 if channels <= 8192 else 2048 if channels <= 16384 else 4096
    chunk = max(group, min(chunk, triton.next_power_of_2(channels)))
    return chunk, max(1, min(16, chunk // 256))


def launch_activation_quantizer(
    x: torch.Tensor, smooth: torch.Tensor | None, rotation_group: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on checked, non-empty arguments: x [M, K] -> int8 [M, K], float32 scale [M]."""
    rows, channels = x.shape
    if x.stride(1) != 1:
        x = x.contiguous()
    q = torch.empty((rows, channels), dtype=torch.int8, device=x.device)
    scale = torch.empty((rows,), dtype=torch.float32, device=x.device)
    group = rotation_group or 1
    chunk, warps = _chunk_and_warps(channels, group)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        _quantize_rows_kernel[(rows,)](
            x,
            x if smooth is None else smooth.float().contiguous(),
            q,
            scale,
            channels,
            x.stride(0),
            HAS_SMOOTH=smooth is not None,
            BLOCK=chunk,
            GROUP=group,
            DIGITS=rotation_digits(group),
            num_warps=warps,
        )
    return q, scale
