"""The products that newer ComfyUI asks of a weight's layout: a linear with what stands before it, or behind it, in one.

Each is NotImplemented, before anything is computed, where the caller's separate passes are to run: for arguments that
no fused op knows, for a gradient, for a compiler, and where the user's choice of a kernel is not INT8.
"""

from collections.abc import Sequence
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels import (
    FLOAT_DTYPES,
    Norm,
    Quantized,
    int8_gemm,
    int8_linear,
    native_computes,
    norm_quantize,
    runs_fused,
)
from ..comfyui.quantized import stored
from .linear_call import LinearCall


def activated_product(weight: QuantizedTensor, x: torch.Tensor, bias: torch.Tensor | None, call: LinearCall) -> Any:
    """What a call asks for of a linear of this weight, [..., N] of the dtype of `x`; or NotImplemented.

    Args:
        weight: of this pack's layout, [N, K].
        x: [B, T, K] or [T, K], or as wide as the call's activation takes it.
    """
    given = bias, call.act_weight, call.residual, call.residual_scale
    if call.unknown or not _multiplies(weight, x, given):
        return NotImplemented
    (outputs, channels), held = weight.shape, weight.params
    if call.residual is not None and not call.takes_residual((*x.shape[:-1], outputs)):
        return NotImplemented
    if call.activation is None:
        if x.shape[-1] != channels:
            return NotImplemented
        bits = held.activation_bits
        output = int8_linear(x, stored(weight), held.scale, bias, held.transform, activation_bits=bits)
    elif call.quantizes(x, channels):
        output = _product(weight, call.quantized(x, held.transform, held.activation_bits), bias, x)
    else:
        return NotImplemented
    return call.added(output)


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
    if not _multiplies(weight, x, (bias, norm_weight, modulation_scale)):
        return NotImplemented
    channels = weight.shape[1]
    if not x.shape[-1] == norm_weight.numel() == modulation_scale.numel() == channels:
        return NotImplemented
    norm, held = Norm("rms", norm_eps, norm_weight.reshape(channels)), weight.params
    scale = 1 + _row(modulation_scale, x)
    quantized = norm_quantize(x, norm, scale, None, held.transform, held.activation_bits)
    return _product(weight, quantized, bias, x)


def _multiplies(weight: QuantizedTensor, x: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
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
    held = weight.params
    native = native_computes(held.smooth, held.activation_bits)
    n, k = stored(weight).shape
    return runs_fused(device, held.kernel, n, k, native)


def _row(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """One row of values with the axes of a tensor."""
    return values.reshape((1,) * (like.ndim - 1) + (-1,))


def _product(weight: QuantizedTensor, quantized: Quantized, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    output = int8_gemm(*quantized, stored(weight), weight.params.scale, bias, x.dtype)
    return output.view(*x.shape[:-1], -1)
