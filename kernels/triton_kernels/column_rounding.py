"""Rounding a block of a weight's columns one after the other: kernel and launch."""

import torch
import triton
import triton.language as tl

from .launching import Launcher
from .rows import ROUND_TO_EVEN

_ROWS, _WARPS = 32, 4


@triton.jit
def _to_steps(values, divisor):
    """values / divisor rounded half to even in -127..127, as a float."""
    steps = tl.minimum(tl.maximum(tl.div_rn(values, divisor), -127.0), 127.0)
    return (steps + ROUND_TO_EVEN) - ROUND_TO_EVEN


@triton.jit
def round_columns_kernel(target, scale, feedback, q, N, COLUMNS: tl.constexpr, ROWS: tl.constexpr):
    """One program rounds ROWS rows of `target` [N, COLUMNS], which stay in its registers."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows < N
    places = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    left = tl.load(target + places, mask=inside[:, None], other=0.0)
    row_scale = tl.load(scale + rows, mask=inside, other=0.0)
    divisor = tl.where(row_scale > 0, row_scale, 1.0)
    for column in range(COLUMNS):
        value = tl.sum(tl.where(columns[None, :] == column, left, 0.0), axis=1)
        error = value - _to_steps(value, divisor) * divisor
        left -= error[:, None] * tl.load(feedback + column * COLUMNS + columns)[None, :]
    steps = tl.where(row_scale[:, None] > 0, _to_steps(left, divisor[:, None]), 0.0)
    tl.store(q + places, steps.to(tl.int8), mask=inside[:, None])


def round_columns_constants(columns: int) -> tuple[dict[str, object], dict[str, object]]:
    """The kernel's constants and compilation options for blocks of so many columns.

    Products and sums are not fused, so that the result has the bits of the reference.
    """
    return {"COLUMNS": columns, "ROWS": _ROWS}, {"num_warps": _WARPS, "num_stages": 2, "enable_fp_fusion": False}


_ROUNDING = Launcher(round_columns_kernel, round_columns_constants)


def launch_column_rounding(target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on the arguments of `round_columns`."""
    rows, columns = target.shape
    target, scale, feedback = target.contiguous(), scale.contiguous(), feedback.contiguous()
    q = torch.empty(target.shape, dtype=torch.int8, device=target.device)
    _ROUNDING((columns,), (-(-rows // _ROWS), 1), (target, scale, feedback, q), (rows,))
    return q
