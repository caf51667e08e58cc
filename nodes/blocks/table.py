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
    parts,
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
        parts: classes of the submodules whose forward is replaced, beside norms, linears and activations.
    """

    forward: Callable[..., Any]
    streams: tuple[str, ...]
    parts: frozenset[str]


_FLUX = ("Modulation", "SelfAttention", "QKNorm", "SiLUActivation", "YakMLP")
_WAN = ("WanSelfAttention", "WanT2VCrossAttention", "WanI2VCrossAttention", "WanFeedForward")

BLOCKS = {
    IDEOGRAM4_BLOCK: BlockKind(
        ideogram4.forward,
        ("x",),
        parts("ideogram4.model", "Ideogram4Attention") | parts("lumina.model", "FeedForward"),
    ),
    LUMINA_BLOCK: BlockKind(lumina.forward, ("x",), parts("lumina.model", "JointAttention", "FeedForward")),
    FLUX_DOUBLE_BLOCK: BlockKind(flux.double, ("img", "txt"), parts("flux.layers", *_FLUX)),
    FLUX_SINGLE_BLOCK: BlockKind(flux.single, ("x",), parts("flux.layers", *_FLUX)),
    QWEN_IMAGE_BLOCK: BlockKind(
        qwen_image.forward,
        ("encoder_hidden_states", "hidden_states"),
        parts("qwen_image.model", "Attention", "FeedForward", "GELU"),
    ),
    WAN_BLOCK: BlockKind(wan.forward, ("x",), parts("wan.model", *_WAN)),
    WAN_FEED_FORWARD: BlockKind(feed_forward.wan, (), frozenset()),
    LTX_FEED_FORWARD: BlockKind(feed_forward.ltx_video, (), parts("lightricks.model", "GELU_approx")),
    MINIMAX_FEED_FORWARD: BlockKind(feed_forward.minimax, (), frozenset()),
}
