"""What LoRAs add to a weight that becomes INT8 in front of each product."""

from typing import NamedTuple

import torch

from ..checks import check_matrix
from .int8_weights import SMALLEST_SCALE, row_slices


class LowRank(NamedTuple):
    """What a weight [N, K] is more than it is stored as, such as LoRAs: up @ down.

    Attributes:
        up: [N, R], R at least 1, bf16, fp16 or fp32 (of which the GPU's kernel keeps all bits).
        down: [R, K], of the same dtype.
    """

    up: torch.Tensor
    down: torch.Tensor

    def channel_scales(self) -> torch.Tensor:
        """By how much the per-channel scale of any weight must grow to hold this, too: float32 [N], absmax / 127 of
        each row of up @ down."""
        scale = torch.empty(self.up.shape[0], device=self.up.device)
        down = self.down.float()
        for rows in row_slices((len(scale), down.shape[1])):
            scale[rows] = (self.up[rows].float() @ down).abs().amax(dim=1) / 127
        return scale

    def check(self, rows: int, channels: int) -> None:
        """Raise TypeError or ValueError unless it can be added to a weight of this shape."""
        up, down = self
        check_matrix("up", up)
        check_matrix("down", down)
        if up.dtype != down.dtype:
            raise TypeError(f"up and down must be of one dtype, got {up.dtype} and {down.dtype}")
        rank = up.shape[1]
        if up.shape[0] != rows or down.shape != (rank, channels) or rank == 0:
            raise ValueError(
                f"up and down must be [{rows}, R] and [R, {channels}], got {list(up.shape)} and {list(down.shape)}"
            )


def rounded_rows(values: torch.Tensor, scale: torch.Tensor, low_rank: LowRank | None, rows: slice) -> torch.Tensor:
    """Some rows of a weight as int8: round((values + up @ down) / scale), halves to even, clamped to -127..127.

    Args:
        values: float32 [rows, K].
        scale: float32 [N, 1]; zeros stand where it is none: 0, NaN, Inf, negative, or too small.
        low_rank: of the whole weight, or None.
        rows: which of the N these are.
    """
    if low_rank is not None:
        values = values + low_rank.up[rows].float() @ low_rank.down.float()
    usable = (scale[rows] >= SMALLEST_SCALE) & torch.isfinite(scale[rows])
    steps = (values / torch.where(usable, scale[rows], 1.0)).round().clamp(-127, 127)
    return torch.where(usable, steps, 0).to(torch.int8)
