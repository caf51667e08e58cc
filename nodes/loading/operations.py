"""The layer classes that a model is built of: ComfyUI's `custom_operations`, with another product of linears.

ComfyUI keeps owning the weight: loading, offloading, dynamic VRAM, LoRA and saving all see its QuantizedTensor. Decided
here is only what a linear holds after loading and how it multiplies.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import comfy.ops
import torch
import torch.nn.functional as F
from comfy.quant_ops import QuantizedTensor

from ...kernels import NATIVE, int8_path, native_computes
from ..comfyui.layers import load_beside_weight, quantized_operations
from ..comfyui.lazy_tensors import lazy_pieces
from ..comfyui.quantized import held_weight, layout_of, storage_shape
from ..deferred.notes import MEMORY, Deferred, hidden_calls, tracking
from ..files import quant_config
from ..files.holding import HELD_LAYOUTS, is_grouped, is_stored, quant_config_in, stored_kind
from ..files.reading.values import check_finite
from ..linears.fused_forward import INT8Linear, native_forward, needs_gradient
from ..linears.int8_weight import LAYOUT, format_of_weight, int8_weight_of, is_int8, quant_config_of
from ..linears.linear_call import arguments_of, refuse_unknown
from ..linears.stored_weights import put_hooked
from .load_plan import LoadPlan


def int8_operations(plan: LoadPlan) -> type:
    """Return an operations class for one model, whose linears hold what `plan` says.

    Loading raises ValueError for a weight of another shape than its layer's.
    """
    kernel, compute_dtype = plan.kernel, plan.compute_dtype
    base = quantized_operations(compute_dtype)

    class INT8Operations(base):
        class Linear(INT8Linear, base.Linear):
            int8_kernel = kernel
            of_file = plan.file
            own_arguments = arguments_of(base.Linear.forward)
            dequantized = False  # whether the state dict had an INT8 weight of which a float one is held
            config: Mapping[str, Any] = {}  # of the state dict, as long as the weight is what it says

            def _load_from_state_dict(self, state_dict, prefix, *args):
                self.dequantized = False
                plan.missing, plan.unexpected = args[2:4]  # PyTorch's: one list for all modules
                weight = state_dict.get(f"{prefix}weight")
                said = state_dict.get(f"{prefix}{quant_config.QUANT_CONFIG}")
                said = {} if said is None else quant_config.decode_config(said)
                self.config = quant_config_in(weight) if is_grouped(weight) else said
                is_int8_in_file = self.config.get("format") in quant_config.INT8_FORMATS
                read, needed = weight, (self.out_features, self.in_features)
                if is_int8_in_file or is_stored(weight):
                    parts = ("weight", quant_config.SCALE, quant_config.SMOOTH, quant_config.QUANT_CONFIG)
                    pieces = {part: state_dict.pop(f"{prefix}{part}", None) for part in parts}
                    load_beside_weight(self, base.Linear, state_dict, prefix, *args)
                else:  # ComfyUI takes the weight out of PyTorch's hands, and its check of the shape with it
                    super()._load_from_state_dict(state_dict, prefix, *args)
                    if self.weight is None:
                        return
                    if isinstance(self.weight, QuantizedTensor):
                        read = self.weight.data
                        needed = storage_shape(read, needed)
                if needed is not None and weight.shape != needed:
                    raise ValueError(
                        f"{prefix}weight has shape {list(weight.shape)}, but the model needs {list(needed)}"
                    )
                if is_int8_in_file:
                    made = int8_weight_of(pieces, self.config, compute_dtype)
                else:
                    input_scale = getattr(self, "pre_quant_scale", None)
                    made = plan.make(prefix.removesuffix("."), read, input_scale)
                    if made is not None:
                        if input_scale is not None:
                            self.pre_quant_scale = None  # the weight has the factors now
                    elif is_stored(read):
                        made = read.dequantize()
                        check_finite(f"{prefix}weight", made)
                    elif isinstance(read, QuantizedTensor):
                        self.weight = torch.nn.Parameter(held_weight(read), requires_grad=False)
                if made is not None:
                    self._hold(made, is_int8_in_file or (is_grouped(read) and is_int8(made)))

            def _hold(self, weight: Any, of_file: bool) -> None:
                """Hold a weight that was made, or of an INT8 one of the file perhaps the floats that it stands for."""
                if of_file:
                    native = native_computes(weight.params.smooth, weight.params.activation_bits)
                    self.dequantized = plan.in_floats(self.out_features, self.in_features, native)
                    if self.dequantized:
                        plan.wait()
                        weight = weight.dequantize()
                else:
                    self.config = quant_config_in(weight) if is_grouped(weight) else {}
                kind = stored_kind(weight)
                if is_int8(weight):
                    self.layout_type, self.quant_format = LAYOUT, format_of_weight(weight)
                elif kind is not None:
                    self.layout_type, self.quant_format = layout_of(weight), kind.name(weight)
                else:
                    self.layout_type = self.quant_format = None
                    weight = weight.to(compute_dtype)
                self.weight = torch.nn.Parameter(weight, requires_grad=False)

            def set_weight(self, weight, inplace_update=False, seed=None, return_weight=False, **others):
                if not (is_stored(self.weight) or inplace_update):
                    return super().set_weight(weight, seed=seed, return_weight=return_weight, **others)
                refuse_unknown(self, others)
                if return_weight:
                    return weight.to(compute_dtype)
                if inplace_update:  # by a hook
                    put_hooked(self, weight, seed)
                elif weight.shape != self.weight.shape:  # of the same shape, its patches act in its products
                    # A LoRA widens it. ComfyUI puts the stored one back.
                    self.weight = torch.nn.Parameter(weight.to(compute_dtype), requires_grad=False)
                return None

            def state_dict(self, *args, destination=None, prefix="", **kwargs):
                tensors = super().state_dict(*args, destination=destination, prefix=prefix, **kwargs)
                key = f"{prefix}{quant_config.QUANT_CONFIG}"
                if is_int8(self.weight):
                    tensors[key] = quant_config_of(self.weight, quant_config.other_options(self.config))
                    # ComfyUI saves what it gets by copying the weight, and counts bytes: it needs no numbers here.
                    for name, part in lazy_pieces(self).items():
                        tensors[prefix + name] = torch.empty(part.shape, dtype=part.dtype, device="meta")
                elif key in tensors and self.config:  # what ComfyUI, too, does not know of it
                    written = {} if is_grouped(self.weight) else quant_config.decode_config(tensors[key])
                    tensors[key] = quant_config.encoded({**self.config, **written})
                return tensors

            def unfused(self, form, x, args, kwargs):
                if form is not None and form.own:
                    if isinstance(x, QuantizedTensor):
                        x = x.dequantize()
                    path = int8_path(x.device, kernel, self.out_features, self.in_features, form.native)
                    native = path == NATIVE and not needs_gradient(self, x)
                    product = partial(native_forward, self) if native else self.forward_comfy_cast_weights
                elif getattr(self, "pre_quant_scale", None) is None and _is_resident(self, x):
                    product = partial(F.linear, weight=self.weight, bias=self.bias)
                elif getattr(self, "layout_type", None) in HELD_LAYOUTS:
                    # ComfyUI's forward would put the input into blocks.
                    product = self.forward_comfy_cast_weights
                else:
                    return super().unfused(form, x, args, kwargs)
                comfy.ops.run_every_op()
                return self.around(product, x, args, kwargs)

        class Embedding(base.Embedding):
            def _load_from_state_dict(self, state_dict, prefix, *args):
                table = state_dict.get(f"{prefix}weight")
                if is_stored(table):
                    state_dict[f"{prefix}weight"] = table.dequantize()
                super()._load_from_state_dict(state_dict, prefix, *args)

        LayerNorm = _uncast_where_resident(base.LayerNorm, F.layer_norm, ("weight", "bias"))
        RMSNorm = _uncast_where_resident(base.RMSNorm, F.rms_norm, ("weight",))

    return INT8Operations


def _uncast_where_resident(own: Any, norm: Callable[..., torch.Tensor], parameters: Sequence[str]) -> type:
    """Return a class of norms like ComfyUI's `own` that computes as PyTorch's does where nothing is to be cast."""

    class Norm(own):
        def forward(self, input, *args, **kwargs):
            if args or kwargs or torch.compiler.is_compiling():
                return super().forward(input, *args, **kwargs)
            with hidden_calls():
                resident = _is_resident(self, input)
            if not resident:
                return super().forward(input)
            comfy.ops.run_every_op()
            given = (self.normalized_shape, *map(self._parameters.get, parameters), self.eps)
            forward = tracking.forward
            if forward is None:
                return norm(input, *given)
            forward.settle()
            with hidden_calls():  # a norm of any input may wait
                return forward.tracked(forward.called(norm, (type(input),), (input, *given), {}))

    return Norm


def _is_resident(layer: Any, input: Any) -> bool:
    """Whether a layer in floats can multiply as it is: ComfyUI's operations for quantized models cast each weight in
    each call, which keeps a fast card waiting."""
    if torch.compiler.is_compiling() or layer.weight_function or layer.bias_function:
        return False
    if type(input) not in _ACTIVATIONS:
        return False
    device, dtype = input.device, input.dtype
    for held in layer._parameters.values():
        if held is not None and (type(held) is not torch.nn.Parameter or held.device != device or held.dtype != dtype):
            return False
    return True


_ACTIVATIONS = (*MEMORY, Deferred)
