"""What an INT8 weight is to a product, whoever loaded it, and what a linear knows of its own."""

import weakref
from typing import Any, NamedTuple

import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels import UNCHANGED, ChannelTransform, RepeatedLinear, native_computes
from ..comfyui.layers import wants_full_precision
from ..comfyui.quantized import is_native_int8, stored
from ..files.holding.stored_weight import StoredKind, stored_kind
from .int8_weight import is_int8
from .stored_weights import StoredLoRA


class InputForm(NamedTuple):
    """How a linear's input is to be quantized; smoothing factors may be on another device."""

    transform: ChannelTransform
    activation_bits: int


class INT8Parts(NamedTuple):
    """An INT8 weight as the kernel takes it.

    Attributes:
        stored: int8 [N, K], or a weight in another form that a kernel makes that of.
        scale: float32, one value or one per output channel.
        transform: what is done to its input.
        activation_bits: to how many bits its input is rounded.
        lora: what changes a weight in another form; on the device where it is used, which need not be this one's.
    """

    stored: Any
    scale: torch.Tensor
    transform: ChannelTransform
    activation_bits: int
    lora: StoredLoRA | None = None

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 [N, K] and its scale; of other forms new ones, in memory that PyTorch hands from layer to layer."""
        weight, scale, lora = self.stored, self.scale, self.lora
        kind = stored_kind(weight)
        if kind is None:
            return weight, scale
        low_rank = None
        if lora is not None:
            scale, low_rank = scale + lora.scale, lora.low_rank
        return kind.expand(weight, scale, low_rank), scale


def int8_parts(weight: Any, layer: Any) -> INT8Parts | None:
    """The parts of an INT8 weight of either kind, or of one that is made INT8 for each product; None of any other.

    `layer` is its linear: of ComfyUI's own formats it knows what the quant config says of its input.
    """
    if is_int8(weight):
        held = weight.params
        return INT8Parts(stored(weight), held.scale, held.transform, held.activation_bits)
    if is_native_int8(weight):
        held, scale = stored(weight), weight.params.scale.float()
        group = weight.params.convrot_groupsize if weight.params.convrot else None
        bits = 16 if _asks_for_16_bits(layer) else 8
    else:
        kind, held = stored_kind(weight), weight
        scale = None if kind is None else kind.scale(weight)
        if kind is None or scale is None:
            return None
        group = kind.rotation_group(weight)
        bits = 16 if kind.held is None and _asks_for_16_bits(layer) else kind.activation_bits(weight)
    return INT8Parts(held, scale, _rotation(group), bits)


def _asks_for_16_bits(layer: Any) -> bool:
    """Whether a linear with a weight of ComfyUI's own is to have activations of 16 bits: one of a text encoder also
    while ComfyUI lets it multiply quantized activations, to write a text."""
    return getattr(layer, "of_encoder", False) or wants_full_precision(layer)


def known_parts(weight: Any, layer: Any) -> INT8Parts:
    """Those of a weight that is INT8 in a product."""
    parts = int8_parts(weight, layer)
    assert parts is not None
    return parts


class WeightForm(NamedTuple):
    """What an INT8 weight is, beside its numbers.

    Attributes:
        own: whether this pack holds it; else one of ComfyUI's own loaders does.
        kind: what makes INT8 of it for each product; None for one that is INT8.
        rotation_group, smoothed, activation_bits: what is done to its input.
        native: whether ComfyUI's own INT8 could compute the linear.
    """

    own: bool
    kind: StoredKind | None
    rotation_group: int | None
    smoothed: bool
    activation_bits: int
    native: bool


def weight_form(weight: Any, layer: Any) -> WeightForm | None:
    """That of a linear's weight; None of one that is not INT8 in a product."""
    kind = stored_kind(weight)
    own = is_int8(weight) or (kind is not None and kind.held is not None)
    parts = int8_parts(weight, layer)
    if parts is None:
        return None
    smooth, group = parts.transform.smooth, parts.transform.rotation_group
    native = native_computes(smooth, parts.activation_bits) and (kind is None or not own)
    return WeightForm(own, kind, group, smooth is not None, parts.activation_bits, native)


class KnownWeight:
    """What a linear's weight is, for as long as it is that weight: this holds none of its tensors.

    Attributes:
        form: what it is.
    """

    __slots__ = ("_input_form", "_linear", "_numbers", "_settings", "form")

    def __init__(self, weight: Any, form: WeightForm) -> None:
        # ComfyUI replaces a module's weight, or under the same weight what is stored, or both; a patch that is copied
        # into it replaces its parameters.
        self._numbers, self._settings = weakref.ref(stored(weight)), weakref.ref(weight.params)
        self.form = form
        self._input_form = None if form.smoothed else InputForm(_rotation(form.rotation_group), form.activation_bits)
        self._linear: RepeatedLinear | None = None

    def is_of(self, weight: Any) -> bool:
        """Whether it is still that of the weight."""
        return self._numbers() is stored(weight) and self._settings() is weight.params

    def __reduce__(self) -> tuple:
        """A copy of the linear looks at its own weight."""
        return _nothing, ()

    def form_of_input(self, weight: Any) -> InputForm:
        """How its input is to be quantized."""
        return self._input_form or InputForm(weight.params.transform, self.form.activation_bits)

    def repeated(self, operands: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]) -> RepeatedLinear:
        """What computes with it, given what `operands` gives."""
        if self._linear is None:
            self._linear = RepeatedLinear.of(*operands, self.form.rotation_group, self.form.activation_bits)
        return self._linear

    def operands(self, weight: Any, lora: StoredLoRA | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """int8 [N, K], its scale, and the factors by which its input is divided."""
        kind = self.form.kind
        if kind is not None:
            scale: Any = kind.scale(weight)
            return *INT8Parts(weight, scale, UNCHANGED, self.form.activation_bits, lora).operands(), None
        held = weight.params
        scale = held.scale if held.scale.dtype == torch.float32 else held.scale.float()
        return stored(weight), scale, held.smooth if self.form.smoothed else None


def _nothing() -> None:
    return None


def known_weight(layer: Any) -> KnownWeight | None:
    """What a linear's weight is now; None for one that is not INT8 in a product. Not for a compiler."""
    weight, known = layer._parameters.get("weight"), layer.__dict__.get("known_weight")
    if not isinstance(weight, QuantizedTensor):
        return None
    if known is None or not known.is_of(weight):
        form = weight_form(weight, layer)
        known = layer.known_weight = None if form is None else KnownWeight(weight, form)
    return known


def form_of(layer: Any) -> WeightForm | None:
    """The form of a linear's weight, also for a compiler."""
    if torch.compiler.is_compiling():
        return weight_form(layer.weight, layer)
    known = known_weight(layer)
    return None if known is None else known.form


def is_comfyui_int8(weight: Any, layer: Any) -> bool:
    """Whether the weight of a linear is INT8, perhaps in fewer bits, as ComfyUI's own loaders hold it."""
    form = weight_form(weight, layer)
    return form is not None and not form.own


# A table rather than a cache, which a compiler warns of.
_ROTATIONS = {4**digits: ChannelTransform(None, 4**digits) for digits in range(1, 7)}


def _rotation(group: int | None) -> ChannelTransform:
    if group is None:
        return UNCHANGED
    return _ROTATIONS.get(group) or ChannelTransform(None, group)
