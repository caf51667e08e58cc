"""Writes in place: which of PyTorch's functions write, and into which arguments."""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from .notes import storage_of, values_of

HANDED_OUT = ("numpy", "__array__", "__dlpack__")
"""Methods that hand a tensor's memory out: something else than PyTorch may write into it at any later time."""

_WRITES = (
    *(*HANDED_OUT, "data_ptr", "untyped_storage", "storage", "_typed_storage", "__reduce_ex__"),
    *("__setitem__", "__set__", "__delete__", "__setstate__"),
)
_READS = ("requires_grad_", "__init__", "__index__", "__int__", "__invert__")
"""Names of functions that write, and of those that only read, though they are named like writes."""


def written_arguments(func: Any) -> Callable[[Sequence, Mapping], Iterable[Any]] | None:
    """A selector of the arguments that a function may write into; None for one that only reads."""
    name = getattr(func, "__name__", "")
    operators = [getattr(func, overload) for overload in func.overloads()] if hasattr(func, "overloads") else [func]
    schemas = [operator._schema for operator in operators if getattr(operator, "_schema", None) is not None]
    if schemas:
        infos = [argument.alias_info for schema in schemas for argument in schema.arguments]
        return _all if any(info is not None and info.is_write for info in infos) else None
    in_place = name.endswith("_") and not name.endswith("__")
    if (in_place or name.startswith("__i") or name in _WRITES) and name not in _READS:
        return _all if name.startswith("_foreach") else _first
    try:
        return _if_in_place if "inplace" in inspect.signature(func).parameters else None
    except (TypeError, ValueError):
        return None


def _first(args: Sequence, kwargs: Mapping) -> Sequence:
    return args[:1] or tuple(kwargs.values())[:1]


def _all(args: Sequence, kwargs: Mapping) -> Sequence:
    return *args, *kwargs.values()


def _if_in_place(args: Sequence, kwargs: Mapping) -> Sequence:
    return _first(args, kwargs) if kwargs.get("inplace") else ()  # PyTorch shows it by name


def storages(values: Any) -> Iterator[int]:
    """Yield the addresses at which the memory of tensors begins, also of those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield storage_of(values_of(value))
        elif isinstance(value, (list, tuple)):
            yield from storages(value)
