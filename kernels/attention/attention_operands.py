"""The operands of INT8 attention: queries and keys rotated and quantized, values scaled into fp16."""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launching.launching import constant_launcher
from ..linear.rows import INFINITY_BITS, ROUND_TO_EVEN, magnitude_bits
from .attention_reference import padded_width

_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)


@triton.jit(do_not_specialize=("TK",))
def largest_values_kernel(
    v, v_max, HK, TK, v_sample, v_head, v_token,
    WIDTH: tl.constexpr, D: tl.constexpr, CHUNKS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One program: a chunk of the tokens of one head. Stores the largest magnitude of the values per channel: float32
    [B HK, CHUNKS, D]."""
    chunk, head = tl.program_id(0) % CHUNKS, tl.program_id(0) // CHUNKS
    column, token = tl.arange(0, D), tl.arange(0, ROWS)
    base = v + (head // HK).to(tl.int64) * v_sample + (head % HK).to(tl.int64) * v_head
    largest = tl.zeros((ROWS, D), tl.int32)
    for first in range(chunk * ROWS, TK, CHUNKS * ROWS):
        tokens = (first + token)[:, None]
        tile = base + tokens.to(tl.int64) * v_token + column[None, :]
        values = tl.load(tile, mask=(tokens < TK) & (column < WIDTH)[None, :], other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude_bits(values))
    place = (head.to(tl.int64) * CHUNKS + chunk) * D + column
    tl.store(v_max + place, tl.max(largest, axis=0).to(tl.float32, bitcast=True))


@triton.jit
def _hadamard(N: tl.constexpr, dtype: tl.constexpr):
    """Return the matrix [N, N] of 1 and -1, N at most 256: -1 where row and column share an odd number of bits."""
    shared = tl.arange(0, N)[:, None] & tl.arange(0, N)[None, :]
    shared ^= shared >> 4
    return (1 - ((0x6996 >> (shared & 15)) & 1) * 2).to(dtype)


@triton.jit
def _center(x, T, token_stride, left, WIDTH: tl.constexpr, PART: tl.constexpr, SAMPLES: tl.constexpr):
    """Return PART channels of the mean key: the mean of one key of each SAMPLES-th part of all."""
    column = left + tl.arange(0, PART)
    sample, step = tl.arange(0, SAMPLES), tl.cdiv(T, SAMPLES)
    token = sample * step + sample * 7 % step  # not all of one column of an image
    inside = (token < T)[:, None] & (column < WIDTH)[None, :]
    values = tl.load(x + token[:, None].to(tl.int64) * token_stride + column[None, :], mask=inside, other=0.0)
    return tl.sum(values.to(tl.float32), axis=0) / tl.sum((token < T).to(tl.float32))


@triton.jit
def _rotated(
    x, matrix, center, first, T, token_stride, left,
    CENTERED: tl.constexpr, WIDTH: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Return PART channels of ROWS tokens, less the mean, times the matrix: float32 [ROWS, PART]."""
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
def _store_scales(scale, largest, first, end, factor):
    """Store scales from `first` on, of the bits of largest magnitudes."""
    place = first + tl.arange(0, largest.shape[0])
    values = tl.where(largest >= INFINITY_BITS, float("nan"), largest.to(tl.float32, bitcast=True) * factor)
    tl.store(scale + place, values, mask=place < end)


@triton.jit
def _quantize_tokens(
    x, q, scale, begin, T, token_stride, factor,
    CENTERED: tl.constexpr, SAMPLES: tl.constexpr, SHARE: tl.constexpr, DTYPE: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Rotate and round BLOCKS blocks of ROWS tokens of one head, less the mean: q = round(127 x / absmax), scale =
    factor absmax. SHARE tokens have an absmax and a scale in common. With a NaN or Inf the scale is NaN.

    Heads of more channels than PART are rotated in two halves, and these with each other.
    """
    matrix = _hadamard(PART, DTYPE)
    left_center = tl.zeros((PART,), tl.float32)
    center = left_center
    if CENTERED:
        left_center = _center(x, T, token_stride, 0, WIDTH, PART, SAMPLES)
        if PART < D:
            center = _center(x, T, token_stride, PART, WIDTH, PART, SAMPLES)
    for first in range(begin, tl.minimum(begin + ROWS * BLOCKS, T), ROWS):
        left = _rotated(x, matrix, left_center, first, T, token_stride, 0, CENTERED, WIDTH, PART, ROWS)
        right = left
        if PART < D:
            other = _rotated(x, matrix, center, first, T, token_stride, PART, CENTERED, WIDTH, PART, ROWS)
            right = left - other
            left += other
        largest = tl.max(tl.maximum(magnitude_bits(left), magnitude_bits(right)), axis=1)
        if SHARE > 1:
            each = tl.reshape(largest, (ROWS // (4 * SHARE), SHARE // 2, 4, 2))
            common = tl.max(tl.max(each, axis=3), axis=1)
            _store_scales(
                scale, tl.reshape(common, (ROWS // SHARE,)), first // SHARE, tl.cdiv(T, 4 * SHARE) * 4, factor
            )
            largest = tl.reshape(tl.broadcast_to(common[:, None, :, None], each.shape), (ROWS,))
        else:
            _store_scales(scale, largest, first, T, factor)
        broken = largest >= INFINITY_BITS
        absmax = largest.to(tl.float32, bitcast=True)
        inverse = tl.minimum(tl.div_rn(127.0, tl.where(absmax > 0, absmax, 1.0)), _FLOAT32_MAX)
        _store_steps(q, left, inverse, broken, first, T, 0, D, PART, ROWS)
        if PART < D:
            _store_steps(q, right, inverse, broken, first, T, PART, D, PART, ROWS)


@triton.jit
def _scale_values(
    v, v16, v_scale, v_max, begin, T, token_stride,
    MAXIMA: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Divide values by their channels' largest magnitude, to fp16 [T, D]; a channel with a NaN or Inf becomes NaN."""
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
    q, k, v, v_max, q8, q_scale, k8, k_scale, v16, v_scale,
    B, H, HK, TQ, TK, TK_PADDED, q_sample, q_head, q_token, k_sample, k_head, k_token, v_sample, v_head, v_token,
    q_factor, k_factor,
    SAMPLES: tl.constexpr, SHARE: tl.constexpr, SCALES_VALUES: tl.constexpr,
    MAXIMA: tl.constexpr, DTYPE: tl.constexpr,
    WIDTH: tl.constexpr, D: tl.constexpr, PART: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """One program: tokens of the keys, of the queries or of the values of a head; keys, which take longest, first."""
    blocks = tl.cdiv(tl.maximum(TQ, TK), ROWS * BLOCKS)
    first, head = tl.program_id(0) % blocks * (ROWS * BLOCKS), tl.program_id(0) // blocks
    if head < B * HK:
        if first < TK:
            base = k + (head // HK).to(tl.int64) * k_sample + (head % HK).to(tl.int64) * k_head
            begin = head.to(tl.int64) * TK_PADDED
            _quantize_tokens(
                base, k8 + begin * D, k_scale + begin // SHARE, first, TK, k_token,
                k_factor, True, SAMPLES, SHARE, DTYPE, WIDTH, D, PART, ROWS, BLOCKS,
            )  # fmt: skip
    elif head < B * (H + HK):
        if first < TQ:
            own = head - B * HK
            base = q + (own // H).to(tl.int64) * q_sample + (own % H).to(tl.int64) * q_head
            begin = own.to(tl.int64) * TQ
            _quantize_tokens(
                base, q8 + begin * D, q_scale + begin, first, TQ, q_token, q_factor,
                False, SAMPLES, 1, DTYPE, WIDTH, D, PART, ROWS, BLOCKS,
            )  # fmt: skip
    else:
        if SCALES_VALUES and first < TK:
            own = (head - B * (H + HK)).to(tl.int64)
            base = v + own // HK * v_sample + own % HK * v_head
            _scale_values(
                base, v16 + own * TK * D, v_scale + own * D, v_max + own * MAXIMA * D, first, TK, v_token,
                MAXIMA, WIDTH, D, ROWS, BLOCKS,
            )  # fmt: skip


# Keys whose mean is taken, at most: that of more is hardly better, and any vector may be subtracted from all keys.
_SAMPLES = 64
# Chunks in which the largest values are sought, and how many rows at a time.
_CHUNKS, _CHUNK_ROWS = 16, 32
# So that tiles of keys of any size lie inside.
_KEY_BLOCK = 128
_WIDEST_PART = 128


_LARGEST_VALUES = constant_launcher(largest_values_kernel)
# By whether heads are rotated in halves, whose loads the compiler's pipeline speeds up.
_OPERANDS = {
    False: constant_launcher(attention_operands_kernel, num_stages=1),
    True: constant_launcher(attention_operands_kernel),
}
_WARPS = 4


class AttentionOperands(NamedTuple):
    """The tensors that the attention kernel reads. D is the head's width padded to a power of two.

    Of a window of 4 `share` keys in order, columns 2 i and 2 i + 1 of all eights have the scale i in common.
    """

    q: torch.Tensor  # int8 [B H, TQ, D]
    q_scale: torch.Tensor  # float32 [B H, TQ]
    k: torch.Tensor  # int8 [B HK, TK padded, D]
    k_scale: torch.Tensor  # float32 [B HK, TK padded / share], of `share` keys each
    v: torch.Tensor  # fp16 [B HK, TK, D], or as the values came
    v_scale: torch.Tensor | None  # float32 [B HK, D]; None for values as they came


def quantized_operands(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, scaled: bool, share: int = 1
) -> AttentionOperands:
    """Compute the operands of checked, non-empty tensors [B, H, T, WIDTH] whose channels lie side by side.

    `scale` is not negative. `scaled` says whether the values go into fp16. `share` keys have a scale in common: 1, 8
    or 16.
    """
    (batch, heads, tq, width), (_, kv_heads, tk, _) = q.shape, k.shape
    channels, key_tokens = padded_width(width), (tk // _KEY_BLOCK + 2) * _KEY_BLOCK
    queries, keys = batch * heads, batch * kv_heads

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return q.new_empty(shape, dtype=dtype)

    q8, k8 = new(queries, tq, channels, dtype=torch.int8), new(keys, key_tokens, channels, dtype=torch.int8)
    q_scale, k_scale = new(queries, tq), new(keys, key_tokens // share)
    v16, v_scale = (new(keys, tk, channels, dtype=torch.float16), new(keys, channels)) if scaled else (v, q_scale)
    maxima = new(keys, _CHUNKS, channels) if scaled else q_scale
    if scaled:
        form = (width, channels, _CHUNKS, _CHUNK_ROWS, _WARPS)
        _LARGEST_VALUES(form, (_CHUNKS * keys, 1), (v, maxima), (kv_heads, tk, *v.stride()[:3]))
    dtype = tl.float32 if not q.is_cuda else tl.float16 if q.dtype == torch.float16 else tl.bfloat16
    # How many tokens a program holds at a time, and how often.
    halves = channels > _WIDEST_PART
    rows, blocks = (32, 8) if halves else (64, 4)
    sizes = (width, channels, min(channels, _WIDEST_PART), rows, blocks, _WARPS)
    form = (_SAMPLES, share, scaled, _CHUNKS, dtype, *sizes)
    tensors = (q, k, v, maxima, q8, q_scale, k8, k_scale, v16, v_scale)
    numbers = (batch, heads, kv_heads, tq, tk, key_tokens, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    # The rotation multiplies both by the root of the channels.
    numbers += (scale * math.log2(math.e) / 127 / channels, 1 / 127)
    programs = -(-max(tq, tk) // (rows * blocks)) * (queries + keys * (2 if scaled else 1))
    _OPERANDS[halves](form, (programs, 1), tensors, numbers)
    return AttentionOperands(q8, q_scale, k8, k_scale, v16, v_scale if scaled else None)
