"""A weight in whole steps, of 8 bits or in codes of 4, and how codes are made."""

from typing import NamedTuple

import torch

from ..interruption import stop_if_asked
from ..reference.grouped_codes import DEFAULT_CODEBOOK, GROUP, GroupedCodes, packed_codes
from ..reference.int8_weights import quantize_weight, row_slices
from ..reference.transform import ChannelTransform
from .column_feedback import ColumnFeedback


class RoundedWeight(NamedTuple):
    """A weight [N, K] in whole steps.

    Attributes:
        q: int8 [N, K].
        scale: float32 [N].
        codes: those of 4 bits that q stands for; None for a weight of 8 bits.
    """

    q: torch.Tensor
    scale: torch.Tensor
    codes: GroupedCodes | None = None


def quantize_to_codes(
    w: torch.Tensor, rotation_group: int, feedback: ColumnFeedback | None = None, scale: torch.Tensor | None = None
) -> RoundedWeight:
    """A weight in codes of 4 bits, with ComfyUI's default codebook and an FP8 scale for each 16 columns (W4A8).

    Args:
        w: [N, K] bf16, fp16 or fp32; 16 and `rotation_group` divide K.
        rotation_group: channels per Hadamard group.
        feedback: what rounding a column asks of the later ones, `of` codes; None to round each by itself.
        scale: float32 [N] of the INT8 weight; None for the largest value's.

    Raises TypeError, ValueError as `quantize_weight`.
    """
    transform = ChannelTransform(None, rotation_group)
    if scale is None:
        scale = quantize_weight(w, transform)[1]
    codebook = torch.tensor(DEFAULT_CODEBOOK, device=w.device)
    feedback = feedback or ColumnFeedback.alone(w.shape[1], w.device)
    done = []
    for rows in row_slices(w.shape):
        stop_if_asked()
        done.append(feedback.round(transform.to_weight(w[rows]), scale[rows], codebook))
    q, codes, group_scale = map(torch.cat, zip(*done, strict=True))
    group_scale = group_scale.to(torch.float8_e4m3fn)
    return RoundedWeight(q, scale, GroupedCodes(packed_codes(codes), group_scale, codebook, GROUP))
