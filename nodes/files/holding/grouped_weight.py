"""A weight in codes of 4 or 6 bits (W4A8, W6A8) as ComfyUI carries it: a layout of its QuantizedTensor.

Such a layer of name X is `X.weight` (int8, the codes), `X.weight_s_rel` (a scale a group), `X.weight_s_channel`
(float32 [N]), perhaps `X.weight_codebook` (float32 [16]) and a quant config. It stands for an INT8 weight that is
always rotated (ConvRot). Newer ComfyUI has a layout of its own for it, whose parameters have the same names. This one
is there in every version, keeps the quant config, and has the shape of the weight wherever a model is recognised by
shapes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class
from comfy_kitchen.tensor import BaseLayoutParams

from ....kernels import Addition, ChannelTransform, GroupedCodes, LowRank, dequantize_weight, expand_codes
from ...comfyui.quantized import HeldWeight, has_layout, stored
from .. import quant_config

GROUPED_LAYOUT = "GroupedCodesLayout"


class GroupedCodesLayout(QuantizedLayout):
    """int8 codes [N, K / 2] or [N, 3 K / 4], the scales of groups [N, K / group_size] and what the config says."""

    @dataclass(frozen=True)
    class Params(BaseLayoutParams):
        s_channel: torch.Tensor | None = None
        codebook: torch.Tensor | None = None
        group_size: int = 16
        convrot_groupsize: int = 256
        activation_bits: int = 8
        config: str = ""

        def _tensor_fields(self) -> list[str]:
            return ["scale", "s_channel", *(() if self.codebook is None else ("codebook",))]

    @classmethod
    def quantize(cls, tensor, **options):
        raise NotImplementedError("weights in codes of 4 or 6 bits are read, and not made")

    @classmethod
    def dequantize(cls, qdata, params) -> torch.Tensor:
        """The original weight, free of rotation, in `params.orig_dtype`."""
        q = expand_codes(GroupedCodes(qdata, params.scale, params.codebook, params.group_size))
        transform = ChannelTransform(None, params.convrot_groupsize)
        return dequantize_weight(q, params.s_channel, transform, params.orig_dtype)

    @classmethod
    def get_plain_tensors(cls, qtensor) -> tuple[torch.Tensor, ...]:
        held = qtensor.params
        return stored(qtensor), *(getattr(held, field) for field in held._tensor_fields())

    @classmethod
    def state_dict_tensors(cls, qdata, params) -> dict[str, torch.Tensor]:
        tensors = {"": qdata, "_s_rel": params.scale, "_s_channel": params.s_channel}
        return tensors if params.codebook is None else {**tensors, "_codebook": params.codebook}

    @classmethod
    def requantize_kwargs(cls, qtensor) -> dict:
        return {}


register_layout_class(GROUPED_LAYOUT, GroupedCodesLayout)


def is_grouped(weight: Any) -> TypeGuard[QuantizedTensor]:
    """Whether a tensor is a weight in codes of 4 or 6 bits, as this pack reads it."""
    return has_layout(weight, GROUPED_LAYOUT)


def coded_weight(codes: GroupedCodes, scale: torch.Tensor, rotation_group: int, dtype: torch.dtype) -> QuantizedTensor:
    """Codes of 4 bits and the scale [N] of the INT8 weight that they stand for, in floats of `dtype` to ComfyUI."""
    config = {"format": quant_config.GROUPED_FORMATS[0], "group_size": codes.group, "convrot_groupsize": rotation_group}
    return HeldWeight(codes.codes, GROUPED_LAYOUT, _form(codes, scale, dtype, config))


def _form(codes: GroupedCodes, scale: torch.Tensor, dtype: torch.dtype, config: dict) -> GroupedCodesLayout.Params:
    rotation_group, bits = quant_config.group_size(config), quant_config.activation_bits(config)
    held = (codes.scale, dtype, codes.shape, scale, codes.codebook, codes.group, rotation_group, bits)
    return GroupedCodesLayout.Params(*held, json.dumps(config))


def grouped_codes(weight: QuantizedTensor) -> GroupedCodes:
    """The codes of such a weight, in this layout or in ComfyUI's own."""
    form = weight.params
    return GroupedCodes(stored(weight), form.scale, form.codebook, form.group_size)


def channel_scale(weight: QuantizedTensor) -> torch.Tensor:
    """float32 [N, 1], of the INT8 weight that they stand for."""
    return weight.params.s_channel.view(-1, 1)


def expanded(weight: QuantizedTensor, scale: torch.Tensor, low_rank: LowRank | None) -> torch.Tensor:
    """int8 [N, K] of the INT8 weight with `scale`, which is its own unless `low_rank` is added to it."""
    addition = None if low_rank is None else Addition(*low_rank, channel_scale(weight), scale)
    return expand_codes(grouped_codes(weight), addition)


def held_codes(weight: QuantizedTensor, dtype: torch.dtype) -> HeldWeight:
    """A weight that was read, as a linear holds it that takes and gives floats of `dtype`: in no file any more."""
    return HeldWeight(stored(weight).clone(), GROUPED_LAYOUT, replace(weight.params.clone(), orig_dtype=dtype))


def quant_config_in(weight: QuantizedTensor) -> dict[str, Any]:
    """The quant config that it had in its file."""
    return json.loads(weight.params.config)


def codes_in(parts: Mapping[str, torch.Tensor], config: dict[str, Any]) -> GroupedCodes:
    """The codes of a layer of a file, by the ends of its tensors' names and its decoded quant config. Raises ValueError
    for options that are no numbers."""
    scale, group = parts[quant_config.GROUP_SCALE], quant_config.group_size(config, "group_size", 16)
    scale = scale.view(torch.float8_e4m3fn) if scale.dtype == torch.uint8 else scale
    return GroupedCodes(parts["weight"], scale, parts.get(quant_config.CODEBOOK), group)


def with_joined_codes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a checked file with each layer in codes as one weight, without a quant config: that is in the
    weight."""
    together = dict(tensors)
    for layer, config in quant_config.configs_in(tensors).items():
        if config.get("format") not in quant_config.GROUPED_FORMATS:
            continue
        del together[f"{layer}.{quant_config.QUANT_CONFIG}"]
        names = ("weight", quant_config.GROUP_SCALE, quant_config.CHANNEL_SCALE, quant_config.CODEBOOK)
        parts = {name: together.pop(f"{layer}.{name}") for name in names if f"{layer}.{name}" in together}
        codes = codes_in(parts, config)
        form = _form(codes, parts[quant_config.CHANNEL_SCALE], torch.float32, config)
        together[f"{layer}.weight"] = QuantizedTensor(codes.codes, GROUPED_LAYOUT, form)
    return together
