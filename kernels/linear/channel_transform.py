"""Smoothing and rotation of a linear's input channels before they are rounded, undone in its weight."""

from dataclasses import dataclass

import torch

from ..checks import check_vector


def rotate(x: torch.Tensor, group: int) -> torch.Tensor:
    """Multiply each group of `group` neighbouring channels of `x` [..., K] by the regular Hadamard matrix (ConvRot).

    The matrix is the n-fold Kronecker power of A = J - 2P divided by sqrt(group), where J is the 4 x 4 matrix of ones
    and P reverses four elements. It is symmetric and orthogonal: applying `rotate` twice gives `x` back. The
    Kronecker power is applied one base-4 digit of the channel index at a time, which needs no matrix.

    `x` must be floating point; the result has its shape and dtype. `group` is a power of 4 that divides K.
    """
    digits = (group.bit_length() - 1) // 2
    rotated = x
    for _ in range(digits):
        # The leading digit becomes the trailing one; after all digits the order is the original one again.
        quads = rotated.reshape(x.numel() // group, 4, group // 4).transpose(1, 2)
        rotated = quads.sum(-1, keepdim=True) - 2 * quads.flip(-1)
    return rotated.reshape(x.shape) / 2**digits


@dataclass(frozen=True, eq=False)
class ChannelTransform:
    """Smoothing of a linear's input channels, then rotation of groups of them.

    Activations become x' = rotate(x / smooth) and the weight W' = rotate(W . diag(smooth)), so that x' . W'^T = x . W^T
    in real arithmetic. All arithmetic is float32.

    Raises TypeError for a `rotation_group` that is no int.
    """

    smooth: torch.Tensor | None = None  # factors [K], floating point; None for no smoothing
    rotation_group: int | None = None  # channels per Hadamard group, a power of 4 that divides K; None for no rotation

    def __post_init__(self) -> None:
        group = self.rotation_group
        if group is not None and (not isinstance(group, int) or isinstance(group, bool)):
            raise TypeError(f"rotation_group must be an int or None, got {type(group).__name__}")

    def check(self, channels: int) -> None:
        """Raise TypeError or ValueError unless it can be applied to `channels` input channels."""
        group = self.rotation_group
        if group is not None and (group < 4 or group & (group - 1) or group.bit_length() % 2 == 0):
            raise ValueError(f"rotation_group must be a power of 4, got {group}")
        if group is not None and channels % group:
            raise ValueError(f"rotation_group {group} does not divide K = {channels}")
        if self.smooth is not None:
            check_vector("smooth", self.smooth, channels, "K")

    def on(self, device: torch.device) -> "ChannelTransform":
        """Return this transform with its factors in float32 on `device`."""
        smooth = None if self.smooth is None else self.smooth.to(device, torch.float32)
        return ChannelTransform(smooth, self.rotation_group)

    def to_activations(self, x: torch.Tensor) -> torch.Tensor:
        """Return x' in float32 for `x` [..., K], any floating dtype; factors and `x` on one device.

        The division is a multiplication by the reciprocals, as in the kernel.
        """
        values = x.float() if self.smooth is None else x.float() * self.smooth.float().reciprocal()
        return values if self.rotation_group is None else rotate(values, self.rotation_group)

    def to_weight(self, w: torch.Tensor) -> torch.Tensor:
        """Return W' in float32 for rows of a weight [N, K], any floating dtype; factors and `w` on one device."""
        values = w.float() if self.smooth is None else w.float() * self.smooth.float()
        return values if self.rotation_group is None else rotate(values, self.rotation_group)

    def from_weight(self, transformed: torch.Tensor) -> torch.Tensor:
        """Return the rows [N, K] of W for float32 rows of W'; factors and rows on one device."""
        values = transformed if self.rotation_group is None else rotate(transformed, self.rotation_group)
        return values if self.smooth is None else values / self.smooth.float()


UNCHANGED = ChannelTransform()
"""Neither smoothing nor rotation."""
