"""Layers: ComfyUI's classes of them, and their weights on the device where they are used."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import comfy.model_management
import comfy.ops
import torch


def quantized_operations(compute_dtype: torch.dtype) -> Any:
    """The layer classes that ComfyUI chooses for a quantized model: where a card lacks FP8, NVFP4 or MXFP8, layers in
    those formats must not round their inputs to them."""
    quantized = SimpleNamespace(quant_config={"mixed_ops": True})
    device = comfy.model_management.get_torch_device()
    return comfy.ops.pick_operations(None, compute_dtype, load_device=device, model_config=quantized)


def load_beside_weight(layer: Any, own: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Load all tensors but the weight of a linear of ComfyUI's class `own`, as PyTorch does. `args` are what PyTorch's
    method takes behind the prefix."""
    layer.__dict__.pop("weight", None)  # from ComfyUI 0.39 on a plain None until it is loaded
    layer.register_parameter("weight", None)
    theirs: Any = super(own, layer)
    theirs._load_from_state_dict(state_dict, prefix, *args)


@contextmanager
def cast_quantized(
    layer: Any, device: torch.device, dtype: torch.dtype, functions: list | None
) -> Iterator[tuple[Any, torch.Tensor | None]]:
    """Yield weight and bias of a layer on a device, for an input of a dtype; ComfyUI gets them back, whatever happens.

    `functions` change the weight in place of those attached to the layer; None leaves those. A patch that is applied
    while the weight is streamed is folded back into a quantized weight.
    """
    attached = layer.weight_function
    if functions is not None:  # a compiler would see that the layer gets an attribute of its own
        layer.weight_function = functions
    try:
        weight, bias, stream = comfy.ops.cast_bias_weight(
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
    try:
        yield weight, bias
    finally:
        comfy.ops.uncast_bias_weight(layer, weight, bias, stream)


def other_activation(x: torch.Tensor, activation: str, weight: Any, eps: float) -> torch.Tensor | None:
    """Return a linear's activated input as this ComfyUI computes it; None for an activation that it does not know."""
    own = getattr(comfy.ops, "_eager_input_act", None)
    try:
        return None if own is None else own(x, activation, weight, eps)  # an older one's linears take none
    except KeyError:
        return None


def wants_full_precision(layer: Any) -> bool:
    """Whether ComfyUI wants the product in floats: a file marks the layer (`full_precision_matrix_mult`), or a text
    encoder has it."""
    return getattr(layer, "_full_precision_mm", False) or getattr(layer, "_full_precision_mm_config", False)
