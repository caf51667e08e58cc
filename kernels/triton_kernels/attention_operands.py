"""What INT8 attention reads: queries and keys rotated and quantized, values scaled into fp16."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..reference.attention import padded_width
from .launching import constant_launcher
from .rows import INFINITY_BITS, ROUND_TO_EVEN, magnitude_bits

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=("TK", "STEP"))
def attention_statistics_kernel(
    k, v, k_sum, v_max,
    HK, TK, STEP, k_sample, k_head, k_token, v_sample, v_head, v_token,
    SUM: tl.constexpr, MAX: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr,
    CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of the tokens of one head. The sum of each STEP-th key and the largest magnitude of the
    values, per channel: float32 [B HK, CHUNKS, D]."""
    chunk, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    sample, own = (head // HK).to(tl.int64), (head % HK).to(tl.int64)
    column, token = tl.arange(0, D), tl.arange(0, ROWS)
    place = (head.to(tl.int64) * CHUNKS + chunk) * D + column
    if SUM:
        base = k + sample * k_sample + own * k_head
        sums = tl.zeros((ROWS, D), tl.float32)
        for first in range(chunk * ROWS, tl.cdiv(TK, STEP), CHUNKS * ROWS):
            tokens = (first + token)[:, None] * STEP
            tile = base + tokens.to(tl.int64) * k_token + column[None, :]
            sums += tl.load(tile, mask=(tokens < TK) & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
        tl.store(k_sum + place, tl.sum(sums, axis=0))
    if MAX:
        base = v + sample * v_sample + own * v_head
        largest = tl.zeros((ROWS, D), tl.int32)
        for first in range(chunk * ROWS, TK, CHUNKS * ROWS):
            tokens = (first + token)[:, None]
            tile = base + tokens.to(tl.int64) * v_token + column[None, :]
            values = tl.load(tile, mask=(tokens < TK) & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
            largest = tl.maximum(largest, magnitude_bits(values))
        tl.store(v_max + place, tl.max(largest, axis=0).to(tl.float32, bitcast=True))


@triton.jit
def _hadamard(N: tl.constexpr, dtype: tl.constexpr):
    """The matrix [N, N] of 1 and -1, N at most 256: -1 where the bits that row and column share are odd in number."""
    shared = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    shared ^= shared >> 4
    return (1 - ((0x6996 >> (shared & 15)) & 1) * 2).to(dtype)


@triton.jit
def _center(sums, left, count, SUMS: tl.constexpr, D: tl.constexpr, PART: tl.constexpr):
    """The mean key [PART] of SUMS sums [SUMS, D]."""
    column = left + tl.arange(0, PART)
    total = tl.zeros((PART,), tl.float32)
    for part in tl.static_range(SUMS):  # pyright: ignore[reportGeneralTypeIssues]
        total += tl.load(sums + part * D + column)
    return total / count


@triton.jit
def _rotated(
    x, matrix, center, first, T, token_stride, left,
    CENTERED: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """PART channels of ROWS tokens, less the mean, times the matrix: float32 [ROWS, PART]."""
    token, column = first + tl.arange(0, ROWS), left + tl.arange(0, PART)
    inside = (token < T)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + token[:, None].to(tl.int64) * token_stride + column[None, :], mask=inside, other=0.0)
    if CENTERED:
        values = tl.where(inside, values.to(tl.float32) - center[None, :], 0.0)
    return tl.dot(values.to(matrix.dtype), matrix)


@triton.jit
def _store_steps(q, values, inverse, broken, first, T, left, D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr):
    token, column = first + tl.arange(0, ROWS), left + tl.arange(0, PART)
    steps = (values * inverse[:, None] + ROUND_TO_EVEN).to(tl.int32, bitcast=True)
    steps = tl.where(broken[:, None], 0, steps).to(tl.int8)
    tl.store(q + token[:, None].to(tl.int64) * D + column[None, :], steps, mask=(token < T)[:, None])


@triton.jit
def _quantize_tokens(
    x, q, scale, sums, begin, T, token_stride, factor, count,
    CENTERED: tl.constexpr, SUMS: tl.constexpr, DTYPE: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """BLOCKS blocks of ROWS tokens of one head, less the mean, rotated: q = round(127 x / absmax), scale = factor
    absmax. A token with a NaN or Inf gets the scale NaN.

    Heads of more channels than PART are rotated in two halves, and these with each other.
    """
    matrix = _hadamard(PART, DTYPE)
    left_center = tl.zeros((PART,), tl.float32)
    center = left_center
    if CENTERED:
        left_center = _center(sums, 0, count, SUMS, D, PART)
        if PART < D:
            center = _center(sums, PART, count, SUMS, D, PART)
    for first in range(begin, tl.minimum(begin + ROWS * BLOCKS, T), ROWS):
        left = _rotated(x, matrix, left_center, first, T, token_stride, 0, CENTERED, WIDTH, PART, ROWS)
        right = left
        if PART < D:
            other = _rotated(x, matrix, center, first, T, token_stride, PART, CENTERED, WIDTH, PART, ROWS)
            right = left - other
            left += other
        largest = tl.max(tl.maximum(magnitude_bits(left), magnitude_bits(right)), axis=1)
        broken = largest >= INFINITY_BITS
        absmax = largest.to(tl.float32, bitcast=True)
        token = first + tl.arange(0, ROWS)
        tl.store(scale + token, tl.where(broken, float("nan"), absmax * factor), mask=token < T)
        inverse = tl.minimum(tl.div_rn(127.0, tl.where(absmax > 0, absmax, 1.0)), _FLOAT32_MAX)
        _store_steps(q, left, inverse, broken, first, T, 0, D, PART, ROWS)
        if PART < D:
            _store_steps(q, right, inverse, broken, first, T, PART, D, PART, ROWS)


@triton.jit
def _scale_values(
    v, v16, v_scale, v_max, begin, T, token_stride,
    MAXIMA: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Values over their channels' largest magnitude, in fp16 [T, D]; a channel with a NaN or Inf becomes NaN."""
    column = tl.arange(0, D)
    largest = tl.zeros((D,), tl.int32)
    for part in tl.static_range(MAXIMA):  # pyright: ignore[reportGeneralTypeIssues]
        largest = tl.maximum(largest, magnitude_bits(tl.load(v_max + part * D + column)))
    absmax = tl.where(largest >= INFINITY_BITS, float("nan"), largest.to(tl.float32, bitcast=True))
    inverse = tl.minimum(tl.div_rn(1.0, tl.where(absmax == 0.0, 1.0, absmax)), _FLOAT32_MAX)
    for first in range(begin, tl.minimum(begin + ROWS * BLOCKS, T), ROWS):
        token = first + tl.arange(0, ROWS)
        inside = (token < T)[:, None] & (column < WIDTH)[None, :]
        tile = v + token[:, None].to(tl.int64) * token_stride + column[None, :]
        values = tl.load(tile, mask=inside, other=0.0).to(tl.float32) * inverse[None, :]
        place = token[:, None].to(tl.int64) * D + column[None, :]
        tl.store(v16 + place, values.to(tl.float16), mask=(token < T)[:, None])
    if begin == 0:
        tl.store(v_scale + column, absmax)


@triton.jit(do_not_specialize=("TQ", "TK"))
def attention_operands_kernel(
    q, k, v, k_sum, v_max, q8, q_scale, k8, k_scale, v16, v_scale,
    B, H, HK, TQ, TK, TK_PADDED, q_sample, q_head, q_token, k_sample, k_head, k_token, v_sample, v_head, v_token,
    sums_head, q_factor, k_factor, count,
    SUMS: tl.constexpr, SCALES_VALUES: tl.constexpr, MAXIMA: tl.constexpr, DTYPE: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: tokens of the queries, of the keys or of the values of a head, in this order of heads."""
    blocks = tl.cdiv(tl.maximum(TQ, TK), ROWS * BLOCKS)
    first, head = tl.program_id(0) % blocks * (ROWS * BLOCKS), tl.program_id(0) // blocks
    if head < B * H:
        if first < TQ:
            base = q + (head // H).to(tl.int64) * q_sample + (head % H).to(tl.int64) * q_head
            own = head.to(tl.int64) * TQ
            _quantize_tokens(
                base, q8 + own * D, q_scale + own, k_sum, first, TQ, q_token, q_factor, count,
                False, SUMS, DTYPE, WIDTH, D, PART, ROWS, BLOCKS,
            )  # fmt: skip
    elif head < B * (H + HK):
        if first < TK:
            own = head - B * H
            base = k + (own // HK).to(tl.int64) * k_sample + (own % HK).to(tl.int64) * k_head
            begin = own.to(tl.int64) * TK_PADDED
            _quantize_tokens(
                base, k8 + begin * D, k_scale + begin, k_sum + own.to(tl.int64) * sums_head, first, TK, k_token,
                k_factor, count, True, SUMS, DTYPE, WIDTH, D, PART, ROWS, BLOCKS,
            )  # fmt: skip
    else:
        if SCALES_VALUES and first < TK:
            own = (head - B * (H + HK)).to(tl.int64)
            base = v + own // HK * v_sample + own % HK * v_head
            _scale_values(
                base, v16 + own * TK * D, v_scale + own * D, v_max + own * MAXIMA * D, first, TK, v_token,
                MAXIMA, WIDTH, D, ROWS, BLOCKS,
            )  # fmt: skip


# Keys whose mean is taken: of more the mean is no better.
_SUMMED_ROWS, _CHUNKS = 32, 16
# So that tiles of keys of any size lie inside.
_KEY_BLOCK = 128
_WIDEST_PART = 128


_STATISTICS = constant_launcher(attention_statistics_kernel)
_OPERANDS = constant_launcher(attention_operands_kernel)
_WARPS = 4


class AttentionOperands(NamedTuple):
    """What the attention kernel reads.

    Attributes:
        q, k: int8 [B H, TQ, D] and [B HK, TK padded, D], D the head's width padded to a power of two.
        q_scale, k_scale: float32 [B H, TQ] and [B HK, TK padded].
        v: fp16 [B HK, TK, D] with v_scale float32 [B HK, D], or the values as they came with None.
    """

    q: torch.Tensor
    q_scale: torch.Tensor
    k: torch.Tensor
    k_scale: torch.Tensor
    v: torch.Tensor
    v_scale: torch.Tensor | None


def quantized_operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, key_mean: torch.Tensor | None, scaled: bool
) -> AttentionOperands:
    """The operands of checked, non-empty tensors [B, H, T, WIDTH] whose channels lie side by side.

    `key_mean` float32 [B, HK, D], zeros behind WIDTH, or None for the mean of some of the keys; `scaled` says whether
    the values go into fp16.
    """
    (batch, heads, tq, width), (_, kv_heads, tk, _) = q.shape, k.shape
    channels, key_tokens = padded_width(width), (tk // _KEY_BLOCK + 2) * _KEY_BLOCK
    queries, keys = batch * heads, batch * kv_heads

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return q.new_empty(shape, dtype=dtype)

    q8, k8 = new(queries, tq, channels, dtype=torch.int8), new(keys, key_tokens, channels, dtype=torch.int8)
    q_scale, k_scale = new(queries, tq), new(keys, key_tokens)
    v16, v_scale = (new(keys, tk, channels, dtype=torch.float16), new(keys, channels)) if scaled else (v, q_scale)
    sums = new(keys, _CHUNKS, channels) if key_mean is None else key_mean
    maxima = new(keys, _CHUNKS, channels) if scaled else sums
    step = -(-tk // (_CHUNKS * _SUMMED_ROWS))
    # A mean that is given is one sum of one key.
    chunks, count = (_CHUNKS, -(-tk // step)) if key_mean is None else (1, 1)
    if key_mean is None or scaled:
        form = (key_mean is None, scaled, width, channels, _CHUNKS, _SUMMED_ROWS, _WARPS)
        numbers = (kv_heads, tk, step, *k.stride()[:3], *v.stride()[:3])
        _STATISTICS(form, (_CHUNKS * keys, 1), (k, v, sums, maxima), numbers)
    dtype = tl.float32 if not q.is_cuda else tl.float16 if q.dtype == torch.float16 else tl.bfloat16
    # How many tokens a program holds at a time, and how often.
    rows, blocks = (32, 8) if channels > _WIDEST_PART else (64, 4)
    form = (chunks, scaled, _CHUNKS, dtype, width, channels, min(channels, _WIDEST_PART), rows, blocks, _WARPS)
    tensors = (q, k, v, sums, maxima, q8, q_scale, k8, k_scale, v16, v_scale)
    numbers = (batch, heads, kv_heads, tq, tk, key_tokens, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    # The rotation multiplies both by the root of the channels.
    factors = (abs(scale) * math.log2(math.e) / 127 / channels, math.copysign(1 / 127, scale))
    numbers += (chunks * channels, *factors, float(count))
    programs = -(-max(tq, tk) // (rows * blocks)) * (queries + keys * (2 if scaled else 1))
    _OPERANDS(form, (programs, 1), tensors, numbers)
    return AttentionOperands(q8, q_scale, k8, k_scale, v16, v_scale if scaled else None)
