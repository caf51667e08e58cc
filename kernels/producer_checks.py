"""Whether the arguments of the producers are well-formed. All raise TypeError or ValueError, naming the argument."""

import torch

from .checks import (
    check_activation_bits,
    check_float_rows,
    check_modulation,
    check_same_device,
    check_tokens,
    check_vector,
)
from .reference_producers import ACTIVATIONS, Norm
from .transform import ChannelTransform


def _check_norm(norm: Norm, channels: int) -> None:
    if norm.kind not in ("rms", "layer"):
        raise ValueError(f"a norm's kind must be rms or layer, got {norm.kind!r}")
    for name, vector in (("the norm's weight", norm.weight), ("the norm's bias", norm.bias)):
        if vector is not None:
            check_vector(name, vector, channels, "K")


def check_norm_quantize(
    x: torch.Tensor,
    norm: Norm,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    transform: ChannelTransform,
    activation_bits: int,
) -> None:
    """Check the arguments of `norm_quantize`."""
    check_tokens("x", x)
    _check_norm(norm, x.shape[-1])
    check_modulation("scale", scale, x)
    check_modulation("shift", shift, x)
    check_activation_bits(activation_bits)
    transform.check(x.shape[-1])
    check_same_device(x=x, weight=norm.weight, bias=norm.bias, scale=scale, shift=shift, smooth=transform.smooth)


def check_activate_quantize(
    gate: torch.Tensor,
    activation: str,
    up: torch.Tensor | None,
    beside: torch.Tensor | None,
    transform: ChannelTransform,
    activation_bits: int,
) -> None:
    """Check the arguments of `activate_quantize`."""
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
    transform.check(gate.shape[-1] + (0 if beside is None else beside.shape[-1]))
    check_same_device(gate=gate, up=up, beside=beside, smooth=transform.smooth)


def check_gated_residual(residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor | None, norm: Norm | None) -> None:
    """Check the arguments of `gated_residual`."""
    check_tokens("residual", residual)
    check_tokens("x", x)
    if residual.shape != x.shape:
        raise ValueError(f"x must have the residual's shape {tuple(residual.shape)}, got {tuple(x.shape)}")
    check_modulation("gate", gate, x)
    weight, bias = (None, None) if norm is None else (norm.weight, norm.bias)
    if norm is not None:
        _check_norm(norm, x.shape[-1])
    check_same_device(residual=residual, x=x, gate=gate, weight=weight, bias=bias)


def check_norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    freqs: torch.Tensor,
    pairs: str,
    out: tuple[torch.Tensor, torch.Tensor] | None,
) -> None:
    """Check the arguments of `norm_rope`."""
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
