"""Kernel and launch of norms of queries and keys with rotary positions, in one pass over both."""

import torch
import triton
import triton.language as tl

from ..launching.launching import Layout, dense
from ..linear.rows import fits_registers, row_launcher, token_offset
from ..operators import Tensors


@triton.jit
def _load_pairs(
    row, heads, stride, H, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, NEIGHBOURS: tl.constexpr
):
    """Return first and second elements of the pairs of `heads` [HEADS, 1], float32 [HEADS, HALF], zeros outside."""
    head = row + heads.to(tl.int64) * stride
    if NEIGHBOURS:
        element = tl.arange(0, 2 * HALF)[None, :]
        both = tl.load(head + element, mask=(heads < H) & (element < D), other=0.0).to(tl.float32)
        return tl.split(tl.reshape(both, (HEADS, HALF, 2)))
    else:
        element = tl.arange(0, HALF)[None, :]
        inside = (heads < H) & (element < D // 2)
        first = tl.load(head + element, mask=inside, other=0.0).to(tl.float32)
        second = tl.load(head + element + D // 2, mask=inside, other=0.0).to(tl.float32)
        return first, second


@triton.jit
def _store_pairs(
    row, first, second, heads, stride, H, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    dtype = row.dtype.element_ty
    head = row + heads.to(tl.int64) * stride
    if NEIGHBOURS:
        element = tl.arange(0, 2 * HALF)[None, :]
        both = tl.reshape(tl.join(first.to(dtype), second.to(dtype)), (HEADS, 2 * HALF))
        tl.store(head + element, both, mask=(heads < H) & (element < D))
    else:
        element = tl.arange(0, HALF)[None, :]
        inside = (heads < H) & (element < D // 2)
        tl.store(head + element, first.to(dtype), mask=inside)
        tl.store(head + element + D // 2, second.to(dtype), mask=inside)


@triton.jit
def _load_matrices(
    freqs, row, heads, H: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, EACH: tl.constexpr
):
    """Return the four elements of a token's matrices, [1, HALF]; with EACH those of `heads`, [HEADS, HALF]."""
    element = tl.arange(0, 4 * HALF)[None, :]
    if EACH:
        first = (row.to(tl.int64) * H + heads) * (2 * D)
        values = tl.load(freqs + first + element, mask=(heads < H) & (element < 2 * D), other=0.0)
        values = tl.reshape(values, (HEADS, HALF, 2, 2))
    else:
        values = tl.load(freqs + row.to(tl.int64) * (2 * D) + element, mask=element < 2 * D, other=0.0)
        values = tl.reshape(values, (1, HALF, 2, 2))
    column_0, column_1 = tl.split(values.to(tl.float32))
    f00, f10 = tl.split(column_0)
    f01, f11 = tl.split(column_1)
    return f00, f01, f10, f11


@triton.jit
def _finish(
    first, second, inverse, weight, out_row, matrices, heads, out_head, H,
    D: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr, NORM: tl.constexpr, NEIGHBOURS: tl.constexpr,
):  # fmt: skip
    """Apply norm and weight to some heads, rotate and store them."""
    if NORM == "heads":
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(first * first + second * second, axis=1) / D + inverse))[:, None]
    if NORM != "none":
        first *= inverse
        second *= inverse
    if weight is not None:
        if NORM == "heads":
            w_first, w_second = _load_pairs(weight, tl.zeros((1, 1), tl.int32), 0, H, D, 1, HALF, NEIGHBOURS)  # pyright: ignore[reportGeneralTypeIssues]
        else:
            w_first, w_second = _load_pairs(weight, heads, D, H, D, HEADS, HALF, NEIGHBOURS)  # pyright: ignore[reportGeneralTypeIssues]
        first *= w_first
        second *= w_second
    f00, f01, f10, f11 = matrices
    turned_first = tl.fma(first, f00, second * f01)
    turned_second = tl.fma(first, f10, second * f11)
    _store_pairs(out_row, turned_first, turned_second, heads, out_head, H, D, HEADS, HALF, NEIGHBOURS)


@triton.jit
def _norm_rope_token(
    x_row, weight, out_row, freqs, token, x_head, out_head, eps, H: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, HEAD: tl.constexpr, TAIL: tl.constexpr,
    NORM: tl.constexpr, NEIGHBOURS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Norm and rotate the H heads of one token, HEAD and TAIL of them. NORM is "heads", "all" or "none"."""
    heads = tl.arange(0, HEAD)[:, None]
    matrices = _load_matrices(freqs, token, heads, H, D, HEAD, HALF, EACH)
    first, second = _load_pairs(x_row, heads, x_head, H, D, HEAD, HALF, NEIGHBOURS)
    if TAIL > 0:
        tail_heads = HEAD + tl.arange(0, TAIL)[:, None]
        tail_first, tail_second = _load_pairs(x_row, tail_heads, x_head, H, D, TAIL, HALF, NEIGHBOURS)
    inverse = eps
    if NORM == "all":
        squares = tl.sum(tl.sum(first * first + second * second, axis=1), axis=0)
        if TAIL > 0:
            squares += tl.sum(tl.sum(tail_first * tail_first + tail_second * tail_second, axis=1), axis=0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(squares / (H * D) + eps))
    _finish(first, second, inverse, weight, out_row, matrices, heads, out_head, H, D, HEAD, HALF, NORM, NEIGHBOURS)
    if TAIL > 0:
        if EACH:
            matrices = _load_matrices(freqs, token, tail_heads, H, D, TAIL, HALF, EACH)
        _finish(
            tail_first, tail_second, inverse, weight, out_row, matrices, tail_heads, out_head, H,
            D, TAIL, HALF, NORM, NEIGHBOURS,
        )  # fmt: skip


@triton.jit(do_not_specialize=("T",))
def norm_rope_kernel(
    q,
    k,
    q_weight,
    q_bias,
    k_weight,
    k_bias,
    freqs,
    q_out,
    k_out,
    T,
    q_sample,
    q_token,
    q_head,
    k_sample,
    k_token,
    k_head,
    q_out_sample,
    q_out_token,
    q_out_head,
    k_out_sample,
    k_out_token,
    k_out_head,
    q_eps,
    k_eps,
    Q_NORM: tl.constexpr,
    Q_WEIGHT: tl.constexpr,
    Q_HEADS: tl.constexpr,
    Q_HEAD: tl.constexpr,
    Q_TAIL: tl.constexpr,
    K_NORM: tl.constexpr,
    K_WEIGHT: tl.constexpr,
    K_HEADS: tl.constexpr,
    K_HEAD: tl.constexpr,
    K_TAIL: tl.constexpr,
    NEIGHBOURS: tl.constexpr,
    EACH: tl.constexpr,
    D: tl.constexpr,
    HALF: tl.constexpr,
):
    """One program: the query or the key of one token, side by side, so that the second finds the matrices in the cache.
    There are no biases."""
    row = tl.program_id(0) // 2
    if tl.program_id(0) % 2 == 0:
        _norm_rope_token(
            q + token_offset(row, T, q_sample, q_token), q_weight if Q_WEIGHT else None,
            q_out + token_offset(row, T, q_out_sample, q_out_token), freqs, row % T, q_head, q_out_head, q_eps,
            Q_HEADS, D, HALF, Q_HEAD, Q_TAIL, Q_NORM, NEIGHBOURS, EACH,
        )  # fmt: skip
    else:
        _norm_rope_token(
            k + token_offset(row, T, k_sample, k_token), k_weight if K_WEIGHT else None,
            k_out + token_offset(row, T, k_out_sample, k_out_token), freqs, row % T, k_head, k_out_head, k_eps,
            K_HEADS, D, HALF, K_HEAD, K_TAIL, K_NORM, NEIGHBOURS, EACH,
        )  # fmt: skip


NORM_ROPE = row_launcher(norm_rope_kernel)


def _side(heads: int, width: int, kind: str | None, weight: torch.Tensor | None) -> tuple[object, ...]:
    """Return the kernel's constants of queries or of keys: the norm's extent, whether it has a weight, the heads."""
    of_all = weight is not None and weight.numel() == heads * width != width
    head = 1 << (heads.bit_length() - 1)
    tail = 1 << (heads - head - 1).bit_length() if heads > head else 0
    return "none" if kind is None else "all" if of_all else "heads", weight is not None, heads, head, tail


def _as_read(tensors: Tensors) -> Tensors:
    return [*dense(tensors[:-1]), tensors[-1].contiguous()]


def launch_norm_rope(
    tensors: Tensors,
    q_kind: str | None,
    q_eps: float,
    k_kind: str | None,
    k_eps: float,
    pairs: str,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Layout | None:
    """Return the launch on checked, non-empty q, k, weight and bias of the norm of each, and freqs like these; None
    where no program holds all heads of a token, or can write to `out`."""
    q, k, q_weight, _, k_weight, _, freqs = tensors
    heads, width = (q.shape[2], k.shape[2]), q.shape[3]
    writable = out is None or out[0].stride(-1) == out[1].stride(-1) == 1
    if not writable or not fits_registers(max(heads) * width, 1):
        return None
    results = out or [x.new_empty(x.shape) for x in (q, k)]
    half = 1 << (width // 2 - 1).bit_length()
    sides = (*_side(heads[0], width, q_kind, q_weight), *_side(heads[1], width, k_kind, k_weight))
    warps = max(1, min(16, (1 << (max(heads).bit_length() - 1)) * 2 * half // 1024))
    form = (*sides, pairs == "neighbours", freqs.numel() != q.shape[1] * width * 2, width, half, warps)
    # Of samples, tokens and heads; 0 along an axis of size 1.
    sized = [pair for x in (*dense((q, k)), *results) for pair in zip(x.stride()[:3], x.shape, strict=False)]
    strides = [stride if size > 1 else 0 for stride, size in sized]
    grid = (2 * q.shape[0] * q.shape[1], 1)
    return Layout(NORM_ROPE, form, grid, (q.shape[1], *strides, q_eps, k_eps), tensors, _as_read)
