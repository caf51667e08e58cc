"""Rounding a weight so that a linear's outputs on recorded inputs stay what they were: GPTQ (Frantar et al. 2022, arXiv
2210.17323) for a sample of few rows.

GPTQ rounds the columns of W one after the other and spreads the error of each over those that are still to come: then
trace(D H D^T) stays small, where D is the error of W and H says how strongly the input's channels vary together. Here
H = (1 - damping) S + damping diag(S), with S = X^T X / R of the recorded rows X [R, K]: 128 rows know the channels' own
strengths well and what 4608 channels have in common badly. H is a diagonal and R more dimensions, so that no K x K
matrix is needed: what matters of the columns that are done is E = X D^T [R, N], and by Woodbury's identity all columns
behind a block count as one R x R matrix. Any K will do.

Codes of 4 bits have a scale for each group of 16 neighbours, so that their columns are rounded in their own order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..card.device import uses_triton
from ..weights.weight_reference import CANDIDATES, GROUP

_BLOCK = 128  # columns
# Of 0.3, 0.6, 0.9 and 0.97 the one with which a small diffusion transformer lost least on other prompts, with 16-bit
# activations. It matters little: 0.3 to 0.9 differ by less than calibrated and nearest rounding do.
_DAMPING = 0.6
# Codes of 4 bits have more to make good: the word model's velocities lose 0.95 of what they lose with 0.6.
_DAMPING_OF_CODES = 0.3
# A channel counts as at least so strong, relative to the mean: one that is all but silent in the sample must not take
# over what other channels lose. From 1e-6 to 0.1 it makes no difference but where one channel outweighs all others and
# is rotated into them: there 0.1 is best.
_WEAKEST = 0.1
# So few that PyTorch runs an operation on one thread: of thousands of small ones each would wait for the others.
_ELEMENTS_AT_ONCE = 1 << 15


class RoundedColumns(NamedTuple):
    """Columns in whole steps.

    Attributes:
        q: int8 [N, B] in -127..127; of codes what they stand for: level times scale, rounded.
        codes: uint8 [N, B] in 0..15: which level of the codebook; None for INT8.
        group_scale: float32 [N, B / 16] that FP8 (e4m3) holds exactly; None for INT8.
    """

    q: torch.Tensor
    codes: torch.Tensor | None = None
    group_scale: torch.Tensor | None = None


def round_columns(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor | None = None
) -> RoundedColumns:
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
    """
    if target.numel() and uses_triton(target):
        from .column_rounding import launch_column_rounding

        return RoundedColumns(*launch_column_rounding(target, scale, feedback, codebook))
    return round_columns_reference(target, scale, feedback, codebook)


def round_columns_reference(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor | None = None
) -> RoundedColumns:
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
            best = _best_scale(torch.where(usable, left[:, first : first + GROUP] / divisor, 0.0), codebook)
            group_scale.append(best[:, None])
            levels = (best[:, None] * codebook).round_().clamp_(-127, 127)
            for column in range(first, first + GROUP):
                value = left[:, column : column + 1]
                codes.append(_first_least((value / divisor - levels).abs_()))
                q.append(levels.gather(1, codes[-1]))
                left[:, column:] -= (value - q[-1] * divisor) * feedback[column, column:]
        whole, code = torch.cat(q, dim=1).to(torch.int8), torch.cat(codes, dim=1).to(torch.uint8)
        parts.append((whole, code, torch.cat(group_scale, dim=1)))
    return RoundedColumns(*map(torch.cat, zip(*parts, strict=True)))


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


@dataclass(frozen=True)
class ColumnFeedback:
    """What rounding one column asks of the later ones, for inputs like the rows that it was made of.

    Columns are in the order in which they are rounded, cut into blocks of B and filled up with zeros.

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
    def of(cls, rows: torch.Tensor, codes: bool = False) -> ColumnFeedback:
        """For float32 rows [R, K] in the basis in which the weight is rounded; not all of them zeros. The strongest
        channel is rounded first; for `codes` of 4 bits the first."""
        damping = _DAMPING_OF_CODES if codes else _DAMPING
        # float64: the strengths of channels may lie many powers of ten apart.
        x = rows.double()
        strength = x.square().mean(dim=0)
        order = torch.arange(len(strength), device=x.device)
        if not codes:
            order = strength.argsort(descending=True, stable=True)
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
        return cls(order, *(part.float().contiguous() for part in (x.transpose(1, 2), correction, within)))

    @classmethod
    def alone(cls, channels: int, device: torch.device) -> ColumnFeedback:
        """What rounds each of so many columns by itself: to nearest."""
        blocks = -(-channels // _BLOCK)
        nothing = torch.empty(blocks, _BLOCK, 0, device=device)
        within = torch.eye(_BLOCK, device=device).expand(blocks, _BLOCK, _BLOCK)
        return cls(torch.arange(channels, device=device), nothing, nothing.transpose(1, 2), within)

    def round(self, values: torch.Tensor, scale: torch.Tensor, codebook: torch.Tensor | None = None) -> RoundedColumns:
        """int8 [N, K] in -127..127 for float32 values [N, K] and their scales [N], block after block; with a codebook
        in codes, K / 16 scales a row, for feedback `of` codes."""
        channels = values.shape[1]
        ordered = F.pad(values[:, self.order], (0, -channels % _BLOCK))
        done = []
        error = values.new_zeros(values.shape[0], self.rows.shape[2])  # of the outputs
        # These products may be TF32: they carry errors, of which a thousandth more or less is nothing.
        for index, (rows, correction, within) in enumerate(zip(self.rows, self.correction, self.within, strict=True)):
            block = ordered[:, index * _BLOCK : (index + 1) * _BLOCK]
            done.append(round_columns(torch.addmm(block, error, correction, alpha=-1), scale, within, codebook))
            error.addmm_((done[-1].q.float() * scale[:, None]).sub_(block), rows)
        # A padded column is one of the last.
        parts = (torch.cat(part, dim=1) for part in zip(*done, strict=True) if part[0] is not None)
        q, *codes = (part[:, : channels * part.shape[1] // ordered.shape[1]] for part in parts)
        return RoundedColumns(q[:, self.order.argsort()], *codes)
