"""What stands between the linears of a block, each in one pass over memory: norms, activations, gates, rotary
positions.

Those before a linear write its quantized input. Where no Triton kernel runs, the references of `reference_producers`
do.
"""

from typing import Literal

import torch

from . import reference_producers as reference
from .reference_producers import ACTIVATIONS, Norm
from .transform import UNCHANGED, ChannelTransform


def norm_quantize(
    x: torch.Tensor,
    norm: Norm,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    activation_bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm(x) (1 + scale) + shift, quantized per token as `quantize_activations` does; float32 in between.

    Args:
        x: [B, T, K] bf16, fp16 or fp32.
        norm: the norm over K.
        scale, shift: [B or 1, T or 1, K], or None.
        transform: what is done to the channels before they are quantized.
        activation_bits: 8 or 16.

    Returns:
        int8 [B T, K], or [B T, 2K] for 16 bits, and float32 per-token scale [B T].
    """
    return reference.norm_quantize_reference(x, norm, scale, shift, transform, activation_bits)


def activate_quantize(
    gate: torch.Tensor,
    activation: str,
    up: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    activation_bits: int = 8,
) -> tuple[torch.Tensor, torch.Tensor]:
    """activation(gate) up behind the channels of `beside`, quantized per token; float32 in between.

    Args:
        gate, up: [..., F] bf16, fp16 or fp32; either may be some columns of a wider tensor.
        activation: one of ACTIVATIONS.
        beside: [..., K - F] channels that come first, as they are; or None.
        transform: what is done to all K channels before they are quantized.
        activation_bits: 8 or 16.

    Returns:
        int8 [rows, K], or [rows, 2K] for 16 bits, and float32 per-token scale [rows].

    Raises ValueError for an unknown activation.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    return reference.activate_quantize_reference(gate, activation, up, beside, transform, activation_bits)


def gated_residual(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None = None,
    norm: Norm | None = None,
    tanh: bool = False,
) -> torch.Tensor:
    """residual + gate norm(x), with the gate's tanh where `tanh` says so; float32 in between.

    Args:
        residual, x: [B, T, K] bf16, fp16 or fp32.
        gate: [B or 1, T or 1, K], or None for ones.
        norm: the norm of `x`, or None.

    Returns:
        A new tensor like `residual`.
    """
    return reference.gated_residual_reference(residual, x, gate, norm, tanh)


def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    freqs: torch.Tensor,
    pairs: Literal["neighbours", "halves"],
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norms of queries and keys and their rotary positions; float32 in between.

    Args:
        q, k: [B, T, H, D] bf16, fp16 or fp32, of any strides.
        q_norm, k_norm: "rms" norms over the head (weight [D]) or over all heads (weight [H D]), or None.
        freqs: float32 [..., T, D / 2, 2, 2], axes of size 1 before T: the matrix by which each pair of elements is
            multiplied.
        pairs: which elements of a head are a pair: 2i and 2i + 1, or i and i + D / 2.
        out: two tensors like q and k to write into, such as slices of a longer sequence; new ones when None.

    Returns:
        Both results, [B, T, H, D].
    """
    return reference.norm_rope_reference(q, k, q_norm, k_norm, freqs, pairs, out)
