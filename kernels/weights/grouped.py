"""Weights in codes of 4 or 6 bits with a scale for each group of them (W4A8, W6A8), expanded to INT8 for a product.

A code stands for a level, and level times the group's scale, rounded, is the weight's INT8. So what such a file holds
is an INT8 weight in fewer bits: nothing is lost when it is expanded.
"""

import torch

from ..card.device import weights_use_triton
from ..checks import check_same_device, check_weight_scale
from ..operators import Result, operator
from ..reference.grouped_codes import GroupedCodes
from ..reference.int8_weights import row_slices
from ..reference.low_rank import Addition, rounded_rows


def _check(weight: GroupedCodes, addition: Addition | None) -> list[Result]:
    weight.check()
    if addition is not None:
        addition.low_rank.check(*weight.shape)
        check_weight_scale(addition.channel_scale, weight.shape[0])
        check_weight_scale(addition.larger, weight.shape[0])
        check_same_device(codes=weight.codes, **addition._asdict())
    return [(weight.shape, torch.int8)]


@operator(_check)
def expand_codes(weight: GroupedCodes, addition: Addition | None = None) -> torch.Tensor:
    """The INT8 weight that codes stand for: clamp(round(level * scale of the group), -127, 127), halves to even.

    With an `addition` it is round((that * channel_scale + up @ down) / larger), clamped alike. The sums are float32, in
    no certain order.

    Args:
        weight: the codes.
        addition: what is added before rounding.

    Returns:
        int8 [N, K]; with an addition, zeros in the rows for which `larger` is none: 0, NaN, Inf, negative.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
    """
    codes = weight.codes
    if addition is not None:
        scales = (scale.reshape(-1, 1).expand(len(codes), 1).contiguous() for scale in addition[2:])
        addition = Addition(*addition.low_rank, *scales)
    if codes.numel() and weights_use_triton(codes):
        from ..triton_kernels.grouped_codes import launch_codes_expander, launch_codes_low_rank_expander

        return launch_codes_expander(weight) if addition is None else launch_codes_low_rank_expander(weight, addition)
    out = torch.empty(weight.shape, dtype=torch.int8, device=codes.device)
    if out.numel():
        for some in row_slices(out.shape):
            whole = _levels(weight, some).round_().clamp_(-127, 127)
            if addition is not None:
                whole = rounded_rows(whole * addition.channel_scale[some], addition.larger, addition.low_rank, some)
            out[some] = whole.to(torch.int8)
    return out


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
