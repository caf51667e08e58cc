"""A block of a weight's columns, rounded one after the other: each column's error is made good by those after it.

To INT8, or to codes of 4 bits with a scale for each group of 16, which is found when its turn comes.
"""

from typing import NamedTuple

import torch

from ..card.device import uses_triton
from ..reference.grouped_codes import CANDIDATES, GROUP

# So few that PyTorch runs an operation on one thread: of thousands of small ones each would wait for the others.
_ELEMENTS_AT_ONCE = 1 << 15


class RoundedColumns(NamedTuple):
    """Columns in whole steps.

    Attributes:
        q: int8 [N, B] in -127..127; of codes what they stand for: level times scale, rounded.
        codes: uint8 [N, B] in 0..15: which level of the codebook; None for INT8.
        group_scale: float32 [N, B / 16] that FP8 (e4m3) holds exactly; None for INT8.
    """

    q: torch.Tensor
    codes: torch.Tensor | None = None
    group_scale: torch.Tensor | None = None


def round_columns(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor | None = None
) -> RoundedColumns:
    """Round q_j = t_j / scale, column by column; t_k of each k > j becomes t_k - (t_j - q_j scale) feedback[j, k].

    With a codebook q_j is the nearest INT8 that a level gives. A group's scale is chosen in front of its first column:
    of 16 candidates, each rounded to FP8, the one that rounds its 16 values, as they are by then, with the least
    squared error.

    On a GPU this is one kernel, with the bits of the reference: both do the same float32 operations in the same order.

    Args:
        target: float32 [N, B], finite, what the columns are to come near to; B is a power of 2 of at least 16.
        scale: float32 [N], finite, of the INT8 weight; 0 makes the row zeros, and its groups' scales.
        feedback: float32 [B, B], upper triangular with ones on the diagonal.
        codebook: float32 [16], the levels, ascending, of codes of 4 bits; None for INT8.
    """
    if target.numel() and uses_triton(target):
        from ..triton_kernels.column_rounding import launch_column_rounding

        return RoundedColumns(*launch_column_rounding(target, scale, feedback, codebook))
    return round_columns_reference(target, scale, feedback, codebook)


def round_columns_reference(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor | None = None
) -> RoundedColumns:
    """`round_columns` in plain PyTorch."""
    parts, rows = [], max(1, _ELEMENTS_AT_ONCE // target.shape[1])
    for some, row_scale in zip(target.split(rows), scale.split(rows), strict=True):
        left, usable = some.clone(), row_scale[:, None] > 0
        divisor = torch.where(usable, row_scale[:, None], 1.0)
        if codebook is None:
            for column in range(left.shape[1]):
                value = left[:, column : column + 1]
                error = value - (value / divisor).clamp_(-127, 127).round_() * divisor
                left[:, column:] -= error * feedback[column, column:]
            # The diagonal's ones have left of each column what it was rounded to.
            steps = (left / divisor).clamp_(-127, 127).round_()
            parts.append((torch.where(usable, steps, 0.0).to(torch.int8),))
            continue
        q, codes, group_scale = [], [], []
        for first in range(0, left.shape[1], GROUP):
            best = _best_scale(torch.where(usable, left[:, first : first + GROUP] / divisor, 0.0), codebook)
            group_scale.append(best[:, None])
            levels = (best[:, None] * codebook).round_().clamp_(-127, 127)
            for column in range(first, first + GROUP):
                value = left[:, column : column + 1]
                codes.append(_first_least((value / divisor - levels).abs_()))
                q.append(levels.gather(1, codes[-1]))
                left[:, column:] -= (value - q[-1] * divisor) * feedback[column, column:]
        whole, code = torch.cat(q, dim=1).to(torch.int8), torch.cat(codes, dim=1).to(torch.uint8)
        parts.append((whole, code, torch.cat(group_scale, dim=1)))
    return RoundedColumns(*map(torch.cat, zip(*parts, strict=True)))


def _first_least(distances: torch.Tensor) -> torch.Tensor:
    """int64 [N, 1]: where in each row of [N, C] the least stands, the first of equals."""
    numbers = torch.arange(distances.shape[1], device=distances.device)
    least = distances.amin(dim=1, keepdim=True)
    return torch.where(distances == least, numbers, distances.shape[1] - 1).amin(dim=1, keepdim=True)


def _best_scale(values: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """The scale [N] of groups of values [N, 16]: of the candidates the first with the least squared error."""
    whole = values.abs().amax(dim=1, keepdim=True) / codebook.abs().max()
    candidates = torch.tensor(CANDIDATES, device=values.device)
    scales = (whole * candidates).clamp_(max=448).to(torch.float8_e4m3fn).float()  # [N, candidates]
    levels = (scales[:, :, None] * codebook).round_().clamp_(-127, 127)  # ascending
    wanted = values[:, None, :].expand(-1, len(CANDIDATES), -1).contiguous()
    above = torch.searchsorted(levels, wanted).clamp_(max=levels.shape[2] - 1)
    distances = (wanted - levels.gather(2, above)).abs_()
    distances = torch.minimum(distances, (wanted - levels.gather(2, (above - 1).clamp_(min=0))).abs_())
    squares = torch.zeros_like(scales)
    for square in distances.square_().unbind(2):  # in this order on a GPU, too
        squares += square
    return scales.gather(1, _first_least(squares))[:, 0]
