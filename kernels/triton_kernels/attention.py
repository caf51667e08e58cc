"""Attention with an online softmax in float32, probabilities and values in floats: of queries and keys in int8, and
exact of wide heads, which PyTorch's own kernels do badly on a card."""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ..operators import OperatorLaunch, Tensors
from ..reference.attention import WIDEST_HEAD, padded_width
from .attention_operands import AttentionOperands, quantized_operands
from .launching import Build, Launcher, built


@triton.jit
def _add_values(
    acc, probabilities, shrunk, v, key, inside, v_stride, left,
    RAGGED: tl.constexpr, HALF_SUMS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    """acc [ROWS, PART], shrunk, with probabilities [ROWS, KEYS] times PART columns of the keys' values."""
    column = left + tl.arange(0, PART)
    tile = v + key[:, None].to(tl.int64) * v_stride + column[None, :]
    if RAGGED or COLUMNS % PART:
        values = tl.load(tile, mask=inside[:, None] & (column < COLUMNS)[None, :], other=0.0)
    else:
        values = tl.load(tile)
    if HALF_SUMS:
        part = tl.dot(probabilities, values, out_dtype=tl.float16)
        return acc * shrunk[:, None] + part.to(tl.float32)
    else:
        return tl.dot(probabilities, values, acc * shrunk[:, None])


@triton.jit
def _products(
    q, k, first, end, k_token,
    INT8: tl.constexpr, RAGGED: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    key, column = first + tl.arange(0, KEYS), tl.arange(0, D)
    if INT8:
        return tl.dot(q, tl.load(k + key[None, :].to(tl.int64) * D + column[:, None]), out_dtype=tl.int32)
    else:
        tile = k + key[None, :].to(tl.int64) * k_token + column[:, None]
        if RAGGED or WIDTH < D:
            keys = tl.load(tile, mask=(key < end)[None, :] & (column < WIDTH)[:, None], other=0.0)
        else:
            keys = tl.load(tile)
        return tl.dot(q, keys)


@triton.jit
def _logits(raw, k_scale, first, INT8: tl.constexpr, KEYS: tl.constexpr):
    if INT8:
        return raw.to(tl.float32) * tl.load(k_scale + first + tl.arange(0, KEYS))[None, :]
    else:
        return raw


@triton.jit
def _attend_to_keys(
    logits, q_scale, v, mask, first, end, v_stride, mask_token, mask_key, rows, valid_rows,
    highest, total, acc, acc_right,
    MASK: tl.constexpr, MASK_ROWS: tl.constexpr, RAGGED: tl.constexpr, HALF_SUMS: tl.constexpr,
    COLUMNS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """What KEYS keys from `first` on add to the rows: their highest logit so far, in powers of two, the sum of their
    probabilities and the sums of values, both relative to the highest.

    MASK is "none", "bool" or "float"; MASK_ROWS "one" for a mask that is the same for all rows, "far" where offsets in
    it need 64 bits. logits float32 [ROWS, KEYS], to be multiplied by q_scale [ROWS] for powers of two. acc_right: of
    heads of more channels than PART, the sums of the other half.
    """
    key = first + tl.arange(0, KEYS)
    inside = key < end
    if MASK != "none" or RAGGED:
        logits *= q_scale[:, None]
    if MASK != "none":
        if MASK_ROWS == "one":
            seen = tl.load(mask + key.to(tl.int64) * mask_key, mask=inside, other=0)[None, :]
        else:
            row, column = rows[:, None], key[None, :]
            if MASK_ROWS == "far":
                row, column = row.to(tl.int64), column.to(tl.int64)
            place = mask + (row * mask_token + column * mask_key)
            seen = tl.load(place, mask=valid_rows[:, None] & inside[None, :], other=0)
        if MASK == "bool":
            logits = tl.where(seen != 0, logits, float("-inf"))
        else:
            logits += seen.to(tl.float32) * 1.4426950408889634
    if RAGGED:
        logits = tl.where(inside[None, :], logits, float("-inf"))
    if MASK != "none" or RAGGED:
        now = tl.maximum(highest, tl.max(logits, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)  # no key seen yet
        probabilities = tl.exp2(logits - base[:, None])
    else:
        now = tl.maximum(highest, tl.max(logits, axis=1) * q_scale)
        base = now
        probabilities = tl.exp2(logits * q_scale[:, None] - base[:, None])
    shrunk = tl.exp2(highest - base)
    total = total * shrunk + tl.sum(probabilities, axis=1)
    probabilities = probabilities.to(v.dtype.element_ty)
    acc = _add_values(acc, probabilities, shrunk, v, key, inside, v_stride, 0, RAGGED, HALF_SUMS, COLUMNS, PART)
    if PART < D:
        acc_right = _add_values(
            acc_right, probabilities, shrunk, v, key, inside, v_stride, PART, RAGGED, HALF_SUMS, COLUMNS, PART
        )
    return now, total, acc, acc_right


@triton.jit
def _store_part(
    out, acc, inverse, v_scale, rows, valid_rows, out_token, left,
    HAS_V_SCALE: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    column = left + tl.arange(0, PART)
    acc *= inverse[:, None]
    if HAS_V_SCALE:
        acc *= tl.load(v_scale + column)[None, :]
    tl.store(
        out + rows[:, None].to(tl.int64) * out_token + column[None, :], acc.to(out.dtype.element_ty),
        mask=valid_rows[:, None] & (column < WIDTH)[None, :],
    )  # fmt: skip


@triton.jit(do_not_specialize=("TQ", "TK"))
def attention_kernel(
    q, q_scale, k, k_scale, v, v_scale, mask, out,
    H, GROUP, TQ, TK, TK_PADDED, q_sample, q_head, q_token, k_sample, k_head, k_token, v_sample, v_head, v_token,
    out_sample, out_head, out_token, mask_sample, mask_head, mask_token, mask_key, factor,
    INT8: tl.constexpr, MASK: tl.constexpr, MASK_ROWS: tl.constexpr, RAGGED: tl.constexpr, HALF_SUMS: tl.constexpr,
    HAS_V_SCALE: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One program: ROWS queries of one head.

    With INT8 q, k: int8 [B H, TQ, D] and [B H / GROUP, TK_PADDED, D] side by side; scales float32 [B H, TQ] and
    [B H / GROUP, TK_PADDED], the queries' with the logits' scale and log2(e) in them. Without: floats [B, H, TQ, WIDTH]
    and [B, H / GROUP, TK, WIDTH], whose `factor` is the logits' scale times log2(e).
    v: [B, H / GROUP, TK, COLUMNS]. out: [B, H, TQ, WIDTH]. With HALF_SUMS the products of a tile of keys are summed in
    fp16.
    """
    blocks = tl.cdiv(TQ, ROWS)
    head = tl.program_id(0) // blocks
    sample, own = (head // H).to(tl.int64), head % H
    k_own = (own // GROUP).to(tl.int64)
    one_k_head = sample * (H // GROUP) + own // GROUP
    rows, column = tl.program_id(0) % blocks * ROWS + tl.arange(0, ROWS), tl.arange(0, D)
    valid_rows = rows < TQ
    if INT8:
        row = head.to(tl.int64) * TQ + rows
        queries = tl.load(q + row[:, None] * D + column[None, :], mask=valid_rows[:, None], other=0)
        scale = tl.load(q_scale + row, mask=valid_rows, other=0.0)
        k += one_k_head * TK_PADDED * D
        k_scale += one_k_head * TK_PADDED
    else:
        q += sample * q_sample + own.to(tl.int64) * q_head
        inside = valid_rows[:, None] & (column < WIDTH)[None, :]
        queries = tl.load(q + rows[:, None].to(tl.int64) * q_token + column[None, :], mask=inside, other=0.0)
        scale = tl.full((ROWS,), 1.0, tl.float32) * factor
        k += sample * k_sample + k_own * k_head
    v += sample * v_sample + k_own * v_head
    if MASK != "none":
        mask += sample * mask_sample + own.to(tl.int64) * mask_head

    highest = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, PART), tl.float32)
    acc_right = acc
    whole = TK // KEYS * KEYS if RAGGED else TK
    if AHEAD:
        raw = _products(queries, k, 0, TK, k_token, INT8, False, WIDTH, D, KEYS)
    for first in tl.range(0, whole, KEYS, num_stages=STAGES):
        if AHEAD:
            later = _products(queries, k, first + KEYS, TK, k_token, INT8, False, WIDTH, D, KEYS)
        else:
            raw = _products(queries, k, first, TK, k_token, INT8, False, WIDTH, D, KEYS)
        highest, total, acc, acc_right = _attend_to_keys(
            _logits(raw, k_scale, first, INT8, KEYS), scale, v, mask, first, TK, v_token, mask_token, mask_key,
            rows, valid_rows, highest, total, acc, acc_right, MASK, MASK_ROWS, False, HALF_SUMS, COLUMNS, D, PART, KEYS,
        )  # fmt: skip
        if AHEAD:
            raw = later
    if RAGGED:
        if not AHEAD:
            raw = _products(queries, k, whole, TK, k_token, INT8, True, WIDTH, D, KEYS)
        highest, total, acc, acc_right = _attend_to_keys(
            _logits(raw, k_scale, whole, INT8, KEYS), scale, v, mask, whole, TK, v_token, mask_token, mask_key,
            rows, valid_rows, highest, total, acc, acc_right, MASK, MASK_ROWS, True, HALF_SUMS, COLUMNS, D, PART, KEYS,
        )  # fmt: skip

    inverse = tl.where(total == 0.0, 0.0, tl.div_rn(1.0, total))
    out += sample * out_sample + own.to(tl.int64) * out_head
    v_scale += one_k_head * D
    _store_part(out, acc, inverse, v_scale, rows, valid_rows, out_token, 0, HAS_V_SCALE, WIDTH, PART)
    if PART < D:
        _store_part(out, acc_right, inverse, v_scale, rows, valid_rows, out_token, PART, HAS_V_SCALE, WIDTH, PART)


@dataclass(frozen=True)
class AttentionTiles:
    """What a program of the attention kernel works on.

    Attributes:
        rows, keys: of a tile of logits.
        part: channels of a sum of values: at most `rows`, or two warps share rows on an Ampere card.
        warps, stages: as Triton has them.
        ahead: whether a tile's products are made while the one before is worked on.
    """

    rows: int
    keys: int
    part: int
    warps: int
    stages: int
    ahead: bool = False


# By channels of a head, padded to a power of two.
_AMPERE_TILES = {
    32: AttentionTiles(64, 128, 32, 4, 2),
    64: AttentionTiles(64, 128, 64, 4, 2),
    128: AttentionTiles(64, 64, 64, 4, 2, ahead=True),
    256: AttentionTiles(128, 32, 128, 8, 3, ahead=True),
}
_HOPPER_TILES = {
    32: AttentionTiles(64, 128, 32, 4, 2),
    64: AttentionTiles(64, 128, 64, 4, 2),
    128: AttentionTiles(64, 128, 128, 4, 2),
    256: AttentionTiles(128, 64, 256, 8, 3),
}
_TILES = {(9, 0): _HOPPER_TILES}
# Of exact attention, heads of 129 to 256 channels.
_FLOAT_TILES = {(9, 0): AttentionTiles(128, 64, 256, 8, 2)}
_AMPERE_FLOAT_TILES = AttentionTiles(128, 16, 128, 8, 3)
# Larger ones that are faster where calls leave hardly any multiprocessor without work, and how many run on one.
_FILLING_TILES = {(9, 0): {128: AttentionTiles(128, 64, 128, 4, 3)}}
_RESIDENT = 2
_FILLED = 0.9
# GeForce's tensor cores halve their speed for float32 sums.
_HALF_SUMS = ((8, 6), (8, 9), (12, 0), (12, 1))


def mask_kind(mask: torch.Tensor | None) -> tuple[str, str]:
    """What the kernels' MASK and MASK_ROWS are for a mask [B, H, TQ, TK]."""
    if mask is None:
        return "none", "one"
    rows, keys, far = mask.stride(2), mask.stride(3), 2**31
    spread = "one" if not rows else "far" if mask.shape[2] * rows + mask.shape[3] * keys >= far else "many"
    return "bool" if mask.dtype == torch.bool else "float", spread


def tiles_for(
    capability: tuple[int, int],
    channels: int,
    mask: tuple[str, str] = ("none", "one"),
    heads_of: tuple[int, int] = (0, 0),
    multiprocessors: int = 1,
) -> AttentionTiles:
    """The tiles of a card by its compute capability, for heads of so many channels, padded to a power of two.

    A mask with a number for each query takes the registers of half of a tile. `heads_of` are the heads of all samples
    and the queries of one, on a card of so many multiprocessors.
    """
    tiles = _TILES.get(capability, _AMPERE_TILES)[channels]
    larger = _FILLING_TILES.get(capability, {}).get(channels)
    if larger is not None and mask[0] == "none" and _fills(larger, *heads_of, multiprocessors):
        return larger
    if mask[1] == "one":
        return tiles
    widest = channels == WIDEST_HEAD
    # With products made ahead the compiler keeps the sums of an A100, which are all float32, in registers.
    ahead = widest and mask[0] == "bool" and capability == (8, 0)
    return replace(tiles, keys=tiles.keys if widest else 32, stages=2, ahead=ahead)


def float_tiles_for(capability: tuple[int, int], mask: tuple[str, str] = ("none", "one")) -> AttentionTiles:
    """The tiles of exact attention on a card by its compute capability."""
    tiles = _FLOAT_TILES.get(capability, _AMPERE_FLOAT_TILES)
    return tiles if mask[1] == "one" else replace(tiles, keys=min(tiles.keys, 32), stages=2)


def _fills(tiles: AttentionTiles, heads: int, queries: int, multiprocessors: int) -> bool:
    """Whether the last round of a call's programs leaves few places on the multiprocessors free, of those of all."""
    programs, places = heads * -(-queries // tiles.rows), _RESIDENT * multiprocessors
    return programs >= _FILLED * places * -(-programs // places) > 0


def attention_constants(
    tiles: AttentionTiles, int8: bool, width: int, mask: tuple[str, str], ragged: bool, half_sums: bool, scaled: bool
) -> Build:
    """The kernel's constants and compilation options."""
    channels = padded_width(width) if int8 else WIDEST_HEAD
    form = (int8, *mask, ragged, half_sums, scaled, width, channels if scaled else width, channels, tiles.part)
    constants = (*form, tiles.rows, tiles.keys, tiles.stages, tiles.ahead)
    return built(attention_kernel, *constants, num_warps=tiles.warps, num_stages=tiles.stages)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_ATTENTION = Launcher(attention_kernel, attention_constants)


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 6)


def attend_in_int8(half_sums: bool, scale: float, tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
    """Launch the kernels on q, k, v, a mask and a mean of the keys, checked and non-empty, to fill [B, TQ, H, D]."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors[:3])
    mask, key_mean = tensors[3:]
    if key_mean is not None:
        padding = padded_width(q.shape[-1]) - q.shape[-1]
        given = key_mean.float().expand(k.shape[0], k.shape[1], q.shape[-1])
        key_mean = torch.nn.functional.pad(given, (0, padding)).contiguous()
    operands = quantized_operands(q, k, v, scale, key_mean, half_sums or v.dtype == torch.float32 or not v.is_cuda)
    if operands.v_scale is not None:
        v = operands.v.unflatten(0, k.shape[:2])
    _launch(operands, True, (q, k, v), mask, results[0], half_sums, 0.0)


def launch_int8_attention(tensors: Tensors, scale: float) -> OperatorLaunch | None:
    """The launch on checked, non-empty tensors like these; None for heads that the kernels have no room for."""
    q = tensors[0]
    if q.shape[-1] > WIDEST_HEAD:
        return None
    return functools.partial(attend_in_int8, _capability(q.device) in _HALF_SUMS, scale)


def _attend_in_floats(scale: float, tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors[:3])
    if scale < 0:  # the kernel takes the highest logit before it multiplies by the scale
        q, scale = -q, -scale
    operands = AttentionOperands(q, q, k, k, v, None)
    _launch(operands, False, (q, k, v), tensors[3], results[0], False, scale * math.log2(math.e))


def launch_float_attention(tensors: Tensors, scale: float) -> OperatorLaunch:
    """The launch on checked, non-empty fp16 or bf16 tensors of more than 128 channels."""
    return functools.partial(_attend_in_floats, scale)


def _launch(
    operands: AttentionOperands,
    int8: bool,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    out: torch.Tensor,
    half_sums: bool,
    factor: float,
) -> None:
    """Launch the kernel on operands of `given` q, k and v [B, H, T, WIDTH], by whose strides it reads floats, to fill
    `out` [B, TQ, H, D]."""
    (batch, heads, tq, width), (_, kv_heads, tk, _) = given[0].shape, given[1].shape
    mask = None if mask is None else mask.expand(batch, heads, tq, tk)
    kind, capability, out = mask_kind(mask), _capability(out.device), out.transpose(1, 2)
    if int8:
        multiprocessors = _multiprocessors(out.device)
        tiles = tiles_for(capability, operands.q.shape[-1], kind, (batch * heads, tq), multiprocessors)
    else:
        tiles = float_tiles_for(capability, kind)
    scaled = operands.v_scale is not None
    form = (tiles, int8, width, kind, tk % tiles.keys != 0, half_sums, scaled)
    read = (0,) * 6 if int8 else (*given[0].stride()[:3], *given[1].stride()[:3])
    strides = (*read, *given[2].stride()[:3], *out.stride()[:3])
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    numbers = (heads, heads // kv_heads, tq, tk, operands.k.shape[1], *strides, *mask_strides, factor)
    tensors = (*operands[:5], operands.v_scale if operands.v_scale is not None else operands.q_scale)
    grid = (-(-tq // tiles.rows) * batch * heads, 1)
    _ATTENTION(form, grid, (*tensors, operands.q if mask is None else mask, out), numbers)
