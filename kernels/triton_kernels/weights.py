"""Weights from INT8 to floats and back, one Triton kernel each way: what a patch (LoRA) of a streamed weight takes."""

import torch
import triton
import triton.language as tl

from ..reference.transform import ChannelTransform
from .launching import Launcher
from .rows import (
    INFINITY_BITS,
    LARGEST_GROUP,
    ROUND_TO_EVEN,
    SMALLEST_SCALE_CONSTEXPR,
    input_offsets,
    magnitude_bits,
    rotate_row,
    row_blocks,
)

_DEQUANTIZED_BLOCK = 4096
# Seven rounds of Philox pass the statistical tests that its authors ran (Salmon et al. 2011); the default is ten.
_PHILOX_ROUNDS = tl.constexpr(7)


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
        values = tl.div_rn(values, tl.load(smooth + offsets, mask=inside, other=1.0))
    tl.store(out + row * K + offsets, values.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _load_transformed(
    w_row,
    smooth,
    start,
    K,
    HAS_SMOOTH: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """BLOCK values of one row from `start` on in float32, times their smoothing factors and rotated; zeros beyond K."""
    offsets = input_offsets(start, BLOCK, GROUP)
    inside = offsets < K
    values = tl.load(w_row + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_SMOOTH:
        values *= tl.load(smooth + offsets, mask=inside, other=1.0)
    if GROUP > 1:
        values = rotate_row(values, BLOCK, GROUP)
    return values


@triton.jit
def _store_rounded(q, first, values, scale, broken, offsets, seed, K, STOCHASTIC: tl.constexpr):
    """Round values / scale and store them, zeros for a scale of 0; `first` is the index of the row's first value."""
    divisor = tl.where(scale > 0, scale, 1.0)
    if STOCHASTIC:
        inverse = tl.where(scale > 0, tl.div_rn(1.0, divisor), 0.0)
        steps = tl.floor(values * inverse + tl.rand(seed, first + offsets, n_rounds=_PHILOX_ROUNDS))
        rounded = tl.minimum(tl.maximum(steps, -127.0), 127.0).to(tl.int32)
    else:
        rounded = (tl.div_rn(values, divisor) + ROUND_TO_EVEN).to(tl.int32, bitcast=True)
    tl.store(q + first + offsets, tl.where(broken, 0, rounded).to(tl.int8), mask=offsets < K)


@triton.jit(do_not_specialize=["seed"])
def _quantize_kernel(
    w,
    smooth,
    q,
    scale,
    seed,
    K,
    stride_w,
    HAS_SMOOTH: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program quantizes one output channel: scale = absmax / 127, q = round(w' / scale), w' = rotate(w smooth).

    A channel with a NaN or Inf gets the scale NaN. Rows are held and walked as in the quantizer of activations.
    """
    row = tl.program_id(0).to(tl.int64)
    w_row = w + row * stride_w
    first = row * K
    head_offsets = tl.arange(0, HEAD)

    if IN_REGISTERS:
        head = _load_transformed(w_row, smooth, 0, K, HAS_SMOOTH, HEAD, GROUP)
        largest = tl.max(magnitude_bits(head), axis=0)
        if TAIL > 0:
            tail = _load_transformed(w_row, smooth, HEAD, K, HAS_SMOOTH, TAIL, GROUP)
            largest = tl.maximum(largest, tl.max(magnitude_bits(tail), axis=0))
    else:
        bits = tl.zeros((HEAD,), dtype=tl.int32)
        for start in range(0, K, HEAD):
            values = _load_transformed(w_row, smooth, start, K, HAS_SMOOTH, HEAD, GROUP)
            bits = tl.maximum(bits, magnitude_bits(values))
        largest = tl.max(bits, axis=0)

    broken = largest >= INFINITY_BITS
    channel_scale = tl.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    channel_scale = tl.where(channel_scale < SMALLEST_SCALE_CONSTEXPR, 0.0, channel_scale)
    tl.store(scale + row, tl.where(broken, float("nan"), channel_scale))

    if IN_REGISTERS:
        _store_rounded(q, first, head, channel_scale, broken, head_offsets, seed, K, STOCHASTIC)
        if TAIL > 0:
            _store_rounded(q, first, tail, channel_scale, broken, HEAD + tl.arange(0, TAIL), seed, K, STOCHASTIC)
    else:
        for start in range(0, K, HEAD):
            values = _load_transformed(w_row, smooth, start, K, HAS_SMOOTH, HEAD, GROUP)
            _store_rounded(q, first, values, channel_scale, broken, start + head_offsets, seed, K, STOCHASTIC)


def _dequantizer_constants(block: int, group: int, has_smooth: bool) -> tuple[dict[str, object], dict[str, object]]:
    options = {"num_warps": max(1, min(8, block // 512)), "num_stages": 2, "enable_fp_fusion": False}
    return {"HAS_SMOOTH": has_smooth, "BLOCK": block, "GROUP": group}, options


def _quantizer_constants(
    channels: int, group: int, has_smooth: bool, stochastic: bool
) -> tuple[dict[str, object], dict[str, object]]:
    head, tail, in_registers, warps = row_blocks(channels, group)
    constants = {
        "HAS_SMOOTH": has_smooth,
        "STOCHASTIC": stochastic,
        "HEAD": head,
        "TAIL": tail,
        "IN_REGISTERS": in_registers,
        "GROUP": group,
    }
    return constants, {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": False}


_DEQUANTIZER = Launcher(_dequantize_kernel, _dequantizer_constants)
_QUANTIZER = Launcher(_quantize_kernel, _quantizer_constants)


def can_launch(transform: ChannelTransform) -> bool:
    """Whether the kernels know the transform's rotation."""
    return (transform.rotation_group or 1) <= LARGEST_GROUP


def launch_weight_dequantizer(
    q: torch.Tensor, scale: torch.Tensor, transform: ChannelTransform, dtype: torch.dtype
) -> torch.Tensor:
    """Launch the kernel on checked, non-empty arguments: contiguous q [N, K], scale of 1 or N values -> [N, K]."""
    rows, channels = q.shape
    group = transform.rotation_group or 1
    smooth = transform.smooth
    out = torch.empty(q.shape, dtype=dtype, device=q.device)
    stride = 0 if scale.numel() == 1 else 1
    block = max(group, min(_DEQUANTIZED_BLOCK, 1 << (channels - 1).bit_length()))
    tensors = (q, scale, scale if smooth is None else smooth, out)
    _DEQUANTIZER((block, group, smooth is not None), (rows, -(-channels // block)), tensors, (channels, stride))
    return out


def launch_weight_quantizer(
    w: torch.Tensor, transform: ChannelTransform, seed: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on checked, non-empty arguments: w [N, K] -> int8 [N, K], float32 scale [N].

    `seed` rounds stochastically; None rounds half to even.
    """
    rows, channels = w.shape
    group = transform.rotation_group or 1
    smooth = transform.smooth
    if w.stride(1) != 1:
        w = w.contiguous()
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(rows, dtype=torch.float32, device=w.device)
    tensors = (w, w if smooth is None else smooth, q, scale)
    # 31 bits, so that all seeds are one type to Triton.
    numbers = ((seed or 0) & 0x7FFFFFFF, channels, w.stride(0))
    _QUANTIZER((channels, group, smooth is not None, seed is not None), (rows, 1), tensors, numbers)
    return q, scale
