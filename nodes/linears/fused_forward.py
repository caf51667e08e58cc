"""The forward of INT8 linears on the fused kernel, whoever loaded the weight and whatever patches it."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import comfy.ops
import comfy.utils
import comfy_kitchen
import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels import ChannelTransform, Quantized, int8_gemm, int8_linear, requantize_weight, runs_fused
from ..comfyui.layers import cast_quantized
from ..comfyui.patcher import key_of
from ..comfyui.quantized import stored
from ..deferred import consumers
from ..deferred.notes import Deferred, hidden_calls, tracking, values_of
from .linear_call import LinearCall, read_linear_call
from .plain_loras import StoredLoRA, add_lora, each_once, loras_of, stored_lora
from .weight_form import KnownWeight, WeightForm, known_form, known_weight, weight_form


def native_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """Return the output of a linear with an INT8 weight of this pack, computed as ComfyUI computes its own INT8. The
    weight is unsmoothed, with activations of 8 bits; `input` is floating point [..., K]."""
    with cast_quantized(layer, input.device, input.dtype, None) as (weight, bias):
        form = weight_form(weight, layer)
        if form is None:  # a patch has made it a float
            return torch.nn.functional.linear(input, weight, bias)
        (q, scale), group = form.operands(weight), form.unsmoothed.transform.rotation_group
        rotation = {} if group is None else {"convrot": True, "convrot_groupsize": group}
        rows = input.reshape(-1, input.shape[-1])
        return comfy_kitchen.int8_linear(rows, q, scale, bias, input.dtype, **rotation).view(*input.shape[:-1], -1)


def _operands(
    known: KnownWeight | None, form: WeightForm, weight: Any, lora: StoredLoRA | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the operands of a weight that ComfyUI has cast, with what is known of the one that its linear holds."""
    return (known if known is not None and known.form.kind is form.kind else form).operands(weight, lora)


def needs_gradient(layer: Any, input: torch.Tensor) -> bool:
    """Whether a product may need a gradient, which INT8 has not: of its input, of its bias, or of what changes its
    weight, such as a LoRA in training."""
    if not torch.is_grad_enabled():
        return False
    bias = layer._parameters["bias"]
    changed = layer.weight_function or layer.bias_function or (bias is not None and bias.requires_grad)
    return input.requires_grad or bool(changed)


class INT8Linear:
    """A mixin before ComfyUI's class of linears, its `super()`: the fused kernel multiplies by INT8 weights, and fused
    ops may quantize inputs."""

    int8_kernel: str
    own_arguments: Mapping[str, Any]  # `arguments_of` ComfyUI's own forward
    of_encoder = False  # whether it belongs to a text encoder of ComfyUI's own loader
    linear_name = ""  # its path, set by name_linears
    of_file = ""  # the name of the file that it was loaded of
    weight: Any
    weight_function: list
    bias_function: list
    _parameters: Any
    in_features: int
    out_features: int

    def forward(self, input: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Compute a call of ComfyUI's. Hide the calls in here from a deferred forward, and track the result."""
        deferring = None if torch.compiler.is_compiling() else tracking.forward
        if deferring is None:
            return self._called(input, args, kwargs)
        deferring.settle()
        with hidden_calls():
            return deferring.tracked(self._called(input, args, kwargs))

    def _called(self, x: Any, args: Any, kwargs: Any) -> torch.Tensor:
        form, known = known_weight(self)
        if not self._fuses(form, x.device) or needs_gradient(self, x):
            if len(self.weight_function) > 1:  # ComfyUI's own products would apply a patch as often as it is there
                self.weight_function = each_once(self.weight_function)
            return self.unfused(form, values_of(x), values_of(args), values_of(kwargs))
        comfy.ops.run_every_op()
        if isinstance(x, QuantizedTensor):
            x = x.dequantize()
        call = (
            read_linear_call(self, self.own_arguments, values_of(args), values_of(kwargs)) if args or kwargs else None
        )
        quantize = None
        if type(x) is Deferred and (call is None or (call.activation is None and not call.unknown)):
            quantize = functools.partial(consumers.linear, self, x)
        elif call is not None:
            x = values_of(x)
            # A compiler fuses separate passes by itself.
            quantize = None if torch.compiler.is_compiling() else call.quantizer(x, self.in_features)
        output = self._product(known, x, call, quantize)
        return output if call is None else call.added(output)

    def _fuses(self, form: WeightForm | None, device: torch.device) -> bool:
        shape = self.out_features, self.in_features
        return form is not None and runs_fused(device, self.int8_kernel, *shape, form.native)

    def is_fused_on(self, device: torch.device) -> bool:
        """Whether the fused kernel multiplies by this linear's weight on a device."""
        return self._fuses(known_weight(self)[0], device)

    def unfused(self, form: WeightForm | None, x: Any, args: Any, kwargs: Any) -> torch.Tensor:
        """Return the output of ComfyUI's own forward, for a weight of `form`. An older one drops all arguments but the
        input, which are computed around it."""
        own: Any = super()
        return own.forward(x, *args, **kwargs) if self.own_arguments else self.around(own.forward, x, args, kwargs)

    def around(self, product: Callable[..., torch.Tensor], x: torch.Tensor, args: Any, kwargs: Any) -> torch.Tensor:
        """Return `product` of x in floats, with what a call's arguments ask for in separate passes around it."""
        call = read_linear_call(self, self.own_arguments, args, kwargs)
        return product(x) if call is None else call.added(product(call.activated(x)))

    def _product(
        self,
        known: KnownWeight | None,
        x: Any,
        call: LinearCall | None,
        quantize: Callable[[ChannelTransform, int], Quantized | None] | None,
    ) -> torch.Tensor:
        """Return the product [..., N] with the activated input, in any memory mode. `x` is in floats, or deferred;
        `quantize` returns int8 [rows, K or 2K] of it and a scale per row, or None where it must be read as floats."""
        device, dtype, leading, functions = x.device, x.dtype, x.shape[:-1], self.weight_function
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        lora = stored_lora(weight, functions) if functions else None
        in_floats = values_of if call is None or type(x) is Deferred else call.activated
        if functions and lora is None:  # a LoRA of a streamed INT8 weight reads floats
            quantize = None
        elif known is not None and self._lies_on(device, dtype):
            quantized = None if quantize is None else quantize(*known.form.input_form(weight))
            x = in_floats(x) if quantized is None else x
            linear, held = known.linear(weight, lora)
            if quantized is None:
                return linear(x, held, bias)
            return linear.multiply(quantized, held, bias, leading, dtype)
        once = each_once(functions) if len(functions) > 1 else functions
        thin = loras_of(once, weight.shape) if lora is None else []
        fewer = [] if thin or lora is not None else once if len(once) < len(functions) else None
        with cast_quantized(self, device, dtype, fewer) as (weight, bias):
            form = weight_form(weight, self)
            if form is None:  # outside dynamic VRAM a patch of a partially loaded model makes it floats
                transform, bits = known_form(self.weight, self).input_form(self.weight)
                key = next(filter(None, map(key_of, self.weight_function)), None)
                transform = transform.on(device)  # a weight that is not loaded lies elsewhere
                seed = None if key is None else comfy.utils.string_to_seed(key)  # as ComfyUI rounds it
                q, scale = requantize_weight(weight, transform, seed)
            else:
                q, scale = _operands(known, form, weight, lora)
                transform, bits = form.input_form(weight)
            quantized = None if quantize is None else quantize(transform, bits)
            if quantized is not None:
                return int8_gemm(*quantized, q, scale, bias, dtype).view(*leading, -1)
            x = in_floats(x)
            output = int8_linear(x, q, scale, bias, transform, activation_bits=bits)
            for factors in thin:
                add_lora(output, x, factors)
        return output

    def _lies_on(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether weight and bias lie on a device, the bias in this dtype and with nothing to be done to it."""
        bias = self._parameters["bias"]
        if self.bias_function or stored(self._parameters["weight"]).device != device:
            return False
        return bias is None or (bias.dtype == dtype and bias.device == device)

    def _forward(self, input: Any, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute ComfyUI's product with a weight and bias that it has cast, such as for several parts of an input."""
        form = None if isinstance(input, QuantizedTensor) or needs_gradient(self, input) else weight_form(weight, self)
        if form is None or not self._fuses(form, input.device):
            own: Any = super()
            return own._forward(input, weight, bias)
        q, scale = _operands(known_weight(self)[1], form, weight)
        transform, bits = form.input_form(weight)
        return int8_linear(input, q, scale, bias, transform, activation_bits=bits)
