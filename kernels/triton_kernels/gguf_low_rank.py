"""GGUF's blocks to INT8 with a product of two thin matrices added to their weights first: a LoRA costs no further pass
over memory, and no product of activations.

A program makes 256 columns of some rows. The thin product is a `tl.dot` of floats on the tile that was decoded. It
keeps all bits of float32 factors, which the tensor cores would cut to ten.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from ..gguf.formats import GGUFFormat
from .gguf import aligned
from .gguf_decoding import decode, divisors, places_within, rounded
from .launching import Launcher


@triton.jit
def thin_product(
    up, down, row, row_inside, column, column_inside, rank, K, RANK: tl.constexpr, INTERPRETED: tl.constexpr
):
    """up @ down, float32 [rows, columns], at these rows and columns, and 0 where they are not inside."""
    total = tl.zeros((row.shape[0], column.shape[0]), dtype=tl.float32)
    for start in range(0, rank, RANK):
        middle = start + tl.arange(0, RANK)
        known = middle < rank
        left_at = up + row[:, None] * rank + middle[None, :]
        left = tl.load(left_at, mask=row_inside[:, None] & known[None, :], other=0.0)
        right_at = down + middle[:, None].to(tl.int64) * K + column[None, :]
        right = tl.load(right_at, mask=known[:, None] & column_inside[None, :], other=0.0)
        if INTERPRETED:  # which multiplies the bits of bf16
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit
def expand_with_low_rank_kernel(
    blocks,
    scale,
    up,
    down,
    out,
    N,
    K,
    rank,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    ROWS: tl.constexpr,
    BESIDE: tl.constexpr,
    RUNS: tl.constexpr,
    RANK: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program makes BESIDE blocks of each of ROWS rows: round((w + up @ down) / scale of the row)."""
    row_blocks = K // WEIGHTS
    number = tl.arange(0, ROWS * BESIDE)[:, None, None]
    row = tl.program_id(0).to(tl.int64) * ROWS + number // BESIDE
    block = tl.program_id(1) * BESIDE + number % BESIDE
    inside = (row < N) & (block < row_blocks)
    first, second = decode(blocks + (row * row_blocks + block) * BYTES, inside, FORMAT, RUNS)  # pyright: ignore[reportGeneralTypeIssues]

    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    place = tl.arange(0, BESIDE * RUNS * 16)
    of_block = tl.program_id(1) * BESIDE + place // (RUNS * 16)
    within, gap = places_within(place // 16 % RUNS, place % 16, FORMAT, WEIGHTS)  # pyright: ignore[reportGeneralTypeIssues]
    columns, known = of_block * WEIGHTS + within, of_block < row_blocks
    added = thin_product(up, down, rows, rows < N, columns, known, rank, K, RANK, INTERPRETED)
    first += tl.reshape(added, (ROWS * BESIDE, RUNS, 16))
    added = thin_product(up, down, rows, rows < N, columns + gap, known, rank, K, RANK, INTERPRETED)
    second += tl.reshape(added, (ROWS * BESIDE, RUNS, 16))

    divisor, inverse, rest, most = divisors(tl.load(scale + row, mask=inside, other=0.0))  # pyright: ignore[reportGeneralTypeIssues]
    run = tl.arange(0, RUNS)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    within, gap = places_within(run, lane, FORMAT, WEIGHTS)  # pyright: ignore[reportGeneralTypeIssues]
    target = out + (row * K + block * WEIGHTS) + within
    tl.store(target, rounded(first, divisor, inverse, rest, most, INTERPRETED), mask=inside)
    tl.store(target + gap, rounded(second, divisor, inverse, rest, most, INTERPRETED), mask=inside)


_ROWS, _COLUMNS, _RANK = 16, 256, 32
OPTIONS = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}


def gguf_low_rank_constants(name: str, form: GGUFFormat, interpreted: bool) -> dict[str, Any]:
    """What the kernel is compiled for."""
    tile = {"ROWS": _ROWS, "BESIDE": _COLUMNS // form.weights, "RUNS": 1 if form.weights == 32 else 8}
    common = {"FORMAT": name, "BYTES": form.bytes, "WEIGHTS": form.weights}
    return {**common, **tile, "RANK": _RANK, "INTERPRETED": interpreted}


_EXPANDER = Launcher(expand_with_low_rank_kernel, lambda *form: (gguf_low_rank_constants(*form), OPTIONS))


def launch_gguf_low_rank_expander(
    blocks: torch.Tensor, name: str, form: GGUFFormat, scale: torch.Tensor, up: torch.Tensor, down: torch.Tensor
) -> torch.Tensor:
    """Launch the kernel on checked, non-empty arguments.

    uint8 [N, row bytes], contiguous scale [N], contiguous up [N, R] and down [R, K] of one dtype -> int8 [N, K].
    """
    blocks = aligned(blocks)
    (rank, channels), rows = down.shape, blocks.shape[0]
    out = torch.empty(rows, channels, dtype=torch.int8, device=blocks.device)
    grid = (-(-rows // _ROWS), -(-channels // _COLUMNS))
    tensors = (blocks, scale, up, down, out)
    _EXPANDER((name, form, not blocks.is_cuda), grid, tensors, (rows, channels, rank))
    return out
