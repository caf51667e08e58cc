"""The INT8 linear in plain PyTorch: what runs on a CPU, and what the kernels share with it."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F

from ..internals.torch_functions import int_mm
from .channel_transform import UNCHANGED, ChannelTransform

_FLOAT32_MAX = torch.finfo(torch.float32).max
# Half of it, the most that clipping leaves, is the smallest that float32 holds with all its bits.
SMALLEST_SCALE = 2 * torch.finfo(torch.float32).tiny
REMAINDER_STEPS = 254
"""How finely the second int8 number of a 16-bit activation divides the step of the first."""

Quantized = tuple[torch.Tensor, torch.Tensor]
"""Rows of activations: int8 [rows, K], or [rows, 2K] for 16 bits, and their float32 scale [rows]."""


class LinearForm(NamedTuple):
    """The properties of an INT8 linear, of a weight [N, K], for which its kernels are compiled."""

    n: int
    k: int
    has_bias: bool = False
    has_one_scale: bool = False  # whether all channels of the weight share a scale
    has_factors: bool = False  # whether its input is smoothed
    rotation_group: int | None = None  # how its input is quantized
    activation_bits: int = 8


class BlockForm(NamedTuple):
    """The work between a block's linears, as far as it is known before the block runs."""

    width: int  # channels of its stream
    enters: LinearForm  # a linear that reads the stream
    leaves: LinearForm  # one that ends the feed-forward
    head: int  # channels of a head of queries and keys that are normed; 0 for none
    # Whether norms with weights stand before and after attention and feed-forward, scaled and gated; else norms without
    # weights before them, scaled and shifted.
    is_sandwiched: bool
    is_gated: bool  # whether the feed-forward is silu(gate) up; else it is gelu(x)


def quantized_layouts(
    x: torch.Tensor, channels: int, transform: ChannelTransform, activation_bits: int
) -> list[tuple[Sequence[int], torch.dtype]]:
    """Return shapes and dtypes of the rows of `x` [..., any], quantized with so many `channels`.

    Raises TypeError or ValueError for a transform or a number of bits that they cannot have.
    """
    if activation_bits not in (8, 16):
        raise ValueError(f"activation_bits must be 8 or 16, got {activation_bits!r}")
    transform.check(channels)
    rows = math.prod(x.shape[:-1])
    return [((rows, channels * (activation_bits // 8)), torch.int8), ((rows,), torch.float32)]


def quantize_activations_reference(
    x: torch.Tensor, transform: ChannelTransform = UNCHANGED, activation_bits: int = 8
) -> Quantized:
    """Return `quantize_activations` of checked arguments in plain PyTorch, on any device."""
    values = transform.to_activations(x)
    absmax = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(len(values))
    finite = torch.isfinite(absmax)
    # A tensor divisor: PyTorch turns a division by a Python number into a multiplication on a GPU.
    scale = torch.where(finite, absmax / torch.full_like(absmax, 127), float("nan"))
    inverse_scale = (torch.full_like(absmax, 127) / torch.where(absmax > 0, absmax, 1.0)).clamp(max=_FLOAT32_MAX)
    steps = values * inverse_scale[:, None]
    q = steps.round()
    if activation_bits == 16:
        q = torch.cat([q, ((steps - q) * REMAINDER_STEPS).round()], dim=1)
    return torch.where(finite[:, None], q, 0.0).to(torch.int8), scale


# 1024 * 127^2 < 2^24: a float32 sum of this many int8 products is exact in any order.
_EXACT_CHANNELS = 1024


def int8_accumulate_reference(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Multiply int8 [M, K] or [M, 2K] x int8 [N, K] -> int32 [M, N], exact, any device and shape.

    Of 16-bit activations [M, 2K] the sums over the remainders are rounded to steps, halves away from zero. A GPU runs
    `torch._int_mm`, a CPU float32 slices, since `_int_mm` takes seconds there without VNNI.
    """
    channels = weight.shape[1]
    if q.shape[1] != channels:
        remainders = int8_accumulate_reference(q[:, channels:], weight)
        halves = remainders.sign() * (REMAINDER_STEPS // 2)
        steps = torch.div(remainders + halves, REMAINDER_STEPS, rounding_mode="trunc")
        return int8_accumulate_reference(q[:, :channels], weight) + steps
    if not q.is_cuda:
        accumulator = torch.zeros((q.shape[0], weight.shape[0]), dtype=torch.int32, device=q.device)
        for q_slice, w_slice in zip(q.split(_EXACT_CHANNELS, dim=1), weight.split(_EXACT_CHANNELS, dim=1), strict=True):
            accumulator += (q_slice.float() @ w_slice.float().t()).to(torch.int32)
        return accumulator
    # cuBLASLt takes any number of 32s; zeros change no sum.
    m, n = q.shape[0], weight.shape[0]
    pad_k = -channels % 32
    q = F.pad(q, (0, pad_k, 0, -m % 32))
    weight = F.pad(weight, (0, pad_k, 0, -n % 32))
    return int_mm(q, weight.t())[:m, :n]
