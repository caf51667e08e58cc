"""Weights in forms of files, as layouts of ComfyUI's QuantizedTensor: GGUF's blocks, and codes of 4 or 6 bits (W4A8,
W6A8). They become INT8 in front of each product: STORED_KINDS is a table with an entry for each kind.

A tensor has the weight's shape, by which ComfyUI recognises a model. What no layout knows to do with it is done with
the floats that it stands for. No layout here quantizes: no patch is written back into such a weight.

A layer X in codes is `X.weight` (int8, the codes), `X.weight_s_rel` (a scale a group), `X.weight_s_channel` (float32
[N]), perhaps `X.weight_codebook` (float32 [16]) and a quant config. It stands for an INT8 weight that is always rotated
(ConvRot). Newer ComfyUI has a layout with the same parameters; this one exists in every version, and keeps the quant
config.
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from comfy.quant_ops import QuantizedLayout, QuantizedTensor, register_layout_class

from ...kernels import (
    GGUF_FORMATS,
    ChannelTransform,
    GroupedCodes,
    LowRank,
    Operator,
    OperatorCall,
    check_channels,
    dequantize_gguf,
    dequantize_weight,
    expand_codes,
    expand_gguf,
    gguf_channel_scales,
)
from ..comfyui.quantized import (
    NATIVE_GROUPED_LAYOUT,
    HeldParams,
    HeldWeight,
    has_layout,
    is_plain_grouped,
    layout_of,
    stored,
    to_device,
)
from . import quant_config
from .reading.gguf_package import decode_gguf

GGUF_LAYOUT, GROUPED_LAYOUT = "GGUFBlocksLayout", "GroupedCodesLayout"
CAN_STAY_IN_GGUF = os.name != "nt"
"""Whether a GGUF file is mapped copy-on-write. Else ComfyUI can neither pin a weight's memory there, to stream it, nor
put a patched one back."""
_NO_SCALES = torch.empty((0, 1), dtype=torch.float32)


class GGUFLayout(QuantizedLayout):
    """uint8 [N, bytes of a row], the name of a block format, and whether products are INT8. `scale` is always empty:
    the first product finds what rows are scaled by."""

    @dataclass(frozen=True)
    class Params(HeldParams):
        gguf_format: str = ""
        becomes_int8: bool = False

    @classmethod
    def dequantize(cls, qdata, params) -> torch.Tensor:
        """Return the weight in `params.orig_dtype`, made by the package gguf where no kernel knows the format."""
        decode = dequantize_gguf if params.gguf_format in GGUF_FORMATS else decode_gguf
        return decode(qdata, params.gguf_format, params.orig_dtype)

    @classmethod
    def state_dict_tensors(cls, qdata, params) -> dict[str, torch.Tensor]:
        return {"": qdata}


class GroupedCodesLayout(QuantizedLayout):
    """int8 codes [N, K / 2] or [N, 3 K / 4], the scales of groups [N, K / group_size] and what the config says."""

    @dataclass(frozen=True)
    class Params(HeldParams):
        s_channel: torch.Tensor | None = None
        codebook: torch.Tensor | None = None
        group_size: int = 16
        convrot_groupsize: int = 256
        activation_bits: int = 8
        config: str = ""

        def _tensor_fields(self) -> list[str]:
            return ["scale", "s_channel", *(() if self.codebook is None else ("codebook",))]

    @classmethod
    def dequantize(cls, qdata, params) -> torch.Tensor:
        """Return the original weight, free of rotation, in `params.orig_dtype`."""
        q = expand_codes(GroupedCodes(qdata, params.scale, params.codebook, params.group_size))
        transform = ChannelTransform(None, params.convrot_groupsize)
        return dequantize_weight(q, params.s_channel, transform, params.orig_dtype)

    @classmethod
    def state_dict_tensors(cls, qdata, params) -> dict[str, torch.Tensor]:
        tensors = {"": qdata, "_s_rel": params.scale, "_s_channel": params.s_channel}
        return tensors if params.codebook is None else {**tensors, "_codebook": params.codebook}


register_layout_class(GGUF_LAYOUT, GGUFLayout)
register_layout_class(GROUPED_LAYOUT, GroupedCodesLayout)


def is_gguf(weight: Any) -> TypeGuard[QuantizedTensor]:
    """Whether a tensor is a weight in GGUF's blocks."""
    return has_layout(weight, GGUF_LAYOUT)


def is_grouped(weight: Any) -> TypeGuard[QuantizedTensor]:
    """Whether a tensor is a weight in codes of 4 or 6 bits, as this pack reads it."""
    return has_layout(weight, GROUPED_LAYOUT)


def holdable(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor of a GGUF file as a MODEL can hold it: in the file, or in memory of its own."""
    return tensor if CAN_STAY_IN_GGUF else tensor.clone()


def read_gguf_weight(blocks: torch.Tensor, gguf_format: str, shape: tuple[int, int]) -> QuantizedTensor:
    """Return a weight [N, K] as it was read: uint8 blocks [N, bytes of a row] of any format that gguf decodes."""
    form = GGUFLayout.Params(_NO_SCALES, torch.float32, shape, gguf_format)
    return QuantizedTensor(blocks, GGUF_LAYOUT, form)


def plain_floats(weight: QuantizedTensor) -> torch.Tensor:
    """Return the float32 of a weight in GGUF's blocks as it was read, by plain PyTorch: a few weights are not worth a
    compiled kernel."""
    form = weight.params
    if form.gguf_format in GGUF_FORMATS:
        return dequantize_gguf.reference(stored(weight), form.gguf_format, form.orig_dtype)
    return weight.dequantize()


def held_gguf(
    weight: QuantizedTensor, dtype: torch.dtype, becomes_int8: bool, check_on: torch.device | None
) -> HeldWeight:
    """Return a weight that was read as a linear of floats of `dtype` holds it, to be multiplied in INT8 or in floats.

    Raises ValueError where a row holds a NaN or Inf, found on the device `check_on`; None leaves that to the first
    product, which need not read the file once more.
    """
    blocks, form = stored(weight), replace(weight.params, orig_dtype=dtype, becomes_int8=becomes_int8)
    if check_on is not None:
        check_channels(gguf_channel_scales.at_once(to_device(blocks, check_on), form.gguf_format))
    return HeldWeight(holdable(blocks), GGUF_LAYOUT, form)


def coded_weight(codes: GroupedCodes, scale: torch.Tensor, rotation_group: int, dtype: torch.dtype) -> QuantizedTensor:
    """Return a weight of codes of 4 bits and the scale [N] of their INT8 weight, in floats of `dtype` to ComfyUI."""
    config = {"format": quant_config.GROUPED_FORMATS[0], "group_size": codes.group, "convrot_groupsize": rotation_group}
    return HeldWeight(codes.codes, GROUPED_LAYOUT, _form(codes, scale, dtype, config))


def _form(codes: GroupedCodes, scale: torch.Tensor, dtype: torch.dtype, config: dict) -> GroupedCodesLayout.Params:
    rotation_group, bits = quant_config.group_size(config), quant_config.activation_bits(config)
    held = (codes.scale, dtype, codes.shape, scale, codes.codebook, codes.group, rotation_group, bits)
    return GroupedCodesLayout.Params(*held, json.dumps(config))


def grouped_codes(weight: QuantizedTensor) -> GroupedCodes:
    """Return the codes of such a weight, in this layout or in ComfyUI's own."""
    form = weight.params
    return GroupedCodes(stored(weight), form.scale, form.codebook, form.group_size)


def channel_scale(weight: QuantizedTensor) -> torch.Tensor:
    """Return the scale float32 [N, 1] of the INT8 weight that codes stand for."""
    return weight.params.s_channel.view(-1, 1)


def held_codes(weight: QuantizedTensor, dtype: torch.dtype) -> HeldWeight:
    """Return a weight that was read as a linear of floats of `dtype` holds it; its codes stay in the file."""
    return HeldWeight(stored(weight), GROUPED_LAYOUT, replace(weight.params, orig_dtype=dtype))


def quant_config_in(weight: QuantizedTensor) -> dict[str, Any]:
    """Return the quant config that it had in its file."""
    return json.loads(weight.params.config)


def codes_in(parts: Mapping[str, torch.Tensor], config: dict[str, Any]) -> GroupedCodes:
    """Return the codes of a file's layer, by the ends of its tensors' names and its decoded quant config. Raises
    ValueError for options that are no numbers."""
    scale, group = parts[quant_config.GROUP_SCALE], quant_config.group_size(config, "group_size", 16)
    scale = scale.view(torch.float8_e4m3fn) if scale.dtype == torch.uint8 else scale
    return GroupedCodes(parts["weight"], scale, parts.get(quant_config.CODEBOOK), group)


def with_joined_codes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a checked file with each layer in codes as one weight, which has its quant config."""
    together = dict(tensors)
    for layer, config in quant_config.configs_in(tensors).items():
        if config.get("format") in quant_config.GROUPED_FORMATS:
            names = ("weight", quant_config.GROUP_SCALE, quant_config.CHANNEL_SCALE, quant_config.CODEBOOK)
            parts: dict[str, Any] = {name: together.pop(f"{layer}.{name}", None) for name in names}
            codes = codes_in(parts, config)
            form = _form(codes, parts[quant_config.CHANNEL_SCALE], torch.float32, config)
            together[f"{layer}.weight"] = QuantizedTensor(codes.codes, GROUPED_LAYOUT, form)
            del together[f"{layer}.{quant_config.QUANT_CONFIG}"]
    return together


@dataclass(frozen=True)
class StoredKind:
    """How the weights of one layout become INT8."""

    name: Callable[[QuantizedTensor], str]  # what users call its form
    becomes_int8: Callable[[QuantizedTensor], bool]  # whether products are INT8
    # float32 [N, 1] that its rows are scaled by as INT8, on the weight's device.
    scale: Callable[[QuantizedTensor], torch.Tensor]
    rotation_group: Callable[[QuantizedTensor], int | None]  # channels per Hadamard group of the INT8 weight, or None
    activation_bits: Callable[[QuantizedTensor], int]  # to how many bits its input is rounded
    # (weight, scale, what is added) -> the operator that makes int8 [N, K] of it, and its arguments. Without anything
    # added the scale is its own. Of a weight that is not INT8 it makes floats.
    expansion: Callable[[QuantizedTensor, torch.Tensor, LowRank | None], tuple[Operator, tuple]]
    # (weight that was read, dtype of the linear, whether it becomes INT8, device to check it on or None) -> the weight
    # that a linear holds. Raises ValueError for a scale that is not finite. None for a layout of ComfyUI's, which its
    # own loaders hold.
    held: Callable[[QuantizedTensor, torch.dtype, bool, torch.device | None], QuantizedTensor] | None = None
    # What finds `scale`, which may be NaN, by reading the whole weight: the operator and its arguments. None where the
    # scale is stored.
    finding: Callable[[QuantizedTensor], tuple[Operator, tuple]] | None = None

    def calls(self, weight: QuantizedTensor) -> list[OperatorCall]:
        """Return the calls that make of a weight what products read."""
        finding = [self.finding(weight)] if self.finding is not None and self.becomes_int8(weight) else []
        expansion = self.expansion(weight, torch.empty(weight.shape[0], 1), None)
        return [operator.called_with(*arguments) for operator, arguments in (*finding, expansion)]


def _gguf_finding(weight: QuantizedTensor) -> tuple[Operator, tuple]:
    return gguf_channel_scales, (stored(weight), weight.params.gguf_format)


def _gguf_scale(weight: QuantizedTensor) -> torch.Tensor:
    find, arguments = _gguf_finding(weight)
    # A compiled graph reads it in each product.
    return (find if torch.compiler.is_compiling() else find.at_once)(*arguments)[:, None]


def _gguf_expansion(weight: QuantizedTensor, scale: torch.Tensor, added: LowRank | None) -> tuple[Operator, tuple]:
    blocks = stored(weight), weight.params.gguf_format
    if not weight.params.becomes_int8:
        return dequantize_gguf, (*blocks, weight.dtype)
    return expand_gguf, (*blocks, scale, added)


_CODES = StoredKind(
    name=lambda weight: f"W{grouped_codes(weight).bits}A8",
    becomes_int8=lambda weight: True,
    scale=channel_scale,
    rotation_group=lambda weight: weight.params.convrot_groupsize,
    activation_bits=lambda weight: weight.params.activation_bits,
    expansion=lambda weight, scale, added: (expand_codes, (grouped_codes(weight), channel_scale(weight), scale, added)),
    held=lambda weight, dtype, becomes_int8, check_on: held_codes(weight, dtype),
)
STORED_KINDS: dict[str, StoredKind] = {
    GGUF_LAYOUT: StoredKind(
        name=lambda weight: f"GGUF {weight.params.gguf_format}",
        becomes_int8=lambda weight: weight.params.becomes_int8,
        scale=_gguf_scale,
        rotation_group=lambda weight: None,
        activation_bits=lambda weight: 8,
        expansion=_gguf_expansion,
        held=held_gguf,
        finding=_gguf_finding,
    ),
    GROUPED_LAYOUT: _CODES,
    NATIVE_GROUPED_LAYOUT: replace(_CODES, becomes_int8=is_plain_grouped, activation_bits=lambda weight: 8, held=None),
}

HELD_LAYOUTS = tuple(layout for layout, kind in STORED_KINDS.items() if kind.held is not None)
"""Those of this pack."""


def stored_kind(weight: Any) -> StoredKind | None:
    """Return the kind of a weight that becomes INT8 for a product, whoever loaded it; None for any other tensor."""
    return STORED_KINDS.get(layout_of(weight)) if isinstance(weight, QuantizedTensor) else None


def is_stored(weight: Any) -> bool:
    """Whether a tensor is a weight in a form that this pack holds it in."""
    kind = stored_kind(weight)
    return kind is not None and kind.held is not None


def can_stay(weight: Any) -> bool:
    """Whether a kernel reads the form of a weight, so that it can stay in it while a MODEL runs."""
    return is_grouped(weight) or (is_gguf(weight) and weight.params.gguf_format in GGUF_FORMATS)
