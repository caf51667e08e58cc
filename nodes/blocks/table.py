"""The blocks that have a fused forward: a table, an entry a class of ComfyUI's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..comfyui.classes import (
    FLUX_DOUBLE_BLOCK,
    FLUX_SINGLE_BLOCK,
    IDEOGRAM4_BLOCK,
    LTX_FEED_FORWARD,
    LUMINA_BLOCK,
    MINIMAX_FEED_FORWARD,
    QWEN_IMAGE_BLOCK,
    WAN_BLOCK,
    WAN_FEED_FORWARD,
)
from . import feed_forward, flux, ideogram4, lumina, qwen_image, wan


@dataclass(frozen=True)
class BlockKind:
    """How a class of blocks is fused.

    Attributes:
        forward: (block, the module of ComfyUI's that its class is of, its arguments) -> what its own forward returns,
            or NotImplemented, before anything is computed, for arguments that only its own forward knows. It leaves
            its arguments as they are.
        streams: the names of the arguments that its outputs are sums with, in the order of the outputs. A feed-forward
            has none: its output is no sum, and its only argument is x [B, T, K] or [T, K].
    """

    forward: Callable[..., Any]
    streams: tuple[str, ...]

    @property
    def axes(self) -> tuple[int, ...]:
        """How many its input may have."""
        return (3,) if self.streams else (2, 3)


BLOCKS = {
    IDEOGRAM4_BLOCK: BlockKind(ideogram4.forward, ("x",)),
    LUMINA_BLOCK: BlockKind(lumina.forward, ("x",)),
    FLUX_DOUBLE_BLOCK: BlockKind(flux.double, ("img", "txt")),
    FLUX_SINGLE_BLOCK: BlockKind(flux.single, ("x",)),
    QWEN_IMAGE_BLOCK: BlockKind(qwen_image.forward, ("encoder_hidden_states", "hidden_states")),
    WAN_BLOCK: BlockKind(wan.forward, ("x",)),
    WAN_FEED_FORWARD: BlockKind(feed_forward.wan, ()),
    LTX_FEED_FORWARD: BlockKind(feed_forward.ltx_video, ()),
    MINIMAX_FEED_FORWARD: BlockKind(feed_forward.minimax, ()),
}
