"""What stands between the linears of a block, each in one pass over memory: norms, activations, gates, rotary
positions.

Those before a linear write its quantized input. Where no Triton kernel runs, the references of `reference_producers`
do. To a compiler each is an opaque operator.
"""

from typing import Any, Literal

import torch

from . import reference_producers as reference
from .compilers import define_operators, watched
from .device import uses_triton
from .producer_checks import check_activate_quantize, check_gated_residual, check_norm_quantize, check_norm_rope
from .reference import Quantized, new_quantized
from .reference_producers import Norm
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
    if watched(x):
        flat = (*_flat_norm(norm), scale, shift, *_flat_transform(transform), activation_bits)
        return torch.ops.int8_dit.norm_quantize.default(x, *flat)
    return _norm_quantize(x, norm, scale, shift, transform, activation_bits)


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
    if watched(gate):
        flat = (activation, up, beside, *_flat_transform(transform), activation_bits)
        return torch.ops.int8_dit.activate_quantize.default(gate, *flat)
    return _activate_quantize(gate, activation, up, beside, transform, activation_bits)


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
    if not watched(x):
        return _gated_residual(residual, x, gate, norm, tanh)
    if not _differentiated(residual, x, gate):
        return torch.ops.int8_dit.gated_residual.default(residual, x, gate, *_flat_norm(norm), tanh)
    check_gated_residual(residual, x, gate, norm)
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
    if not watched(q):
        return _norm_rope(q, k, q_norm, k_norm, freqs, pairs, out)
    if _differentiated(q, k):
        check_norm_rope(q, k, q_norm, k_norm, freqs, pairs, out)
        return reference.norm_rope_reference(q, k, q_norm, k_norm, freqs, pairs, out)
    flat = (*_flat_norm(q_norm), *_flat_norm(k_norm), freqs, pairs)
    results = torch.ops.int8_dit.norm_rope.default(q, k, *flat)
    if out is None:
        return results
    for target, result in zip(out, results, strict=True):
        target.copy_(result)
    return out


def _norm_quantize(
    x: torch.Tensor,
    norm: Norm,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    transform: ChannelTransform,
    activation_bits: int,
) -> Quantized:
    tensors = (x, norm.weight, norm.bias, scale, shift, transform.smooth)
    key = (norm.kind, transform.rotation_group, activation_bits, *_layouts(*tensors))
    if key not in _checked:
        check_norm_quantize(x, norm, scale, shift, transform, activation_bits)
        _checked.add(key)
    _refuse_gradient("norm_quantize", *tensors[:-1])
    if not x.numel():
        return _no_rows(x, x.shape[-1], activation_bits)
    if _runs_kernel(x, x.shape[-1], transform):
        from .fused.norms import launch_norm_quantizer

        return launch_norm_quantizer(key, x, norm, scale, shift, transform, activation_bits)
    with torch.no_grad():
        return reference.norm_quantize_reference(x, norm, scale, shift, transform, activation_bits)


def _activate_quantize(
    gate: torch.Tensor,
    activation: str,
    up: torch.Tensor | None,
    beside: torch.Tensor | None,
    transform: ChannelTransform,
    activation_bits: int,
) -> Quantized:
    channels = gate.shape[-1] + (0 if beside is None else beside.shape[-1])
    key = (activation, transform.rotation_group, activation_bits, *_layouts(gate, up, beside, transform.smooth))
    if key not in _checked:
        check_activate_quantize(gate, activation, up, beside, transform, activation_bits)
        _checked.add(key)
    _refuse_gradient("activate_quantize", gate, up, beside)
    if not gate.numel():
        return _no_rows(gate, channels, activation_bits)
    if _runs_kernel(gate, channels, transform):
        from .fused.gates import launch_activation_producer

        return launch_activation_producer(key, gate, activation, up, beside, transform, activation_bits)
    with torch.no_grad():
        return reference.activate_quantize_reference(gate, activation, up, beside, transform, activation_bits)


def _gated_residual(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, norm: Norm | None, tanh: bool
) -> torch.Tensor:
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    tensors = (residual, x, gate, weight, bias)
    key = (None if norm is None else norm.kind, tanh, *_layouts(*tensors))
    if key not in _checked:
        check_gated_residual(residual, x, gate, norm)
        _checked.add(key)
    if residual.numel() and _runs_kernel(x, x.shape[-1]) and not _differentiated(*tensors):
        from .fused.norms import launch_gated_residual

        return launch_gated_residual(key, residual, x, gate, norm, tanh)
    return reference.gated_residual_reference(residual, x, gate, norm, tanh)


def _norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    freqs: torch.Tensor,
    pairs: str,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    weights = tuple(None if norm is None else norm.weight for norm in (q_norm, k_norm))
    tensors = (q, k, *weights, freqs, *(out or ()))
    key = (pairs, q_norm is None, k_norm is None, *_layouts(*tensors))
    if key not in _checked:
        check_norm_rope(q, k, q_norm, k_norm, freqs, pairs, out)
        _checked.add(key)
    longest = max(q.shape[2], k.shape[2]) * q.shape[3]
    writable = out is None or out[0].stride(-1) == out[1].stride(-1) == 1
    if q.numel() and writable and _runs_kernel(q, longest) and not _differentiated(*tensors):
        from .fused.rope import launch_norm_rope

        return launch_norm_rope(key, q, k, q_norm, k_norm, freqs, pairs == "neighbours", out)
    return reference.norm_rope_reference(q, k, q_norm, k_norm, freqs, pairs, out)


# What a compiler calls: the same with flat arguments, and what their results look like.

_NORM = "str? {0}kind, float {0}eps, Tensor? {0}weight, Tensor? {0}bias"
_TRANSFORM = "Tensor? smooth, int? rotation_group"


def _flat_norm(norm: Norm | None) -> tuple[str | None, float, torch.Tensor | None, torch.Tensor | None]:
    return (None, 0.0, None, None) if norm is None else (norm.kind, norm.eps, norm.weight, norm.bias)


def _flat_transform(transform: ChannelTransform) -> tuple[torch.Tensor | None, int | None]:
    return transform.smooth, transform.rotation_group


def _norm(kind: Any, *rest: Any) -> Norm | None:
    return None if kind is None else Norm(kind, *rest)


def _norm_quantize_operator(x, kind, eps, weight, bias, scale, shift, smooth, group, bits) -> Quantized:
    norm = Norm(kind, eps, weight, bias)
    return _norm_quantize(x, norm, scale, shift, ChannelTransform(smooth, group), bits)


def _fake_norm_quantize(x, kind, eps, weight, bias, scale, shift, smooth, group, bits) -> Quantized:
    norm = Norm(kind, eps, weight, bias)
    check_norm_quantize(x, norm, scale, shift, ChannelTransform(smooth, group), bits)
    return new_quantized(x, x.shape[-1], bits)


def _activate_quantize_operator(gate, activation, up, beside, smooth, group, bits) -> Quantized:
    return _activate_quantize(gate, activation, up, beside, ChannelTransform(smooth, group), bits)


def _fake_activate_quantize(gate, activation, up, beside, smooth, group, bits) -> Quantized:
    check_activate_quantize(gate, activation, up, beside, ChannelTransform(smooth, group), bits)
    return new_quantized(gate, gate.shape[-1] + (0 if beside is None else beside.shape[-1]), bits)


def _gated_residual_operator(residual, x, gate, kind, eps, weight, bias, tanh) -> torch.Tensor:
    return _gated_residual(residual, x, gate, _norm(kind, eps, weight, bias), tanh).contiguous()


def _fake_gated_residual(residual, x, gate, kind, eps, weight, bias, tanh) -> torch.Tensor:
    check_gated_residual(residual, x, gate, _norm(kind, eps, weight, bias))
    return residual.new_empty(residual.shape)


def _norm_rope_operator(q, k, q_kind, q_eps, q_weight, q_bias, k_kind, k_eps, k_weight, k_bias, freqs, pairs):
    norms = _norm(q_kind, q_eps, q_weight, q_bias), _norm(k_kind, k_eps, k_weight, k_bias)
    q_out, k_out = _norm_rope(q, k, *norms, freqs, pairs, None)
    return q_out.contiguous(), k_out.contiguous()


def _fake_norm_rope(q, k, q_kind, q_eps, q_weight, q_bias, k_kind, k_eps, k_weight, k_bias, freqs, pairs):
    norms = _norm(q_kind, q_eps, q_weight, q_bias), _norm(k_kind, k_eps, k_weight, k_bias)
    check_norm_rope(q, k, *norms, freqs, pairs, None)
    return q.new_empty(q.shape), k.new_empty(k.shape)


define_operators(
    {
        f"norm_quantize(Tensor x, {_NORM.format('')}, Tensor? scale, Tensor? shift, {_TRANSFORM}, int activation_bits)"
        " -> (Tensor, Tensor)": (_norm_quantize_operator, _fake_norm_quantize),
        f"activate_quantize(Tensor gate, str activation, Tensor? up, Tensor? beside, {_TRANSFORM}, int activation_bits)"
        " -> (Tensor, Tensor)": (_activate_quantize_operator, _fake_activate_quantize),
        f"gated_residual(Tensor residual, Tensor x, Tensor? gate, {_NORM.format('')}, bool tanh) -> Tensor": (
            _gated_residual_operator,
            _fake_gated_residual,
        ),
        f"norm_rope(Tensor q, Tensor k, {_NORM.format('q_')}, {_NORM.format('k_')}, Tensor freqs, str pairs)"
        " -> (Tensor, Tensor)": (_norm_rope_operator, _fake_norm_rope),
    }
)
