"""Weights that become INT8 in front of each product: a table with an entry for each kind."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from comfy.quant_ops import QuantizedTensor

from ....kernels import GGUF_FORMATS, LowRank, expand_gguf
from ...comfyui.quantized import NATIVE_GROUPED_LAYOUT, is_plain_grouped, layout_of, stored
from . import gguf_weight, grouped_weight


@dataclass(frozen=True)
class StoredKind:
    """How the weights of one layout become INT8.

    Attributes:
        name: what users call its form.
        scale: float32 [N, 1] that its rows are scaled by as INT8; None for a weight that computes in floats.
        rotation_group: channels per Hadamard group of the INT8 weight, or None.
        activation_bits: to how many bits its input is rounded.
        expand: (weight, scale, what is added) -> int8 [N, K]. Without anything added the scale is its own.
        held: (weight that was read, dtype of the linear, whether it is to become INT8, device for what there is to
            compute) -> the weight that a linear holds, where it was but in no file any more; raises ValueError for one
            that has no finite scale. None for a layout of ComfyUI's, which its own loaders hold.
    """

    name: Callable[[QuantizedTensor], str]
    scale: Callable[[QuantizedTensor], torch.Tensor | None]
    rotation_group: Callable[[QuantizedTensor], int | None]
    activation_bits: Callable[[QuantizedTensor], int]
    expand: Callable[[QuantizedTensor, torch.Tensor, LowRank | None], torch.Tensor]
    held: Callable[[QuantizedTensor, torch.dtype, bool, torch.device], QuantizedTensor] | None = None


def _expanded_blocks(weight: QuantizedTensor, scale: torch.Tensor, low_rank: LowRank | None) -> torch.Tensor:
    return expand_gguf(stored(weight), weight.params.gguf_format, scale, low_rank)


def _bits_in_name(weight: QuantizedTensor) -> str:
    return f"W{grouped_weight.grouped_codes(weight).bits}A8"


STORED_KINDS: dict[str, StoredKind] = {
    gguf_weight.GGUF_LAYOUT: StoredKind(
        name=lambda weight: f"GGUF {weight.params.gguf_format}",
        scale=lambda weight: weight.params.scale if gguf_weight.has_scales(weight) else None,
        rotation_group=lambda weight: None,
        activation_bits=lambda weight: 8,
        expand=_expanded_blocks,
        held=gguf_weight.held_gguf,
    ),
    grouped_weight.GROUPED_LAYOUT: StoredKind(
        name=_bits_in_name,
        scale=grouped_weight.channel_scale,
        rotation_group=lambda weight: weight.params.convrot_groupsize,
        activation_bits=lambda weight: weight.params.activation_bits,
        expand=grouped_weight.expanded,
        held=lambda weight, dtype, becomes_int8, device: grouped_weight.held_codes(weight, dtype),
    ),
    NATIVE_GROUPED_LAYOUT: StoredKind(
        name=_bits_in_name,
        scale=lambda weight: grouped_weight.channel_scale(weight) if is_plain_grouped(weight) else None,
        rotation_group=lambda weight: weight.params.convrot_groupsize,
        activation_bits=lambda weight: 8,
        expand=grouped_weight.expanded,
    ),
}


HELD_LAYOUTS = tuple(layout for layout, kind in STORED_KINDS.items() if kind.held is not None)
"""Those of this pack."""


def stored_kind(weight: Any) -> StoredKind | None:
    """The kind of a weight that becomes INT8 for a product, whoever loaded it; None for any other tensor."""
    return STORED_KINDS.get(layout_of(weight)) if isinstance(weight, QuantizedTensor) else None


def is_stored(weight: Any) -> bool:
    """Whether a tensor is a weight in a form that this pack holds it in."""
    kind = stored_kind(weight)
    return kind is not None and kind.held is not None


def can_stay(weight: Any) -> bool:
    """Whether a tensor is a weight in a form that a kernel reads, so that it can stay in it while a MODEL runs."""
    in_kernels = gguf_weight.is_gguf(weight) and weight.params.gguf_format in GGUF_FORMATS
    return in_kernels or grouped_weight.is_grouped(weight)
