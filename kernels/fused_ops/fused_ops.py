"""The fused ops between linears: norms, activations and gates that quantize, gated residuals, rotary positions.

Here an op checks its arguments and has its reference; `launch_...` of its name, in the file that its decorator names,
launches its kernel. All raise TypeError or ValueError for a wrong dtype, shape, device, group, number of bits or name.
Those that quantize raise RuntimeError where an argument needs a gradient, which rounding does not have.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F

from ..checks import check_modulation, check_rows, check_tokens, check_vector
from ..linear.channel_transform import UNCHANGED, ChannelTransform
from ..linear.linear_reference import Quantized, quantize_activations_reference, quantized_layouts
from ..operators import Operation, operator

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}
"""By name. A sigmoid is not 0 for 0, so that only one with `up` is quantized."""


@dataclass(frozen=True, eq=False)
class Norm:
    """A norm over the last axis: "rms", or "layer" which subtracts the mean first. `weight` and `bias` are [K]."""

    kind: Literal["rms", "layer"]
    eps: float
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def normalized(x: torch.Tensor, norm: Norm) -> torch.Tensor:
    """Return norm(x) over the last axis in float32."""
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
    """Return norm(x) scale + shift in float32, or x scale + shift, with the arguments of `norm_quantize`."""
    values = x.float() if norm is None else normalized(x, norm)
    if scale is not None:
        values = values * _rows_of(scale, rows)
    return values if shift is None else values + _rows_of(shift, rows)


def _rows_of(modulation: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """Return the modulation in float32, its `rows` of the tokens where they are given."""
    return (modulation if rows is None else modulation.index_select(-2, rows)).float()


def _check_norm(norm: Norm, channels: int) -> None:
    if norm.kind not in ("rms", "layer"):
        raise ValueError(f"a norm's kind must be rms or layer, got {norm.kind!r}")
    for name, vector in (("the norm's weight", norm.weight), ("the norm's bias", norm.bias)):
        if vector is not None:
            check_vector(name, vector, channels, "K")


@operator(kernel="fused_ops.fused_kernels", rounds=True)
def norm_quantize(
    x: torch.Tensor,
    norm: Norm,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    activation_bits: int = 8,
    rows: torch.Tensor | None = None,
) -> Operation[Quantized]:
    """Quantize norm(x) scale + shift per token as `quantize_activations` does; float32 in between.

    Args:
        x: [B, T, K] or [T, K], bf16, fp16 or fp32.
        scale, shift: [B or 1, T or 1, K], with as many axes as `x`, or None.
        transform: of the channels before they are quantized.
        activation_bits: 8 or 16.
        rows: int32 [T], or None: which row of scale and shift [B or 1, M, K] each token has. Each must be below M,
            which is not checked: that would wait for the GPU.

    Returns int8 [B T, K], or [B T, 2K] for 16 bits, and float32 per-token scale [B T].
    """
    check_tokens("x", x)
    _check_norm(norm, x.shape[-1])
    check_modulation(x, rows, scale=scale, shift=shift)
    yield quantized_layouts(x, x.shape[-1], transform, activation_bits)
    values = modulated(x, norm, scale, shift, rows)
    yield quantize_activations_reference(values.flatten(0, -2), transform, activation_bits)


@operator(kernel="fused_ops.fused_kernels")
def gated_residual(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None = None,
    norm: Norm | None = None,
    rows: torch.Tensor | None = None,
    out: tuple[torch.Tensor] | None = None,
) -> Operation[torch.Tensor]:
    """Return residual + gate norm(x) in the dtype of `residual`; float32 in between.

    Args:
        residual, x: [B, T, K] or [T, K], bf16, fp16 or fp32.
        gate: [B or 1, T or 1, K], with as many axes as `x`, or None for ones.
        rows: which row of `gate` each token has, as in `norm_quantize`; or None.
        out: the contiguous tensor to write into, which may be `residual`; a new one when None.
    """
    check_tokens("residual", residual)
    check_tokens("x", x)
    if residual.shape != x.shape:
        raise ValueError(f"x must have the residual's shape {tuple(residual.shape)}, got {tuple(x.shape)}")
    check_modulation(x, rows, gate=gate)
    if norm is not None:
        _check_norm(norm, x.shape[-1])
    target = None if out is None else out[0]
    if target is not None and (target.shape != x.shape or target.dtype != residual.dtype or not target.is_contiguous()):
        raise ValueError(f"out must be a contiguous {residual.dtype} tensor of shape {tuple(x.shape)}")
    yield [(residual.shape, residual.dtype)]
    result = (residual.float() + modulated(x, norm, gate, rows=rows)).to(residual.dtype)
    yield result if target is None else target.copy_(result)


def activated(
    gate: torch.Tensor, activation: str, up: torch.Tensor | None = None, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """Return activation(gate) up behind `beside` in float32, with the arguments of `activate_quantize`."""
    values = ACTIVATIONS[activation](gate.float())
    values = values if up is None else values * up.float()
    return values if beside is None else torch.cat([beside.float(), values], dim=-1)


@operator(kernel="fused_ops.fused_kernels", rounds=True)
def activate_quantize(
    gate: torch.Tensor,
    activation: str,
    up: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    activation_bits: int = 8,
) -> Operation[Quantized]:
    """Quantize activation(gate) up behind the channels of `beside` per token; float32 in between.

    Args:
        gate, up: [..., F] bf16, fp16 or fp32; either may be some columns of a wider tensor.
        activation: one of ACTIVATIONS.
        beside: [..., K - F] channels that come first, as they are; or None.
        transform: of all K channels before they are quantized.
        activation_bits: 8 or 16.

    Returns int8 [rows, K], or [rows, 2K] for 16 bits, and float32 per-token scale [rows].
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if activation == "sigmoid" and up is None:
        raise ValueError("a sigmoid is quantized with up, which it is the gate of")
    check_rows("gate", gate)
    if not gate.shape[-1]:
        raise ValueError(f"gate must have channels, got shape {tuple(gate.shape)}")
    for name, part, shape in (("up", up, gate.shape), ("beside", beside, gate.shape[:-1])):
        if part is not None:
            check_rows(name, part)
            if part.shape[: len(shape)] != shape or part.ndim != gate.ndim:
                raise ValueError(f"{name} must have the rows of gate {tuple(gate.shape)}, got {tuple(part.shape)}")
    channels = gate.shape[-1] + (0 if beside is None else beside.shape[-1])
    yield quantized_layouts(gate, channels, transform, activation_bits)
    values = activated(gate, activation, up, beside)
    yield quantize_activations_reference(values.flatten(0, -2), transform, activation_bits)


@operator(kernel="fused_ops.rope_kernel")
def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    freqs: torch.Tensor,
    pairs: Literal["neighbours", "halves"],
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> Operation[tuple[torch.Tensor, torch.Tensor]]:
    """Return norms of queries and keys with rotary positions, both [B, T, H, D]; float32 in between.

    Args:
        q, k: [B, T, H, D] bf16, fp16 or fp32, of any strides.
        q_norm, k_norm: "rms" norms over the head (weight [D]) or over all heads (weight [H D]), or None.
        freqs: floats [..., T, D / 2, 2, 2] for all heads, or [..., T, H, D / 2, 2, 2] for each of as many in q and k,
            axes of size 1 before T: the matrix by which each pair of elements is multiplied.
        pairs: which elements of a head are a pair: 2i and 2i + 1, or i and i + D / 2.
        out: two tensors like q and k to write into, such as slices of a longer sequence; new ones when None.
    """
    if pairs not in ("neighbours", "halves"):
        raise ValueError(f"pairs must be neighbours or halves, got {pairs!r}")
    for name, x, norm in (("q", q, q_norm), ("k", k, k_norm)):
        check_rows(name, x)
        if x.ndim != 4 or x.shape[3] % 2 or (x.shape[:2], x.shape[3]) != (q.shape[:2], q.shape[3]):
            shapes = f"{tuple(q.shape)} and {tuple(k.shape)}"
            raise ValueError(f"q and k must be [B, T, H, D] of the same B, T and even D, got {shapes}")
        if norm is not None and (norm.kind != "rms" or norm.bias is not None):
            raise ValueError(f"the norm of {name} must be an rms norm without bias")
        weight = None if norm is None else norm.weight
        if weight is not None and weight.shape not in ((x.shape[3],), (x.shape[2] * x.shape[3],)):
            sizes = f"({x.shape[3]},) or ({x.shape[2] * x.shape[3]},)"
            raise ValueError(f"the weight of the norm of {name} must have shape {sizes}, got {tuple(weight.shape)}")
    of_all = q.shape[1] * q.shape[3] * 2
    of_each = of_all * q.shape[2] if q.shape[2] == k.shape[2] else of_all
    if not freqs.is_floating_point() or freqs.shape[-2:] != (2, 2) or freqs.numel() not in (of_all, of_each):
        wanted = f"[..., {q.shape[1]}, {q.shape[3] // 2}, 2, 2], or as many for each head of q and k,"
        raise ValueError(f"freqs must be floating point {wanted}, got {freqs.dtype} {tuple(freqs.shape)}")
    for name, target, x in zip(("q", "k"), out or (), (q, k), strict=False):
        if target.shape != x.shape:
            raise ValueError(f"the output of {name} must have shape {tuple(x.shape)}, got {tuple(target.shape)}")
    yield [(q.shape, q.dtype), (k.shape, k.dtype)]
    results = (_norm_rope(q, q_norm, freqs, pairs), _norm_rope(k, k_norm, freqs, pairs))
    yield results if out is None else (out[0].copy_(results[0]), out[1].copy_(results[1]))


def _norm_rope(x: torch.Tensor, norm: Norm | None, freqs: torch.Tensor, pairs: str) -> torch.Tensor:
    heads, width = x.shape[-2:]
    values = x.float()
    if norm is not None and norm.weight is not None and norm.weight.numel() == heads * width != width:
        values = normalized(values.flatten(-2), norm).unflatten(-1, (heads, width))
    elif norm is not None:
        values = normalized(values, norm)
    # [T, 1 or H, D / 2, 2, 2]: the same for all samples
    tokens = x.shape[-3]
    of_each = 1 if freqs.numel() == tokens * width * 2 else heads
    matrix = freqs.reshape(tokens, of_each, width // 2, 2, 2).float()
    if pairs == "halves":
        first, second = values.chunk(2, dim=-1)
    else:
        first, second = values[..., ::2], values[..., 1::2]
    rotated = [matrix[..., row, 0] * first + matrix[..., row, 1] * second for row in (0, 1)]
    result = torch.cat(rotated, dim=-1) if pairs == "halves" else torch.stack(rotated, dim=-1).flatten(-2)
    return result.to(x.dtype)
