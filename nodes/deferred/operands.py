"""What a deferred value means to a fused op: an entry for each kind.

`value` is what a fused op takes, in floats: only to be compared with what the model's own calls give.
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


def _copy_of(tensor: Any) -> Any:
    return None if tensor is None else tensor.clone()


class Normed(NamedTuple):
    """norm(x) scale + shift. Linears take it; residuals do without a shift, rotary positions without both.

    The value may have more bits than `x`, where the norm was asked for in float32.

    Attributes:
        x: [B, T, K] or [T, K]; or heads of queries or keys, whose last axis is the head's.
        norm: None for x as it is.
        scale, shift: [B or 1, T or 1, K] with as many axes as `x`, or None; with `rows` [B or 1, M, K].
        rows: int32 [T], which of the M rows each token has, or None.
        all_heads: whether the norm is over the last two axes together.
    """

    x: torch.Tensor
    norm: Norm | None = None
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    all_heads: bool = False

    @property
    def is_unmodulated(self) -> bool:
        return self.scale is self.shift is None

    def copied(self) -> "Normed":
        """A copy in memory of its own."""
        x, scale, shift = map(_copy_of, (self.x, self.scale, self.shift))
        norm = self.norm and replace(self.norm, weight=_copy_of(self.norm.weight), bias=_copy_of(self.norm.bias))
        return self._replace(x=x, norm=norm, scale=scale, shift=shift)

    def value(self) -> torch.Tensor:
        x = self.x.flatten(-2) if self.all_heads else self.x
        return modulated(x, self.norm, self.scale, self.shift, self.rows).view(self.x.shape)

    def quantize(self, transform: ChannelTransform, bits: int) -> Quantized | None:
        """The rows that a linear reads; None where no fused op makes them."""
        if self.all_heads or self.x.ndim not in (2, 3):
            return None
        if self.norm is None:
            return quantize_activations(self.x.flatten(0, -2), transform, bits) if self.is_unmodulated else None
        return norm_quantize(self.x, self.norm, self.scale, self.shift, transform, bits, self.rows)


class Activated(NamedTuple):
    """activation(gate) up, behind the channels of `beside`; as `activate_quantize` has them. Linears take it."""

    gate: torch.Tensor
    activation: str
    up: torch.Tensor | None = None
    beside: torch.Tensor | None = None

    def value(self) -> torch.Tensor:
        return activated(*self)

    def quantize(self, transform: ChannelTransform, bits: int) -> Quantized | None:
        """The rows that a linear reads; None of a sigmoid that is no gate."""
        if self.activation == "sigmoid" and self.up is None:
            return None
        return activate_quantize(self.gate, self.activation, self.up, self.beside, transform, bits)


class Sliced(NamedTuple):
    """Some tokens of another deferred tensor, a view of it. Writes into it change what that is."""

    parent: Any
    start: int
    stop: int


class Joined(NamedTuple):
    """Tensors, deferred ones among them, that follow each other along an axis. Linears and rotary positions take it."""

    parts: tuple[torch.Tensor, ...]
    axis: int

    def value(self) -> torch.Tensor | None:
        parts = [part for part in map(_value_of, self.parts) if part is not None]
        return torch.cat(parts, self.axis) if len(parts) == len(self.parts) else None


class Copied(NamedTuple):
    """The values of `x` in memory of their own, perhaps in float32. Norms take it."""

    x: torch.Tensor


class Spread(NamedTuple):
    """A modulation of tokens in groups of equal size: row i // each of `values` [B, M, K] for token i."""

    values: torch.Tensor
    each: int
    tokens: int


Pairs = Literal["neighbours", "halves"]


class Turned(NamedTuple):
    """Heads of queries or keys at their rotary positions. The next ones at the same positions take it with them, or a
    `cat` of parts of the tokens."""

    heads: torch.Tensor
    freqs: torch.Tensor
    pairs: Pairs


def _value_of(x: Any) -> torch.Tensor | None:
    """That of a tensor, deferred or not."""
    note = getattr(x, "note", None)
    if note is None:
        return x
    return note.value() if note.operand is None else note.operand.value()
