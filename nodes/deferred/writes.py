"""Writes in place: which of PyTorch's functions write, and into what. What a note reads is computed before."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .notes import storage_of, valued

_HANDED_OUT = (
    "data_ptr",
    "numpy",
    "__array__",
    "__dlpack__",
    "untyped_storage",
    "storage",
    "_typed_storage",
    "__reduce_ex__",
)
"""Methods after which something else than PyTorch may write."""

_NAMES_OF_READS = ("requires_grad_", "__init__", "__index__", "__int__", "__invert__")


@functools.lru_cache(4096)
def written_arguments(func: Any) -> Callable[[tuple, dict], Iterator[Any]] | None:
    """What gives the arguments that a function may write into; None for one that only reads."""
    name = getattr(func, "__name__", "")
    schema = getattr(func, "_schema", None)
    if schema is not None:
        written = [
            (i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info is not None and a.alias_info.is_write
        ]
        return functools.partial(_chosen, tuple(written)) if written else None
    if hasattr(func, "overloads"):  # an operator that has not chosen its overload yet
        schemas = [getattr(func, overload)._schema for overload in func.overloads()]
        writes = any(a.alias_info is not None and a.alias_info.is_write for s in schemas for a in s.arguments)
        return _all if writes else None
    in_place = name.endswith("_") and not name.endswith("__")
    operator = name.startswith("__i") or name in ("__setitem__", "__set__", "__delete__", "__setstate__")
    if (in_place or operator or name in _HANDED_OUT) and name not in _NAMES_OF_READS:
        return _all if name.startswith("_foreach") else _first
    try:
        return _if_in_place if "inplace" in inspect.signature(func).parameters else None
    except (TypeError, ValueError):
        return None


def hands_out(func: Any) -> bool:
    """Whether a function lets others write into a tensor's memory at any later time."""
    return getattr(func, "__name__", "") in ("numpy", "__array__", "__dlpack__")


def _first(args: tuple, kwargs: dict) -> Iterator[Any]:
    yield from args[:1] or tuple(kwargs.values())[:1]


def _all(args: tuple, kwargs: dict) -> Iterator[Any]:
    yield from args
    yield from kwargs.values()


def _if_in_place(args: tuple, kwargs: dict) -> Iterator[Any]:
    if kwargs.get("inplace") or True in args[1:]:
        yield from _first(args, kwargs)


def _chosen(written: tuple[tuple[int, str], ...], args: tuple, kwargs: dict) -> Iterator[Any]:
    for place, name in written:
        if place < len(args):
            yield args[place]
        elif name in kwargs:
            yield kwargs[name]


def storages(values: Any) -> Iterator[int]:
    """Where the memory of tensors begins, also of those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield storage_of(valued(value))
        elif isinstance(value, (list, tuple)):
            yield from storages(value)
