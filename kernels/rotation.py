"""Group-wise rotation by the regular Hadamard matrix (ConvRot), in plain PyTorch."""

import torch

from .checks import check_rotation_group


def rotation_digits(group: int) -> int:
    """The n for which `group` = 4 ** n."""
    return (group.bit_length() - 1) // 2


def rotate(x: torch.Tensor, group: int) -> torch.Tensor:
    """Multiply each group of `group` neighbouring channels of `x` [..., K] by the regular Hadamard matrix.

    The matrix is the n-fold Kronecker power of A = J - 2P divided by sqrt(group), where J is the 4 x 4 matrix of ones
    and P reverses four elements. It is symmetric and orthogonal: applying `rotate` twice gives `x` back. The
    Kronecker power is applied one base-4 digit of the channel index at a time, which needs no matrix.

    `x` must be floating point; the result has its shape and dtype. Raises ValueError for a group that is no power of
    4 or does not divide K.
    """
    check_rotation_group(group, x.shape[-1])
    digits = rotation_digits(group)
    rotated = x
    for _ in range(digits):
        # The leading digit becomes the trailing one; after all digits the order is the original one again.
        quads = rotated.reshape(-1, 4, group // 4).transpose(1, 2)
        rotated = quads.sum(-1, keepdim=True) - 2 * quads.flip(-1)
    return rotated.reshape(x.shape) / 2**digits
