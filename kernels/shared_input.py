"""One quantization of an input that several INT8 linears of a block read: q, k, v, or the two branches of a SwiGLU."""

import weakref
from collections.abc import Callable

import torch

from .linear import int8_gemm, linear_rows, quantize_activations
from .reference import Quantized
from .transform import ChannelTransform


class InputPlace:
    """Where a model keeps the one quantized input that its linears are sharing at the moment."""

    def __init__(self) -> None:
        self.kept: _KeptInput | None = None


class _KeptInput:
    """The quantization of `x` for one group, and who has used it."""

    def __init__(self, group: "_Group", x: torch.Tensor, quantized: Quantized) -> None:
        self.group = group
        self.quantized = quantized
        self.readers: set[InputReader] = set()
        self._version = _version(x)
        self._stream = _stream(x)
        # The place must not be kept alive by the callback, nor this object, whose memory is to go when the place drops
        # it.
        place = weakref.ref(group.place)

        def drop(dead: weakref.ref) -> None:
            holder = place()
            if holder is None:
                return
            kept = holder.kept  # read once: other threads change it
            if kept is not None and kept._x is dead:
                holder.kept = None

        self._x = weakref.ref(x, drop)

    def serves(self, reader: "InputReader", x: torch.Tensor) -> bool:
        """Whether `reader` may use it for `x`.

        Who has used it before starts a new round, which `x` may be changed in.
        """
        return (
            self.group is reader.group
            and reader not in self.readers
            and self._x() is x
            and self._version == _version(x)
            and self._stream == _stream(x)
        )


def _version(x: torch.Tensor) -> int | None:
    """Counts in-place changes; inference tensors have no such counter."""
    return None if x.is_inference() else x._version


def _stream(x: torch.Tensor) -> int | None:
    """What is queued on one stream is not ready for another."""
    return torch.cuda.current_stream(x.device).cuda_stream if x.is_cuda else None


class _Group:
    def __init__(self, place: InputPlace, size: int) -> None:
        self.place = place
        self.size = size
        self.traced: tuple[torch.Tensor, Quantized] | None = None  # input and result, while a compiler traces


class InputReader:
    """A linear's membership in a group whose members quantize alike and read the same tensor, one after the other.

    Shared is only what cannot be mistaken: the very same tensor object, unchanged as far as its version counter says,
    on the same stream, by each member once. Any other call quantizes anew. The int8 tensor is given up when the last
    member has used it, when another group's takes its place, or when the input dies, whichever comes first.
    """

    def __init__(self, group: _Group, last: bool) -> None:
        self.group = group
        self._last = last

    @classmethod
    def group_of(cls, place: InputPlace, size: int) -> list["InputReader"]:
        """The readers of a new group, in the order in which they are called."""
        group = _Group(place, size)
        return [cls(group, last=index == size - 1) for index in range(size)]

    def int8_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        transform: ChannelTransform,
        activation_bits: int = 8,
    ) -> torch.Tensor:
        """`int8_linear`, with the quantization of `x` shared by the group; the same bits and the same errors.

        `transform` and `activation_bits` must be the same for all members, its factors by value.
        """
        rows = linear_rows(x, weight)
        shared = self._shared_traced if torch.compiler.is_compiling() else self.shared
        q, q_scale = shared(x, lambda: quantize_activations(rows, transform, activation_bits))
        out = int8_gemm(q, q_scale, weight, weight_scale, bias, x.dtype)
        return out.reshape(*x.shape[:-1], weight.shape[0])

    def shared(self, x: torch.Tensor, quantize: Callable[[], Quantized]) -> Quantized:
        """What `quantize` makes of `x`, or has made of it for another member."""
        # Threads may overwrite each other's `kept`: that costs a quantization, and the one in hand stays right.
        place = self.group.place
        kept = place.kept
        if kept is None or not kept.serves(self, x):
            place.kept = None  # its memory can be had for the new one
            kept = _KeptInput(self.group, x, quantize())
            place.kept = kept
        kept.readers.add(self)
        if len(kept.readers) == self.group.size and place.kept is kept:
            place.kept = None
        return kept.quantized

    def _shared_traced(self, x: torch.Tensor, quantize: Callable[[], Quantized]) -> Quantized:
        """The same for a compiler, since none merges equal operators in a graph without gradients (torch 2.11).

        Nothing is kept beyond the last member, so that no graph returns the quantized input.
        """
        traced = self.group.traced
        quantized = None if traced is None or traced[0] is not x else traced[1]
        if quantized is None:
            quantized = quantize()
        self.group.traced = None if self._last else (x, quantized)
        return quantized
