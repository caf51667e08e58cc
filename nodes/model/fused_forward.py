"""An INT8 linear of a model computed by the fused kernel, whoever loaded its weight and whatever patches it."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import comfy.ops
import comfy.utils
import comfy_kitchen
import torch
from comfy.model_management import cast_to_device
from comfy.model_patcher import LowVramPatch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor
from comfy.weight_adapter.lora import LoRAAdapter

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

NATIVE_LAYOUT = QUANT_ALGOS[NATIVE_FORMAT]["comfy_tensor_layout"]
Cast = tuple[Any, torch.Tensor | None, Any]


class INT8Parts(NamedTuple):
    """An INT8 weight as the kernel takes it.

    Attributes:
        stored: int8 [N, K], or a weight in GGUF's blocks.
        scale: float32, one value or one per output channel.
        transform: what is done to its input.
        activation_bits: to how many bits its input is rounded.
    """

    stored: torch.Tensor
    scale: torch.Tensor
    transform: ChannelTransform
    activation_bits: int

    def q(self) -> torch.Tensor:
        """int8 [N, K]; of blocks a new one, in memory that PyTorch hands from one layer to the next."""
        weight = self.stored
        return expand_blocks(weight._qdata, weight._params.block_format, self.scale) if is_gguf(weight) else weight


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


@dataclass(frozen=True)
class _LoRA:
    """What a patch adds to a linear's weight: factor up @ down, [N, rank] @ [rank, K]."""

    up: torch.Tensor
    down: torch.Tensor
    factor: float

    def add_to(self, output: torch.Tensor, input: torch.Tensor) -> None:
        """Add input @ (factor up @ down)^T to the output, where it is: two thin products."""
        up, down = (cast_to_device(t, input.device, input.dtype) for t in (self.up, self.down))
        rows = torch.nn.functional.linear(input, down).flatten(0, -2)
        output.view(-1, output.shape[-1]).addmm_(rows, up.t(), alpha=self.factor)


def _each_once(functions: list) -> list:
    """What changes a weight in use, without a patch that ComfyUI attached a second time when it unloaded a part."""
    keys: set[str] = set()
    kept = []
    for function in functions:
        key = function.key if isinstance(function, LowVramPatch) else None
        if key is None or key not in keys:
            kept.append(function)
            keys |= set() if key is None else {key}
    return kept


def _loras_of(functions: list) -> list[_LoRA]:
    """The patches of a partially loaded weight where all are plain LoRAs, which need no new weight; else nothing."""
    loras = []
    for function in functions:
        patches = function.patches[function.key] if isinstance(function, LowVramPatch) else [None]
        for patch in patches:
            if patch is None:
                return []
            strength, adapter, strength_model, offset, change = patch
            if type(adapter) is not LoRAAdapter or strength_model != 1.0 or offset is not None or change is not None:
                return []
            up, down, alpha, *others = adapter.weights  # others: of convolutions, DoRA, and another shape
            if any(other is not None for other in others):
                return []
            factor = 1.0 if alpha is None else float(alpha) / down.shape[0]
            loras.append(_LoRA(up.flatten(1), down.flatten(1), strength * factor))
    return loras


def fused_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight, in any memory mode; `input` is floating point [..., K].

    `layer.input_reader` is an InputReader or None.
    """
    resident = _resident_parts(layer, input.device, input.dtype)
    if resident is not None:
        reader, repeated = layer.input_reader, _repeated_linear(resident)
        smooth, weight = resident.transform.smooth, resident.q()
        if reader is None:
            quantized = repeated.quantize(input, weight, smooth)
        else:
            quantized = reader.shared(input, lambda: repeated.quantize(input, weight, smooth))
        bias = layer._parameters["bias"]
        return repeated.multiply(quantized, weight, resident.scale, bias, input.shape[:-1], input.dtype)
    attached = layer.weight_function
    functions = _each_once(attached) if len(attached) > 1 else attached
    loras = _loras_of(functions) if functions else []
    if loras or functions is not attached:
        layer.weight_function = [] if loras else functions
        try:
            weight, bias, stream = _cast(layer, input.device, input.dtype)
        finally:
            layer.weight_function = attached
    else:
        weight, bias, stream = _cast(layer, input.device, input.dtype)
    parts = int8_parts(weight)
    if parts is None:  # outside dynamic VRAM a patch of a partially loaded model makes a float weight all the same
        _, _, transform, bits = _known_parts(layer.weight)
        q, scale = requantize_weight(weight, transform, _seed_of_patches(layer))
    else:
        q, (_, scale, transform, bits) = parts.q(), parts
    linear = int8_linear if layer.input_reader is None else layer.input_reader.int8_linear
    output = linear(input, q, scale, bias, transform, activation_bits=bits)
    for lora in loras:
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
        return _repeated_linear(resident).multiply(quantized, resident.q(), resident.scale, bias, shape, dtype)
    weight, bias, stream = held or _cast(layer, q.device, dtype)
    parts = _known_parts(weight)
    output = int8_gemm(q, q_scale, parts.q(), parts.scale, bias, dtype)
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
        output = comfy_kitchen.int8_linear(rows, parts.q(), parts.scale, bias, input.dtype, **rotation)
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
        parts = None if self.weight_function else int8_parts(self.weight)  # a LoRA of a streamed weight reads floats
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
    """The weight of a linear that lies on `device` and has nothing to be done to it, nor its bias of `dtype`; else
    None."""
    if torch.compiler.is_compiling() or layer.weight_function or layer.bias_function:
        return None
    parts = int8_parts(layer._parameters["weight"])
    if parts is None or parts.stored.device != device:
        return None
    bias = layer._parameters["bias"]
    return parts if bias is None or (bias.device == device and bias.dtype == dtype) else None


def _repeated_linear(parts: INT8Parts) -> RepeatedLinear:
    return RepeatedLinear.of(parts.transform.rotation_group, parts.activation_bits)


def _cast(layer: Any, device: torch.device, dtype: torch.dtype) -> Cast:
    """Weight and bias on a device for an input of a dtype, and what ComfyUI wants back after their use."""
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


def _known_parts(weight: Any) -> INT8Parts:
    parts = int8_parts(weight)
    assert parts is not None
    return parts


def _seed_of_patches(layer: Any) -> int | None:
    """The seed with which ComfyUI rounds a patched weight; None where what changes the weight is no patch."""
    keys = [function.key for function in layer.weight_function if isinstance(function, LowVramPatch)]
    return _seed(keys[0]) if keys else None


_seed = functools.lru_cache(maxsize=4096)(comfy.utils.string_to_seed)
