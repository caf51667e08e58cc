"""Norms: modulated and quantized for the next linear, or gated and added to the residual."""

from dataclasses import dataclass
from typing import Literal

import torch

from ..checks import (
    check_modulation,
    check_modulation_rows,
    check_tokens,
    check_vector,
)
from ..operators import Operation, operator
from ..reference.linear import Quantized, quantize_activations_reference, quantized_layouts
from ..reference.transform import UNCHANGED, ChannelTransform


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last axis: "rms", or "layer" which subtracts the mean first. `weight` and `bias` are [K]."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def normalized(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """norm(x) over the last axis in float32."""
    values = x.float()
    if norm.kind == "layer":
        values = values - values.mean(-1, keepdim=True)
    values = values * (values.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
    if norm.weight is not None:
        values = values * norm.weight.float()
    return values if norm.bias is None else values + norm.bias.float()


def modulated(
    x: torch.Tensor,
    norm: Norm | None,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """norm(x) scale + shift in float32, of arguments as `norm_quantize` has them; without a norm of x as it is."""
    values = x.float() if norm is None else normalized(x, norm)
    if scale is not None:
        values = values * _chosen(scale, rows)
    return values if shift is None else values + _chosen(shift, rows)


def _chosen(modulation: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """A modulation in float32, of each token its own where `rows` choose."""
    return (modulation if rows is None else modulation.index_select(-2, rows)).float()


def _check_norm(norm: Norm, channels: int) -> None:
    if norm.kind not in ("rms", "layer"):
        raise ValueError(f"a norm's kind must be rms or layer, got {norm.kind!r}")
    for name, vector in (("the norm's weight", norm.weight), ("the norm's bias", norm.bias)):
        if vector is not None:
            check_vector(name, vector, channels, "K")


@operator(kernel="norms", rounds=True)
def norm_quantize(
    x: torch.Tensor,
    norm: Norm,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    activation_bits: int = 8,
    rows: torch.Tensor | None = None,
) -> Operation[Quantized]:
    """norm(x) scale + shift, quantized per token as `quantize_activations` does; float32 in between.

    Args:
        x: [B, T, K] or [T, K], bf16, fp16 or fp32.
        norm: the norm over K.
        scale, shift: [B or 1, T or 1, K], with as many axes as `x`, or None.
        transform: what is done to the channels before they are quantized.
        activation_bits: 8 or 16.
        rows: int32 [T], or None: which row of scale and shift [B or 1, M, K] each token has. Each must be below M,
            which is not checked: that would wait for the GPU.

    Returns:
        int8 [B T, K], or [B T, 2K] for 16 bits, and float32 per-token scale [B T].

    Raises:
        TypeError, ValueError: wrong dtype, shape, device, group or number of bits.
        RuntimeError: an argument needs a gradient, which rounding does not have.
    """
    check_tokens("x", x)
    _check_norm(norm, x.shape[-1])
    check_modulation_rows(rows, x)
    check_modulation("scale", scale, x, rows)
    check_modulation("shift", shift, x, rows)
    yield quantized_layouts(x, x.shape[-1], transform, activation_bits)
    values = modulated(x, norm, scale, shift, rows)
    yield quantize_activations_reference(values.flatten(0, -2), transform, activation_bits)


@operator(kernel="norms")
def gated_residual(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None = None,
    norm: Norm | None = None,
    rows: torch.Tensor | None = None,
    out: tuple[torch.Tensor] | None = None,
) -> Operation[torch.Tensor]:
    """residual + gate norm(x); float32 in between.

    Args:
        residual, x: [B, T, K] or [T, K], bf16, fp16 or fp32.
        gate: [B or 1, T or 1, K], with as many axes as `x`, or None for ones.
        norm: the norm of `x`, or None.
        rows: which row of `gate` each token has, as in `norm_quantize`; or None.
        out: the contiguous tensor to write into, which may be `residual`; a new one when None.

    Returns:
        The sum in the dtype of `residual`.

    Raises TypeError or ValueError for a wrong dtype, shape or device.
    """
    check_tokens("residual", residual)
    check_tokens("x", x)
    if residual.shape != x.shape:
        raise ValueError(f"x must have the residual's shape {tuple(residual.shape)}, got {tuple(x.shape)}")
    check_modulation_rows(rows, x)
    check_modulation("gate", gate, x, rows)
    if norm is not None:
        _check_norm(norm, x.shape[-1])
    target = None if out is None else out[0]
    if target is not None and (target.shape != x.shape or target.dtype != residual.dtype or not target.is_contiguous()):
        raise ValueError(f"out must be a contiguous {residual.dtype} tensor of shape {tuple(x.shape)}")
    yield [(residual.shape, residual.dtype)]
    result = (residual.float() + modulated(x, norm, gate, rows=rows)).to(residual.dtype)
    yield result if target is None else target.copy_(result)
