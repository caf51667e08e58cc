"""A weight in whole steps, of 8 bits or in codes of 4: how codes are made, and how a weight is rounded so that the
outputs on recorded inputs stay what they were, where that is better on inputs that were held out.

That is GPTQ (Frantar et al. 2022, arXiv 2210.17323) for a sample of few rows. GPTQ rounds the columns of W one after
the other and spreads the error of each over those that are still to come. So trace(D H D^T) stays small, where D is the
error of W and H says how strongly the input's channels vary together. Here H = (1 - damping) S + damping diag(S), with
S = X^T X / R of the recorded rows X [R, K]: 128 rows know the channels' own strengths well and what 4608 channels have
in common badly. H is a diagonal and R more dimensions, so no K x K matrix is needed. What matters of the columns that
are done is E = X D^T [R, N], and by Woodbury's identity all columns behind a block count as one R x R matrix. Any K
will do.

Codes of 4 bits have a scale for each group of 16 neighbours, so their columns are rounded in their own order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..card.device import uses_triton
from ..interruption import stop_if_asked
from ..linear.channel_transform import UNCHANGED, ChannelTransform
from ..weights.weight_reference import (
    CANDIDATES,
    DEFAULT_CODEBOOK,
    GROUP,
    GroupedCodes,
    packed_codes,
    quantize_weight,
    row_slices,
)
from .output_error import OutputError

_BLOCK = 128  # columns
# Of 0.3, 0.6, 0.9 and 0.97 the one with which a small diffusion transformer lost least on other prompts, with 16-bit
# activations. It matters little: 0.3 to 0.9 differ by less than calibrated and nearest rounding do.
_DAMPING = 0.6
# Codes of 4 bits have more to make good: the word model's velocities lose 0.95 of what they lose with 0.6.
_DAMPING_OF_CODES = 0.3
# The least strength of a channel, relative to the mean: one that is all but silent in the sample must not take over
# what other channels lose. From 1e-6 to 0.1 it makes no difference but where one channel outweighs all others and is
# rotated into them: there 0.1 is best.
_WEAKEST = 0.1
# So few that PyTorch runs an operation on one thread: of thousands of small ones each would wait for the others.
_ELEMENTS_AT_ONCE = 1 << 15
_FOLDS = 4
_JUDGED_CHANNELS = 1024  # of the outputs, evenly spaced: their mean error says enough of the others'


class RoundedWeight(NamedTuple):
    """A weight in whole steps: int8 [N, K], float32 [N], and the codes of 4 bits that q stands for, if any."""

    q: torch.Tensor
    scale: torch.Tensor
    codes: GroupedCodes | None = None


def quantize_to_codes(w: torch.Tensor, rotation_group: int | None) -> RoundedWeight:
    """Quantize a weight to codes of 4 bits with ComfyUI's default codebook, an FP8 scale for each 16 columns (W4A8).

    It is [N, K] bf16, fp16 or fp32; 16 and the channels per Hadamard group divide K. Raises as `quantize_weight`.
    """
    transform = ChannelTransform(None, rotation_group)
    _, scale = quantize_weight(w, transform)
    return ColumnFeedback.to_nearest_codes(w.shape[1], w.device).round(w, scale, transform)


@dataclass
class CalibratedRounding:
    """The rounding of linears that read one input; what they share is computed when the first is rounded.

    `parts` are rows [.., K] of the recorded calls, any floating dtype and device; none where nothing was recorded. The
    other attributes are as `quantize_group` has them.
    """

    parts: Sequence[torch.Tensor]
    transform: ChannelTransform
    activation_bits: int = 8
    in_codes: bool = False
    _shared: tuple[list[tuple[torch.Tensor, ColumnFeedback]], ColumnFeedback] | None = None

    def improve(self, w: torch.Tensor, rounded: RoundedWeight) -> tuple[RoundedWeight, float] | None:
        """Round a weight anew, if that is better on inputs that it was not calibrated on.

        That is measured by cross-validation: the calls are dealt into folds, and the linear's error on each is measured
        with the weight that was calibrated on the others.

        Args:
            w: the exact weight [N, K], bf16, fp16 or fp32.
            rounded: as `quantize_weight` or `quantize_to_codes` made it with this transform.

        Returns:
            The weight for the same scale, and the error of the output on held-out inputs, relative to that of the
            weight rounded to nearest; None where it is no better, or fewer than two calls were recorded.
        """
        transform = self.transform.on(w.device)
        self._shared = self._shared or self._feedback(transform, w.device)
        if self._shared is None:
            return None
        folds, whole = self._shared
        judged = slice(None, None, -(-w.shape[0] // _JUDGED_CHANNELS))
        nearest = calibrated = 0.0
        for held_out, feedback in folds:
            error = OutputError(held_out, w[judged])
            again = feedback.round(w[judged], rounded.scale[judged], transform)
            nearest += error.squares(rounded.q[judged], rounded.scale[judged], transform, self.activation_bits)
            calibrated += error.squares(again.q, again.scale, transform, self.activation_bits)
        if not calibrated < nearest:
            return None
        return whole.round(w, rounded.scale, transform), math.sqrt(calibrated / nearest)

    def _feedback(
        self, transform: ChannelTransform, device: torch.device
    ) -> tuple[list[tuple[torch.Tensor, ColumnFeedback]], ColumnFeedback] | None:
        """Return each fold's rows with the feedback of the others, and that of all; None if none can be held out."""
        count, parts = min(_FOLDS, len(self.parts)), [part.to(device).float() for part in self.parts]
        transformed = [transform.to_activations(part) for part in parts]
        if count < 2 or not all(any(bool(part.any()) for part in transformed[fold::count]) for fold in range(count)):
            return None
        folds = []
        for fold in range(count):
            others = [part for index, part in enumerate(transformed) if index % count != fold]
            folds.append((torch.cat(parts[fold::count]), ColumnFeedback.of(torch.cat(others), self.in_codes)))
        return folds, ColumnFeedback.of(torch.cat(transformed), self.in_codes)


@dataclass(frozen=True)
class ColumnFeedback:
    """What rounding one column asks of the later ones, for inputs like the rows that it was made of.

    Columns are in the order in which they are rounded, cut into blocks of B and filled up with zeros.
    """

    order: torch.Tensor  # int64 [K], the channel that each column is
    codebook: torch.Tensor | None  # of codes of 4 bits, as `round_columns` takes it; None for INT8
    rows: torch.Tensor  # float32 [blocks, B, R], the inputs
    correction: torch.Tensor  # float32 [blocks, R, B]: answers the errors that the blocks before left in the outputs
    within: torch.Tensor  # float32 [blocks, B, B], as `round_columns` takes it

    @classmethod
    def of(cls, rows: torch.Tensor, in_codes: bool = False) -> ColumnFeedback:
        """Return the feedback of float32 rows [R, K], not all zeros, in the basis in which the weight is rounded.

        The strongest channel is rounded first; of codes of 4 bits the first channel.
        """
        damping = _DAMPING_OF_CODES if in_codes else _DAMPING
        # float64: the strengths of channels may lie many powers of ten apart.
        x = rows.double()
        strength = x.square().mean(dim=0)
        order, codebook = strength.argsort(descending=True, stable=True), None
        if in_codes:
            order = torch.arange(len(strength), device=x.device)
            codebook = torch.tensor(DEFAULT_CODEBOOK, device=x.device)
        missing = -len(order) % _BLOCK
        x = F.pad(x[:, order], (0, missing)) * math.sqrt((1 - damping) / len(rows))
        diagonal = damping * strength.clamp(min=_WEAKEST * float(strength.mean()))
        diagonal = F.pad(diagonal[order], (0, missing), value=1.0).reshape(-1, 1, _BLOCK)
        x = x.reshape(len(rows), -1, _BLOCK).transpose(0, 1)  # [blocks, R, B]
        known = (x / diagonal) @ x.transpose(1, 2)
        behind = known.flip(0).cumsum(0).flip(0) - known
        answered = torch.linalg.solve(torch.eye(len(rows), dtype=x.dtype, device=x.device) + behind, x)
        # H of a block's columns, those behind it answering as best they can, is U U^T with U upper triangular.
        block = x.transpose(1, 2) @ answered + torch.diag_embed(diagonal.squeeze(1))
        upper = torch.linalg.cholesky(block.flip(1, 2)).flip(1, 2)
        identity = torch.eye(_BLOCK, dtype=x.dtype, device=x.device).expand_as(upper)
        inverse = torch.linalg.solve_triangular(upper, identity, upper=True)
        within = inverse / inverse.diagonal(dim1=1, dim2=2)[..., None]
        correction = answered @ inverse.transpose(1, 2) @ inverse
        return cls(order, codebook, *(part.float().contiguous() for part in (x.transpose(1, 2), correction, within)))

    @classmethod
    def to_nearest_codes(cls, channels: int, device: torch.device) -> ColumnFeedback:
        """No feedback: each of so many columns is rounded by itself, to codes of 4 bits."""
        blocks = -(-channels // _BLOCK)
        nothing = torch.empty(blocks, _BLOCK, 0, device=device)
        within = torch.eye(_BLOCK, device=device).expand(blocks, _BLOCK, _BLOCK)
        codebook = torch.tensor(DEFAULT_CODEBOOK, device=device)
        return cls(torch.arange(channels, device=device), codebook, nothing, nothing.transpose(1, 2), within)

    def round(self, w: torch.Tensor, scale: torch.Tensor, transform: ChannelTransform = UNCHANGED) -> RoundedWeight:
        """Round a transformed weight [N, K] for the scale [N] of its INT8, block after block; stops if asked to.

        The transform's factors are on the weight's device.
        """
        done = []
        for rows in row_slices(w.shape):
            stop_if_asked()
            done.append(self._round_rows(transform.to_weight(w[rows]), scale[rows]))
        q, *codes = map(torch.cat, zip(*done, strict=True))
        if self.codebook is None:
            return RoundedWeight(q, scale)
        group_scale = codes[1].to(torch.float8_e4m3fn)
        return RoundedWeight(q, scale, GroupedCodes(packed_codes(codes[0]), group_scale, self.codebook, GROUP))

    def _round_rows(self, values: torch.Tensor, scale: torch.Tensor) -> list[torch.Tensor]:
        """Round float32 values [N, K] for scales [N], with results as `round_columns` has them."""
        channels, blocks = values.shape[1], []
        columns = F.pad(values[:, self.order], (0, -channels % _BLOCK)).split(_BLOCK, dim=1)
        error = values.new_zeros(values.shape[0], self.rows.shape[2])  # of the outputs
        # These products may be TF32: they carry errors, of which a thousandth more or less is nothing.
        for block, rows, correction, within in zip(columns, self.rows, self.correction, self.within, strict=True):
            target = torch.addmm(block, error, correction, alpha=-1)
            blocks.append(round_columns(target, scale, within, self.codebook))
            error.addmm_((blocks[-1][0].float() * scale[:, None]).sub_(block), rows)
        # A padded column is one of the last.
        parts = (torch.cat(part, dim=1) for part in zip(*blocks, strict=True))
        q, *codes = (part[:, : channels * part.shape[1] // (_BLOCK * len(blocks))] for part in parts)
        return [q[:, self.order.argsort()], *codes]


def round_columns(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
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

    Returns:
        q, int8 [N, B] in -127..127. With a codebook also the codes, uint8 [N, B] in 0..15, that q stands for (level
        times scale, rounded), and their scales, float32 [N, B / 16] that FP8 (e4m3) holds exactly.
    """
    if target.numel() and uses_triton(target):
        from .column_rounding import launch_column_rounding

        return launch_column_rounding(target, scale, feedback, codebook)
    return round_columns_reference(target, scale, feedback, codebook)


def round_columns_reference(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
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
            values = torch.where(usable, left[:, first : first + GROUP] / divisor, 0.0)
            group_scale.append(_best_scale(values, codebook))
            levels = (group_scale[-1] * codebook).round_().clamp_(-127, 127)
            for column in range(first, first + GROUP):
                value = left[:, column : column + 1]
                codes.append((value / divisor - levels).abs_().argmin(dim=1, keepdim=True))  # the first of equals
                q.append(levels.gather(1, codes[-1]))
                left[:, column:] -= (value - q[-1] * divisor) * feedback[column, column:]
        whole, code = torch.cat(q, dim=1).to(torch.int8), torch.cat(codes, dim=1).to(torch.uint8)
        parts.append((whole, code, torch.cat(group_scale, dim=1)))
    return tuple(map(torch.cat, zip(*parts, strict=True)))


def _best_scale(values: torch.Tensor, codebook: torch.Tensor) -> torch.Tensor:
    """Return the scale [N, 1] of groups of values [N, 16]: the first candidate with the least squared error."""
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
    return scales.gather(1, squares.argmin(dim=1, keepdim=True))
