"""GGUF's blocks to INT8, to per-channel scales and to floats, one Triton kernel each, wherever rows begin."""

from typing import Any

import torch
import triton
import triton.language as tl

from ..gguf.formats import GGUFFormat
from .gguf_decoding import decode, divisors, places_within, rounded
from .launching import Launcher
from .rows import INFINITY_BITS, SMALLEST_SCALE_CONSTEXPR, magnitude_bits


@triton.jit
def _decode(blocks, start, count, FORMAT: tl.constexpr, BYTES: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr):
    """Blocks from `start` on, as far as there are `count`: which there are [BLOCKS, 1, 1], and `decode` of them."""
    block = tl.arange(0, BLOCKS)[:, None, None]
    inside = start + block < count
    at = blocks + start.to(tl.int64) * BYTES + block * BYTES
    first, second = decode(at, inside, FORMAT, RUNS)  # pyright: ignore[reportGeneralTypeIssues]
    return inside, first, second


@triton.jit
def _places(start, FORMAT: tl.constexpr, WEIGHTS: tl.constexpr, BLOCKS: tl.constexpr, RUNS: tl.constexpr):
    """Where the weights of the two tiles of `_decode` stand in the whole tensor."""
    block = tl.arange(0, BLOCKS)[:, None, None]
    run = tl.arange(0, RUNS)[None, :, None]
    lane = tl.arange(0, 16)[None, None, :]
    within, gap = places_within(run, lane, FORMAT, WEIGHTS)  # pyright: ignore[reportGeneralTypeIssues]
    first = start.to(tl.int64) * WEIGHTS + (block * WEIGHTS + within)
    return first, first + gap


@triton.jit
def expand_kernel(
    blocks,
    scale,
    out,
    count,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """One program expands BLOCKS of `count` blocks to int8: round(w / scale of the row)."""
    start = tl.program_id(0) * BLOCKS
    inside, first, second = _decode(blocks, start, count, FORMAT, BYTES, BLOCKS, RUNS)  # pyright: ignore[reportGeneralTypeIssues]
    first_place, second_place = _places(start, FORMAT, WEIGHTS, BLOCKS, RUNS)
    row = (start + tl.arange(0, BLOCKS)[:, None, None]) // ROW_BLOCKS
    divisor, inverse, rest, most = divisors(tl.load(scale + row, mask=inside, other=0.0))  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(out + first_place, rounded(first, divisor, inverse, rest, most, INTERPRETED), mask=inside)
    tl.store(out + second_place, rounded(second, divisor, inverse, rest, most, INTERPRETED), mask=inside)


@triton.jit
def dequantize_kernel(
    blocks,
    out,
    count,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
):
    """One program turns BLOCKS of `count` blocks into floats."""
    start = tl.program_id(0) * BLOCKS
    inside, first, second = _decode(blocks, start, count, FORMAT, BYTES, BLOCKS, RUNS)  # pyright: ignore[reportGeneralTypeIssues]
    first_place, second_place = _places(start, FORMAT, WEIGHTS, BLOCKS, RUNS)
    tl.store(out + first_place, first.to(out.dtype.element_ty), mask=inside)
    tl.store(out + second_place, second.to(out.dtype.element_ty), mask=inside)


@triton.jit
def scales_kernel(
    blocks,
    scale,
    FORMAT: tl.constexpr,
    BYTES: tl.constexpr,
    WEIGHTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    RUNS: tl.constexpr,
    ROW_BLOCKS: tl.constexpr,
):
    """One program finds absmax / 127 of one row; NaN for a row with a NaN or Inf."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((BLOCKS, RUNS, 16), dtype=tl.int32)
    for block in range(0, ROW_BLOCKS, BLOCKS):
        start, end = row * ROW_BLOCKS + block, (row + 1) * ROW_BLOCKS
        _, first, second = _decode(blocks, start, end, FORMAT, BYTES, BLOCKS, RUNS)
        largest = tl.maximum(largest, tl.maximum(magnitude_bits(first), magnitude_bits(second)))
    bits = tl.max(tl.reshape(largest, (BLOCKS * RUNS * 16,)), axis=0)
    row_scale = tl.div_rn(bits.to(tl.float32, bitcast=True), 127.0)
    row_scale = tl.where(row_scale < SMALLEST_SCALE_CONSTEXPR, 0.0, row_scale)
    tl.store(scale + row, tl.where(bits >= INFINITY_BITS, float("nan"), row_scale))


_WARPS = 8
OPTIONS = {"num_warps": _WARPS, "num_stages": 2, "enable_fp_fusion": False}
# Bytes that a thread loads at once: all that a load can, where blocks begin on 16 bytes.
_ALIGNED_BYTES, _BYTES = 16, 8


def _runs(form: GGUFFormat) -> int:
    return 1 if form.weights == 32 else 8


def _blocks(form: GGUFFormat, vector: int) -> int:
    """How many a program decodes at once, with `vector` packed bytes a thread."""
    return _WARPS * 32 * vector // (16 * _runs(form))


def _expander_vector(form: GGUFFormat) -> int:
    return _BYTES if form.bytes % 16 else _ALIGNED_BYTES


def decoder_constants(name: str, form: GGUFFormat, vector: int = _BYTES) -> dict[str, Any]:
    """What all kernels are compiled for, with a tile of `vector` packed bytes a thread."""
    blocks, runs = _blocks(form, vector), _runs(form)
    return {"FORMAT": name, "BYTES": form.bytes, "WEIGHTS": form.weights, "BLOCKS": blocks, "RUNS": runs}


def gguf_expander_constants(name: str, form: GGUFFormat, row_blocks: int, interpreted: bool) -> dict[str, Any]:
    """The expander's constants, for rows of so many blocks."""
    return {
        **decoder_constants(name, form, _expander_vector(form)),
        "ROW_BLOCKS": row_blocks,
        "INTERPRETED": interpreted,
    }


def scales_constants(name: str, form: GGUFFormat, row_blocks: int) -> dict[str, Any]:
    """The constants of the kernel that finds scales, for rows of so many blocks."""
    return {**decoder_constants(name, form), "ROW_BLOCKS": row_blocks}


_EXPANDER = Launcher(expand_kernel, lambda *form: (gguf_expander_constants(*form), OPTIONS))
_DEQUANTIZER = Launcher(dequantize_kernel, lambda *form: (decoder_constants(*form), OPTIONS))
_SCALES = Launcher(scales_kernel, lambda *form: (scales_constants(*form), OPTIONS))


def aligned(blocks: torch.Tensor) -> torch.Tensor:
    """The same, contiguous, and beginning where the widest load may."""
    blocks = blocks.contiguous()
    return blocks.clone() if blocks.data_ptr() % 16 else blocks


def launch_gguf_expander(blocks: torch.Tensor, name: str, form: GGUFFormat, scale: torch.Tensor) -> torch.Tensor:
    """Launch the kernel on checked, non-empty arguments: uint8 [N, row bytes], contiguous scale [N] -> int8 [N, K]."""
    blocks = aligned(blocks)
    rows, row_blocks = blocks.shape[0], blocks.shape[1] // form.bytes
    out = torch.empty(rows, row_blocks * form.weights, dtype=torch.int8, device=blocks.device)
    count = rows * row_blocks
    grid = (-(-count // _blocks(form, _expander_vector(form))), 1)
    _EXPANDER((name, form, row_blocks, not blocks.is_cuda), grid, (blocks, scale, out), (count,))
    return out


def launch_dequantizer(blocks: torch.Tensor, name: str, form: GGUFFormat, dtype: torch.dtype) -> torch.Tensor:
    """Launch the kernel on checked, non-empty blocks: uint8 [N, row bytes] -> [N, K] in `dtype`."""
    blocks = aligned(blocks)
    rows, row_blocks = blocks.shape[0], blocks.shape[1] // form.bytes
    out = torch.empty(rows, row_blocks * form.weights, dtype=dtype, device=blocks.device)
    count = rows * row_blocks
    _DEQUANTIZER((name, form), (-(-count // _blocks(form, _BYTES)), 1), (blocks, out), (count,))
    return out


def launch_scales(blocks: torch.Tensor, name: str, form: GGUFFormat) -> torch.Tensor:
    """Launch the kernel on checked, non-empty blocks: uint8 [N, row bytes] -> float32 scale [N]."""
    blocks = aligned(blocks)
    rows, row_blocks = blocks.shape[0], blocks.shape[1] // form.bytes
    scale = torch.empty(rows, dtype=torch.float32, device=blocks.device)
    _SCALES((name, form, row_blocks), (rows, 1), (blocks, scale))
    return scale
