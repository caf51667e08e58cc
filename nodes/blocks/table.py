"""The blocks that have a fused forward: a table, an entry a class of ComfyUI's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..comfyui.classes import (
    FLUX_DOUBLE_BLOCK,
    FLUX_SINGLE_BLOCK,
    IDEOGRAM4_BLOCK,
    KANDINSKY5_BLOCK,
    KANDINSKY6_BLOCK,
    LTX_AV_BLOCK,
    LTX_BLOCK,
    LTX_FEED_FORWARD,
    LUMINA_BLOCK,
    MINIMAX_BLOCK,
    MINIMAX_FEED_FORWARD,
    QWEN_IMAGE_BLOCK,
    WAN_AUDIO_BLOCK,
    WAN_BLOCK,
    WAN_FEED_FORWARD,
    WAN_VACE_BLOCK,
)
from . import feed_forward, flux, ideogram4, kandinsky, ltx, lumina, minimax, qwen_image, wan


@dataclass(frozen=True)
class BlockKind:
    """How a class of blocks is fused.

    Attributes:
        forward: (block, the module of ComfyUI's that its class is of, its arguments) -> what its own forward returns,
            or NotImplemented, before anything is computed, for arguments that only its own forward knows. It leaves
            its arguments as they are.
        streams: the names of the arguments that its outputs are sums with, in the order of the outputs; an argument
            may be several in a tuple. A feed-forward has none: its output is no sum, and its only argument is x.
        axes: how many its input may have: 3 for [B, T, K], 2 for [T, K].
    """

    forward: Callable[..., Any]
    streams: tuple[str, ...] = ()
    axes: tuple[int, ...] = (3,)


_TOKENS = (2, 3)

BLOCKS = {
    IDEOGRAM4_BLOCK: BlockKind(ideogram4.forward, ("x",)),
    LUMINA_BLOCK: BlockKind(lumina.forward, ("x",)),
    FLUX_DOUBLE_BLOCK: BlockKind(flux.double, ("img", "txt")),
    FLUX_SINGLE_BLOCK: BlockKind(flux.single, ("x",)),
    QWEN_IMAGE_BLOCK: BlockKind(qwen_image.forward, ("encoder_hidden_states", "hidden_states")),
    WAN_BLOCK: BlockKind(wan.forward, ("x",)),
    WAN_VACE_BLOCK: BlockKind(wan.vace, ("c", "c")),
    WAN_AUDIO_BLOCK: BlockKind(wan.hearing, ("x",)),
    LTX_BLOCK: BlockKind(ltx.video, ("x",)),
    LTX_AV_BLOCK: BlockKind(ltx.audio_and_video, ("x",)),
    KANDINSKY5_BLOCK: BlockKind(kandinsky.decoder, ("visual_embed",)),
    KANDINSKY6_BLOCK: BlockKind(kandinsky.video_and_audio, ("visual_embed", "audio_embed")),
    MINIMAX_BLOCK: BlockKind(minimax.forward, ("x",), axes=(2,)),
    WAN_FEED_FORWARD: BlockKind(feed_forward.wan, axes=_TOKENS),
    LTX_FEED_FORWARD: BlockKind(feed_forward.ltx_video, axes=_TOKENS),
    MINIMAX_FEED_FORWARD: BlockKind(feed_forward.minimax, axes=_TOKENS),
}
