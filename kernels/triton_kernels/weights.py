"""Weights from INT8 to floats, for a patch (LoRA) of a streamed one: a Triton kernel and its launch."""

import torch
import triton
import triton.language as tl

from ..reference.transform import ChannelTransform
from .rows import input_offsets, rotate_row, row_launcher

_DEQUANTIZED_BLOCK = 4096


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


_DEQUANTIZER = row_launcher(_dequantize_kernel)


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
    form = (smooth is not None, block, group, max(1, min(8, block // 512)))
    _DEQUANTIZER(form, (rows, -(-channels // block)), tensors, (channels, stride))
    return out
