"""The products that newer ComfyUI asks of a weight's layout: a linear with what stands before it, or behind it, in one.

Each is NotImplemented, before anything is computed, where the caller's separate passes are to run: for arguments that
no fused op knows, for a gradient, for a compiler, and where the user's choice of a kernel is not INT8.
"""

from collections.abc import Callable
from typing import Any

import torch

from ...kernels import (
    FLOAT_DTYPES,
    ChannelTransform,
    Norm,
    Quantized,
    activate_quantize,
    gated_residual,
    int8_gemm,
    int8_linear,
    native_computes,
    norm_quantize,
    runs_fused,
)
from ..comfyui.quantized import QuantizedTensor, params, stored

Before = Callable[[torch.Tensor, Norm, ChannelTransform, int], Quantized]


def _swiglu(x: torch.Tensor, norm: Norm, transform: ChannelTransform, bits: int) -> Quantized:
    gate, up = x.chunk(2, dim=-1)
    return activate_quantize(gate, "silu", up, None, transform, bits)


_BEFORE: dict[str, Before] = {
    "gelu_tanh": lambda x, norm, *form: activate_quantize(x, "gelu_tanh", None, None, *form),
    "swiglu": _swiglu,
    "rms_norm": lambda x, norm, *form: norm_quantize(x, norm, None, None, *form),
}


def activated_product(
    weight: QuantizedTensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    norm_weight: torch.Tensor | None,
    norm_eps: float,
    residual: torch.Tensor | None,
    residual_scale: torch.Tensor | None,
) -> Any:
    """residual + residual_scale (activation(x) weight^T + bias), [..., N] of the dtype of `x`; or NotImplemented.

    Args:
        weight: of this pack's layout, [N, K].
        x: [B, T, K] or [T, K]; [..., 2K] for "swiglu", whose halves are gate and up.
        activation: "gelu_tanh", "swiglu", "rms_norm", "none" or None.
        norm_weight, norm_eps: of "rms_norm"; [K].
        residual: [..., N], or None.
        residual_scale: [N], or as many axes as `x`, all but the last possibly 1.
    """
    if not _multiplies(weight, x, bias, norm_weight, residual, residual_scale):
        return NotImplemented
    outputs, channels = weight.shape
    known = activation in (None, "none") or activation in _BEFORE
    if not known or x.shape[-1] != channels * (2 if activation == "swiglu" else 1):
        return NotImplemented
    if activation == "rms_norm" and (norm_weight is None or norm_weight.shape != (channels,)):
        return NotImplemented
    if residual is not None:
        if residual_scale is None or residual.shape != (*x.shape[:-1], outputs):
            return NotImplemented
        residual_scale = _row(residual_scale, residual) if residual_scale.ndim == 1 else residual_scale
        sizes = zip(residual_scale.shape[:-1], residual.shape[:-1], strict=False)
        fits = residual_scale.ndim == residual.ndim and residual_scale.shape[-1] == outputs
        if not fits or any(size not in (1, whole) for size, whole in sizes):
            return NotImplemented
    held = params(weight)
    form = held.transform, held.activation_bits
    if activation in (None, "none"):
        output = int8_linear(x, stored(weight), held.scale, bias, form[0], activation_bits=form[1])
    else:
        quantized = _BEFORE[activation](x, Norm("rms", norm_eps, norm_weight), *form)
        output = _product(weight, quantized, bias, x)
    return output if residual is None else gated_residual(residual.to(output.dtype), output, residual_scale)


def modulated_product(
    weight: QuantizedTensor,
    x: torch.Tensor,
    bias: torch.Tensor | None,
    norm_weight: torch.Tensor,
    norm_eps: float,
    modulation_scale: torch.Tensor,
) -> Any:
    """rms_norm(x) (1 + modulation_scale) weight^T + bias, [..., N] of the dtype of `x`; or NotImplemented.

    Args:
        weight: of this pack's layout, [N, K].
        x: [B, T, K] or [T, K].
        norm_weight: K values.
        modulation_scale: K values, one row for all tokens.
    """
    if not _multiplies(weight, x, bias, norm_weight, modulation_scale):
        return NotImplemented
    channels = weight.shape[1]
    if not x.shape[-1] == norm_weight.numel() == modulation_scale.numel() == channels:
        return NotImplemented
    norm, held = Norm("rms", norm_eps, norm_weight.reshape(channels)), params(weight)
    scale = _row(modulation_scale, x)
    quantized = norm_quantize(x, norm, scale, None, held.transform, held.activation_bits)
    return _product(weight, quantized, bias, x)


def _multiplies(weight: QuantizedTensor, x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether the kernel is to multiply by a weight, and can read what comes with it."""
    if (
        torch.compiler.is_compiling()
        or weight.ndim != 2
        or stored(weight).shape != weight.shape
        or x.ndim not in (2, 3)
    ):
        return False
    given = [x, *(tensor for tensor in others if tensor is not None)]
    plain = not any(isinstance(tensor, QuantizedTensor) or tensor.dtype not in FLOAT_DTYPES for tensor in given)
    beside = all(tensor.device == stored(weight).device for tensor in given)
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    return plain and beside and not learns and _runs_fused(weight, x.device)


def _runs_fused(weight: QuantizedTensor, device: torch.device) -> bool:
    held = params(weight)
    native = native_computes(held.smooth, held.activation_bits)
    n, k = stored(weight).shape
    return runs_fused(device, held.kernel, n, k, native)


def _row(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One row of values with the axes of a tensor."""
    return values.reshape((1,) * (like.ndim - 1) + (-1,))


def _product(weight: QuantizedTensor, quantized: Quantized, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    output = int8_gemm(*quantized, stored(weight), params(weight).scale, bias, x.dtype)
    return output.view(*x.shape[:-1], -1)
