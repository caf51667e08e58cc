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


class Segment(NamedTuple):
    """What tokens that follow each other are multiplied with, and what is added then: [.., 1 or tokens, K], or None."""

    start: int
    stop: int
    scale: torch.Tensor | None
    shift: torch.Tensor | None


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
        segments: modulations of some tokens each.
    """

    x: torch.Tensor
    norm: Norm | None = None
    scale: torch.Tensor | None = None
    shift: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    all_heads: bool = False
    segments: tuple[Segment, ...] = ()

    @property
    def is_unmodulated(self) -> bool:
        return self.scale is self.shift is None and not self.segments

    def copied(self) -> "Normed":
        """The same in memory of its own."""
        x, scale, shift = map(_copy_of, (self.x, self.scale, self.shift))
        segments = tuple(Segment(start, stop, *map(_copy_of, tensors)) for start, stop, *tensors in self.segments)
        norm = self.norm and replace(self.norm, weight=_copy_of(self.norm.weight), bias=_copy_of(self.norm.bias))
        return self._replace(x=x, norm=norm, scale=scale, shift=shift, segments=segments)

    def value(self) -> torch.Tensor | None:
        whole = self.in_rows()
        if whole is None:
            return None
        x = self.x.flatten(-2) if self.all_heads else self.x
        return modulated(x, whole.norm, whole.scale, whole.shift, whole.rows).view(self.x.shape)

    def quantize(self, transform: ChannelTransform, bits: int) -> Quantized | None:
        """The rows that a linear reads; None where no fused op makes them."""
        whole = self.in_rows()
        if whole is None or whole.all_heads or whole.x.ndim not in (2, 3):
            return None
        if whole.norm is None:
            return quantize_activations(whole.x.flatten(0, -2), transform, bits) if whole.is_unmodulated else None
        return norm_quantize(whole.x, whole.norm, whole.scale, whole.shift, transform, bits, whole.rows)

    def in_rows(self) -> "Normed | None":
        """The same with rows in the place of segments; None where these do not follow each other to the end."""
        if not self.segments:
            return self
        x, end, scales, shifts = self.x, 0, [], []
        rows = torch.empty(x.shape[-2], dtype=torch.int32, device=x.device)
        for start, stop, *modulations in sorted(self.segments, key=lambda segment: segment.start):
            tokens = max(t.shape[-2] for t in modulations if t is not None)
            if start != end or tokens not in (1, stop - start):
                return None
            first = sum(t.shape[-2] for t in scales)
            rows[start:stop] = first if tokens == 1 else torch.arange(first, first + tokens, device=rows.device)
            for t, neutral, found in zip(modulations, (1.0, 0.0), (scales, shifts), strict=True):
                filled = x.new_full((1,) * x.ndim, neutral) if t is None else t
                found.append(filled.expand(*x.shape[:-2], tokens, x.shape[-1]))
            end = stop
        if end != len(rows):
            return None
        shift = torch.cat(shifts, -2) if any(segment.shift is not None for segment in self.segments) else None
        return self._replace(scale=torch.cat(scales, -2), shift=shift, rows=rows, segments=())


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
