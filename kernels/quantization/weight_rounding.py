"""A weight in whole steps, of 8 bits or in codes of 4: how codes are made, and how a weight is rounded so that a
linear's outputs on recorded inputs stay what they were, where that is better on inputs that were held out."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from ..interruption import stop_if_asked
from ..linear.channel_transform import ChannelTransform
from ..weights.weight_reference import DEFAULT_CODEBOOK, GROUP, GroupedCodes, packed_codes, quantize_weight, row_slices
from .column_feedback import ColumnFeedback
from .output_error import OutputError

_FOLDS = 4
_JUDGED_CHANNELS = 1024  # of the outputs, evenly spaced: their mean error says enough of the others'


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


def quantize_to_codes(w: torch.Tensor, rotation_group: int) -> RoundedWeight:
    """A weight in codes of 4 bits, with ComfyUI's default codebook and an FP8 scale for each 16 columns (W4A8).

    Args:
        w: [N, K] bf16, fp16 or fp32; 16 and `rotation_group` divide K.
        rotation_group: channels per Hadamard group.

    Raises TypeError, ValueError as `quantize_weight`.
    """
    transform = ChannelTransform(None, rotation_group)
    _, scale = quantize_weight(w, transform)
    return _rounded(w, transform, scale, ColumnFeedback.alone(w.shape[1], w.device), in_codes=True)


def _rounded(
    w: torch.Tensor, transform: ChannelTransform, scale: torch.Tensor, feedback: ColumnFeedback, in_codes: bool
) -> RoundedWeight:
    """w transformed and rounded for the scale [N] of its INT8, with feedback `of` codes where it is in codes."""
    codebook, done = torch.tensor(DEFAULT_CODEBOOK, device=w.device) if in_codes else None, []
    for rows in row_slices(w.shape):
        stop_if_asked()
        done.append(feedback.round(transform.to_weight(w[rows]), scale[rows], codebook))
    q, *codes = (torch.cat(part) for part in zip(*done, strict=True) if part[0] is not None)
    if codebook is None:
        return RoundedWeight(q, scale)
    group_scale = codes[1].to(torch.float8_e4m3fn)
    return RoundedWeight(q, scale, GroupedCodes(packed_codes(codes[0]), group_scale, codebook, GROUP))


@dataclass
class CalibratedRounding:
    """The rounding of linears that read one input; what they share is computed when the first is rounded.

    Attributes:
        parts: rows [.., K] of the recorded calls, any floating dtype and device; none where nothing was recorded.
        transform: what is done to the channels.
        activation_bits: 8 or 16: to how many bits the input is rounded.
        in_codes: whether the weights are in codes of 4 bits.
    """

    parts: Sequence[torch.Tensor]
    transform: ChannelTransform
    activation_bits: int = 8
    in_codes: bool = False
    _whole: ColumnFeedback | None = None
    _folds: list[tuple[torch.Tensor, ColumnFeedback]] = field(default_factory=list)

    def improve(self, w: torch.Tensor, rounded: RoundedWeight) -> tuple[RoundedWeight, float] | None:
        """Round a weight anew, if that is better on inputs that it was not calibrated on.

        Whether it is, is measured by cross-validation: the calls are dealt into folds, and the linear's error on each
        is measured with the weight that was calibrated on the others.

        Args:
            w: the exact weight [N, K], bf16, fp16 or fp32.
            rounded: as `quantize_weight` or `quantize_to_codes` made it with this transform.

        Returns:
            What was made of it for the same scale, and the error of the output on held-out inputs, relative to that of
            the weight rounded to nearest; None where it is no better, or fewer than two calls were recorded.
        """
        if not self._prepare(w.device):
            return None
        judged = slice(None, None, -(-w.shape[0] // _JUDGED_CHANNELS))
        nearest = calibrated = 0.0
        for held_out, feedback in self._folds:
            error = OutputError(held_out, w[judged])
            again = self._round(w[judged], rounded.scale[judged], feedback)
            nearest += error.squares(rounded.q[judged], rounded.scale[judged], self.transform, self.activation_bits)
            calibrated += error.squares(again.q, again.scale, self.transform, self.activation_bits)
        if not calibrated < nearest:
            return None
        assert self._whole is not None
        return self._round(w, rounded.scale, self._whole), math.sqrt(calibrated / nearest)

    def _prepare(self, device: torch.device) -> bool:
        """Make what all linears of the input share; False where nothing can be held out."""
        count = min(_FOLDS, len(self.parts))
        if count < 2:
            return False
        if self._whole is None:
            parts = [part.to(device).float() for part in self.parts]
            transform = self.transform.on(device)
            transformed = [transform.to_activations(part) for part in parts]
            if not all(any(bool(part.any()) for part in transformed[fold::count]) for fold in range(count)):
                return False
            for fold in range(count):
                others = [part for index, part in enumerate(transformed) if index % count != fold]
                feedback = ColumnFeedback.of(torch.cat(others), codes=self.in_codes)
                self._folds.append((torch.cat(parts[fold::count]), feedback))
            self._whole = ColumnFeedback.of(torch.cat(transformed), codes=self.in_codes)
        return True

    def _round(self, w: torch.Tensor, scale: torch.Tensor, feedback: ColumnFeedback) -> RoundedWeight:
        return _rounded(w, self.transform.on(w.device), scale, feedback, self.in_codes)
