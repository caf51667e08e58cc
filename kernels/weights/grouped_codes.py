"""Codes of 4 or 6 bits with a scale a group to INT8, alone and with LoRAs added: one Triton kernel each.

Both work on quads: the codes of four neighbouring columns, which make one word of INT8. A quad has two bytes of low
nibbles and, with 6 bits, one byte with the rest. No group begins inside a quad. Compiled without fused multiply-adds,
they round products and sums apart, as PyTorch does.
"""

import torch
import triton
import triton.language as tl

from ..launching.launching import Layout, contiguous
from ..linear.rows import ROUND_TO_EVEN, row_launcher
from ..operators import Tensors
from .gguf_decoding import as_float, divisors, rounded
from .gguf_kernels import aligned, thin_product
from .weight_reference import GroupedCodes


@triton.jit
def _load_quads(low, high, scale, inside, BITS: tl.constexpr):
    """Load quads where they are `inside`: nibbles, the upper bits, and float32 scales of groups.

    FP8 scales come as bytes: Ampere's Triton has no such floats. In float32 their bits make 2^-120 of the value.
    """
    nibbles = tl.load(low, mask=inside, other=0).to(tl.int32)
    upper = nibbles
    if BITS == 6:
        upper = tl.load(high, mask=inside, other=0).to(tl.int32)
    group_scale = tl.load(scale, mask=inside, other=0)
    if scale.dtype.element_ty == tl.uint8:
        bits = group_scale.to(tl.int32)
        group_scale = ((bits & 127) << 20 | bits >> 7 << 31).to(
            tl.float32, bitcast=True
        ) * 1.329227995784916e36  # 2^120
    return nibbles, upper, group_scale.to(tl.float32)


@triton.jit
def _whole(quads, codebook, NUMBER: tl.constexpr, BITS: tl.constexpr):
    """Return the INT8 of column NUMBER of quads in float32, plus ROUND_TO_EVEN: in the low bits of the sum."""
    nibbles, upper, group_scale = quads
    code = nibbles >> 4 * NUMBER & 15
    if BITS == 6:
        code |= (upper >> 2 * NUMBER & 3) << 4
    if codebook is not None:  # noqa: SIM108 (Triton compiles one branch)
        level = tl.load(codebook + code)
    else:
        level = as_float(code, 8 if BITS == 4 else 32)
    return tl.minimum(tl.maximum(level * group_scale, -127.0), 127.0) + ROUND_TO_EVEN


@triton.jit
def _byte(whole, NUMBER: tl.constexpr):
    """Return the integer of `_whole` as byte NUMBER of a word."""
    return (whole.to(tl.int32, bitcast=True) & 255) << 8 * NUMBER


@triton.jit
def expand_codes_kernel(
    codes,
    scale,
    codebook,
    out,
    count,
    QUADS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_QUADS: tl.constexpr,
    HAS_CODEBOOK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program expands BLOCK of the `count` quads of all rows: clamp(round(level * scale)).

    Only 6 bits read QUADS, the number of a row's.
    """
    start = tl.program_id(0)
    number = start * BLOCK + tl.arange(0, BLOCK)
    inside = number < count
    low = codes.to(tl.pointer_type(tl.uint16), bitcast=True) + start.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    high = codes
    if BITS == 6:  # behind the nibbles of each row are its upper bits
        row = (number // QUADS).to(tl.int64)
        low += row * (QUADS // 2)
        high = codes + start.to(tl.int64) * BLOCK + tl.arange(0, BLOCK) + (row + 1) * (2 * QUADS)
    quads = _load_quads(low, high, scale + number // GROUP_QUADS, inside, BITS)
    codebook = codebook if HAS_CODEBOOK else None
    word = _byte(_whole(quads, codebook, 0, BITS), 0)
    for column in tl.static_range(1, 4):  # pyright: ignore[reportGeneralTypeIssues]
        word |= _byte(_whole(quads, codebook, column, BITS), column)
    words = out.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(words + start.to(tl.int64) * BLOCK + tl.arange(0, BLOCK), word, mask=inside)


@triton.jit
def _patched(whole, added, channel_scale, by, NUMBER: tl.constexpr):
    """Return byte NUMBER of words: an INT8 times its scale plus `added`, rounded to other steps."""
    values = (whole - ROUND_TO_EVEN) * channel_scale + added
    return (rounded(values, by).to(tl.int32) & 255) << 8 * NUMBER


@triton.jit
def expand_codes_with_low_rank_kernel(
    codes,
    scale,
    codebook,
    channel_scale,
    larger,
    up,
    down,
    out,
    N,
    K,
    rank,
    QUADS: tl.constexpr,
    BITS: tl.constexpr,
    GROUP_QUADS: tl.constexpr,
    HAS_CODEBOOK: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program makes BLOCK quads of each of ROWS rows: round((INT8 * channel_scale + up @ down) / larger)."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * BLOCK * 4 + tl.arange(0, BLOCK * 4)
    added = thin_product(up, down, rows, rows < N, columns, columns < K, rank, K)
    # Bit 0 of a column's number in its quad is the last axis, bit 1 the one before.
    even, odd = tl.split(tl.reshape(added, (ROWS, BLOCK, 2, 2)))
    added_0, added_2 = tl.split(even)
    added_1, added_3 = tl.split(odd)

    row, quad = rows[:, None], tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < N) & (quad < QUADS)
    low = codes.to(tl.pointer_type(tl.uint16), bitcast=True) + row * (QUADS * BITS // 4) + quad
    high = codes + row * (QUADS * BITS // 2) + QUADS * 2 + quad
    group = scale + row * (QUADS // GROUP_QUADS) + quad // GROUP_QUADS
    quads = _load_quads(low, high, group, inside, BITS)
    codebook = codebook if HAS_CODEBOOK else None
    own = tl.load(channel_scale + row, mask=row < N, other=0.0)
    by = divisors(tl.load(larger + row, mask=row < N, other=0.0))
    added = added_0, added_1, added_2, added_3
    word = _patched(_whole(quads, codebook, 0, BITS), added[0], own, by, 0)
    for column in tl.static_range(1, 4):  # pyright: ignore[reportGeneralTypeIssues]
        word |= _patched(_whole(quads, codebook, column, BITS), added[column], own, by, column)
    tl.store(out.to(tl.pointer_type(tl.int32), bitcast=True) + (row * QUADS + quad), word, mask=inside)


_QUADS, _WARPS = 1024, 8  # a program's: four a thread, which stores 16 bytes at once
_ROWS, _ROW_QUADS, _LOW_RANK_WARPS = 16, 64, 4

_EXPANDER = row_launcher(expand_codes_kernel)
_LOW_RANK_EXPANDER = row_launcher(expand_codes_with_low_rank_kernel)


def _as_read(tensors: Tensors) -> Tensors:
    """Return the operands as the kernels take them: bytes, and with LoRAs the scales of each row."""
    group_scale, codebook, *scales, up, down = contiguous(tensors[1:])
    codes = aligned(tensors[0].view(torch.uint8))
    if group_scale.dtype == torch.float8_e4m3fn:
        group_scale = group_scale.view(torch.uint8)
    if down is None:
        return [codes, group_scale, codebook]
    scales = (scale.reshape(-1).expand(len(codes)).contiguous() for scale in scales)
    return [codes, group_scale, codebook, *scales, up, down]


def launch_expand_codes(tensors: Tensors, group: int) -> Layout:
    codes, scale, codebook, *_, down = tensors
    weight = GroupedCodes(codes, scale, codebook, group)
    rows, channels = weight.shape
    form = (channels // 4, weight.bits, group // 4, codebook is not None)
    if down is None:
        form = form if weight.bits == 6 else (1, *form[1:])  # rows of 4 bits are one long row: compiled once
        count = rows * channels // 4
        return Layout(_EXPANDER, (*form, _QUADS, _WARPS), (-(-count // _QUADS), 1), (count,), tensors, _as_read)
    form = (*form, _ROWS, _ROW_QUADS, _LOW_RANK_WARPS)
    grid = (-(-rows // _ROWS), -(-channels // (4 * _ROW_QUADS)))
    return Layout(_LOW_RANK_EXPANDER, form, grid, (rows, channels, len(down)), tensors, _as_read)
