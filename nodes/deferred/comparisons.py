"""Comparisons of operands with results of the model's own calls, each kind of work a few times."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from .notes import Deferred, Note

_MOST_APART = 0.01  # a result in bf16 is within 0.4 % after three roundings, and a defect further away
_MOST_COMPARED = 3  # a model's blocks do the same work, and to compare all of them takes as long as a step
_SCALARS = (int, float, bool, str, type(None), torch.dtype, torch.device)


class Comparisons:
    """The comparisons of one forward.

    A kind of work is an integer id that equal calls share: of one function, with equal numbers, tensors of equal
    layouts, and deferred tensors of equal kinds. An argument of any other type makes the call a kind of its own.
    """

    def __init__(self) -> None:
        self._apart: list[torch.Tensor] = []
        self._numbers: dict[tuple, int] = {}
        self._compared: Counter[int] = Counter()

    def kinds(self, call: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the kind of a call, followed by the kinds of the deferred work that it reads."""
        read: list[int] = []

        def form(value: Any) -> Any:
            if type(value) is Deferred:
                value = value.note
            if type(value) is Note:
                if not value.kinds:  # of another forward
                    return object()
                read.extend(value.kinds)
                return Note, value.kinds[0]
            if isinstance(value, torch.Tensor):
                return value.shape, value.stride(), value.dtype
            if type(value) is slice:
                return slice, value.start, value.stop, value.step
            if isinstance(value, (list, tuple)):
                return tuple(map(form, value))
            return value if isinstance(value, _SCALARS) else object()

        described = (call, form(args), tuple(kwargs), form(tuple(kwargs.values())))
        number = self._numbers.setdefault(described, len(self._numbers))
        return (number, *dict.fromkeys(read))

    def are_enough_of(self, kinds: Sequence[int]) -> bool:
        """Whether work of a kind needs no more of them."""
        return self._compared[kinds[0]] >= _MOST_COMPARED

    def add(self, kinds: Sequence[int], fused: torch.Tensor, plain: torch.Tensor) -> None:
        """Record the relative error of a fused op's result, given the model's own result and its kinds."""
        self._compared.update(kinds)
        plain = plain.float()
        apart, size = (fused.float() - plain).norm(), plain.norm()
        self._apart.append(torch.where(size > 0, apart / size, apart))

    def agree(self) -> bool | None:
        """Whether all differ by rounding at most; None if all errors are NaN."""
        if not self._apart:
            return True
        apart = torch.stack(self._apart)
        told = apart[~apart.isnan()]
        return None if not len(told) else told.max().item() <= _MOST_APART
