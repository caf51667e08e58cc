"""The producers in plain PyTorch: what runs on a CPU, and what the kernels are compared with."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from .reference import quantize_activations_reference
from .transform import ChannelTransform

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
}


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


def norm_quantize_reference(
    x: torch.Tensor,
    norm: Norm,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    transform: ChannelTransform,
    activation_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_quantize` in plain PyTorch, any device."""
    values = normalized(x, norm)
    if scale is not None:
        values = values * (1 + scale.float())
    if shift is not None:
        values = values + shift.float()
    return quantize_activations_reference(values.flatten(0, -2), transform, activation_bits)


def activate_quantize_reference(
    gate: torch.Tensor,
    activation: str,
    up: torch.Tensor | None,
    beside: torch.Tensor | None,
    transform: ChannelTransform,
    activation_bits: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`activate_quantize` in plain PyTorch, any device."""
    values = ACTIVATIONS[activation](gate.float())
    if up is not None:
        values = values * up.float()
    if beside is not None:
        values = torch.cat([beside.float(), values], dim=-1)
    return quantize_activations_reference(values.flatten(0, -2), transform, activation_bits)


def gated_residual_reference(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, norm: Norm | None, tanh: bool
) -> torch.Tensor:
    """`gated_residual` in plain PyTorch, any device."""
    values = x.float() if norm is None else normalized(x, norm)
    if gate is not None:
        values = values * (gate.float().tanh() if tanh else gate.float())
    return (residual.float() + values).to(residual.dtype)


def norm_rope_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    freqs: torch.Tensor,
    pairs: str,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_rope` in plain PyTorch, any device."""
    results = (_norm_rope(q, q_norm, freqs, pairs), _norm_rope(k, k_norm, freqs, pairs))
    if out is None:
        return results
    for target, result in zip(out, results, strict=True):
        target.copy_(result)
    return out


def _norm_rope(x: torch.Tensor, norm: Norm | None, freqs: torch.Tensor, pairs: str) -> torch.Tensor:
    heads, width = x.shape[-2:]
    values = x.float()
    if norm is not None and norm.weight is not None and norm.weight.numel() == heads * width != width:
        values = normalized(values.flatten(-2), norm).unflatten(-1, (heads, width))
    elif norm is not None:
        values = normalized(values, norm)
    # [T, 1, D / 2, 2, 2]: the same for all samples and heads
    matrix = freqs.reshape(x.shape[-3], 1, width // 2, 2, 2).float()
    if pairs == "halves":
        first, second = values.chunk(2, dim=-1)
    else:
        first, second = values[..., ::2], values[..., 1::2]
    rotated = [matrix[..., row, 0] * first + matrix[..., row, 1] * second for row in (0, 1)]
    result = torch.cat(rotated, dim=-1) if pairs == "halves" else torch.stack(rotated, dim=-1).flatten(-2)
    return result.to(x.dtype)
