"""A block of a weight's columns, rounded one after the other: each column's error is made good by those after it."""

import torch

from ..card.device import weights_use_triton

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
    rows = rows_at_once(target.shape[1])
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


def rows_at_once(columns: int) -> int:
    """How many rows of a block PyTorch's operations take at a time."""
    return max(1, _ELEMENTS_AT_ONCE // columns)
