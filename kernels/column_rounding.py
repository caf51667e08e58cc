"""A block of a weight's columns, rounded one after the other: each column's error is made good by those after it."""

import torch

from .device import weights_use_triton


def round_columns(target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
    """Round q_j = t_j / scale, and let t_k become t_k - (t_j - q_j scale) feedback[j, k] for all k > j, column by column.

    On a GPU this is one kernel, with the bits of the reference: both do the same float32 operations in the same order.

    Args:
        target: float32 [N, B], contiguous, what the columns are to come near to; B is a power of 2 of at least 16.
        scale: float32 [N], finite; 0 makes the row zeros.
        feedback: float32 [B, B], contiguous, upper triangular with ones on the diagonal.

    Returns:
        int8 [N, B] in -127..127.
    """
    if target.numel() and weights_use_triton(target):
        from .fused.column_rounding import launch_column_rounding

        return launch_column_rounding(target, scale, feedback)
    return round_columns_reference(target, scale, feedback)


def round_columns_reference(target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
    """`round_columns` in plain PyTorch."""
    left = target.clone()
    divisor = torch.where(scale > 0, scale, 1.0)[:, None]
    for column in range(target.shape[1]):
        value = left[:, column : column + 1]
        error = value - (value / divisor).clamp_(-127, 127).round_() * divisor
        left[:, column:] -= error * feedback[column, column:]
    # The diagonal's ones have left of each column what it was rounded to.
    q = (left / divisor).clamp_(-127, 127).round_()
    return torch.where(scale[:, None] > 0, q, 0.0).to(torch.int8)
