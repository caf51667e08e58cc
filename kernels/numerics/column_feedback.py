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

import torch
import torch.nn.functional as F

from ..weights.column_rounding import RoundedColumns, round_columns

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
