"""Rounding a weight so that a linear's outputs on recorded inputs stay what they were: GPTQ (Frantar et al. 2022, arXiv
2210.17323) for a sample of few rows.

GPTQ rounds the columns of W one after the other and spreads the error of each over those that are still to come: then
trace(D H D^T) stays small, where D is the error of W and H says how strongly the input's channels vary together. Here
H = (1 - damping) S + damping diag(S), with S = X^T X / R of the recorded rows X [R, K]: 64 rows know the channels' own
strengths well and what 4608 channels have in common badly. H is a diagonal and R more dimensions, so that no K x K
matrix is needed: what matters of the columns that are done is E = X D^T [R, N], and by Woodbury's identity all columns
behind a block count as one R x R matrix. Any K will do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ..interruption import stop_if_asked
from ..reference.int8_weights import row_slices
from ..reference.transform import ChannelTransform
from ..weights.column_rounding import round_columns
from .output_error import OutputError

_BLOCK = 128  # columns
# Of 0.3, 0.6, 0.9 and 0.97 the one with which a small diffusion transformer lost least on other prompts, with 16-bit
# activations. It matters little: 0.3 to 0.9 differ by less than calibrated and nearest rounding do.
_DAMPING = 0.6
# A channel counts as at least so strong, relative to the mean: one that is all but silent in the sample must not take
# over what other channels lose. From 1e-6 to 0.1 it makes no difference but where one channel outweighs all others and
# is rotated into them: there 0.1 is best.
_WEAKEST = 0.1
_FOLDS = 4
_JUDGED_CHANNELS = 1024  # of the outputs, evenly spaced: their mean error says enough of the others'


@dataclass(frozen=True)
class ColumnFeedback:
    """What rounding one column asks of the later ones, for inputs like the rows that it was made of.

    Columns are in the order in which they are rounded, the strongest channel first, cut into blocks of B and filled up
    with zeros.

    Attributes:
        order: int64 [K] the channel that each column is.
        rows: float32 [blocks, B, R], the inputs.
        correction: float32 [blocks, R, B]: how a block answers the errors that those before it left in the outputs.
        within: float32 [blocks, B, B], as `round_columns` takes it.
    """

    order: torch.Tensor
    rows: torch.Tensor
    correction: torch.Tensor
    within: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor) -> ColumnFeedback:
        """For float32 rows [R, K] in the basis in which the weight is rounded; not all of them zeros."""
        # float64: the strengths of channels may lie many powers of ten apart.
        x = rows.double()
        strength = x.square().mean(dim=0)
        order = strength.argsort(descending=True, stable=True)
        missing = -len(order) % _BLOCK
        x = F.pad(x[:, order], (0, missing)) * math.sqrt((1 - _DAMPING) / len(rows))
        diagonal = _DAMPING * strength.clamp(min=_WEAKEST * float(strength.mean()))
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
        return cls(order, *(part.float().contiguous() for part in (x.transpose(1, 2), correction, within)))

    def round(self, values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """int8 [N, K] in -127..127 for float32 values [N, K] and their scales [N]."""
        ordered = F.pad(values[:, self.order], (0, -values.shape[1] % _BLOCK))
        q = torch.empty(ordered.shape, dtype=torch.int8, device=values.device)
        error = values.new_zeros(values.shape[0], self.rows.shape[2])  # of the outputs
        # These products may be TF32: they carry errors, of which a thousandth more or less is nothing.
        for index, (rows, correction, within) in enumerate(zip(self.rows, self.correction, self.within, strict=True)):
            columns = slice(index * _BLOCK, (index + 1) * _BLOCK)
            target = torch.addmm(ordered[:, columns], error, correction, alpha=-1)
            q[:, columns] = steps = round_columns(target, scale, within)
            error.addmm_((steps.float() * scale[:, None]).sub_(ordered[:, columns]), rows)
        return q[:, self.order.argsort()]


@dataclass(frozen=True)
class Improved:
    """A weight that was rounded better.

    Attributes:
        q: int8 [N, K].
        ratio: the error of the output on held-out inputs, relative to that of the weight rounded to nearest; below 1.
    """

    q: torch.Tensor
    ratio: float


class CalibratedRounding:
    """The rounding of linears that read one input; what they share is computed when the first is rounded.

    Args:
        parts: rows [.., K] of the recorded calls, any floating dtype and device; none where nothing was recorded.
        transform: what is done to the channels.
        activation_bits: 8 or 16: to how many bits the input is rounded.
    """

    def __init__(self, parts: Sequence[torch.Tensor], transform: ChannelTransform, activation_bits: int = 8) -> None:
        self._parts = parts
        self._transform = transform
        self._bits = activation_bits
        self._whole: ColumnFeedback | None = None
        self._folds: list[tuple[torch.Tensor, ColumnFeedback]] = []

    def improve(self, w: torch.Tensor, q: torch.Tensor, scale: torch.Tensor) -> Improved | None:
        """Round a weight anew, if that is better on inputs that it was not calibrated on.

        Whether it is, is measured by cross-validation: the calls are dealt into folds, and the linear's error on each
        is measured with the weight that was calibrated on the others.

        Args:
            w: the exact weight [N, K], bf16, fp16 or fp32.
            q: int8 [N, K] and
            scale: float32 [N], as `quantize_weight` made them with this transform.

        Returns:
            What was made of it for the same scale; None where that is no better, or fewer than two calls were recorded.
        """
        if not self._prepare(w.device):
            return None
        judged = slice(None, None, -(-w.shape[0] // _JUDGED_CHANNELS))
        nearest = calibrated = 0.0
        for held_out, feedback in self._folds:
            error = OutputError(held_out, w[judged])
            rounded = self._round(w[judged], scale[judged], feedback)
            nearest += error.squares(q[judged], scale[judged], self._transform, self._bits)
            calibrated += error.squares(rounded, scale[judged], self._transform, self._bits)
        if not calibrated < nearest:
            return None
        assert self._whole is not None
        return Improved(self._round(w, scale, self._whole), math.sqrt(calibrated / nearest))

    def _prepare(self, device: torch.device) -> bool:
        """Make what all linears of the input share; False where nothing can be held out."""
        count = min(_FOLDS, len(self._parts))
        if count < 2:
            return False
        if self._whole is None:
            parts = [part.to(device).float() for part in self._parts]
            transform = self._transform.on(device)
            transformed = [transform.to_activations(part) for part in parts]
            if not all(any(bool(part.any()) for part in transformed[fold::count]) for fold in range(count)):
                return False
            for fold in range(count):
                others = [part for index, part in enumerate(transformed) if index % count != fold]
                self._folds.append((torch.cat(parts[fold::count]), ColumnFeedback.of(torch.cat(others))))
            self._whole = ColumnFeedback.of(torch.cat(transformed))
        return True

    def _round(self, w: torch.Tensor, scale: torch.Tensor, feedback: ColumnFeedback) -> torch.Tensor:
        transform = self._transform.on(w.device)
        q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
        for rows in row_slices(w):
            stop_if_asked()
            q[rows] = feedback.round(transform.to_weight(w[rows]), scale[rows])
        return q
