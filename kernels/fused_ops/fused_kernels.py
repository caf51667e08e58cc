"""Kernels and launches of fused ops of rows, one program a token: norms, modulated and quantized for the next linear,
or gated and added to the residual; activation functions and their gates, quantized."""

import torch
import triton
import triton.language as tl

from ..launching.launching import Layout, dense
from ..linear.rows import (
    fits_registers,
    input_offsets,
    magnitude_bits,
    modulation_offset,
    reciprocal,
    row_blocks,
    row_launcher,
    store_quantized,
    store_scale,
    token_offset,
    token_strides,
    transformed,
)
from ..operators import Tensors


@triton.jit
def _load_read_once(row, offsets, K):
    """Load a part of one row in float32, zeros beyond K. It leaves the cache first."""
    return tl.load(row + offsets, mask=offsets < K, other=0.0, eviction_policy="evict_first").to(tl.float32)


@triton.jit
def _load_shared(row, offsets, K):
    """Load a part of a row that other programs read too. It leaves the cache last."""
    return tl.load(row + offsets, mask=offsets < K, other=0.0, eviction_policy="evict_last").to(tl.float32)


@triton.jit
def _centered(values, mean, offsets, K):
    return tl.where(offsets < K, values - mean, 0.0)


@triton.jit
def _normalized(x_row, head_offsets, tail_offsets, K, eps, NORM: tl.constexpr, TAIL: tl.constexpr):
    """Return HEAD and TAIL of a row after its NORM: "rms", "layer" or "none". Without a TAIL both are HEAD."""
    head = _load_read_once(x_row, head_offsets, K)
    tail = head
    if TAIL > 0:
        tail = _load_read_once(x_row, tail_offsets, K)
    if NORM == "layer":
        total = tl.sum(head, axis=0)
        if TAIL > 0:
            total += tl.sum(tail, axis=0)
        mean = total / K
        head = _centered(head, mean, head_offsets, K)
        if TAIL > 0:
            tail = _centered(tail, mean, tail_offsets, K)
    if NORM != "none":
        squares = tl.sum(head * head, axis=0)
        if TAIL > 0:
            squares += tl.sum(tail * tail, axis=0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(squares / K + eps))
        head *= inverse
        if TAIL > 0:
            tail *= inverse
    return head, tail


@triton.jit
def _affine(values, weight, bias, offsets, K):
    if weight is not None:
        values *= _load_shared(weight, offsets, K)
    if bias is not None:
        values += _load_shared(bias, offsets, K)
    return values


@triton.jit
def _modulated(values, scale_row, shift_row, offsets, K):
    if scale_row is not None and shift_row is not None:
        values = tl.fma(values, _load_shared(scale_row, offsets, K), _load_shared(shift_row, offsets, K))
    elif scale_row is not None:
        values *= _load_shared(scale_row, offsets, K)
    elif shift_row is not None:
        values += _load_shared(shift_row, offsets, K)
    return values


@triton.jit(do_not_specialize=("T",))
def norm_quantize_kernel(
    x,
    weight,
    bias,
    scale,
    shift,
    smooth,
    rows,
    q,
    q_scale,
    T,
    K,
    x_sample,
    x_token,
    scale_sample,
    scale_token,
    shift_sample,
    shift_token,
    eps,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    REMAINDER: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: norm(x) scale + shift of one token, smoothed, rotated and quantized as activations are.

    Strides of samples and tokens are 0 where one row serves all.
    """
    row = tl.program_id(0)
    weight = weight if HAS_WEIGHT else None
    bias = bias if HAS_BIAS else None
    smooth = smooth if HAS_SMOOTH else None
    rows = rows if HAS_ROWS else None
    x_row = x + token_offset(row, T, x_sample, x_token)
    scale_row = scale + modulation_offset(row, T, rows, scale_sample, scale_token) if HAS_SCALE else None
    shift_row = shift + modulation_offset(row, T, rows, shift_sample, shift_token) if HAS_SHIFT else None
    q_row = q + row.to(tl.int64) * (2 * K if REMAINDER else K)

    head_offsets = input_offsets(0, HEAD, GROUP)
    tail_offsets = head_offsets
    if TAIL > 0:
        tail_offsets = input_offsets(HEAD, TAIL, GROUP)
    head, tail = _normalized(x_row, head_offsets, tail_offsets, K, eps, NORM, TAIL)
    head = _affine(head, weight, bias, head_offsets, K)
    head = _modulated(head, scale_row, shift_row, head_offsets, K)
    head = transformed(head, smooth, head_offsets, K, HEAD, GROUP)
    largest = tl.max(magnitude_bits(head), axis=0)
    if TAIL > 0:
        tail = _affine(tail, weight, bias, tail_offsets, K)
        tail = _modulated(tail, scale_row, shift_row, tail_offsets, K)
        tail = transformed(tail, smooth, tail_offsets, K, TAIL, GROUP)
        largest = tl.maximum(largest, tl.max(magnitude_bits(tail), axis=0))

    inverse_scale, broken = store_scale(q_scale + row, largest)
    store_quantized(q_row, head, inverse_scale, broken, tl.arange(0, HEAD), K, REMAINDER)
    if TAIL > 0:
        store_quantized(q_row, tail, inverse_scale, broken, HEAD + tl.arange(0, TAIL), K, REMAINDER)


@triton.jit
def _store_sum(out_row, values, residual_row, gate_row, weight, bias, offsets, K):
    values = _affine(values, weight, bias, offsets, K)
    result = _load_read_once(residual_row, offsets, K)
    if gate_row is not None:
        result = tl.fma(_load_shared(gate_row, offsets, K), values, result)
    else:
        result += values
    tl.store(out_row + offsets, result.to(out_row.dtype.element_ty), mask=offsets < K)


@triton.jit(do_not_specialize=("T",))
def gated_residual_kernel(
    residual,
    x,
    gate,
    weight,
    bias,
    rows,
    out,
    T,
    K,
    residual_sample,
    residual_token,
    x_sample,
    x_token,
    gate_sample,
    gate_token,
    eps,
    NORM: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_GATE: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
):
    """One program: residual + gate norm(x) of one token. `out` may be `residual`."""
    row = tl.program_id(0)
    weight = weight if HAS_WEIGHT else None
    bias = bias if HAS_BIAS else None
    rows = rows if HAS_ROWS else None
    x_row = x + token_offset(row, T, x_sample, x_token)
    residual_row = residual + token_offset(row, T, residual_sample, residual_token)
    gate_row = gate + modulation_offset(row, T, rows, gate_sample, gate_token) if HAS_GATE else None
    out_row = out + row.to(tl.int64) * K
    first = tl.arange(0, HEAD)
    second = first
    if TAIL > 0:
        second = HEAD + tl.arange(0, TAIL)
    head, tail = _normalized(x_row, first, second, K, eps, NORM, TAIL)
    _store_sum(out_row, head, residual_row, gate_row, weight, bias, first, K)
    if TAIL > 0:
        _store_sum(out_row, tail, residual_row, gate_row, weight, bias, second, K)


NORM_QUANTIZE = row_launcher(norm_quantize_kernel)


def launch_norm_quantize(
    tensors: Tensors, kind: str, eps: float, rotation_group: int | None, activation_bits: int
) -> Layout | None:
    """Return the launch on checked, non-empty x, weight, bias, scale, shift, smooth and rows like these; None for rows
    that no program holds."""
    x, *others = tensors
    channels, group = x.shape[-1], rotation_group or 1
    if not fits_registers(channels, group):
        return None
    head, tail, _, warps = row_blocks(channels, group)
    form = (kind, *(tensor is not None for tensor in others), activation_bits == 16, head, tail, group, warps)
    strides = (stride for tensor in dense((x, *others[2:4])) for stride in token_strides(tensor))
    numbers = (x.shape[-2], channels, *strides, eps)
    return Layout(NORM_QUANTIZE, form, (x.numel() // channels, 1), numbers, tensors, dense)


GATED_RESIDUAL = row_launcher(gated_residual_kernel)


def launch_gated_residual(
    tensors: Tensors, kind: str | None, eps: float, out: tuple[torch.Tensor] | None = None
) -> Layout | None:
    """Return the launch on checked, non-empty residual, x, gate, weight, bias and rows like these; None for rows that
    no program holds."""
    _, x, gate, *others = tensors
    channels = x.shape[-1]
    if not fits_registers(channels, 1):
        return None
    head, tail, _, warps = row_blocks(channels, 1)
    form = (kind or "none", *(tensor is not None for tensor in (*others, gate)), head, tail, warps)
    strides = (stride for tensor in dense(tensors[:3]) for stride in token_strides(tensor))
    numbers = (x.shape[-2], channels, *strides, eps)
    return Layout(GATED_RESIDUAL, form, (x.numel() // channels, 1), numbers, tensors, dense)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr):
    """Return silu, gelu_tanh, gelu or sigmoid of float32; 0 for 0, but for the sigmoid."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh u) / 2 is the sigmoid of 2 u, in which nothing cancels
        argument = x * tl.fma(x * x, 0.07135481627260025, 1.5957691216057308) if ACTIVATION == "gelu_tanh" else x
        sigmoid = reciprocal(1.0 + tl.exp(-argument))
        return sigmoid if ACTIVATION == "sigmoid" else x * sigmoid


@triton.jit
def _load_activated(
    gate_row, up_row, beside_row, smooth, start, K, FIRST, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Return BLOCK channels of one row [beside | activation(gate) up], smoothed and rotated; zeros beyond K."""
    offsets = input_offsets(start, BLOCK, GROUP)
    inside = offsets < K
    if beside_row is not None:
        inside = inside & (offsets >= FIRST)
    values = tl.load(gate_row + (offsets - FIRST), mask=inside, other=0.0).to(tl.float32)
    values = _activated(values, ACTIVATION)
    if up_row is not None:
        values *= tl.load(up_row + (offsets - FIRST), mask=inside, other=0.0).to(tl.float32)
    if beside_row is not None:
        # 0 where there is no gate: the activation, or what it is multiplied with
        values += tl.load(beside_row + offsets, mask=offsets < FIRST, other=0.0).to(tl.float32)
    return transformed(values, smooth, offsets, K, BLOCK, GROUP)


@triton.jit(do_not_specialize=("T",))
def activate_quantize_kernel(
    gate,
    up,
    beside,
    smooth,
    q,
    q_scale,
    T,
    K,
    FIRST,
    gate_sample,
    gate_token,
    up_sample,
    up_token,
    beside_sample,
    beside_token,
    ACTIVATION: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    REMAINDER: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: `beside` [B, T, FIRST] and behind it activation(gate) up [B, T, K - FIRST], one token, quantized."""
    row = tl.program_id(0)
    gate_row = gate + token_offset(row, T, gate_sample, gate_token)
    up_row = up + token_offset(row, T, up_sample, up_token) if HAS_UP else None
    beside_row = beside + token_offset(row, T, beside_sample, beside_token) if HAS_BESIDE else None
    smooth = smooth if HAS_SMOOTH else None
    q_row = q + row.to(tl.int64) * (2 * K if REMAINDER else K)

    head = _load_activated(gate_row, up_row, beside_row, smooth, 0, K, FIRST, ACTIVATION, HEAD, GROUP)
    largest = tl.max(magnitude_bits(head), axis=0)
    if TAIL > 0:
        tail = _load_activated(gate_row, up_row, beside_row, smooth, HEAD, K, FIRST, ACTIVATION, TAIL, GROUP)
        largest = tl.maximum(largest, tl.max(magnitude_bits(tail), axis=0))

    inverse_scale, broken = store_scale(q_scale + row, largest)
    store_quantized(q_row, head, inverse_scale, broken, tl.arange(0, HEAD), K, REMAINDER)
    if TAIL > 0:
        store_quantized(q_row, tail, inverse_scale, broken, HEAD + tl.arange(0, TAIL), K, REMAINDER)


ACTIVATE_QUANTIZE = row_launcher(activate_quantize_kernel)


def _tokens(tensors: Tensors) -> Tensors:
    """Reshape [..., F] to [B, T, F] or [T, F]."""
    return [part if part is None or part.ndim < 4 else part.reshape(-1, part.shape[-1]) for part in dense(tensors)]


def launch_activate_quantize(
    tensors: Tensors, activation: str, rotation_group: int | None, activation_bits: int
) -> Layout | None:
    """Return the launch on checked, non-empty gate, up, beside and smooth like these; None for rows that no program
    holds."""
    gate, _, beside, _ = tensors
    first, group = 0 if beside is None else beside.shape[-1], rotation_group or 1
    channels = first + gate.shape[-1]
    if not fits_registers(channels, group):
        return None
    head, tail, _, warps = row_blocks(channels, group)
    form = (activation, *(part is not None for part in tensors[1:]), activation_bits == 16, head, tail, group, warps)
    strides = (stride for part in _tokens(tensors[:3]) for stride in token_strides(part))
    numbers = (gate.numel() // gate.shape[-1] if gate.ndim > 3 else gate.shape[-2], channels, first, *strides)
    return Layout(ACTIVATE_QUANTIZE, form, (gate.numel() // gate.shape[-1], 1), numbers, tensors, _tokens)
