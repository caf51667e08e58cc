"""What stands between the linears of a block, each in one pass over memory: norms, activations, gates, rotary
positions.

Those before a linear write its quantized input. Where no Triton kernel runs, the references of `reference_producers`
do.
"""

from typing import Literal

import torch

from . import reference_producers as reference
from .checks import (
    check_activation_bits,
    check_float_rows,
    check_modulation,
    check_same_device,
    check_tokens,
    check_vector,
)
from .device import uses_triton
from .reference import Quantized, new_quantized
from .reference_producers import ACTIVATIONS, Norm
from .transform import UNCHANGED, ChannelTransform

# What was found to be well-formed: all of a call but its data. It is also what a kernel is prepared for.
_checked: set[tuple] = set()


def _layouts(*tensors: torch.Tensor | None) -> tuple:
    """All of the tensors but their data."""
    return tuple(
        None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.get_device())
        for tensor in tensors
    )


def _differentiated(*tensors: torch.Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def _refuse_gradient(name: str, *tensors: torch.Tensor | None) -> None:
    if _differentiated(*tensors):
        raise RuntimeError(f"{name} has no gradient, as it rounds: run it under torch.no_grad()")


def _runs_kernel(x: torch.Tensor, channels: int, transform: ChannelTransform = UNCHANGED) -> bool:
    if not uses_triton(x):
        return False
    from .fused.rows import fits_registers

    return fits_registers(channels, transform)


def _no_rows(x: torch.Tensor, channels: int, activation_bits: int) -> Quantized:
    q, scale = new_quantized(x, channels, activation_bits)
    return q, scale.zero_()


def _check_norm(norm: Norm, channels: int) -> None:
    if norm.kind not in ("rms", "layer"):
        raise ValueError(f"a norm's kind must be rms or layer, got {norm.kind!r}")
    for name, vector in (("the norm's weight", norm.weight), ("the norm's bias", norm.bias)):
        if vector is not None:
            check_vector(name, vector, channels, "K")


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
        x: [B, T, K] or [T, K], bf16, fp16 or fp32.
        norm: the norm over K.
        scale, shift: [B or 1, T or 1, K], with as many axes as `x`, or None.
        transform: what is done to the channels before they are quantized.
        activation_bits: 8 or 16.

    Returns:
        int8 [B T, K], or [B T, 2K] for 16 bits, and float32 per-token scale [B T].

    Raises:
        TypeError, ValueError: wrong dtype, shape, device, group or number of bits.
        RuntimeError: an argument needs a gradient, which rounding does not have.
    """
    tensors = (x, norm.weight, norm.bias, scale, shift, transform.smooth)
    key = (norm.kind, transform.rotation_group, activation_bits, *_layouts(*tensors))
    if key not in _checked:
        check_tokens("x", x)
        _check_norm(norm, x.shape[-1])
        check_modulation("scale", scale, x)
        check_modulation("shift", shift, x)
        check_activation_bits(activation_bits)
        transform.check(x.shape[-1])
        check_same_device(x=x, weight=norm.weight, bias=norm.bias, scale=scale, shift=shift, smooth=transform.smooth)
        _checked.add(key)
    _refuse_gradient("norm_quantize", *tensors[:-1])
    if not x.numel():
        return _no_rows(x, x.shape[-1], activation_bits)
    if _runs_kernel(x, x.shape[-1], transform):
        from .fused.norms import launch_norm_quantizer

        return launch_norm_quantizer(key, x, norm, scale, shift, transform, activation_bits)
    with torch.no_grad():
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

    Raises:
        TypeError, ValueError: unknown activation; wrong dtype, shape, device, group or number of bits.
        RuntimeError: an argument needs a gradient, which rounding does not have.
    """
    channels = gate.shape[-1] + (0 if beside is None else beside.shape[-1])
    key = (activation, transform.rotation_group, activation_bits, *_layouts(gate, up, beside, transform.smooth))
    if key not in _checked:
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
        check_float_rows("gate", gate)
        if not gate.shape[-1]:
            raise ValueError(f"gate must have channels, got shape {tuple(gate.shape)}")
        for name, part, shape in (("up", up, gate.shape), ("beside", beside, gate.shape[:-1])):
            if part is not None:
                check_float_rows(name, part)
                if part.shape[: len(shape)] != shape or part.ndim != gate.ndim:
                    raise ValueError(f"{name} must have the rows of gate {tuple(gate.shape)}, got {tuple(part.shape)}")
        check_activation_bits(activation_bits)
        transform.check(channels)
        check_same_device(gate=gate, up=up, beside=beside, smooth=transform.smooth)
        _checked.add(key)
    _refuse_gradient("activate_quantize", gate, up, beside)
    if not gate.numel():
        return _no_rows(gate, channels, activation_bits)
    if _runs_kernel(gate, channels, transform):
        from .fused.gates import launch_activation_producer

        return launch_activation_producer(key, gate, activation, up, beside, transform, activation_bits)
    with torch.no_grad():
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
        residual, x: [B, T, K] or [T, K], bf16, fp16 or fp32.
        gate: [B or 1, T or 1, K], with as many axes as `x`, or None for ones.
        norm: the norm of `x`, or None.

    Returns:
        A new tensor like `residual`.

    Raises TypeError or ValueError for a wrong dtype, shape or device.
    """
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    tensors = (residual, x, gate, weight, bias)
    key = (None if norm is None else norm.kind, tanh, *_layouts(*tensors))
    if key not in _checked:
        check_tokens("residual", residual)
        check_tokens("x", x)
        if residual.shape != x.shape:
            raise ValueError(f"x must have the residual's shape {tuple(residual.shape)}, got {tuple(x.shape)}")
        check_modulation("gate", gate, x)
        if norm is not None:
            _check_norm(norm, x.shape[-1])
        check_same_device(residual=residual, x=x, gate=gate, weight=weight, bias=bias)
        _checked.add(key)
    if residual.numel() and _runs_kernel(x, x.shape[-1]) and not _differentiated(*tensors):
        from .fused.norms import launch_gated_residual

        return launch_gated_residual(key, residual, x, gate, norm, tanh)
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

    Raises TypeError or ValueError for a wrong dtype, shape or device.
    """
    weights = tuple(None if norm is None else norm.weight for norm in (q_norm, k_norm))
    tensors = (q, k, *weights, freqs, *(out or ()))
    key = (pairs, q_norm is None, k_norm is None, *_layouts(*tensors))
    if key not in _checked:
        _check_norm_rope(q, k, q_norm, k_norm, freqs, pairs, out)
        _checked.add(key)
    longest = max(q.shape[2], k.shape[2]) * q.shape[3]
    writable = out is None or out[0].stride(-1) == out[1].stride(-1) == 1
    if q.numel() and writable and _runs_kernel(q, longest) and not _differentiated(*tensors):
        from .fused.rope import launch_norm_rope

        return launch_norm_rope(key, q, k, q_norm, k_norm, freqs, pairs == "neighbours", out)
    return reference.norm_rope_reference(q, k, q_norm, k_norm, freqs, pairs, out)


def _check_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    freqs: torch.Tensor,
    pairs: str,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    if pairs not in ("neighbours", "halves"):
        raise ValueError(f"pairs must be neighbours or halves, got {pairs!r}")
    for name, x, norm in (("q", q, q_norm), ("k", k, k_norm)):
        check_float_rows(name, x)
        if x.ndim != 4 or x.shape[3] % 2 or (x.shape[:2], x.shape[3]) != (q.shape[:2], q.shape[3]):
            shapes = f"{tuple(q.shape)} and {tuple(k.shape)}"
            raise ValueError(f"q and k must be [B, T, H, D] of the same B, T and even D, got {shapes}")
        if norm is not None and (norm.kind != "rms" or norm.bias is not None):
            raise ValueError(f"the norm of {name} must be an rms norm without bias")
        weight = None if norm is None else norm.weight
        if weight is not None and weight.shape not in ((x.shape[3],), (x.shape[2] * x.shape[3],)):
            sizes = f"({x.shape[3]},) or ({x.shape[2] * x.shape[3]},)"
            raise ValueError(f"the weight of the norm of {name} must have shape {sizes}, got {tuple(weight.shape)}")
        check_same_device(**{"q": q, name: x, "weight": weight, "freqs": freqs})
    if not freqs.is_floating_point() or freqs.shape[-2:] != (2, 2) or freqs.numel() != q.shape[1] * q.shape[3] * 2:
        wanted = f"[..., {q.shape[1]}, {q.shape[3] // 2}, 2, 2]"
        raise ValueError(f"freqs must be floating point {wanted}, got {freqs.dtype} {tuple(freqs.shape)}")
    for name, target, x in (("q", out[0], q), ("k", out[1], k)) if out else ():
        if target.shape != x.shape:
            raise ValueError(f"the output of {name} must have shape {tuple(x.shape)}, got {tuple(target.shape)}")
        check_same_device(q=q, out=target)
