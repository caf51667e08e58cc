"""The error that INT8 brings to a linear: of its output on sampled inputs, or of its weight alone."""

import math
from typing import Any

import torch

from ..linear.channel_transform import UNCHANGED, ChannelTransform
from ..linear.linear_reference import REMAINDER_STEPS, quantize_activations_reference
from ..weights.weight_ops import dequantize_weight
from ..weights.weight_reference import row_slices


class OutputError:
    """The error that INT8 versions of one linear bring to its output on given rows, all computed in float32.

    The rows are inputs [R, K] of any floating dtype and device. The exact weight is [N, K] bf16, fp16 or fp32; its
    device does the work.
    """

    def __init__(self, rows: torch.Tensor, w: torch.Tensor) -> None:
        self._rows = rows.to(w.device).float()
        self._exact = torch.empty((rows.shape[0], w.shape[0]), dtype=torch.float32, device=w.device)
        for channels in row_slices(w.shape):
            self._exact[:, channels] = self._rows @ w[channels].float().t()
        self._norm = float(torch.linalg.vector_norm(self._exact, dtype=torch.float64))

    def of(self, *quantized: Any, **bits: int) -> float:
        """Return ||Y' - Y|| / ||Y||, with the arguments of `squares`; 0 where Y is zero."""
        squares = self.squares(*quantized, **bits)
        return math.sqrt(squares) / self._norm if self._norm > 0 else 0.0

    def squares(
        self,
        q: torch.Tensor,
        scale: torch.Tensor,
        transform: ChannelTransform = UNCHANGED,
        activation_bits: int = 8,
    ) -> float:
        """Return ||Y' - Y||^2, which adds up over rows: Y = rows . w^T, and Y' is the INT8 linear's output.

        q [N, K] and scale [N] are `quantize_weight`'s for this `transform`; `activation_bits` is 8 or 16. Raises
        ValueError where Y holds a NaN or Inf.
        """
        if not math.isfinite(self._norm):
            raise ValueError("its output on the recorded inputs is not finite")
        steps, x_scale = quantize_activations_reference(self._rows, transform, activation_bits)
        # A float product of the rounded values: every card can do it, and what it rounds itself is far below their
        # error.
        x = steps[:, : q.shape[1]].float()
        if activation_bits == 16:
            x += steps[:, q.shape[1] :].float() / REMAINDER_STEPS
        x *= x_scale[:, None]
        squares = torch.zeros((), dtype=torch.float64, device=q.device)
        for channels in row_slices(q.shape):
            output = x @ (q[channels].float() * scale[channels, None]).t()
            squares += output.sub_(self._exact[:, channels]).square().sum(dtype=torch.float64)
        return float(squares)


def relative_rounding_error(
    w: torch.Tensor, q: torch.Tensor, scale: torch.Tensor, transform: ChannelTransform = UNCHANGED
) -> float:
    """Return ||W - Q(W)|| / ||W|| of a weight [N, K] and its INT8 form; 0 for a weight of zeros.

    It replaces the output error where no activations were seen.
    """
    squares = torch.zeros((), dtype=torch.float64, device=w.device)
    for channels in row_slices(w.shape):
        restored = dequantize_weight(q[channels], scale[channels], transform, torch.float32)
        squares += restored.sub_(w[channels]).square().sum(dtype=torch.float64)
    norm = torch.linalg.vector_norm(w, dtype=torch.float32).double()
    return float(squares.sqrt() / norm) if norm > 0 else 0.0
