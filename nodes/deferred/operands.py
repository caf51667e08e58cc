"""Operands: the inputs of fused ops that deferred values are, a class for each kind.

`value` computes one in floats, to be compared with the result of the model's own calls.
"""

from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from ...kernels import (
    ChannelTransform,
    Norm,
    Quantized,
    activate_quantize,
    activated,
    modulated,
    norm_quantize,
    quantize_activations,
)


class Normed(NamedTuple):
    """norm(x) scale + shift. Linears take it, residuals without a shift, rotary positions without both.

    The dtype of the value may be wider than that of `x`, where the model norms in float32.
    """

    x: torch.Tensor  # [B, T, K] or [T, K]; or heads of queries or keys, whose last axis is the head's
    norm: Norm | None = None  # None for x as it is
    scale: torch.Tensor | None = None  # [B or 1, T or 1, K] with as many axes as `x`; with `rows` [B or 1, M, K]
    shift: torch.Tensor | None = None  # the same
    rows: torch.Tensor | None = None  # int32 [T], which of the M rows each token has
    all_heads: bool = False  # whether the norm is over the last two axes together

    @property
    def is_unmodulated(self) -> bool:
        return self.scale is self.shift is None

    def copied(self) -> "Normed":
        """Return the operand of copies of its tensors."""
        norm = self.norm
        tensors = self.x, self.scale, self.shift, norm and norm.weight, norm and norm.bias
        x, scale, shift, weight, bias = (None if tensor is None else tensor.clone() for tensor in tensors)
        return self._replace(x=x, norm=norm and replace(norm, weight=weight, bias=bias), scale=scale, shift=shift)

    def value(self) -> torch.Tensor:
        x = self.x.flatten(-2) if self.all_heads else self.x
        return modulated(x, self.norm, self.scale, self.shift, self.rows).view(self.x.shape)

    def quantize(self, transform: ChannelTransform, bits: int) -> Quantized | None:
        """Return the int8 rows and scales that a linear reads; None where no fused op computes them."""
        if self.all_heads or self.x.ndim not in (2, 3):
            return None
        if self.norm is None:
            return quantize_activations(self.x.flatten(0, -2), transform, bits) if self.is_unmodulated else None
        return norm_quantize(self.x, self.norm, self.scale, self.shift, transform, bits, self.rows)


class Activated(NamedTuple):
    """activation(gate) up, behind the channels of `beside`, as in `activate_quantize`. Linears take it."""

    gate: torch.Tensor
    activation: str
    up: torch.Tensor | None = None
    beside: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        return activated(*self)

    def quantize(self, transform: ChannelTransform, bits: int) -> Quantized | None:
        """Return the int8 rows and scales that a linear reads; None of a sigmoid that is no gate."""
        if self.activation == "sigmoid" and self.up is None:
            return None
        return activate_quantize(self.gate, self.activation, self.up, self.beside, transform, bits)


class Sliced(NamedTuple):
    """A view of some tokens of another deferred tensor. Writes into it change that tensor's note."""

    parent: Any
    start: int
    stop: int


class Joined(NamedTuple):
    """A concatenation of tensors, also deferred ones, along an axis. Linears and rotary positions take it."""

    parts: tuple[torch.Tensor, ...]
    axis: int

    def value(self) -> torch.Tensor | None:
        of_parts = [(part, getattr(part, "note", None)) for part in self.parts]
        values = [part if note is None else (note.operand or note).value() for part, note in of_parts]
        return None if any(value is None for value in values) else torch.cat(values, self.axis)


class Copied(NamedTuple):
    """A copy of `x`, perhaps in float32. Norms take it."""

    x: torch.Tensor


class Spread(NamedTuple):
    """A modulation of tokens in groups of equal size: row i // each of `values` [B, M, K] for token i."""

    values: torch.Tensor
    each: int
    tokens: int


Pairs = Literal["neighbours", "halves"]


class Turned(NamedTuple):
    """Heads at their rotary positions. The next heads at the same positions take it, or a `cat` of parts of tokens."""

    heads: torch.Tensor
    freqs: torch.Tensor
    pairs: Pairs
