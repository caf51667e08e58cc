"""What a forward changes of its arguments, as it was before, for a second call."""

from collections.abc import Callable, Iterable
from types import FunctionType, MethodType
from typing import Any

import torch

_STATELESS = (FunctionType, MethodType, type, torch.nn.Module)
"""Callables that are no patches with a state of their own."""


def repeatable(call: Callable[[], Any], given: Any) -> Callable[[], Any]:
    """Return the call, which from its second time on finds in `given` what was there before the first.

    That is what dicts and lists hold, such as controls that a forward takes off a list and the end of a cache of keys,
    and the attributes of patches, such as what one keeps from block to block. Tensors are as they are.
    """
    found: dict[int, tuple[Any, Any]] = {}

    def again() -> Any:
        for holder, held in found.values():
            if isinstance(holder, dict):
                holder.clear()
                holder.update(held)
            else:
                holder[:] = held
        if not found:
            _remember((given,), found)
        return call()

    return again


def _remember(values: Iterable[Any], found: dict[int, tuple[Any, Any]]) -> None:
    """Add each dict and list in some values, and a copy of it."""
    for value in values:
        if callable(value) and not isinstance(value, _STATELESS):
            value = getattr(value, "__dict__", None)
        if isinstance(value, tuple):
            _remember(value, found)
        elif isinstance(value, (dict, list)) and id(value) not in found:
            found[id(value)] = value, value.copy()
            _remember(value.values() if isinstance(value, dict) else value, found)
