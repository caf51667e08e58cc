"""An INT8 linear of a model computed by the fused kernel, whoever loaded its weight and whatever patches it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.utils
import comfy_kitchen
import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels import (
    ChannelTransform,
    Quantized,
    int8_gemm,
    int8_linear,
    requantize_weight,
    runs_fused,
)
from ..comfyui.layers import Cast, cast_quantized, given_back
from ..comfyui.patcher import DIFFUSION_MODEL, key_of
from ..comfyui.quantized import stored
from ..deferred import takers
from ..deferred.notes import Deferred, outside, tracking, valued
from .linear_call import LinearCall, read_linear_call
from .plain_loras import add_lora, each_once, loras_of
from .stored_weights import StoredLoRA, stored_lora
from .weight_form import InputForm, KnownWeight, form_of, int8_parts, known_parts, known_weight, weight_form


def class_patch(name: str, prefix: str = DIFFUSION_MODEL) -> str:
    """Under which name a ModelPatcher patches the class of a linear, given its module path in the diffusion model, or
    in what else `root_of` says."""
    return f"{prefix}{name}.__class__"


def fused_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight, in any memory mode; `input` is floating point [..., K]."""
    resident = _resident(layer, input.device, input.dtype)
    if resident is not None:
        known, lora, bias = resident
        operands = known.operands(layer._parameters["weight"], lora)
        return known.repeated(operands)(input, *operands, bias)
    attached = layer.weight_function
    functions = each_once(attached) if len(attached) > 1 else attached
    lora = stored_lora(layer.weight, functions)
    thin = loras_of(functions, layer.weight.shape) if functions and lora is None else []
    fewer = [] if thin else functions if len(functions) < len(attached) else None
    with given_back(layer, _cast(layer, input.device, input.dtype, fewer)) as (weight, bias, _):
        parts = int8_parts(weight, layer)
        if parts is None:  # outside dynamic VRAM a patch of a partially loaded model makes a float weight all the same
            held = known_parts(layer.weight, layer)
            transform, bits = held.transform, held.activation_bits
            q, scale = requantize_weight(weight, transform, _seed_of_patches(layer))
        else:
            q, scale = parts._replace(lora=lora).operands()
            transform, bits = parts.transform, parts.activation_bits
        output = int8_linear(input, q, scale, bias, transform, activation_bits=bits)
        for factors in thin:
            add_lora(output, input, factors)
    return output


def called_forward(layer: Any, call: LinearCall, x: torch.Tensor) -> torch.Tensor:
    """What a call of a ComfyUI linear with an INT8 weight asks for, in any memory mode; `x` is floating point.

    Where a fused op has the activation, it quantizes in the same pass. A compiler folds separate passes by itself.
    """
    rows = x if x.ndim in (2, 3) else x.reshape(-1, x.shape[-1])
    output = None
    if not torch.compiler.is_compiling() and call.quantizes(rows, layer.in_features):
        quantize = functools.partial(call.quantized, rows)
        output = layer.product_of(quantize, x.shape[:-1], x.dtype, x.device)
    return call.around(functools.partial(fused_forward, layer), x) if output is None else call.added(output)


def _multiplied(layer: Any, cast: Cast, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The product with a weight and bias that are cast."""
    parts = known_parts(cast.weight, layer)._replace(lora=stored_lora(layer.weight, layer.weight_function))
    return int8_gemm(*quantized, *parts.operands(), cast.bias, dtype).view(*shape, -1)


def native_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight of this pack, computed as ComfyUI computes its own INT8.

    Its weight is neither smoothed nor wants 16 bits; `input` is floating point [..., K].
    """
    with given_back(layer, _cast(layer, input.device, input.dtype)) as (weight, bias, _):
        parts = int8_parts(weight, layer)
        if parts is None:  # a patch has made it a float
            return torch.nn.functional.linear(input, weight, bias)
        q, scale = parts.operands()
        group = parts.transform.rotation_group
        rotation = {} if group is None else {"convrot": True, "convrot_groupsize": group}
        rows = input.reshape(-1, input.shape[-1])
        return comfy_kitchen.int8_linear(rows, q, scale, bias, input.dtype, **rotation).view(*input.shape[:-1], -1)


def needs_gradient(input: torch.Tensor) -> bool:
    """Whether a product is differentiated, which INT8 has no gradient for."""
    return input.requires_grad and torch.is_grad_enabled()


class INT8Linear:
    """What linears of this pack's classes have beside ComfyUI's own: a fused op may quantize their input for them."""

    int8_kernel: str
    own_arguments: Mapping[str, Any]  # of ComfyUI's own forward behind its input
    holds_own = False  # whether its INT8 weights are this pack's, and not ComfyUI's own
    of_encoder = False  # whether it belongs to a text encoder of ComfyUI's own loader
    linear_name = ""  # its path, given by name_linears
    input_group: object | None = None  # given by group_inputs to those whose input others read too
    weight: Any
    weight_function: list
    _parameters: Any
    in_features: int
    out_features: int

    @staticmethod
    def in_forward(product: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
        """Call what multiplies. In a forward in which work is deferred no call in it is seen, and its result is."""
        forward = None if torch.compiler.is_compiling() else tracking.forward
        if forward is None:
            return product(*args)
        forward.settle()
        with outside():
            return forward.tracked(product(*args))

    def read_call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> LinearCall | None:
        """What the arguments behind an input ask for; None for the product alone."""
        return read_linear_call(self, self.own_arguments, args, kwargs) if args or kwargs else None

    def fused_product(self, x: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """What the arguments ask for, by the fused kernel, which takes a deferred input as it is noted."""
        call = self.read_call(valued(args), valued(kwargs)) if args or kwargs else None
        if type(x) is Deferred:
            plain = call is None or (call.activation is None and not call.unknown)
            output = takers.linear(self, x) if plain else None
            if output is not None:
                return output if call is None else call.added(output)
            x = x.note.value()
        return fused_forward(self, x) if call is None else called_forward(self, call, x)

    def product_around(
        self, product: Callable[..., torch.Tensor], x: torch.Tensor, args: Any, kwargs: Any
    ) -> torch.Tensor:
        """What the arguments ask for, in separate passes around a product of floats."""
        call = self.read_call(args, kwargs)
        return product(x) if call is None else call.around(product, x)

    def is_fused_on(self, device: torch.device) -> bool:
        """Whether the fused kernel multiplies by this linear's weight there."""
        form = form_of(self)
        if form is None or form.own is not self.holds_own:
            return False
        return runs_fused(device, self.int8_kernel, self.out_features, self.in_features, form.native)

    def own_forward(self, forward: Callable[..., torch.Tensor], x: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """What ComfyUI's own forward computes of a call. An older one drops all arguments but the input, so that they
        are computed around it."""
        return forward(x, *args, **kwargs) if self.own_arguments else self.product_around(forward, x, args, kwargs)

    def _forward(self, input: Any, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """ComfyUI's product with a weight and bias that it has cast, such as for several parts of an input."""
        form = None if isinstance(input, QuantizedTensor) or needs_gradient(input) else weight_form(weight, self)
        n, k = self.out_features, self.in_features
        if form is None or not runs_fused(input.device, self.int8_kernel, n, k, form.native):
            own: Any = super()
            return own._forward(input, weight, bias)
        parts = known_parts(weight, self)
        return int8_linear(input, *parts.operands(), bias, parts.transform, activation_bits=parts.activation_bits)

    def input_form(self) -> InputForm | None:
        """How the input is to be quantized, with factors wherever they are; None where it must be given as floats."""
        functions = self.weight_function
        if functions and stored_lora(self.weight, functions) is None:  # a LoRA of a streamed INT8 weight reads floats
            return None
        known = None if torch.compiler.is_compiling() else known_weight(self)
        if known is not None:
            return known.form_of_input(self.weight)
        parts = int8_parts(self.weight, self)
        return None if parts is None else InputForm(parts.transform, parts.activation_bits)

    def product_of(
        self,
        quantize: Callable[[ChannelTransform, int], Quantized | None],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor | None:
        """The output [*shape, N] in `dtype`, in any memory mode, for an input that `quantize` makes on `device`: int8
        [rows, K or 2K] and a scale per row. None where it makes none, or where the input must be given as floats.
        """
        resident = _resident(self, device, dtype)
        if resident is not None:
            known, lora, bias = resident
            weight = self._parameters["weight"]
            quantized = quantize(*known.form_of_input(weight))
            if quantized is None:
                return None
            operands = known.operands(weight, lora)
            return known.repeated(operands).multiply(quantized, *operands[:2], bias, shape, dtype)
        form = self.input_form()
        if form is None:
            return None
        if form.transform.smooth is not None and form.transform.smooth.device != device:
            # Smoothing factors come with the weight.
            with given_back(self, _cast(self, device, dtype)) as cast:
                quantized = quantize(known_parts(cast.weight, self).transform, form.activation_bits)
                return None if quantized is None else _multiplied(self, cast, quantized, shape, dtype)
        quantized = quantize(*form)
        if quantized is None:
            return None
        with given_back(self, _cast(self, device, dtype)) as cast:
            return _multiplied(self, cast, quantized, shape, dtype)


def _resident(
    layer: Any, device: torch.device, dtype: torch.dtype
) -> tuple[KnownWeight, StoredLoRA | None, torch.Tensor | None] | None:
    """What a linear knows of its weight, the LoRAs of a stored one, and its bias. None unless its weight lies on
    `device` with nothing else to be done to it, and its bias of `dtype` too.
    """
    if torch.compiler.is_compiling() or layer.bias_function:
        return None
    known, weight, bias = known_weight(layer), layer._parameters["weight"], layer._parameters["bias"]
    if known is None or stored(weight).device != device:
        return None
    if bias is not None and (bias.dtype != dtype or bias.device != device):
        return None
    functions = layer.weight_function
    lora = stored_lora(weight, functions) if functions else None
    if functions and lora is None:
        return None
    return known, lora, bias


def _cast(layer: Any, device: torch.device, dtype: torch.dtype, functions: list | None = None) -> Cast:
    """`cast_quantized`, where LoRAs of a stored weight are left to it."""
    lora = stored_lora(layer.weight, layer.weight_function)
    return cast_quantized(layer, device, dtype, functions if lora is None else [])


def _seed_of_patches(layer: Any) -> int | None:
    """The seed with which ComfyUI rounds a patched weight; None where what changes the weight is no patch."""
    key = next(filter(None, map(key_of, layer.weight_function)), None)
    return None if key is None else _seed(key)


_seed = functools.lru_cache(maxsize=4096)(comfy.utils.string_to_seed)
