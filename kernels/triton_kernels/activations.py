"""Per-token dynamic INT8 quantization of activations: one Triton kernel, one pass over memory."""

import torch
import triton
import triton.language as tl

from ..reference.linear import new_quantized, quantize_activations_reference
from ..reference.transform import ChannelTransform
from .launching import Launch, Launcher
from .rows import LARGEST_GROUP, input_offsets, magnitude_bits, row_blocks, store_quantized, store_scale, transformed


@triton.jit
def _load_prepared(
    x_row,
    smooth,
    start,
    K,
    HAS_SMOOTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """BLOCK channels of one row from `start` on in float32, smoothed and rotated; zeros beyond K."""
    offsets = input_offsets(start, BLOCK, GROUP)
    values = tl.load(x_row + offsets, mask=offsets < K, other=0.0).to(tl.float32)
    return transformed(values, smooth, offsets, K, HAS_SMOOTH, INTERPRETED, BLOCK, GROUP)


@triton.jit
def quantize_rows_kernel(
    x,
    smooth,
    q,
    scale,
    K,
    stride_x,
    HAS_SMOOTH: tl.constexpr,
    REMAINDER: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program quantizes one token: scale = absmax / 127, q = round(x' 127 / absmax), x' = rotate(x / smooth).

    With REMAINDER a second int8 number for each first one follows K further.
    A token with a NaN or Inf gets the scale NaN and q = 0, so that its whole output row is NaN and no other row is
    touched. A row in registers is a HEAD and a TAIL of powers of two, which wastes fewer lanes than the next power of
    two above K would; a longer row is walked in chunks of HEAD, once for absmax and once to quantize.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * stride_x
    q_row = q + row * (2 * K if REMAINDER else K)
    head_offsets = tl.arange(0, HEAD)

    if IN_REGISTERS:
        head = _load_prepared(x_row, smooth, 0, K, HAS_SMOOTH, INTERPRETED, HEAD, GROUP)
        largest = tl.max(magnitude_bits(head), axis=0)
        if TAIL > 0:
            tail = _load_prepared(x_row, smooth, HEAD, K, HAS_SMOOTH, INTERPRETED, TAIL, GROUP)
            largest = tl.maximum(largest, tl.max(magnitude_bits(tail), axis=0))
    else:
        bits = tl.zeros((HEAD,), dtype=tl.int32)
        for start in range(0, K, HEAD):
            values = _load_prepared(x_row, smooth, start, K, HAS_SMOOTH, INTERPRETED, HEAD, GROUP)
            bits = tl.maximum(bits, magnitude_bits(values))
        largest = tl.max(bits, axis=0)

    inverse_scale, broken = store_scale(scale + row, largest)
    if IN_REGISTERS:
        store_quantized(q_row, head, inverse_scale, broken, head_offsets, K, REMAINDER)
        if TAIL > 0:
            store_quantized(q_row, tail, inverse_scale, broken, HEAD + tl.arange(0, TAIL), K, REMAINDER)
    else:
        for start in range(0, K, HEAD):
            values = _load_prepared(x_row, smooth, start, K, HAS_SMOOTH, INTERPRETED, HEAD, GROUP)
            store_quantized(q_row, values, inverse_scale, broken, start + head_offsets, K, REMAINDER)


def quantize_rows_constants(
    channels: int, has_smooth: bool, remainder: bool, group: int, interpreted: bool
) -> tuple[dict[str, object], dict[str, object]]:
    """The kernel's constants and compilation options."""
    head, tail, in_registers, warps = row_blocks(channels, group)
    constants = {
        "HAS_SMOOTH": has_smooth,
        "REMAINDER": remainder,
        "INTERPRETED": interpreted,
        "HEAD": head,
        "TAIL": tail,
        "IN_REGISTERS": in_registers,
        "GROUP": group,
    }
    # Without fusion there is one rounding after a product and one after a sum, as in the reference.
    return constants, {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": False}


_QUANTIZER = Launcher(quantize_rows_kernel, quantize_rows_constants)


def quantizer_launch(
    x: torch.Tensor,
    smooth: torch.Tensor | None,
    q: torch.Tensor,
    scale: torch.Tensor,
    rotation_group: int | None,
) -> Launch | None:
    """What quantizes matrices like x [M, K] into ones like q [M, K or 2K] and scale [M], all contiguous; None for a
    group that no kernel rotates."""
    channels, group = x.shape[1], rotation_group or 1
    if group > LARGEST_GROUP:
        return None
    form = (channels, smooth is not None, q.shape[1] > channels, group, not x.is_cuda)
    return _QUANTIZER.prepared(form, (x, x if smooth is None else smooth, q, scale), (channels, channels))


def launch_activation_quantizer(
    x: torch.Tensor, transform: ChannelTransform, activation_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on checked, non-empty arguments: x [M, K] -> int8 [M, K] or [M, 2K], float32 scale [M]."""
    group = transform.rotation_group or 1
    if group > LARGEST_GROUP:
        return quantize_activations_reference(x, transform, activation_bits)
    if x.stride(1) != 1:
        x = x.contiguous()
    smooth = None if transform.smooth is None else transform.smooth.float().contiguous()
    rows, channels = x.shape
    q, scale = new_quantized(x, channels, activation_bits)
    form = (channels, smooth is not None, activation_bits == 16, group, not x.is_cuda)
    _QUANTIZER(form, (rows, 1), (x, x if smooth is None else smooth, q, scale), (channels, x.stride(0)))
    return q, scale
