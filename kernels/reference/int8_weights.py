"""Per-output-channel INT8 quantization of weights and its inverse, in plain PyTorch."""

from collections.abc import Iterator, Sequence

import torch

from ..checks import check_matrix
from .transform import UNCHANGED, ChannelTransform

# Rows are independent, so a large weight is processed in slices: the float32 working copies stay this small.
_SLICE_ELEMENTS = 1 << 24
# What a clipped channel's scale can be, relative to absmax / 127; the first, no clipping, wins ties.
_CLIPPING = tuple(1.0 - step / 50 for step in range(26))
# Half of it, the most that clipping leaves, is the smallest that float32 holds with all its bits.
SMALLEST_SCALE = 2 * torch.finfo(torch.float32).tiny


def row_slices(shape: Sequence[int]) -> Iterator[slice]:
    """Slices over the rows of a weight of shape [N, K] that are few enough to be worked on in float32."""
    rows = max(1, _SLICE_ELEMENTS // max(1, shape[1]))
    return (slice(start, start + rows) for start in range(0, shape[0], rows))


def _least_error_scale(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The multiple of `scale` [N] in _CLIPPING under which rounding float32 values [N, K] loses least, row by row."""
    best, least = scale, torch.full_like(scale, torch.inf)
    for ratio in _CLIPPING:
        candidate = scale * ratio
        steps = (values / candidate[:, None]).round_().clamp_(-127, 127)
        squares = steps.mul_(candidate[:, None]).sub_(values).square_().sum(dim=1)
        best = torch.where(squares < least, candidate, best)
        least = torch.minimum(squares, least)
    return best


def quantize_weight(
    w: torch.Tensor,
    transform: ChannelTransform = UNCHANGED,
    clip: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight symmetrically to INT8 with one scale per output channel.

    Args:
        w: [N, K] bf16, fp16 or fp32.
        transform: what `quantize_activations` does to the channels that meet this weight; w takes its other half.
        clip: choose each channel's scale, from half of absmax / 127 to the whole, by the least squared rounding error,
            which clips the channel's largest weights where that pays.

    Returns:
        int8 [N, K] in -127..127 and float32 per-channel scale [N], absmax / 127 unless clipped; 0 for a row of zeros,
        or of values so small that float32 could not hold the scale with all its bits.

    Raises:
        TypeError, ValueError: wrong dtype, shape or group; NaN or Inf in the weight.
    """
    check_matrix("w", w)
    transform.check(w.shape[1])
    q, scale = quantize_rows(w, transform.on(w.device), clip=clip)
    if not bool(torch.isfinite(scale).all()):
        channel = int((~torch.isfinite(scale)).nonzero()[0])
        raise ValueError(f"weight has a NaN or Inf in output channel {channel}")
    return q, scale


def quantize_rows(
    w: torch.Tensor, transform: ChannelTransform, generator: torch.Generator | None = None, clip: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_weight` of checked arguments, in plain PyTorch; a NaN or Inf gives its channel the scale NaN."""
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(w.shape[0], dtype=torch.float32, device=w.device)
    for rows in row_slices(w.shape):
        values = transform.to_weight(w[rows])
        absmax = values.abs().amax(dim=1) if w.shape[1] else values.new_zeros(values.shape[0])
        scale[rows] = absmax / torch.full_like(absmax, 127)
        scale[rows] = torch.where(scale[rows] < SMALLEST_SCALE, 0.0, scale[rows])  # NaN stays
        divisor = torch.where(scale[rows] > 0, scale[rows], 1.0)
        if clip:
            divisor = _least_error_scale(values, divisor)
            scale[rows] = torch.where(scale[rows] > 0, divisor, scale[rows])
        steps = values / divisor[:, None]
        if generator is None:
            steps = steps.round()
        else:
            steps = (steps + torch.rand(steps.shape, generator=generator, device=steps.device)).floor()
        q[rows] = steps.clamp(-127, 127).to(torch.int8)
    return q, torch.where(torch.isfinite(scale), scale, torch.nan)
