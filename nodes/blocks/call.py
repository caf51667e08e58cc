"""What a call of a block asks for: whether only ComfyUI's own forward may run, and which calls are alike."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ...kernels import FLOAT_DTYPES
from ..comfyui.attention import OVERRIDE
from ..comfyui.patcher import PATCHES_BETWEEN_BLOCKS
from .table import BlockKind

_NO_OPTIONS: dict[str, Any] = {}


class Call(NamedTuple):
    """What decides whether a fused forward may stand for a block's own in a call.

    Attributes:
        device: where it computes.
        override: what the MODEL lets attention calls be replaced with, or None.
        likeness: equal for calls that take the same paths through a forward, as far as arguments and options say.
    """

    device: torch.device
    override: Callable[..., Any] | None
    likeness: tuple


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
    options = kwargs.get("transformer_options") if kind.streams else _NO_OPTIONS
    if options is None:
        return "it is called without transformer_options"
    inside = inside_patch(options)
    if inside is not None:
        return inside
    x: Any = args[0] if args else kwargs.get(kind.streams[-1] if kind.streams else "x")
    if not isinstance(x, torch.Tensor) or x.ndim not in kind.axes or x.dtype not in FLOAT_DTYPES:
        return "its input has an unusual form"
    # Some fifty blocks ask this in each forward: loops that run in C where they can.
    given = (*args, *kwargs.values())
    likeness = (
        x.device,
        tuple(kwargs),
        tuple([(value.dtype, value.ndim) if isinstance(value, torch.Tensor) else type(value) for value in given]),
        tuple(options),
        tuple(map(type, options.values())),
        tuple([value for value in options.values() if value is True or value is False]),
    )
    return Call(x.device, options.get(OVERRIDE), likeness)
