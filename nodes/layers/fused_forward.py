"""An INT8 linear of a model computed by the fused kernel, whoever loaded its weight and whatever patches it."""

import functools
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch

from ...kernels import (
    UNCHANGED,
    ChannelTransform,
    Quantized,
    RepeatedLinear,
    int8_gemm,
    int8_linear,
    native_computes,
    requantize_weight,
)
from ..blocks.steps import InputForm
from ..comfyui.layers import (
    Cast,
    bias_functions,
    cast_quantized,
    give_back,
    given_back,
    run_every_op,
    wants_full_precision,
    weight_functions,
)
from ..comfyui.patcher import DIFFUSION_MODEL, key_of, seed_of
from ..comfyui.quantized import QuantizedTensor, is_native_int8, native_product, native_rotation, params, stored
from ..files.holding.stored_weight import StoredKind, stored_kind
from .int8_weight import is_int8
from .plain_loras import add_lora, each_once, loras_of
from .stored_weights import StoredLoRA, stored_lora


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


def class_patch(name: str, prefix: str = DIFFUSION_MODEL) -> str:
    """Under which name a ModelPatcher patches the class of a linear, given its module path in the diffusion model, or
    in what else `root_of` says."""
    return f"{prefix}{name}.__class__"


def int8_parts(weight: Any, layer: Any) -> INT8Parts | None:
    """The parts of an INT8 weight of either kind, or of one that is made INT8 for each product; None of any other.

    `layer` is its linear: of ComfyUI's own formats it knows what the quant config says of its input.
    """
    if is_int8(weight):
        held = params(weight)
        return INT8Parts(stored(weight), held.scale, held.transform, held.activation_bits)
    if is_native_int8(weight):
        held, scale, group = stored(weight), params(weight).scale.float(), native_rotation(weight)
        bits = 16 if wants_full_precision(layer) else 8
    else:
        kind, held = stored_kind(weight), weight
        scale = None if kind is None else kind.scale(weight)
        if kind is None or scale is None:
            return None
        group = kind.rotation_group(weight)
        bits = 16 if kind.held is None and wants_full_precision(layer) else kind.activation_bits(weight)
    return INT8Parts(held, scale, _rotation(group), bits)


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
        input_form: how its input is to be quantized; None where smoothing factors belong to that.
        linear: what computes with it; None before the first product.
    """

    __slots__ = ("_numbers", "_settings", "form", "input_form", "linear")

    def __init__(self, weight: Any, form: WeightForm) -> None:
        # ComfyUI replaces a module's weight, or under the same weight what is stored, or both; a patch that is copied
        # into it replaces its parameters.
        self._numbers, self._settings = weakref.ref(stored(weight)), weakref.ref(params(weight))
        self.form = form
        self.input_form = None if form.smoothed else InputForm(_rotation(form.rotation_group), form.activation_bits)
        self.linear: RepeatedLinear | None = None

    def is_of(self, weight: Any) -> bool:
        """Whether it is still that of the weight."""
        return self._numbers() is stored(weight) and self._settings() is params(weight)

    def __reduce__(self) -> tuple:
        """A copy of the linear looks at its own weight."""
        return _nothing, ()

    def operands(self, weight: Any, lora: StoredLoRA | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """int8 [N, K], its scale, and the factors by which its input is divided."""
        kind = self.form.kind
        if kind is not None:
            scale: Any = kind.scale(weight)
            return *INT8Parts(weight, scale, UNCHANGED, self.form.activation_bits, lora).operands(), None
        held = params(weight)
        scale = held.scale if held.scale.dtype == torch.float32 else held.scale.float()
        return stored(weight), scale, held.smooth if self.form.smoothed else None


def _nothing() -> None:
    return None


def known_weight(layer: Any) -> KnownWeight | None:
    """What a linear's weight is now; None for one that is not INT8 in a product. Not for a compiler."""
    weight, known = layer._parameters["weight"], layer.__dict__.get("known_weight")
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


def fused_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight, in any memory mode; `input` is floating point [..., K]."""
    resident = _resident(layer, input.device, input.dtype)
    if resident is not None:
        linear, weight, scale, smooth, bias = resident
        return linear(input, weight, scale, smooth, bias)
    attached = weight_functions(layer)
    functions = each_once(attached) if len(attached) > 1 else attached
    lora = stored_lora(layer.weight, functions)
    thin = loras_of(functions, layer.weight.shape) if functions and lora is None else []
    fewer = [] if thin else functions if len(functions) < len(attached) else None
    with given_back(layer, _cast(layer, input.device, input.dtype, fewer)) as (weight, bias, _):
        parts = int8_parts(weight, layer)
        if parts is None:  # outside dynamic VRAM a patch of a partially loaded model makes a float weight all the same
            held = _known_parts(layer.weight, layer)
            transform, bits = held.transform, held.activation_bits
            q, scale = requantize_weight(weight, transform, _seed_of_patches(layer))
        else:
            q, scale = parts._replace(lora=lora).operands()
            transform, bits = parts.transform, parts.activation_bits
        output = int8_linear(input, q, scale, bias, transform, activation_bits=bits)
        for factors in thin:
            add_lora(output, input, factors)
    return output


def project(
    layer: Any, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype, held: Cast | None = None
) -> torch.Tensor:
    """The output [*shape, N] in `dtype` of a ComfyUI linear with an INT8 weight, in any memory mode.

    `quantized` is its input as int8 [rows, K or 2K] and a scale per row, as its weight wants it; `held` is its weight
    where that was cast already, and stays cast.
    """
    q, q_scale = quantized
    resident = None if held is not None else _resident(layer, q.device, dtype)
    if resident is not None:
        linear, weight, scale, _, bias = resident
        return linear.multiply(quantized, weight, scale, bias, shape, dtype)
    use = nullcontext(held) if held is not None else given_back(layer, _cast(layer, q.device, dtype))
    with use as (weight, bias, _):
        parts = _known_parts(weight, layer)._replace(lora=stored_lora(layer.weight, weight_functions(layer)))
        return int8_gemm(q, q_scale, *parts.operands(), bias, dtype).view(*shape, -1)


def native_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight of this pack, computed as ComfyUI computes its own INT8.

    Its weight is neither smoothed nor wants 16 bits; `input` is floating point [..., K].
    """
    with given_back(layer, _cast(layer, input.device, input.dtype)) as (weight, bias, _):
        parts = int8_parts(weight, layer)
        if parts is None:  # a patch has made it a float
            return torch.nn.functional.linear(input, weight, bias)
        return native_product(input, *parts.operands(), bias, parts.transform.rotation_group)


class INT8Linear:
    """What linears of this pack's classes have beside ComfyUI's own: a fused op may quantize their input for them."""

    int8_kernel: str
    input_group: object | None = None  # given by group_inputs to those whose input others read too
    weight: Any

    def input_form(self) -> InputForm | None:
        """How the input is to be quantized, with factors wherever they are; None where it must be given as floats."""
        functions = weight_functions(self)
        if functions and stored_lora(self.weight, functions) is None:  # a LoRA of a streamed INT8 weight reads floats
            return None
        known = None if torch.compiler.is_compiling() else known_weight(self)
        if known is not None and known.input_form is not None:
            return known.input_form
        parts = int8_parts(self.weight, self)
        return None if parts is None else InputForm(parts.transform, parts.activation_bits)

    def open(self, form: InputForm, device: torch.device, dtype: torch.dtype) -> tuple[ChannelTransform, Cast | None]:
        """What is done to the input's channels, with factors on `device`, and what `project` and then `close` are to be
        given.

        Factors that are elsewhere come with the weight, which is then cast here.
        """
        if form.transform.smooth is None or form.transform.smooth.device == device:
            return form.transform, None
        cast = _cast(self, device, dtype)
        return _known_parts(cast[0], self).transform, cast

    def close(self, held: Cast | None) -> None:
        """Give back what `open` cast."""
        if held is not None:
            give_back(self, held)

    def keep(self, device: torch.device, dtype: torch.dtype) -> "KeptLinear":
        """This linear for several products, while its weight does not change."""
        return KeptLinear(self, device, dtype)

    def project(
        self, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype, held: Cast | None = None
    ) -> torch.Tensor:
        run_every_op()
        return project(self, quantized, shape, dtype, held)


class KeptLinear:
    """A linear whose weight stays on a device in INT8 for several products: it is streamed once, and made INT8 of fewer
    bits once. The steps of blocks take it for an INT8Linear.
    """

    def __init__(self, layer: Any, device: torch.device, dtype: torch.dtype) -> None:
        self.input_group = layer.input_group
        self._linear: RepeatedLinear | None = None
        resident = _resident(layer, device, dtype)
        if resident is not None:
            self._linear, weight, scale, _, bias = resident
            parts = _known_parts(layer.weight, layer)
            smooth = parts.transform.smooth
        else:
            with given_back(layer, _cast(layer, device, dtype)) as (cast, bias, _):
                parts = _known_parts(cast, layer)
                weight, scale = parts._replace(lora=stored_lora(layer.weight, weight_functions(layer))).operands()
                # Copies: the next linears are streamed into the same memory.
                weight = weight.clone() if stored_kind(parts.stored) is None else weight
                scale, bias, smooth = (None if t is None else t.clone() for t in (scale, bias, parts.transform.smooth))
        smooth = None if smooth is None else smooth.to(device)
        self._operands: tuple[Any, Any, torch.Tensor | None] = weight, scale, bias
        self._form = InputForm(ChannelTransform(smooth, parts.transform.rotation_group), parts.activation_bits)

    def input_form(self) -> InputForm:
        """How the input is to be quantized."""
        return self._form

    def open(self, form: InputForm, device: torch.device, dtype: torch.dtype) -> tuple[ChannelTransform, None]:
        """What is done to the input's channels; there is nothing to be closed."""
        return form.transform, None

    def close(self, held: None) -> None:
        """Nothing: what is kept goes with this."""

    def project(
        self, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype, held: None = None
    ) -> torch.Tensor:
        """The output [*shape, N] of some rows of the input."""
        run_every_op()
        if self._linear is not None:
            return self._linear.multiply(quantized, *self._operands, shape, dtype)
        q, q_scale = quantized
        return int8_gemm(q, q_scale, *self._operands, dtype).view(*shape, -1)


def _resident(
    layer: Any, device: torch.device, dtype: torch.dtype
) -> tuple[RepeatedLinear, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None] | None:
    """What computes a linear, and its int8 weight, scale, smoothing factors and bias. None unless its weight lies on
    `device` with nothing to be done to it but LoRAs of a stored one, and its bias of `dtype` too.
    """
    if torch.compiler.is_compiling() or bias_functions(layer):
        return None
    known, weight, bias = known_weight(layer), layer._parameters["weight"], layer._parameters["bias"]
    if known is None or stored(weight).device != device:
        return None
    if bias is not None and (bias.dtype != dtype or bias.device != device):
        return None
    functions = weight_functions(layer)
    lora = stored_lora(weight, functions) if functions else None
    if functions and lora is None:
        return None
    operands = known.operands(weight, lora)
    linear = known.linear
    if linear is None:
        linear = RepeatedLinear.of(*operands, known.form.rotation_group, known.form.activation_bits)
        known.linear = linear
    return linear, *operands, bias


def _cast(layer: Any, device: torch.device, dtype: torch.dtype, functions: list | None = None) -> Cast:
    """`cast_quantized`, where LoRAs of a stored weight are left to it."""
    lora = stored_lora(layer.weight, weight_functions(layer))
    return cast_quantized(layer, device, dtype, functions if lora is None else [])


def _known_parts(weight: Any, layer: Any) -> INT8Parts:
    parts = int8_parts(weight, layer)
    assert parts is not None
    return parts


def _seed_of_patches(layer: Any) -> int | None:
    """The seed with which ComfyUI rounds a patched weight; None where what changes the weight is no patch."""
    key = next(filter(None, map(key_of, weight_functions(layer))), None)
    return None if key is None else _seed(key)


_seed = functools.lru_cache(maxsize=4096)(seed_of)
