"""Rounding a block of a weight's columns one after the other, to INT8 or to codes of 4 bits: kernels and launches."""

import torch
import triton
import triton.language as tl

from ..linear.rows import ROUND_TO_EVEN, row_launcher
from ..weights.weight_reference import CANDIDATES, GROUP, LEVELS

_SUBNORMAL = tl.constexpr(1.5 * 2.0**14)  # float32 there has the steps of e4m3 below its smallest normal number
_SMALLEST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def _to_steps(values, divisor):
    """Return values / divisor rounded half to even in -127..127, as a float."""
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


@triton.jit
def _as_e4m3(values):
    """Round floats in 0..448 half to even to what e4m3 holds: Ampere's Triton has no such floats."""
    bits = values.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + (bits >> 20 & 1)) & -0x100000).to(tl.float32, bitcast=True)
    return tl.where(values < _SMALLEST_NORMAL, (values + _SUBNORMAL) - _SUBNORMAL, normal)


@triton.jit
def _level(codebook, number, scales):
    """Return the INT8 that a level gives with scales, as a float."""
    value = (scales * tl.load(codebook + number) + ROUND_TO_EVEN) - ROUND_TO_EVEN
    return tl.minimum(tl.maximum(value, -127.0), 127.0)


@triton.jit
def round_to_codes_kernel(
    target,
    scale,
    feedback,
    codebook,
    codes,
    group_scale,
    q,
    N,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUP: tl.constexpr,
    FIRST: tl.constexpr,
    CANDIDATES: tl.constexpr,
    LEVELS: tl.constexpr,
):
    """One program rounds ROWS rows of `target` [N, COLUMNS], which stay in its registers."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    inside = rows < N
    first_place = rows.to(tl.int64) * COLUMNS
    left = tl.load(target + first_place[:, None] + columns[None, :], mask=inside[:, None], other=0.0)
    row_scale = tl.load(scale + rows, mask=inside, other=0.0)
    divisor = tl.where(row_scale > 0, row_scale, 1.0)
    numbers = tl.arange(0, CANDIDATES)
    candidates = (FIRST + numbers).to(tl.float32) / 32.0
    largest_level = tl.max(tl.abs(tl.load(codebook + tl.arange(0, LEVELS))), axis=0)
    for group in range(COLUMNS // GROUP):
        of_group = tl.where(columns[None, :] // GROUP == group, tl.abs(left), 0.0)
        largest = tl.where(row_scale > 0, tl.div_rn(tl.max(of_group, axis=1), divisor), 0.0)
        whole = tl.div_rn(largest, largest_level + tl.zeros_like(largest))
        scales = _as_e4m3(tl.minimum(whole[:, None] * candidates[None, :], 448.0))
        squares = tl.zeros((ROWS, CANDIDATES), dtype=tl.float32)
        for column in range(GROUP):
            value = tl.sum(tl.where(columns[None, :] == group * GROUP + column, left, 0.0), axis=1)
            value = tl.where(row_scale > 0, tl.div_rn(value, divisor), 0.0)
            nearest = tl.full((ROWS, CANDIDATES), float("inf"), dtype=tl.float32)
            for number in range(LEVELS):
                nearest = tl.minimum(nearest, tl.abs(value[:, None] - _level(codebook, number, scales)))
            squares += nearest * nearest
        least = tl.min(squares, axis=1)
        first = tl.min(tl.where(squares == least[:, None], numbers[None, :], CANDIDATES - 1), axis=1)
        best = tl.sum(tl.where(numbers[None, :] == first[:, None], scales, 0.0), axis=1)
        tl.store(group_scale + rows.to(tl.int64) * (COLUMNS // GROUP) + group, best, mask=inside)
        for column in range(group * GROUP, group * GROUP + GROUP):
            value = tl.sum(tl.where(columns[None, :] == column, left, 0.0), axis=1)
            wanted = tl.div_rn(value, divisor)
            distance = tl.full((ROWS,), float("inf"), dtype=tl.float32)
            steps = tl.zeros((ROWS,), dtype=tl.float32)
            code = tl.zeros((ROWS,), dtype=tl.int32)
            for number in range(LEVELS):
                level = _level(codebook, number, best)
                nearer = tl.abs(wanted - level) < distance
                distance = tl.where(nearer, tl.abs(wanted - level), distance)
                steps = tl.where(nearer, level, steps)
                code = tl.where(nearer, number, code)
            tl.store(codes + first_place + column, code.to(tl.uint8), mask=inside)
            tl.store(q + first_place + column, steps.to(tl.int8), mask=inside)
            error = value - steps * divisor
            left -= error[:, None] * tl.load(feedback + column * COLUMNS + columns)[None, :]


_WARPS, _ROWS, _ROWS_OF_CODES = 4, 32, 16
_ROUNDING = row_launcher(round_columns_kernel)
_CODE_ROUNDING = row_launcher(round_to_codes_kernel)


def launch_column_rounding(
    target: torch.Tensor, scale: torch.Tensor, feedback: torch.Tensor, codebook: torch.Tensor | None
) -> tuple[torch.Tensor, ...]:
    """Launch the kernel on the arguments of `round_columns`; return what it returns."""
    rows, columns = target.shape
    operands = [tensor.contiguous() for tensor in (target, scale, feedback)]
    q = torch.empty(target.shape, dtype=torch.int8, device=target.device)
    if codebook is None:
        _ROUNDING((columns, _ROWS, _WARPS), (-(-rows // _ROWS), 1), (*operands, q), (rows,))
        return (q,)
    codes = torch.empty(target.shape, dtype=torch.uint8, device=target.device)
    group_scale = torch.empty(rows, columns // GROUP, dtype=torch.float32, device=target.device)
    candidates = (round(32 * CANDIDATES[0]), len(CANDIDATES))
    form = (columns, _ROWS_OF_CODES, GROUP, *candidates, LEVELS, _WARPS)
    operands += [codebook.contiguous(), codes, group_scale, q]
    _CODE_ROUNDING(form, (-(-rows // _ROWS_OF_CODES), 1), operands, (rows,))
    return q, codes, group_scale
