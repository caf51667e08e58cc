"""Activation functions and their gates, quantized for the next linear, one program a token."""

import triton
import triton.language as tl

from ..operators import Tensors
from .launching import Layout, dense
from .rows import (
    fits_registers,
    input_offsets,
    magnitude_bits,
    reciprocal,
    row_blocks,
    row_launcher,
    store_quantized,
    store_scale,
    token_offset,
    token_strides,
    transformed,
)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr):
    """silu, gelu_tanh, gelu or sigmoid of float32; 0 for 0, but for the sigmoid."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh u) / 2 is the sigmoid of 2 u, in which nothing cancels
        argument = x * tl.fma(x * x, 0.07135481627260025, 1.5957691216057308) if ACTIVATION == "gelu_tanh" else x
        sigmoid = reciprocal(1.0 + tl.exp(-argument), INTERPRETED)
        return sigmoid if ACTIVATION == "sigmoid" else x * sigmoid


@triton.jit
def _load_activated(
    gate_row,
    up_row,
    beside_row,
    smooth,
    start,
    K,
    FIRST,
    ACTIVATION: tl.constexpr,
    HAS_UP: tl.constexpr,
    HAS_BESIDE: tl.constexpr,
    HAS_SMOOTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
):
    """BLOCK channels from `start` on of one row [beside | activation(gate) up] in float32, smoothed and rotated; zeros
    beyond K."""
    offsets = input_offsets(start, BLOCK, GROUP)
    inside = offsets < K
    if HAS_BESIDE:
        inside = inside & (offsets >= FIRST)
    values = tl.load(gate_row + (offsets - FIRST), mask=inside, other=0.0).to(tl.float32)
    values = _activated(values, ACTIVATION, INTERPRETED)
    if HAS_UP:
        values *= tl.load(up_row + (offsets - FIRST), mask=inside, other=0.0).to(tl.float32)
    if HAS_BESIDE:
        # 0 where there is no gate: the activation, or what it is multiplied with
        values += tl.load(beside_row + offsets, mask=offsets < FIRST, other=0.0).to(tl.float32)
    return transformed(values, smooth, offsets, K, HAS_SMOOTH, INTERPRETED, BLOCK, GROUP)


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
    INTERPRETED: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    GROUP: tl.constexpr,
):
    """One program: `beside` [B, T, FIRST] and behind it activation(gate) up [B, T, K - FIRST], one token, quantized."""
    row = tl.program_id(0)
    gate_row = gate + token_offset(row, T, gate_sample, gate_token)
    up_row = up + token_offset(row, T, up_sample, up_token)
    beside_row = beside + token_offset(row, T, beside_sample, beside_token)
    q_row = q + row.to(tl.int64) * (2 * K if REMAINDER else K)

    head = _load_activated(
        gate_row, up_row, beside_row, smooth, 0, K, FIRST,
        ACTIVATION, HAS_UP, HAS_BESIDE, HAS_SMOOTH, INTERPRETED, HEAD, GROUP,
    )  # fmt: skip
    largest = tl.max(magnitude_bits(head), axis=0)
    if TAIL > 0:
        tail = _load_activated(
            gate_row, up_row, beside_row, smooth, HEAD, K, FIRST,
            ACTIVATION, HAS_UP, HAS_BESIDE, HAS_SMOOTH, INTERPRETED, TAIL, GROUP,
        )  # fmt: skip
        largest = tl.maximum(largest, tl.max(magnitude_bits(tail), axis=0))

    inverse_scale, broken = store_scale(q_scale + row, largest)
    store_quantized(q_row, head, inverse_scale, broken, tl.arange(0, HEAD), K, REMAINDER)
    if TAIL > 0:
        store_quantized(q_row, tail, inverse_scale, broken, HEAD + tl.arange(0, TAIL), K, REMAINDER)


ACTIVATE_QUANTIZE = row_launcher(activate_quantize_kernel)


def _as_read(tensors: Tensors) -> Tensors:
    """[..., F] as [B, T, F] or [T, F]."""
    return [part if part is None or part.ndim < 4 else part.reshape(-1, part.shape[-1]) for part in dense(tensors)]


def launch_activate_quantize(
    tensors: Tensors, activation: str, rotation_group: int | None, activation_bits: int
) -> Layout | None:
    """The launch on checked, non-empty gate, up, beside and smooth like these; None for rows that no program holds."""
    gate, _, beside, _ = tensors
    first, group = 0 if beside is None else beside.shape[-1], rotation_group or 1
    channels = first + gate.shape[-1]
    if not fits_registers(channels, group):
        return None
    read = _as_read(tensors)
    given = (tensor is not None for tensor in tensors[1:])
    head, tail, _, warps = row_blocks(channels, group)
    form = (activation, *given, activation_bits == 16, not gate.is_cuda, head, tail, group, warps)
    tokens = gate.numel() // gate.shape[-1] if gate.ndim > 3 else gate.shape[-2]
    numbers = (tokens, channels, first, *(stride for part in read[:3] for stride in token_strides(part)))
    return Layout(ACTIVATE_QUANTIZE, form, (gate.numel() // gate.shape[-1], 1), numbers, tensors, _as_read)
