"""Activation functions and their gates, quantized for the next linear, one program a token."""

import torch
import triton
import triton.language as tl

from ..reference import new_quantized
from ..transform import ChannelTransform
from .launching import RepeatedLaunch, on_device, remembered
from .rows import (
    dense_channels,
    input_offsets,
    magnitude_bits,
    reciprocal,
    row_blocks,
    store_quantized,
    store_scale,
    token_offset,
    token_strides,
    transformed,
)


@triton.jit
def _activated(x, ACTIVATION: tl.constexpr, INTERPRETED: tl.constexpr):
    """silu, gelu_tanh or gelu of float32; 0 for 0."""
    if ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        # (1 + tanh u) / 2 is the sigmoid of 2 u, in which nothing cancels
        argument = x if ACTIVATION == "silu" else x * tl.fma(x * x, 0.07135481627260025, 1.5957691216057308)
        return x * reciprocal(1.0 + tl.exp(-argument), INTERPRETED)


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
        # activations are 0 where there is no gate
        values += tl.load(beside_row + offsets, mask=offsets < FIRST, other=0.0).to(tl.float32)
    return transformed(values, smooth, offsets, K, HAS_SMOOTH, INTERPRETED, BLOCK, GROUP)


@triton.jit
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


# Launches and the integers that go with their tensors, by the keys of `kernels/producers.py`.
_launches: dict[tuple, tuple[RepeatedLaunch, tuple[int, ...]]] = {}


def activate_quantize_constants(
    channels: int,
    activation: str,
    group: int,
    activation_bits: int,
    interpreted: bool,
    has_up: bool,
    has_beside: bool,
    has_smooth: bool,
) -> tuple[dict[str, object], dict[str, object]]:
    """The kernel's constants and compilation options."""
    head, tail, _, warps = row_blocks(channels, group)
    constants = {
        "ACTIVATION": activation,
        "HAS_UP": has_up,
        "HAS_BESIDE": has_beside,
        "HAS_SMOOTH": has_smooth,
        "REMAINDER": activation_bits == 16,
        "INTERPRETED": interpreted,
        "HEAD": head,
        "TAIL": tail,
        "GROUP": group,
    }
    return constants, {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": False}


def _tokens(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """[..., F] as [B, T, F] or [T, F] with dense channels."""
    if tensor is None:
        return None
    tensor = dense_channels(tensor)
    return tensor if tensor.ndim in (2, 3) else tensor.reshape(-1, tensor.shape[-1])


def launch_activation_producer(
    key: tuple,
    gate: torch.Tensor,
    activation: str,
    up: torch.Tensor | None,
    beside: torch.Tensor | None,
    transform: ChannelTransform,
    activation_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on checked, non-empty arguments of which `key` holds all that is not data."""
    parts = (_tokens(gate), _tokens(up), _tokens(beside))
    smooth = None if transform.smooth is None else transform.smooth.float().contiguous()
    x = parts[0]
    assert x is not None
    tensors = [x if tensor is None else tensor for tensor in (*parts, smooth)]
    first = 0 if beside is None else beside.shape[-1]
    channels = first + x.shape[-1]

    def prepare() -> tuple[RepeatedLaunch, tuple[int, ...]]:
        given = (up is not None, beside is not None, smooth is not None)
        group = transform.rotation_group or 1
        constants, options = activate_quantize_constants(
            channels, activation, group, activation_bits, not x.is_cuda, *given
        )
        launch = RepeatedLaunch(activate_quantize_kernel, (x.numel() // x.shape[-1], 1), constants, options)
        strides = (stride for part in parts for stride in token_strides(part))
        return launch, (x.shape[-2], channels, first, *strides)

    launch, integers = remembered(_launches, key, tensors, prepare)
    q, q_scale = new_quantized(x, channels, activation_bits)
    with on_device(x.device):
        launch(*tensors, q, q_scale, *integers)
    return q, q_scale
