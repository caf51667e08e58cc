"""A block of a weight's columns, rounded one after the other: each column's error is made good by those after it.

To INT8, or to codes of 4 bits with a scale for each group of 16, which is found when its turn comes.
"""

from typing import NamedTuple

import torch

from ..card.device import weights_use_triton
from ..reference.grouped_codes import CANDIDATES, GROUP

# So few that PyTorch runs an operation on one thread: of thousands of small ones each would wait for the others.
_ELEMENTS_AT_ONCE = 1 << 15


def round_columns(target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
    """Round q_j = t_j / scale, column by column; t_k of each k > j becomes t_k - (t_j - q_j scale) feedback[j, k].

    On a GPU this is one kernel, with the bits of the reference: both do the same float32 operations in the same order.

    Args:
        target: float32 [N, B], contiguous, what the columns are to come near to; B is a power of 2 of at least 16.
        scale: float32 [N], finite; 0 makes the row zeros.
        feedback: float32 [B, B], contiguous, upper triangular with ones on the diagonal.

    Returns:
        int8 [N, B] in -127..127.
    """
    if target.numel() and weights_use_triton(target):
        from ..triton_kernels.column_rounding import launch_column_rounding

        return launch_column_rounding(target, scale, feedback)
    return round_columns_reference(target, scale, feedback)


def round_columns_reference(target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
    """`round_columns` in plain PyTorch."""
    rows = _rows_at_once(target.shape[1])
    q = torch.empty(target.shape, dtype=torch.int8, device=target.device)
    for start in range(0, len(target), rows):
        part = slice(start, start + rows)
        left = target[part].clone()
        divisor = torch.where(scale[part] > 0, scale[part], 1.0)[:, None]
        for column in range(target.shape[1]):
            value = left[:, column : column + 1]
            error = value - (value / divisor).clamp_(-127, 127).round_() * divisor
            left[:, column:] -= error * feedback[column, column:]
        # The diagonal's ones have left of each column what it was rounded to.
        steps = (left / divisor).clamp_(-127, 127).round_()
        q[part] = torch.where(scale[part, None] > 0, steps, 0.0).to(torch.int8)
    return q


class CodedColumns(NamedTuple):
    """Columns in codes.

    Attributes:
        q: int8 [N, B] that the others stand for: level times scale, rounded.
        codes: uint8 [N, B] in 0..15: which level of the codebook.
        group_scale: float32 [N, B / 16] that FP8 (e4m3) holds exactly.
    """

    q: torch.Tensor
    codes: torch.Tensor
    group_scale: torch.Tensor


def round_to_codes(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor
) -> CodedColumns:
    """Round t_j / scale to the nearest INT8 that a level gives, column by column, q_j; t_k of each k > j becomes
    t_k - (t_j - q_j scale) feedback[j, k].

    A group's scale is chosen in front of its first column: of 16 candidates, each rounded to FP8, the one that rounds
    its 16 values, as they are by then, with the least squared error. On a GPU this is one kernel, with the bits of the
    reference.

    Args:
        target: float32 [N, B], finite, what the columns are to come near to; B is a power of 2 of at least 16.
        scale: float32 [N], finite, of the INT8 weight; 0 makes the row zeros.
        feedback: float32 [B, B], upper triangular with ones on the diagonal.
        codebook: float32 [16], the levels, ascending.

    Returns:
        The columns; where the scale is 0 every group has the scale 0.
    """
    if target.numel() and weights_use_triton(target):
        from ..triton_kernels.column_rounding import launch_code_rounding

        return CodedColumns(*launch_code_rounding(target, scale, feedback, codebook))
    return round_to_codes_reference(target, scale, feedback, codebook)


def round_to_codes_reference(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor
) -> CodedColumns:
    """`round_to_codes` in plain PyTorch."""
    rows, columns = target.shape
    codes = torch.empty(rows, columns, dtype=torch.uint8, device=target.device)
    group_scale = torch.empty(rows, columns // GROUP, device=target.device)
    q = torch.empty(rows, columns, dtype=torch.int8, device=target.device)
    step = _rows_at_once(columns)
    for start in range(0, rows, step):
        part = slice(start, start + step)
        left = target[part].clone()
        divisor = torch.where(scale[part] > 0, scale[part], 1.0)[:, None]
        for first in range(0, columns, GROUP):
            values = torch.where(scale[part, None] > 0, left[:, first : first + GROUP] / divisor, 0.0)
            group_scale[part, first // GROUP] = best = _best_scale(values, codebook)
            levels = (best[:, None] * codebook).round_().clamp_(-127, 127)
            for column in range(first, first + GROUP):
                value = left[:, column : column + 1]
                code = _nearest(value / divisor, levels)
                whole = levels.gather(1, code)
                codes[part, column], q[part, column] = code[:, 0].to(torch.uint8), whole[:, 0].to(torch.int8)
                left[:, column:] -= (value - whole * divisor) * feedback[column, column:]
    return CodedColumns(q, codes, group_scale)


def _nearest(values: torch.Tensor, levels: torch.Tensor) -> torch.Tensor:
    """The number [N, 1] of the level nearest to values [N, 1] of levels [N, 16], the first of two equals."""
    return _first_least((values - levels).abs_())


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


def _rows_at_once(columns: int) -> int:
    """How many rows of a block PyTorch's operations take at a time."""
    return max(1, _ELEMENTS_AT_ONCE // columns)
