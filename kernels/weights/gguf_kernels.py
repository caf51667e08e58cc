"""GGUF's blocks to INT8, to floats and to per-channel scales, one Triton kernel each, wherever rows begin.

One more adds LoRAs, products of two thin matrices, to the weights before they become INT8. So a LoRA costs no further
pass over memory and no product of activations. A program makes 256 columns of some rows. The thin product is a `tl.dot`
of floats on the decoded tile. It keeps all bits of float32 factors, which the tensor cores would cut to ten.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from ..launching.launching import Layout
from ..linear.rows import INFINITY_BITS, INTERPRETED, SMALLEST_SCALE_CONSTEXPR, magnitude_bits, row_launcher
from ..operators import Tensors
from .gguf_decoding import decode, divisors, places_within, rounded
from .gguf_formats import GGUF_FORMATS

_RANK = tl.constexpr(32)  # of a thin product at a time


@triton.jit
def _decode(blocks, start, count, FORMAT: tl.constexpr, BYTES: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr):
    """Decode BLOCKS from `start` on of `count`: which there are [BLOCKS, 1, 1], and both tiles of `decode`."""
    block = tl.arange(0, BLOCKS)[:, None, None]
    inside = start + block < count
    at = blocks + start.to(tl.int64) * BYTES + block * BYTES
    first, second = decode(at, inside, FORMAT, RUNS)  # pyright: ignore[reportGeneralTypeIssues]
    return inside, first, second


@triton.jit
def _places(start, FORMAT: tl.constexpr, WEIGHTS: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr):
    """Return where the weights of both tiles of `_decode` stand in the whole tensor."""
    block = tl.arange(0, BLOCKS)[:, None, None]
    run = tl.arange(0, RUNS)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    within, gap = places_within(run, lane, FORMAT, WEIGHTS)  # pyright: ignore[reportGeneralTypeIssues]
    first = start.to(tl.int64) * WEIGHTS + (block * WEIGHTS + within)
    return first, first + gap


@triton.jit(do_not_specialize=("row_blocks",))
def decode_kernel(
    blocks,
    scale,
    out,
    count,
    row_blocks,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
    ROUNDS: tl.constexpr,
):
    """One program turns BLOCKS of `count` blocks into floats, or if it ROUNDS, into int8: round(w / scale of the row),
    of `row_blocks` blocks each."""
    start = tl.program_id(0) * BLOCKS
    inside, first, second = _decode(blocks, start, count, FORMAT, BYTES, BLOCKS, RUNS)  # pyright: ignore[reportGeneralTypeIssues]
    first_place, second_place = _places(start, FORMAT, WEIGHTS, BLOCKS, RUNS)
    if ROUNDS:
        row = (start + tl.arange(0, BLOCKS)[:, None, None]) // row_blocks
        by = divisors(tl.load(scale + row, mask=inside, other=0.0))
        tl.store(out + first_place, rounded(first, by), mask=inside)
        tl.store(out + second_place, rounded(second, by), mask=inside)
    else:
        tl.store(out + first_place, first.to(out.dtype.element_ty), mask=inside)
        tl.store(out + second_place, second.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=("row_blocks",))
def scales_kernel(
    blocks,
    scale,
    row_blocks,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """One program finds absmax / 127 of one row of `row_blocks` blocks; NaN for a row with a NaN or Inf."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCKS, RUNS, 16), dtype=tl.int32)
    for block in range(0, row_blocks, BLOCKS):
        start, end = row * row_blocks + block, (row + 1) * row_blocks
        _, first, second = _decode(blocks, start, end, FORMAT, BYTES, BLOCKS, RUNS)
        largest = tl.maximum(largest, tl.maximum(magnitude_bits(first), magnitude_bits(second)))
    bits = tl.max(tl.reshape(largest, (BLOCKS * RUNS * 16,)), axis=0)
    row_scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    row_scale = tl.where(row_scale < SMALLEST_SCALE_CONSTEXPR, 0.0, row_scale)
    tl.store(scale + row, tl.where(bits >= INFINITY_BITS, float("nan"), row_scale))


@triton.jit
def thin_product(up, down, row, row_inside, column, column_inside, rank, K):
    """Return up @ down, float32 [rows, columns], at these rows and columns; 0 where they are not inside."""
    total = tl.zeros((row.shape[0], column.shape[0]), dtype=tl.float32)
    for start in range(0, rank, _RANK):
        middle = start + tl.arange(0, _RANK)
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
    added = thin_product(up, down, rows, rows < N, columns, known, rank, K)
    first += tl.reshape(added, (ROWS * BESIDE, RUNS, 16))
    added = thin_product(up, down, rows, rows < N, columns + gap, known, rank, K)
    second += tl.reshape(added, (ROWS * BESIDE, RUNS, 16))

    by = divisors(tl.load(scale + row, mask=inside, other=0.0))
    run = tl.arange(0, RUNS)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    within, gap = places_within(run, lane, FORMAT, WEIGHTS)  # pyright: ignore[reportGeneralTypeIssues]
    target = out + (row * K + block * WEIGHTS) + within
    tl.store(target, rounded(first, by), mask=inside)
    tl.store(target + gap, rounded(second, by), mask=inside)


_WARPS, _LOW_RANK_WARPS = 8, 4
# Bytes that a thread loads at once: all that a load can, where blocks begin on 16 bytes.
_ALIGNED_BYTES, _BYTES = 16, 8
_ROWS, _COLUMNS = 16, 256

_DECODER = row_launcher(decode_kernel)
_SCALES = row_launcher(scales_kernel)
_LOW_RANK_EXPANDER = row_launcher(expand_with_low_rank_kernel)


def _tile(name: str, vector: int) -> tuple[str, int, int, int, int]:
    """Return the constants FORMAT to RUNS: as many blocks at once as make `vector` bytes of two weights a thread."""
    form = GGUF_FORMATS[name]
    return name, form.bytes, form.weights, _WARPS * 32 * vector * 2 // form.weights, form.weights // 32


def aligned(blocks: torch.Tensor) -> torch.Tensor:
    """Return the tensor or a copy that is contiguous and begins where the widest load may."""
    blocks = blocks.contiguous()
    return blocks.clone() if blocks.data_ptr() % 16 else blocks


def _as_read(tensors: Tensors) -> Tensors:
    """Return the operands with a scale for each row, and without absent LoRAs."""
    blocks, scale, *low_rank = tensors
    factors = [factor.contiguous() for factor in low_rank if factor is not None]
    return [aligned(blocks), scale.reshape(-1).expand(len(blocks)).contiguous(), *factors]


def _decoder(tensors: Tensors, tile: tuple, rounds: bool, as_read: Callable[[Tensors], Tensors]) -> Layout:
    blocks = tensors[0]
    count, row_blocks = blocks.numel() // tile[1], blocks.shape[1] // tile[1]
    constants = (*tile, rounds, _WARPS)
    return Layout(_DECODER, constants, (-(-count // tile[3]), 1), (count, row_blocks), tensors, as_read)


def launch_dequantize_gguf(tensors: Tensors, name: str, dtype: torch.dtype) -> Layout:
    return _decoder(tensors, _tile(name, _BYTES), False, lambda tensors: [aligned(tensors[0]), None])


def launch_gguf_channel_scales(tensors: Tensors, name: str) -> Layout:
    (blocks,) = tensors
    row_blocks, constants = blocks.shape[1] // GGUF_FORMATS[name].bytes, (*_tile(name, _BYTES), _WARPS)
    return Layout(_SCALES, constants, (len(blocks), 1), (row_blocks,), tensors, lambda tensors: [aligned(tensors[0])])


def launch_expand_gguf(tensors: Tensors, name: str) -> Layout:
    blocks, _, up, down = tensors
    form = GGUF_FORMATS[name]
    if up is None:
        tile = _tile(name, _BYTES if form.bytes % 16 else _ALIGNED_BYTES)
        return _decoder(tensors, tile, True, _as_read)
    rows, (rank, channels) = len(blocks), down.shape
    grid = (-(-rows // _ROWS), -(-channels // _COLUMNS))
    beside = _COLUMNS // form.weights
    constants = (name, form.bytes, form.weights, _ROWS, beside, form.weights // 32, _LOW_RANK_WARPS)
    return Layout(_LOW_RANK_EXPANDER, constants, grid, (rows, channels, rank), tensors, _as_read)
