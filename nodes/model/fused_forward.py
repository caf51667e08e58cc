"""An INT8 linear of a model computed by the fused kernel, whoever loaded its weight and whatever patches it."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import comfy.ops
import comfy.utils
import comfy_kitchen
import torch
from comfy.model_patcher import LowVramPatch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

from ...kernels import (
    UNCHANGED,
    ChannelTransform,
    InputReader,
    Quantized,
    RepeatedLinear,
    expand_blocks,
    int8_gemm,
    int8_linear,
    requantize_weight,
)
from ..blocks.steps import InputForm
from ..files.gguf_weight import has_scales, is_gguf
from ..files.int8_mark import NATIVE_FORMAT
from .int8_weight import is_int8
from .patched_weights import DIFFUSION_MODEL
from .plain_loras import each_once, loras_of
from .stored_blocks import StoredLoRA, stored_lora

NATIVE_LAYOUT = QUANT_ALGOS[NATIVE_FORMAT]["comfy_tensor_layout"]
Cast = tuple[Any, torch.Tensor | None, Any]


class INT8Parts(NamedTuple):
    """An INT8 weight as the kernel takes it.

    Attributes:
        stored: int8 [N, K], or a weight in GGUF's blocks.
        scale: float32, one value or one per output channel.
        transform: what is done to its input.
        activation_bits: to how many bits its input is rounded.
        lora: what changes a weight in GGUF's blocks; on the device where it is used, which need not be this one's.
    """

    stored: torch.Tensor
    scale: torch.Tensor
    transform: ChannelTransform
    activation_bits: int
    lora: StoredLoRA | None = None

    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """int8 [N, K] and its scale; of blocks new ones, in memory that PyTorch hands from one layer to the next."""
        weight, scale, lora = self.stored, self.scale, self.lora
        if not is_gguf(weight):
            return weight, scale
        low_rank = None
        if lora is not None:
            scale, low_rank = scale + lora.scale, lora.low_rank
        return expand_blocks(weight._qdata, weight._params.block_format, scale, low_rank), scale


def is_native_int8(weight: Any) -> bool:
    """Whether a module's weight is a linear's in ComfyUI's own INT8 format, as its own loaders hold it."""
    return isinstance(weight, QuantizedTensor) and weight._layout_cls == NATIVE_LAYOUT and weight.ndim == 2


def class_patch(name: str) -> str:
    """Under which name a ModelPatcher patches the class of a linear, given its module path in the diffusion model."""
    return f"{DIFFUSION_MODEL}{name}.__class__"


def int8_parts(weight: Any) -> INT8Parts | None:
    """The parts of an INT8 weight of either kind, or of one that is made INT8 for each product; None of any other."""
    if is_int8(weight):
        params = weight._params
        return INT8Parts(weight._qdata, params.scale, params.transform, params.activation_bits)
    if is_native_int8(weight):
        params = weight._params
        transform = _rotation(params.convrot_groupsize, params.convrot)
        return INT8Parts(weight._qdata, params.scale.float(), transform, 8)
    if is_gguf(weight) and has_scales(weight):
        return INT8Parts(weight, weight._params.scale, UNCHANGED, 8)
    return None


# A table rather than a cache, which a compiler warns of.
_ROTATIONS = {4**digits: ChannelTransform(None, 4**digits) for digits in range(1, 7)}


def _rotation(group: int, rotated: bool) -> ChannelTransform:
    if not rotated:
        return UNCHANGED
    return _ROTATIONS.get(group) or ChannelTransform(None, group)


def fused_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight, in any memory mode; `input` is floating point [..., K].

    `layer.input_reader` is an InputReader or None.
    """
    resident = _resident_parts(layer, input.device, input.dtype)
    if resident is not None:
        reader, repeated = layer.input_reader, _repeated_linear(resident)
        smooth, (weight, scale) = resident.transform.smooth, resident.operands()
        if reader is None:
            quantized = repeated.quantize(input, weight, smooth)
        else:
            quantized = reader.shared(input, lambda: repeated.quantize(input, weight, smooth))
        bias = layer._parameters["bias"]
        return repeated.multiply(quantized, weight, scale, bias, input.shape[:-1], input.dtype)
    attached = layer.weight_function
    functions = each_once(attached) if len(attached) > 1 else attached
    stored = stored_lora(layer.weight, functions)
    thin = loras_of(functions, layer.weight.shape) if functions and stored is None else []
    fewer = [] if thin else functions if len(functions) < len(attached) else None
    weight, bias, stream = _cast(layer, input.device, input.dtype, fewer)
    parts = int8_parts(weight)
    if parts is None:  # outside dynamic VRAM a patch of a partially loaded model makes a float weight all the same
        held = _known_parts(layer.weight)
        transform, bits = held.transform, held.activation_bits
        q, scale = requantize_weight(weight, transform, _seed_of_patches(layer))
    else:
        q, scale = parts._replace(lora=stored).operands()
        transform, bits = parts.transform, parts.activation_bits
    linear = int8_linear if layer.input_reader is None else layer.input_reader.int8_linear
    output = linear(input, q, scale, bias, transform, activation_bits=bits)
    for lora in thin:
        lora.add_to(output, input)
    comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return output


def project(
    layer: Any, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype, held: Cast | None = None
) -> torch.Tensor:
    """The output [*shape, N] in `dtype` of a ComfyUI linear with an INT8 weight, in any memory mode.

    `quantized` is its input as int8 [rows, K or 2K] and a scale per row, as its weight wants it; `held` is its weight
    where that was cast already.
    """
    q, q_scale = quantized
    resident = None if held is not None else _resident_parts(layer, q.device, dtype)
    if resident is not None:
        bias = layer._parameters["bias"]
        return _repeated_linear(resident).multiply(quantized, *resident.operands(), bias, shape, dtype)
    weight, bias, stream = held or _cast(layer, q.device, dtype)
    parts = _known_parts(weight)._replace(lora=stored_lora(layer.weight, layer.weight_function))
    output = int8_gemm(q, q_scale, *parts.operands(), bias, dtype)
    comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return output.view(*shape, -1)


def native_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight of this pack, computed as ComfyUI computes its own INT8.

    Its weight is neither smoothed nor wants 16 bits; `input` is floating point [..., K].
    """
    weight, bias, stream = _cast(layer, input.device, input.dtype)
    parts = int8_parts(weight)
    if parts is None:  # a patch has made it a float
        output = torch.nn.functional.linear(input, weight, bias)
    else:
        group = parts.transform.rotation_group
        rotation = {} if group is None else {"convrot": True, "convrot_groupsize": group}
        rows = input.reshape(-1, input.shape[-1])
        output = comfy_kitchen.int8_linear(rows, *parts.operands(), bias, input.dtype, **rotation)
        output = output.view(*input.shape[:-1], -1)
    comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return output


class INT8Linear:
    """What linears of this pack's classes have beside ComfyUI's own: a producer may quantize their input for them."""

    int8_kernel: str
    input_reader: InputReader | None = None  # given by share_inputs to those whose input others read too
    weight: Any
    weight_function: list

    def input_form(self) -> InputForm | None:
        """How the input is to be quantized, with factors wherever they are; None where it must be given as floats."""
        parts = _patched_parts(self.weight, self.weight_function)  # a LoRA of a streamed INT8 weight reads floats
        return None if parts is None else InputForm(parts.transform, parts.activation_bits)

    def open(self, form: InputForm, device: torch.device, dtype: torch.dtype) -> tuple[ChannelTransform, Cast | None]:
        """What is done to the input's channels, with factors on `device`, and what `project` is to be given.

        Factors that are elsewhere come with the weight, which is then cast here.
        """
        if form.transform.smooth is None or form.transform.smooth.device == device:
            return form.transform, None
        cast = _cast(self, device, dtype)
        return _known_parts(cast[0]).transform, cast

    def project(
        self, quantized: Quantized, shape: Sequence[int], dtype: torch.dtype, held: Cast | None = None
    ) -> torch.Tensor:
        comfy.ops.run_every_op()
        return project(self, quantized, shape, dtype, held)


def _resident_parts(layer: Any, device: torch.device, dtype: torch.dtype) -> INT8Parts | None:
    """The weight of a linear that lies on `device` and has nothing to be done to it but LoRAs of a stored one, nor its
    bias of `dtype`; else None."""
    if torch.compiler.is_compiling() or layer.bias_function:
        return None
    parts = _patched_parts(layer._parameters["weight"], layer.weight_function)
    if parts is None or parts.stored.device != device:
        return None
    bias = layer._parameters["bias"]
    return parts if bias is None or (bias.device == device and bias.dtype == dtype) else None


def _repeated_linear(parts: INT8Parts) -> RepeatedLinear:
    return RepeatedLinear.of(parts.transform.rotation_group, parts.activation_bits)


def _cast(layer: Any, device: torch.device, dtype: torch.dtype, functions: list | None = None) -> Cast:
    """Weight and bias on a device for an input of a dtype, and what ComfyUI wants back after their use.

    `functions` change the weight, those that are attached where it is None; LoRAs of a stored weight are left to it.
    """
    attached = layer.weight_function
    if stored_lora(layer.weight, attached) is not None:
        functions = []
    if functions is not None:
        layer.weight_function = functions
    try:
        # want_requant: a patch applied while streaming is folded back into an INT8 weight.
        return comfy.ops.cast_bias_weight(
            layer,
            dtype=layer.weight.dtype,
            device=device,
            bias_dtype=dtype,
            offloadable=True,
            compute_dtype=dtype,
            want_requant=True,
        )
    finally:
        if functions is not None:
            layer.weight_function = attached


def _patched_parts(weight: Any, functions: list) -> INT8Parts | None:
    """The parts of an INT8 weight with what changes it in use; None where that is more than LoRAs of a stored one."""
    lora = stored_lora(weight, functions)
    if functions and lora is None:
        return None
    parts = int8_parts(weight)
    return parts if parts is None or lora is None else parts._replace(lora=lora)


def _known_parts(weight: Any) -> INT8Parts:
    parts = int8_parts(weight)
    assert parts is not None
    return parts


def _seed_of_patches(layer: Any) -> int | None:
    """The seed with which ComfyUI rounds a patched weight; None where what changes the weight is no patch."""
    keys = [function.key for function in layer.weight_function if isinstance(function, LowVramPatch)]
    return _seed(keys[0]) if keys else None


_seed = functools.lru_cache(maxsize=4096)(comfy.utils.string_to_seed)
