"""Weights in codes of 4 or 6 bits with a scale for each group of them (W4A8, W6A8), expanded to INT8 for a product.

A code stands for a level, and level times the group's scale, rounded, is the weight's INT8. So what such a file holds
is an INT8 weight in fewer bits: nothing is lost when it is expanded.
"""

import torch

from ..checks import check_weight_scale
from ..operators import Operation, operator
from ..reference.grouped_codes import GroupedCodes
from ..reference.int8_weights import row_slices
from ..reference.low_rank import LowRank, rounded_rows


@operator(kernel="grouped_codes", rounds=())
def expand_codes(
    weight: GroupedCodes,
    channel_scale: torch.Tensor | None = None,
    larger: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
) -> Operation[torch.Tensor]:
    """The INT8 weight that codes stand for: clamp(round(level * scale of the group), -127, 127), halves to even.

    With a `low_rank` it is round((that * channel_scale + up @ down) / larger), clamped alike. The sums are float32, in
    no certain order.

    Args:
        weight: the codes.
        channel_scale: of the weight, float32 [N] or [N, 1].
        larger: the sum's, such as channel_scale + low_rank.channel_scales(); as many values.
        low_rank: what is added before rounding, in the basis of the stored weight: rotated as that is. Both scales are
            read only with it.

    Returns:
        int8 [N, K]; with a `low_rank`, zeros in the rows for which `larger` is none: 0, NaN, Inf, negative.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
    """
    weight.check()
    if low_rank is not None:
        low_rank.check(*weight.shape)
        if channel_scale is None or larger is None:
            raise TypeError("a low_rank is added to a weight with a channel_scale, and what is larger")
        check_weight_scale(channel_scale, weight.shape[0])
        check_weight_scale(larger, weight.shape[0])
    yield [(weight.shape, torch.int8)]
    out = torch.empty(weight.shape, dtype=torch.int8, device=weight.codes.device)
    if out.numel():
        for some in row_slices(out.shape):
            whole = _levels(weight, some).round_().clamp_(-127, 127)
            if low_rank is not None and channel_scale is not None and larger is not None:
                own, sums = (scale.reshape(-1, 1).expand(len(out), 1) for scale in (channel_scale, larger))
                whole = rounded_rows(whole * own[some], sums, low_rank, some)
            out[some] = whole.to(torch.int8)
    yield out


def _levels(weight: GroupedCodes, rows: slice) -> torch.Tensor:
    """Level times scale of some rows of codes, float32 [rows, K]."""
    channels = weight.shape[1]
    packed = weight.codes[rows].view(torch.uint8)
    low = packed[:, : channels // 2]
    codes = torch.stack([low & 15, low >> 4], dim=2).flatten(1)
    if weight.bits == 6:
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
        codes |= (packed[:, channels // 2 :, None] >> shifts & 3).flatten(1) << 4
    levels = codes.float() - (1 << weight.bits - 1) if weight.codebook is None else weight.codebook[codes.int()]
    return (levels.unflatten(1, (-1, weight.group)) * weight.scale[rows].float()[:, :, None]).flatten(1)
