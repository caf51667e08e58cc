"""Activation functions and their gates, quantized for the next linear."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from ..checks import check_float_rows
from ..operators import Operation, operator
from ..reference.linear import Quantized, quantize_activations_reference, quantized_layouts
from ..reference.transform import UNCHANGED, ChannelTransform

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "sigmoid": torch.sigmoid,
}
"""What each computes. A sigmoid is not 0 for 0, so that only one with `up` is quantized."""


def activated(
    gate: torch.Tensor, activation: str, up: torch.Tensor | None = None, beside: torch.Tensor | None = None
) -> torch.Tensor:
    """activation(gate) up behind `beside`, in float32, of arguments as `activate_quantize` has them."""
    values = ACTIVATIONS[activation](gate.float())
    values = values if up is None else values * up.float()
    return values if beside is None else torch.cat([beside.float(), values], dim=-1)


@operator(kernel="gates", rounds=True)
def activate_quantize(
    gate: torch.Tensor,
    activation: str,
    up: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    activation_bits: int = 8,
) -> Operation[Quantized]:
    """activation(gate) up behind the channels of `beside`, quantized per token; float32 in between.

    Args:
        gate, up: [..., F] bf16, fp16 or fp32; either may be some columns of a wider tensor.
        activation: one of ACTIVATIONS.
        beside: [..., K - F] channels that come first, as they are; or None.
        transform: what is done to all K channels before they are quantized.
        activation_bits: 8 or 16.

    Returns:
        int8 [rows, K], or [rows, 2K] for 16 bits, and float32 per-token scale [rows].

    Raises:
        TypeError, ValueError: unknown activation; wrong dtype, shape, device, group or number of bits.
        RuntimeError: an argument needs a gradient, which rounding does not have.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {', '.join(ACTIVATIONS)}; got {activation!r}")
    if activation == "sigmoid" and up is None:
        raise ValueError("a sigmoid is quantized with up, which it is the gate of")
    check_float_rows("gate", gate)
    if not gate.shape[-1]:
        raise ValueError(f"gate must have channels, got shape {tuple(gate.shape)}")
    for name, part, shape in (("up", up, gate.shape), ("beside", beside, gate.shape[:-1])):
        if part is not None:
            check_float_rows(name, part)
            if part.shape[: len(shape)] != shape or part.ndim != gate.ndim:
                raise ValueError(f"{name} must have the rows of gate {tuple(gate.shape)}, got {tuple(part.shape)}")
    channels = gate.shape[-1] + (0 if beside is None else beside.shape[-1])
    yield quantized_layouts(gate, channels, transform, activation_bits)
    values = activated(gate, activation, up, beside)
    yield quantize_activations_reference(values.flatten(0, -2), transform, activation_bits)
