"""What a call of a block asks for: whether only ComfyUI's own forward may run, and which calls are alike."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...kernels import FLOAT_DTYPES
from ..comfyui.attention import OVERRIDE
from ..comfyui.patcher import PATCHES_BETWEEN_BLOCKS
from .table import BlockKind

_NO_OPTIONS: dict[str, Any] = {}

Flags = tuple[tuple[tuple[str, bool], ...], ...]
"""Choices of options that are True or False, each with its value."""


class Call(NamedTuple):
    """What decides whether a fused forward may stand for a block's own in a call.

    Attributes:
        device: where it computes.
        override: what the MODEL lets attention calls be replaced with, or None.
        form: of what kind its arguments are, and the names of its options; those come last.
    """

    device: torch.device
    override: Callable[..., Any] | None
    form: tuple


def _options_of(kind: BlockKind, kwargs: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The transformer_options of a call; None where it has none though its kind has."""
    return kwargs.get("transformer_options") if kind.streams else _NO_OPTIONS


def settings_of(kind: BlockKind, kwargs: Mapping[str, Any]) -> tuple:
    """What kinds of values options have, and those that are True or False; in the order of their names.

    Calls of one form with the same settings take the same path through a forward. Not for a compiler: it would compile
    again for each number and each text.
    """
    options: Any = _options_of(kind, kwargs)
    return tuple([value if value is True or value is False else type(value) for value in options.values()])


def has_flags(kind: BlockKind, kwargs: Mapping[str, Any], choices: Flags) -> bool:
    """Whether a call has one of these choices of options and their values. It looks at no others, for a compiler."""
    # Without `or`, and without a comprehension: for these a compiler looks at all options.
    options: Any = _options_of(kind, kwargs)
    for flags in choices:
        others = 0
        for name, value in flags:
            others += options[name] is not value
        if not others:
            return True
    return False


def inside_patch(options: Mapping[str, Any]) -> str | None:
    """What a MODEL's options change inside of blocks, in words, or None."""
    patches = options.get("patches")
    if patches:
        for kind, functions in patches.items():
            if kind not in PATCHES_BETWEEN_BLOCKS and functions:
                return f"the MODEL has the patch {kind}"
    replaced = options.get("patches_replace")
    return "the MODEL replaces blocks" if replaced and any(replaced.values()) else None


def read_call(kind: BlockKind, args: tuple, kwargs: dict[str, Any]) -> Call | str:
    """What a call of a block asks for, or in words why only the block's own forward may run."""
    options = _options_of(kind, kwargs)
    if options is None:
        return "it is called without transformer_options"
    inside = inside_patch(options)
    if inside is not None:
        return inside
    x: Any = args[0] if args else kwargs.get(kind.streams[-1] if kind.streams else "x")
    several = x if type(x) is tuple else ()
    x = x[0] if several else x
    if not isinstance(x, torch.Tensor) or x.ndim not in kind.axes or x.dtype not in FLOAT_DTYPES:
        return "its input has an unusual form"
    # Some fifty blocks ask this in each forward: loops that run in C where they can.
    given = (*args, *kwargs.values())
    kinds = [(value.dtype, value.ndim) if isinstance(value, torch.Tensor) else type(value) for value in given]
    kinds += [(part.dtype, part.ndim, part.numel() > 0) for part in several]
    return Call(x.device, options.get(OVERRIDE), (x.device, tuple(kwargs), tuple(kinds), tuple(options)))
