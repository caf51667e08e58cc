"""An INT8 linear of a model computed by the fused kernel, whoever loaded its weight and whatever patches it."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import comfy.utils
import comfy_kitchen
import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels import ChannelTransform, Quantized, int8_gemm, int8_linear, requantize_weight, runs_fused
from ..comfyui.layers import cast_quantized, given_back
from ..comfyui.patcher import key_of
from ..comfyui.quantized import stored
from ..deferred import takers
from ..deferred.notes import Deferred, outside, tracking, valued
from .linear_call import LinearCall, read_linear_call
from .plain_loras import StoredLoRA, add_lora, each_once, loras_of, stored_lora
from .weight_form import InputForm, KnownWeight, form_of, known_form, known_weight, weight_form


def fused_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight, in any memory mode; `input` is floating point [..., K]."""
    resident = _resident(layer, input.device, input.dtype)
    if resident is not None:
        known, lora, bias = resident
        linear, q, scale, smooth = known.linear(layer._parameters["weight"], lora)
        return linear(input, q, scale, smooth, bias)
    attached = layer.weight_function
    functions = each_once(attached) if len(attached) > 1 else attached
    lora = stored_lora(layer.weight, functions)
    thin = loras_of(functions, layer.weight.shape) if functions and lora is None else []
    fewer = [] if thin or lora is not None else functions if len(functions) < len(attached) else None
    with given_back(layer, cast_quantized(layer, input.device, input.dtype, fewer)) as (weight, bias, _):
        form = weight_form(weight, layer)
        if form is None:  # outside dynamic VRAM a patch of a partially loaded model makes a float weight all the same
            transform, bits = known_form(layer.weight, layer).input_form(layer.weight)
            q, scale = requantize_weight(weight, transform, _seed_of_patches(layer))
        else:
            (q, scale), (transform, bits) = form.operands(weight, lora), form.input_form(weight)
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


def native_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight of this pack, computed as ComfyUI computes its own INT8.

    Its weight is neither smoothed nor wants 16 bits; `input` is floating point [..., K].
    """
    with given_back(layer, cast_quantized(layer, input.device, input.dtype)) as (weight, bias, _):
        form = weight_form(weight, layer)
        if form is None:  # a patch has made it a float
            return torch.nn.functional.linear(input, weight, bias)
        (q, scale), group = form.operands(weight), form.unsmoothed.transform.rotation_group
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

    def fused_product(self, x: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """What the arguments ask for, by the fused kernel, which takes a deferred input as it is noted."""
        call = None
        if args or kwargs:
            call = read_linear_call(self, self.own_arguments, valued(args), valued(kwargs))
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
        call = read_linear_call(self, self.own_arguments, args, kwargs)
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
        transform, bits = form.input_form(weight)
        return int8_linear(input, *form.operands(weight), bias, transform, activation_bits=bits)

    def input_form(self) -> InputForm | None:
        """How the input is to be quantized, with factors wherever they are; None where it must be given as floats."""
        functions = self.weight_function
        if functions and stored_lora(self.weight, functions) is None:  # a LoRA of a streamed INT8 weight reads floats
            return None
        form = form_of(self)
        return None if form is None else form.input_form(self.weight)

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
            quantized = quantize(*known.form.input_form(weight))
            if quantized is None:
                return None
            linear, q, scale, _ = known.linear(weight, lora)
            return linear.multiply(quantized, q, scale, bias, shape, dtype)
        form = self.input_form()
        if form is None:
            return None
        smooth, quantized = form.transform.smooth, None
        comes_with_weight = smooth is not None and smooth.device != device
        if not comes_with_weight:
            quantized = quantize(*form)
            if quantized is None:
                return None
        lora = stored_lora(self.weight, self.weight_function)
        functions = None if lora is None else []  # a stored weight's LoRAs are left to its product
        with given_back(self, cast_quantized(self, device, dtype, functions)) as (weight, bias, _):
            cast = known_form(weight, self)
            quantized = quantize(*cast.input_form(weight)) if comes_with_weight else quantized
            if quantized is None:
                return None
            return int8_gemm(*quantized, *cast.operands(weight, lora), bias, dtype).view(*shape, -1)


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


def _seed_of_patches(layer: Any) -> int | None:
    """The seed with which ComfyUI rounds a patched weight; None where what changes the weight is no patch."""
    key = next(filter(None, map(key_of, layer.weight_function)), None)
    return None if key is None else _seed(key)


_seed = functools.lru_cache(maxsize=4096)(comfy.utils.string_to_seed)
