"""An INT8 linear of a model computed by the fused kernel, whoever loaded its weight and whatever patches it."""

import functools
from typing import Any

import comfy.ops
import comfy.utils
import torch
from comfy.quant_ops import QUANT_ALGOS, QuantizedTensor

from ...kernels import ChannelTransform, int8_linear, requantize_weight
from ..files.int8_mark import NATIVE_FORMAT
from .int8_weight import is_int8

_NATIVE_LAYOUT = QUANT_ALGOS[NATIVE_FORMAT]["comfy_tensor_layout"]
Parts = tuple[torch.Tensor, torch.Tensor, ChannelTransform]


def is_native_int8(weight: Any) -> bool:
    """Whether a module's weight is a linear's in ComfyUI's own INT8 format, as its own loaders hold it."""
    return isinstance(weight, QuantizedTensor) and weight._layout_cls == _NATIVE_LAYOUT and weight.ndim == 2


def int8_parts(weight: Any) -> Parts | None:
    """int8 [N, K], its float32 scale and what is done to its input, of a weight of either kind; None of any other."""
    if is_int8(weight):
        return weight._qdata, weight._params.scale, weight._params.transform
    if is_native_int8(weight):
        params = weight._params
        transform = ChannelTransform(None, params.convrot_groupsize if params.convrot else None)
        return weight._qdata, params.scale.float(), transform
    return None


def fused_forward(layer: Any, input: torch.Tensor) -> torch.Tensor:
    """The output of a ComfyUI linear with an INT8 weight, in any memory mode; `input` is floating point [..., K].

    `layer.input_reader` is an InputReader or None.
    """
    # want_requant: a LoRA applied while streaming is folded back into an INT8 weight.
    weight, bias, stream = comfy.ops.cast_bias_weight(
        layer,
        dtype=layer.weight.dtype,
        device=input.device,
        bias_dtype=input.dtype,
        offloadable=True,
        compute_dtype=input.dtype,
        want_requant=True,
    )
    parts = int8_parts(weight)
    if parts is None:  # outside dynamic VRAM the LoRA of a partially loaded model makes a float weight all the same
        _, _, transform = _known_parts(layer.weight)
        q, scale = requantize_weight(weight, transform, _seed_of_patches(layer))
    else:
        q, scale, transform = parts
    linear = int8_linear if layer.input_reader is None else layer.input_reader.int8_linear
    output = linear(input, q, scale, bias, transform)
    comfy.ops.uncast_bias_weight(layer, weight, bias, stream)
    return output


def _known_parts(weight: Any) -> Parts:
    parts = int8_parts(weight)
    assert parts is not None
    return parts


def _seed_of_patches(layer: Any) -> int | None:
    """The seed with which ComfyUI rounds a patched weight; None where what changes the weight is no patch."""
    keys = [function.key for function in layer.weight_function if getattr(function, "is_lowvram_patch", False)]
    return _seed(keys[0]) if keys else None


_seed = functools.lru_cache(maxsize=4096)(comfy.utils.string_to_seed)
