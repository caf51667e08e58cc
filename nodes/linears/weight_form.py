"""The form of an INT8 weight in a product, whoever loaded it, and its cache in the linear."""

import weakref
from typing import Any, NamedTuple

import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels import (
    ChannelTransform,
    LinearWeight,
    RepeatedLinear,
    check_channels,
    is_capturing,
    native_computes,
    saying,
    unplanned_memory,
)
from ..comfyui.layers import wants_full_precision
from ..comfyui.quantized import is_native_int8, stored
from ..files.holding import StoredKind, stored_kind
from .int8_weight import is_int8
from .plain_loras import StoredLoRA


class InputForm(NamedTuple):
    """How a linear's input is quantized; smoothing factors may be on another device."""

    transform: ChannelTransform
    activation_bits: int


class WeightForm(NamedTuple):
    """The properties of an INT8 weight beside its numbers."""

    own: bool  # whether this pack's loader holds it, and not one of ComfyUI's
    kind: StoredKind | None  # of a stored weight, which becomes INT8 for each product; None for INT8
    unsmoothed: InputForm  # how its input is quantized, without smoothing factors
    smoothed: bool  # whether the weight has smoothing factors
    native: bool  # whether ComfyUI's own INT8 could compute the linear

    def input_form(self, weight: Any) -> InputForm:
        """Return how the input of a linear with this weight is quantized."""
        return InputForm(weight.params.transform, self.unsmoothed[1]) if self.smoothed else self.unsmoothed

    def operands(
        self, weight: Any, lora: StoredLoRA | None = None, scale: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a weight of this form as int8 [N, K] and its float32 scale, one value or one per output channel. Of a
        stored weight they are new, and changed by `lora`, which is on the device where it is used; `scale` is its own
        if that is known."""
        kind = self.kind
        if kind is None:
            held = weight.params.scale
            return stored(weight), held if held.dtype == torch.float32 else held.float()
        scale = kind.scale(weight) if scale is None else scale
        scale = scale if lora is None else scale + lora.scale
        expand, arguments = kind.expansion(weight, scale, None if lora is None else lora.low_rank)
        return expand(*arguments), scale


def weight_form(weight: Any, layer: Any) -> WeightForm | None:
    """Return the form of a weight that is INT8 or becomes INT8 for each product; None of any other. `layer` is its
    linear, which knows what a quant config of ComfyUI's own formats says of the input."""
    kind, smooth = stored_kind(weight), None
    own = is_int8(weight) or (kind is not None and kind.held is not None)
    if is_int8(weight):
        held = weight.params
        smooth, group, bits = held.smooth, held.rotation_group, held.activation_bits
    elif is_native_int8(weight):
        group, bits = weight.params.convrot_groupsize if weight.params.convrot else None, 8
    elif kind is not None and kind.becomes_int8(weight):
        group, bits = kind.rotation_group(weight), kind.activation_bits(weight)
    else:
        return None
    # A text encoder's also while it writes a text, where ComfyUI lets it multiply quantized activations.
    if not own and (getattr(layer, "of_encoder", False) or wants_full_precision(layer)):
        bits = 16
    native = native_computes(smooth, bits) and (kind is None or not own)
    return WeightForm(own, kind, InputForm(ChannelTransform(None, group), bits), smooth is not None, native)


def known_form(weight: Any, layer: Any = None) -> WeightForm:
    """Return the form of a weight that has one."""
    form = weight_form(weight, layer)
    assert form is not None
    return form


class KnownWeight:
    """The cached form of a linear's weight, for as long as the linear has that weight. It holds no tensors of it, but
    its scale where that was found by reading the whole weight."""

    __slots__ = ("_linear", "_name", "_numbers", "_scale", "_settings", "form")

    def __init__(self, weight: Any, form: WeightForm, name: str) -> None:
        # ComfyUI replaces a module's weight, or the tensor stored in it, or both; a patch that is copied into it
        # replaces its parameters.
        self._numbers, self._settings = weakref.ref(stored(weight)), weakref.ref(weight.params)
        self.form = form
        self._linear: RepeatedLinear | None = None
        self._name = name
        self._scale: torch.Tensor | None = None

    def is_of(self, weight: Any) -> bool:
        """Whether this is the form of a weight."""
        return self._numbers() is stored(weight) and self._settings() is weight.params

    def __reduce__(self) -> tuple:
        """Pickle and copy as None: a copy of the linear looks at its own weight."""
        return type(None), ()

    def scale(self, weight: Any) -> torch.Tensor | None:
        """Return the scale of the weight where it has to be found, which is done once; else None.

        Raises ValueError for a row that holds a NaN or Inf.
        """
        kind, scale = self.form.kind, self._scale
        if kind is None or kind.finding is None or (scale is not None and scale.device == weight.device):
            return scale
        with unplanned_memory():  # it outlives the call of a block
            scale = kind.scale(weight)
        if not is_capturing(scale.device):  # a graph's memory is its own
            with saying(f"{self._name}: ", "; download or copy the file again"):
                check_channels(scale.flatten())
            self._scale = scale
        return scale

    def operands(self, weight: Any, lora: StoredLoRA | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what the form's `operands` does. Raises what `scale` does."""
        return self.form.operands(weight, lora, self.scale(weight))

    def linear(self, weight: Any, lora: StoredLoRA | None) -> tuple[RepeatedLinear, LinearWeight]:
        """Return the RepeatedLinear of the weight and the operands that it is called with."""
        form = self.form
        operands = form.operands if form.kind is None else self.operands
        held = *operands(weight, lora), weight.params.smooth if form.smoothed else None
        if self._linear is None:
            transform, bits = form.unsmoothed
            self._linear = RepeatedLinear.of(held, transform.rotation_group, bits)
        return self._linear, held


def known_weight(layer: Any) -> tuple[WeightForm | None, KnownWeight | None]:
    """Return the form of a linear's weight, None if it is not INT8 in a product, and its cache, None for a compiler."""
    if torch.compiler.is_compiling():
        return weight_form(layer.weight, layer), None
    weight, known = layer._parameters.get("weight"), layer.__dict__.get("known_weight")
    if not isinstance(weight, QuantizedTensor):
        return None, None
    if known is None or not known.is_of(weight):
        form = weight_form(weight, layer)
        name = ": ".join(filter(None, (getattr(layer, "of_file", ""), getattr(layer, "linear_name", ""))))
        known = layer.known_weight = None if form is None else KnownWeight(weight, form, name)
    return None if known is None else known.form, known
