"""Layers: ComfyUI's classes of them, and their weights on the device where they are used."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import comfy.ops
import torch

from .memory import default_device

if TYPE_CHECKING:  # a type checker does not see ComfyUI

    class CastWeightBiasOp(Any): ...

else:
    from comfy.ops import CastWeightBiasOp


class Cast(NamedTuple):
    """Weight and bias where a layer is computed, and what ComfyUI wants back after their use."""

    weight: Any
    bias: torch.Tensor | None
    stream: Any


def quantized_operations(compute_dtype: torch.dtype) -> Any:
    """ComfyUI's layer classes for a quantized model.

    ComfyUI chooses them: where a card lacks FP8, NVFP4 or MXFP8, layers in those formats must not round their inputs to
    them.
    """
    quantized = SimpleNamespace(quant_config={"mixed_ops": True})
    return comfy.ops.pick_operations(None, compute_dtype, load_device=default_device(), model_config=quantized)


def load_beside_weight(layer: Any, own: Any, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    """Load what a linear of ComfyUI's class `own` has beside its weight, as PyTorch does; the weight it gets otherwise.

    `args` are those of PyTorch's method behind the prefix.
    """
    layer.__dict__.pop("weight", None)  # from ComfyUI 0.39 on a plain None until it is loaded
    layer.register_parameter("weight", None)
    theirs: Any = super(own, layer)
    theirs._load_from_state_dict(state_dict, prefix, *args)


def run_every_op() -> None:
    """What ComfyUI does before each layer: it hears the cancel button."""
    comfy.ops.run_every_op()


def cast_quantized(layer: Any, device: torch.device, dtype: torch.dtype, functions: list | None = None) -> Cast:
    """Weight and bias of a layer on a device, for an input of a dtype; to be given back.

    `functions` change the weight; those that are attached to the layer where it is None. A patch that is applied while
    the weight is streamed is folded back into a quantized weight.
    """
    attached = layer.weight_function
    if functions is not None:
        layer.weight_function = functions
    try:
        cast = comfy.ops.cast_bias_weight(
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
    return Cast(*cast)


@contextmanager
def given_back(layer: Any, cast: Cast) -> Iterator[Cast]:
    """What was cast, for its use; it is given back whatever happens in it."""
    try:
        yield cast
    finally:
        give_back(layer, cast)


def give_back(layer: Any, cast: Cast) -> None:
    """Let ComfyUI have what was cast."""
    comfy.ops.uncast_bias_weight(layer, *cast)


def other_activation(x: torch.Tensor, activation: str, weight: torch.Tensor | None, eps: float) -> torch.Tensor | None:
    """An activation of a linear's input as this ComfyUI computes it; None for one that it does not know."""
    own = getattr(comfy.ops, "_eager_input_act", None)
    if own is None:  # before its linears took activations
        function = getattr(comfy.ops, "INPUT_ACT_EAGER", {}).get(activation)
        return None if function is None else function(x)
    try:
        return own(x, activation, weight, eps)
    except KeyError:
        return None


def weight_functions(layer: Any) -> list:
    """What changes a layer's weight in use."""
    return layer.weight_function


def bias_functions(layer: Any) -> list:
    """What changes a layer's bias in use."""
    return layer.bias_function


def set_weight_functions(layer: Any, functions: list) -> None:
    """Let nothing else change a layer's weight in use, however ComfyUI loads it."""
    layer.weight_function = functions


def keep_weight(layer: Any) -> None:
    """Let dynamic VRAM write no patched weight into a layer."""
    layer.weight_lowvram_function = None


def is_linear(module: Any) -> bool:
    """Whether a module is one of ComfyUI's linears, by what it has: its classes for them have no base of their own."""
    return hasattr(module, "in_features") and hasattr(module, "weight_function")


def input_scale(layer: Any) -> torch.Tensor | None:
    """What a layer in ModelOpt's AWQ form multiplies its input by, [K]."""
    return getattr(layer, "pre_quant_scale", None)


def quantized_format(layer: Any) -> str | None:
    """The format that a quantized layer was marked with in its file."""
    return getattr(layer, "quant_format", None)


def wants_full_precision(layer: Any) -> bool:
    """Whether ComfyUI wants the product of floats: its file marks the layer (`full_precision_matrix_mult`), or it is a
    text encoder's."""
    return getattr(layer, "_full_precision_mm", False) or getattr(layer, "_full_precision_mm_config", False)


def set_format(layer: Any, layout: str | None, name: str | None) -> None:
    """Let ComfyUI know how a layer's weight is quantized now; None for floats."""
    layer.layout_type, layer.quant_format = layout, name


def layout_type(layer: Any) -> str | None:
    """The layout that a layer's weight was quantized with when it was loaded."""
    return getattr(layer, "layout_type", None)


def forget_input_scale(layer: Any) -> None:
    """Let a layer multiply its input by nothing: its weight has the factors now."""
    if input_scale(layer) is not None:
        layer.pre_quant_scale = None


def expert_banks(operations: type) -> type:
    """The class of a bank of experts among an operations class's layers; that of linears where there is none."""
    return getattr(operations, "MoEExperts", operations.Linear)  # pyright: ignore[reportAttributeAccessIssue]
