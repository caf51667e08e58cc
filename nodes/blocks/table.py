"""The blocks that have a fused forward: a table, an entry a class of ComfyUI's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import ideogram4


@dataclass(frozen=True)
class BlockKind:
    """How a class of blocks is fused.

    Attributes:
        forward: (block, the module of ComfyUI's that its class is of, its arguments) -> what its own forward returns,
            or NotImplemented, before anything is computed, for arguments that only its own forward knows. It leaves
            its arguments as they are.
        streams: the names of the arguments that its outputs are sums with, in the order of the outputs.
        parts: classes of the submodules whose forward is replaced, beside norms, linears and activations.
    """

    forward: Callable[..., Any]
    streams: tuple[str, ...]
    parts: frozenset[str]


BLOCKS = {
    "comfy.ldm.ideogram4.model.Ideogram4TransformerBlock": BlockKind(
        ideogram4.forward,
        ("x",),
        frozenset({"comfy.ldm.ideogram4.model.Ideogram4Attention", "comfy.ldm.lumina.model.FeedForward"}),
    ),
}
