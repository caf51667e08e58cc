"""Tensors of a forward in which work is deferred: in memory like any other, but calls with them are seen."""

import copy
from typing import Any

import torch

from ...kernels import read_as_plain
from .notes import outside, seen, tracking


class Tracked(torch.Tensor):
    """A tensor that a linear of this pack gave, or a view or a sum of one. Outside of its forward it is any tensor."""

    __torch_function__ = classmethod(seen)  # pyright: ignore[reportIncompatibleMethodOverride,reportAssignmentType]

    def set_(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """PyTorch shows this write to nobody."""
        if tracking.forward is not None:
            tracking.forward.before_write((self,))
        return super().set_(*args, **kwargs)

    def _as_plain(self) -> torch.Tensor:
        with outside():
            return self.as_subclass(torch.Tensor)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self._as_plain(), memo)


read_as_plain(Tracked)
MEMORY = (torch.Tensor, Tracked)
"""The types of activations in memory."""


def seen_from(x: Any) -> Any:
    """A tensor in the memory of another that is tracked, in a forward in which work is deferred; else the same."""
    if tracking.forward is None or type(x) is not torch.Tensor or not x.is_floating_point():
        return x
    return x.as_subclass(Tracked)
