"""Writes in place: which of PyTorch's functions write, and into what. What a note reads is computed before."""

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .notes import storage_of, valued

HANDED_OUT = ("numpy", "__array__", "__dlpack__")
"""Methods after which something else than PyTorch may write into a tensor's memory at any later time."""

_WRITES = (
    *(*HANDED_OUT, "data_ptr", "untyped_storage", "storage", "_typed_storage", "__reduce_ex__"),
    *("__setitem__", "__set__", "__delete__", "__setstate__"),
)
_READS = ("requires_grad_", "__init__", "__index__", "__int__", "__invert__")
"""Names of functions that write, and of some that do not, though they are called like those that do."""


@functools.lru_cache(4096)
def written_arguments(func: Any) -> Callable[[Sequence, Mapping], Iterable[Any]] | None:
    """A selector of the arguments that a function may write into; None for one that only reads."""
    name = getattr(func, "__name__", "")
    if hasattr(func, "overloads"):  # an operator that has not chosen its overload yet
        return _all if any(_writes(getattr(func, overload)._schema) for overload in func.overloads()) else None
    if getattr(func, "_schema", None) is not None:
        return _all if _writes(func._schema) else None
    in_place = name.endswith("_") and not name.endswith("__")
    if (in_place or name.startswith("__i") or name in _WRITES) and name not in _READS:
        return _all if name.startswith("_foreach") else _first
    try:
        return _if_in_place if "inplace" in inspect.signature(func).parameters else None
    except (TypeError, ValueError):
        return None


def _writes(schema: Any) -> bool:
    """Whether an operator writes into any of its arguments."""
    return any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)


def _first(args: Sequence, kwargs: Mapping) -> Sequence:
    return args[:1] or tuple(kwargs.values())[:1]


def _all(args: Sequence, kwargs: Mapping) -> Sequence:
    return *args, *kwargs.values()


def _if_in_place(args: Sequence, kwargs: Mapping) -> Sequence:
    return _first(args, kwargs) if kwargs.get("inplace") else ()  # PyTorch shows it by name


def storages(values: Any) -> Iterator[int]:
    """Where the memory of tensors begins, also of those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield storage_of(valued(value))
        elif isinstance(value, (list, tuple)):
            yield from storages(value)
