"""The layer classes a model is built with (ComfyUI's `custom_operations`): its own, with the product of linears
replaced.

ComfyUI keeps owning the weight: loading, offloading, dynamic VRAM, LoRA and saving all see its QuantizedTensor. This
module only decides what a linear holds after loading and how it multiplies.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...kernels import BF16, FUSED, ChannelTransform, int8_path, native_computes
from ..comfyui.layers import (
    bias_functions,
    forget_input_scale,
    input_scale,
    layout_type,
    quantized_format,
    quantized_operations,
    run_every_op,
    set_format,
    weight_functions,
)
from ..comfyui.quantized import HeldWeight, QuantizedTensor, layout_of, native_rotation, params, storage_shape, stored
from ..files import int8_mark
from ..files.gguf_weight import is_gguf
from ..files.grouped_weight import is_grouped, mark_in
from ..files.stored_weight import HELD_LAYOUTS, is_stored, stored_kind
from ..files.values import check_finite
from .fused_forward import INT8Linear, form_of, fused_forward, native_forward
from .int8_weight import LAYOUT, computed_with, format_name, int8_weight, is_int8, mark_of
from .stored_blocks import HookedWeight, put_hooked

ConvertLayer = Callable[[str, torch.Tensor, torch.Tensor | None], torch.Tensor | None]
"""(layer name, its weight as stored: float, meta, or in another quantized format; what its input is multiplied by, if
anything) -> the weight to hold instead, or None to leave the layer as it is."""


def leave_layer(name: str, weight: torch.Tensor, pre_quant_scale: torch.Tensor | None) -> None:
    """The ConvertLayer that converts nothing."""


def int8_operations(
    kernel: str,
    compute_dtype: torch.dtype,
    convert_layer: ConvertLayer = leave_layer,
    dequantize_once: Callable[[int, int, bool], bool] = lambda n, k, native: False,
) -> type:
    """An operations class for one model.

    Args:
        kernel: one of kernels.KERNEL_CHOICES: what INT8 linears compute with, decided for the device of each input.
        compute_dtype: dtype of everything that is not INT8. Loading raises ValueError for a weight of another shape
            than its layer's.
        convert_layer: called for each linear that is not INT8 in the state dict.
        dequantize_once: (N, K, whether ComfyUI's own INT8 could compute it) -> whether an INT8 linear of the state dict
            is held as a `compute_dtype` weight instead.
    """
    base = quantized_operations(compute_dtype)

    class INT8Operations(base):
        int8_kernel = kernel
        convert_layer: ConvertLayer  # until the model is loaded
        # Once it is loaded: what of the whole model the state dict lacks, and what it holds beside it.
        missing: Sequence[str] = ()
        unexpected: Sequence[str] = ()

        class Linear(INT8Linear, base.Linear):
            int8_kernel = kernel
            dequantized = False  # whether the state dict had an INT8 weight of which a float one is held
            mark: Mapping[str, Any] = {}  # of the state dict, as long as the weight is what it says

            def _load_from_state_dict(self, state_dict, prefix, *args):
                self.input_group, self.dequantized = None, False
                INT8Operations.missing, INT8Operations.unexpected = args[2:4]  # PyTorch's: one list for all modules
                original = state_dict.get(f"{prefix}weight")
                self.mark = mark_in(original) if is_grouped(original) else _mark(state_dict, prefix)
                smooth, activation_bits = _take_own_form(state_dict, prefix, self.mark)
                if is_stored(original):  # ComfyUI would decode it
                    state_dict[f"{prefix}weight"] = torch.empty(original.shape, device="meta")
                super()._load_from_state_dict(state_dict, prefix, *args)
                if self.weight is None:
                    return
                held: Any = self.weight.data
                # ComfyUI takes the weight out of PyTorch's hands, and its check of the shape with it.
                shape = self.out_features, self.in_features
                needed = storage_shape(held, shape) if isinstance(held, QuantizedTensor) else shape
                if needed is not None and original.shape != needed:
                    raise ValueError(
                        f"{prefix}weight has shape {list(original.shape)}, but the model needs {list(needed)}"
                    )
                if isinstance(held, QuantizedTensor) and quantized_format(self) == int8_mark.NATIVE_FORMAT:
                    transform = ChannelTransform(smooth, native_rotation(held))
                    held = int8_weight(stored(held), params(held).scale, compute_dtype, transform, activation_bits)
                    self._hold_int8(held)
                else:
                    source = held if isinstance(held, QuantizedTensor) else original
                    scale = input_scale(self)
                    converted = INT8Operations.convert_layer(prefix.removesuffix("."), source, scale)
                    if converted is not None:
                        if scale is not None:
                            forget_input_scale(self)
                        if is_grouped(original) and is_int8(converted):
                            self._hold_int8(converted)  # the file's own
                            return
                        self._hold(converted)
                        if not is_grouped(converted):
                            self.mark = {}
                    elif is_gguf(original):
                        decoded = original.dequantize()
                        check_finite(f"{prefix}weight", decoded)
                        self._hold(decoded)
                    elif isinstance(held, QuantizedTensor):
                        held = HeldWeight(stored(held), layout_of(held), params(held))
                        self.weight = torch.nn.Parameter(held, requires_grad=False)

            def _hold_int8(self, weight: QuantizedTensor) -> None:
                """Hold an INT8 weight of the file, or the floats that it stands for."""
                native = native_computes(params(weight).smooth, params(weight).activation_bits)
                self.dequantized = dequantize_once(self.out_features, self.in_features, native)
                self._hold(weight.dequantize() if self.dequantized else weight)

            def _hold(self, weight: Any) -> None:
                kind = stored_kind(weight)
                if is_int8(weight):
                    set_format(self, LAYOUT, format_name(weight))
                    weight = computed_with(weight, kernel)
                elif kind is not None:
                    set_format(self, layout_of(weight), kind.name(weight))
                else:
                    set_format(self, None, None)
                    weight = weight.to(compute_dtype)
                self.weight = torch.nn.Parameter(weight, requires_grad=False)

            def set_weight(self, weight, inplace_update=False, return_weight=False, **kwargs):
                if is_stored(self.weight) and not (inplace_update or return_weight):
                    if weight.shape == self.weight.shape:
                        return None  # its patches act in its products
                    # A LoRA widens it. ComfyUI puts the stored one back.
                    self.weight = torch.nn.Parameter(weight.to(compute_dtype), requires_grad=False)
                    return None
                if not inplace_update:
                    return super().set_weight(weight, return_weight=return_weight, **kwargs)
                # By a hook.
                if is_stored(self.weight) or isinstance(self.weight, HookedWeight):
                    put_hooked(self, weight, kernel, kwargs.get("seed"))
                else:
                    self.weight.copy_(super().set_weight(weight, return_weight=True, **kwargs))

            def state_dict(self, *args, destination=None, prefix="", **kwargs):
                tensors = super().state_dict(*args, destination=destination, prefix=prefix, **kwargs)
                key = f"{prefix}{int8_mark.MARK}"
                if is_int8(self.weight):
                    tensors[key] = mark_of(self.weight, int8_mark.other_options(self.mark))
                elif key in tensors and self.mark:  # what ComfyUI, too, does not know of it
                    written = {} if is_grouped(self.weight) else int8_mark.decode_mark(tensors[key])
                    tensors[key] = int8_mark.encoded({**self.mark, **written})
                return tensors

            def forward(self, input, *args, **kwargs):
                form = form_of(self)
                if form is None or not form.own:
                    if input_scale(self) is None and _is_resident(self, input):
                        run_every_op()
                        return torch.nn.functional.linear(input, self.weight, self.bias)
                    if layout_type(self) in HELD_LAYOUTS:  # ComfyUI's forward would put the input into blocks
                        run_every_op()
                        return self.forward_comfy_cast_weights(input)
                    return super().forward(input, *args, **kwargs)
                run_every_op()
                if isinstance(input, QuantizedTensor):
                    input = input.dequantize()
                path = int8_path(input.device, kernel, self.out_features, self.in_features, form.native)
                if path == BF16 or (input.requires_grad and torch.is_grad_enabled()):
                    return self.forward_comfy_cast_weights(input)
                return (fused_forward if path == FUSED else native_forward)(self, input)

        class Embedding(base.Embedding):
            def _load_from_state_dict(self, state_dict, prefix, *args):
                table = state_dict.get(f"{prefix}weight")
                if is_stored(table):
                    state_dict[f"{prefix}weight"] = table.dequantize()
                super()._load_from_state_dict(state_dict, prefix, *args)

        LayerNorm = _uncast_where_resident(base.LayerNorm, torch.nn.LayerNorm.forward)
        RMSNorm = _uncast_where_resident(base.RMSNorm, torch.nn.RMSNorm.forward)

    INT8Operations.convert_layer = staticmethod(convert_layer)
    return INT8Operations


def _uncast_where_resident(own: Any, plain_forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> type:
    """A class of norms like `own`, one of ComfyUI's, that computes as PyTorch's does where nothing is to be cast."""

    class Norm(own):
        def forward(self, input):
            if not _is_resident(self, input):
                return super().forward(input)
            run_every_op()
            return plain_forward(self, input)

    return Norm


def _is_resident(layer: Any, input: Any) -> bool:
    """Whether a layer in floats can multiply as it is: ComfyUI's operations for quantized models cast each weight in
    each call, which keeps a fast card waiting.
    """
    if torch.compiler.is_compiling() or weight_functions(layer) or bias_functions(layer):
        return False
    return type(input) is torch.Tensor and all(
        held is None or (type(held) is torch.nn.Parameter and held.device == input.device and held.dtype == input.dtype)
        for held in layer._parameters.values()
    )


def _mark(state_dict: dict, prefix: str) -> dict[str, Any]:
    encoded = state_dict.get(f"{prefix}{int8_mark.MARK}")
    return {} if encoded is None else int8_mark.decode_mark(encoded)


def _take_own_form(state_dict: dict, prefix: str, mark: dict[str, Any]) -> tuple[torch.Tensor | None, int]:
    """A layer's smoothing factors, if any, and the bits of its activations, by its mark.

    The factors leave the state dict, and a mark that says of either becomes that of the native format which the rest
    is.
    """
    smooth = state_dict.pop(f"{prefix}{int8_mark.SMOOTH}", None)
    activation_bits = int8_mark.activation_bits(mark)
    if smooth is not None and activation_bits == 8 and mark.get("format") != int8_mark.SMOOTHED_FORMAT:
        raise ValueError(f"{prefix}{int8_mark.SMOOTH} is there although the layer is not marked as smoothed")
    if smooth is not None or (activation_bits != 8 and f"{prefix}{int8_mark.MARK}" in state_dict):
        native = ChannelTransform(None, int8_mark.rotation_group(mark))
        state_dict[f"{prefix}{int8_mark.MARK}"] = int8_mark.encode_mark(native)
    return smooth, activation_bits
