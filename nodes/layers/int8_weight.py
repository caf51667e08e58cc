"""The INT8 weight as ComfyUI carries it: a layout of its QuantizedTensor.

ComfyUI moves, offloads, patches and saves the weight through this layout. Its dequantized value is always the original
weight, free of smoothing and rotation, so that a LoRA made for the original model is right in every memory mode.

Newer ComfyUI asks it for products, too: a linear with what stands before it, or behind it, in one. Each is
NotImplemented, before anything is computed, where the caller's separate passes are to run: for arguments that no fused
op knows, for a gradient, for a compiler, and where the user's choice of a kernel is not INT8.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class
from comfy_kitchen.tensor import BaseLayoutParams

from ...kernels import (
    FLOAT_DTYPES,
    UNCHANGED,
    ChannelTransform,
    Norm,
    Quantized,
    dequantize_weight,
    int8_gemm,
    int8_linear,
    native_computes,
    norm_quantize,
    requantize_weight,
    runs_fused,
)
from ..comfyui.quantized import HeldWeight, has_layout, stored
from ..files import quant_config
from .linear_call import linear_call

LAYOUT = "PerChannelINT8Layout"


class PerChannelINT8Layout(QuantizedLayout):
    """int8 [N, K] with a per-channel scale [N, 1], optional smoothing factors [K], an optional rotation group, to how
    many bits its input is rounded, and what its linear is to compute with (one of kernels.KERNEL_CHOICES)."""

    @dataclass(frozen=True)
    class Params(BaseLayoutParams):
        smooth: torch.Tensor | None = None
        rotation_group: int | None = None
        activation_bits: int = 8
        kernel: str = "auto"

        @property
        def transform(self) -> ChannelTransform:
            """What is done to the channels of the input."""
            return ChannelTransform(self.smooth, self.rotation_group)

        def _tensor_fields(self) -> list[str]:
            return ["scale"] if self.smooth is None else ["scale", "smooth"]

    @classmethod
    def quantize(
        cls,
        tensor,
        scale=None,
        stochastic_rounding=0,
        inplace_ops=False,
        transform=UNCHANGED,
        activation_bits=8,
        kernel="auto",
    ) -> tuple[torch.Tensor, "PerChannelINT8Layout.Params"]:
        """Float weight -> int8 and parameters.

        The scale is always computed anew; `stochastic_rounding` is a seed or 0.
        """
        transform = transform.on(tensor.device)
        q, channel_scale = requantize_weight(tensor, transform, stochastic_rounding or None)
        held = (channel_scale[:, None], tensor.dtype, tuple(tensor.shape))
        return q, cls.Params(*held, transform.smooth, transform.rotation_group, activation_bits, kernel)

    @classmethod
    def dequantize(cls, qdata, params) -> torch.Tensor:
        """The original weight in `params.orig_dtype`."""
        return dequantize_weight(qdata, params.scale, params.transform, params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor) -> tuple[torch.Tensor, torch.Tensor]:
        return stored(qtensor), qtensor.params.scale

    @classmethod
    def state_dict_tensors(cls, qdata, params) -> dict[str, torch.Tensor]:
        tensors = {"": qdata, "_scale": params.scale}
        if params.smooth is not None:
            tensors["_smooth"] = params.smooth
        return tensors

    @classmethod
    def requantize_kwargs(cls, qtensor) -> dict:
        form = qtensor.params
        return {"transform": form.transform, "activation_bits": form.activation_bits, "kernel": form.kernel}

    @classmethod
    def linear_input_act(
        cls,
        weight,
        x,
        bias=None,
        input_act=None,
        input_act_weight=None,
        input_act_eps=0.0,
        residual=None,
        residual_scale=None,
        **others,
    ) -> Any:
        """residual + residual_scale * linear(input_act(x)), [..., N] of the dtype of `x`; or NotImplemented.

        `x` is [B, T, K] or [T, K], or as wide as its activation takes it.
        """
        named = {"input_act": input_act, "act_weight": input_act_weight, "act_eps": input_act_eps}
        call = linear_call(weight, {**named, "residual": residual, "residual_scale": residual_scale, **others})
        given = bias, call.act_weight, residual, residual_scale
        if call.unknown or not _multiplies(weight, x, given):
            return NotImplemented
        (outputs, channels), held = weight.shape, weight.params
        if residual is not None and not call.takes_residual((*x.shape[:-1], outputs)):
            return NotImplemented
        if call.quantizes(x, channels):
            output = _product(weight, call.quantized(x, held.transform, held.activation_bits), bias, x)
        elif call.activation is None and x.shape[-1] == channels:
            bits = held.activation_bits
            output = int8_linear(x, stored(weight), held.scale, bias, held.transform, activation_bits=bits)
        else:
            return NotImplemented
        return call.added(output)

    @classmethod
    def fused_rms_modulated(cls, x, weight, bias, norm_weight, norm_eps, modulation_scale) -> Any:
        """linear(rms_norm(x) (1 + modulation_scale)), [..., N] of the dtype of `x` [B, T, K] or [T, K]; or
        NotImplemented. Both vectors have K values, for all tokens."""
        if not _multiplies(weight, x, (bias, norm_weight, modulation_scale)):
            return NotImplemented
        channels, held = weight.shape[1], weight.params
        if not x.shape[-1] == norm_weight.numel() == modulation_scale.numel() == channels:
            return NotImplemented
        norm = Norm("rms", norm_eps, norm_weight.reshape(channels))
        scale = 1 + modulation_scale.reshape((1,) * (x.ndim - 1) + (-1,))
        quantized = norm_quantize(x, norm, scale, None, held.transform, held.activation_bits)
        return _product(weight, quantized, bias, x)


def _multiplies(weight: Any, x: torch.Tensor, others: Sequence[torch.Tensor | None]) -> bool:
    """Whether the kernel is to multiply by a weight, and can read what comes with it."""
    if torch.compiler.is_compiling() or not is_int8(weight) or weight.ndim != 2 or x.ndim not in (2, 3):
        return False
    held, place, (n, k) = weight.params, stored(weight).device, stored(weight).shape
    given = [x, *(tensor for tensor in others if tensor is not None)]
    plain = not any(isinstance(tensor, QuantizedTensor) or tensor.dtype not in FLOAT_DTYPES for tensor in given)
    learns = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    if weight.shape != (n, k) or not plain or learns or any(tensor.device != place for tensor in given):
        return False
    return runs_fused(x.device, held.kernel, n, k, native_computes(held.smooth, held.activation_bits))


def _product(weight: QuantizedTensor, quantized: Quantized, bias: torch.Tensor | None, x: torch.Tensor) -> torch.Tensor:
    output = int8_gemm(*quantized, stored(weight), weight.params.scale, bias, x.dtype)
    return output.view(*x.shape[:-1], -1)


register_layout_class(LAYOUT, PerChannelINT8Layout)


def int8_weight(
    q: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    transform: ChannelTransform = UNCHANGED,
    activation_bits: int = 8,
) -> QuantizedTensor:
    """Wrap int8 [N, K] and its scale (scalar, [N] or [N, 1]) for ComfyUI; `dtype` is that of the dequantized weight."""
    # One shape for all, because ComfyUI copies requantized parameters over the ones it holds.
    scale = scale.float().reshape(-1, 1).expand(q.shape[0], 1).contiguous()
    smooth = None if transform.smooth is None else transform.smooth.float().contiguous()
    shape = tuple(q.shape)
    form = PerChannelINT8Layout.Params(scale, dtype, shape, smooth, transform.rotation_group, activation_bits)
    return HeldWeight(q, LAYOUT, form)


def int8_weight_of(pieces: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> QuantizedTensor:
    """The weight of an INT8 layer of a file, by its tensors and its decoded quant config; `dtype` as above."""
    transform = ChannelTransform(pieces[quant_config.SMOOTH], quant_config.rotation_group(config))
    return int8_weight(
        pieces["weight"], pieces[quant_config.SCALE], dtype, transform, quant_config.activation_bits(config)
    )


def is_int8(weight: Any) -> TypeGuard[QuantizedTensor]:
    """Whether a module's weight is one of ours."""
    return has_layout(weight, LAYOUT)


def format_of_weight(weight: QuantizedTensor) -> str:
    """The format a weight is marked with in files."""
    return quant_config.format_name(weight.params.transform, weight.params.activation_bits)


def quant_config_of(weight: QuantizedTensor, others: Mapping[str, Any] = {}) -> torch.Tensor:
    """The quant config of a weight in files; `others` are int8_mark's `other_options` of the one that its layer had."""
    return quant_config.encode_config(weight.params.transform, weight.params.activation_bits, others)
