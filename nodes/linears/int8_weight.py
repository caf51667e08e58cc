"""The INT8 weight as a layout of ComfyUI's QuantizedTensor.

ComfyUI moves, offloads, patches and saves the weight through this layout. Dequantized it is the original weight without
smoothing and rotation, so that a LoRA of the original model is right in every memory mode.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class

from ...kernels import UNCHANGED, ChannelTransform, dequantize_weight, requantize_weight
from ..comfyui.quantized import HeldParams, HeldWeight, has_layout
from ..files import quant_config

LAYOUT = "PerChannelINT8Layout"


class PerChannelINT8Layout(QuantizedLayout):
    """int8 [N, K] with a per-channel scale [N, 1], optional smoothing factors [K], an optional rotation group, and the
    bits of its activations. `factors` is a digest of the smoothing factors: linears with equal ones quantize alike."""

    @dataclass(frozen=True)
    class Params(HeldParams):
        smooth: torch.Tensor | None = None
        rotation_group: int | None = None
        activation_bits: int = 8
        factors: bytes | None = None

        @property
        def transform(self) -> ChannelTransform:
            """The transform of the input channels."""
            return ChannelTransform(self.smooth, self.rotation_group)

        def _tensor_fields(self) -> list[str]:
            return ["scale"] if self.smooth is None else ["scale", "smooth"]

    @classmethod
    def quantize(
        cls, tensor, scale=None, stochastic_rounding=0, inplace_ops=False, *, like
    ) -> tuple[torch.Tensor, "PerChannelINT8Layout.Params"]:
        """Return a float weight as int8 and parameters, with the transform and bits of `like` and a new scale;
        `stochastic_rounding` is a seed or 0."""
        transform = like.transform.on(tensor.device)
        q, scale = requantize_weight(tensor, transform, stochastic_rounding or None)
        form = {"scale": scale[:, None], "orig_dtype": tensor.dtype, "orig_shape": tuple(tensor.shape)}
        return q, replace(like, **form, smooth=transform.smooth)

    @classmethod
    def dequantize(cls, qdata, params) -> torch.Tensor:
        """Return the original weight in `params.orig_dtype`."""
        return dequantize_weight(qdata, params.scale, params.transform, params.orig_dtype)

    @classmethod
    def state_dict_tensors(cls, qdata, params) -> dict[str, torch.Tensor]:
        tensors = {"": qdata, "_scale": params.scale, "_smooth": params.smooth}
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    @classmethod
    def requantize_kwargs(cls, qtensor) -> dict:
        return {"like": qtensor.params}


register_layout_class(LAYOUT, PerChannelINT8Layout)


def int8_weight(
    q: torch.Tensor,
    scale: torch.Tensor,
    dtype: torch.dtype,
    transform: ChannelTransform = UNCHANGED,
    activation_bits: int = 8,
) -> QuantizedTensor:
    """Wrap int8 [N, K] and its scale (scalar, [N] or [N, 1]) for ComfyUI; `dtype` is the dequantized weight's."""
    # One shape for all, because ComfyUI copies requantized parameters over the ones it holds.
    scale = scale.float()
    if scale.shape != (q.shape[0], 1):
        scale = scale.reshape(-1, 1).expand(q.shape[0], 1).contiguous()
    smooth = None if transform.smooth is None else transform.smooth.float().contiguous()
    factors = None if smooth is None else hashlib.sha256(smooth.cpu().numpy().tobytes()).digest()
    held = (scale, dtype, tuple(q.shape), smooth, transform.rotation_group, activation_bits, factors)
    return HeldWeight(q, LAYOUT, PerChannelINT8Layout.Params(*held))


def int8_weight_of(pieces: Mapping[str, Any], config: dict[str, Any], dtype: torch.dtype) -> QuantizedTensor:
    """Return the weight of a file's INT8 layer, of its tensors and its decoded quant config; `dtype` as above."""
    transform = ChannelTransform(pieces[quant_config.SMOOTH], quant_config.rotation_group(config))
    bits = quant_config.activation_bits(config)
    return int8_weight(pieces["weight"], pieces[quant_config.SCALE], dtype, transform, bits)


def is_int8(weight: Any) -> TypeGuard[QuantizedTensor]:
    """Whether a weight has this layout."""
    return has_layout(weight, LAYOUT)


def format_of_weight(weight: QuantizedTensor) -> str:
    """Return the name of a weight's format in files."""
    return quant_config.format_name(weight.params.transform, weight.params.activation_bits)


def quant_config_of(weight: QuantizedTensor, others: Mapping[str, Any] = {}) -> torch.Tensor:
    """Return the quant config of a weight for files; `others` are the `other_options` that its layer's had."""
    return quant_config.encode_config(weight.params.transform, weight.params.activation_bits, others)
