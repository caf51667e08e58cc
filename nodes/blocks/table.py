"""The blocks that have a fused forward: a table, an entry a class of ComfyUI's."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

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


def _parts(module: str, *classes: str) -> frozenset[str]:
    return frozenset(f"comfy.ldm.{module}.{name}" for name in classes)


_FLUX = ("Modulation", "SelfAttention", "QKNorm", "SiLUActivation", "YakMLP")
_WAN = ("WanSelfAttention", "WanT2VCrossAttention", "WanI2VCrossAttention", "WanFeedForward")

BLOCKS = {
    "comfy.ldm.ideogram4.model.Ideogram4TransformerBlock": BlockKind(
        ideogram4.forward,
        ("x",),
        _parts("ideogram4.model", "Ideogram4Attention") | _parts("lumina.model", "FeedForward"),
    ),
    "comfy.ldm.lumina.model.JointTransformerBlock": BlockKind(
        lumina.forward, ("x",), _parts("lumina.model", "JointAttention", "FeedForward")
    ),
    "comfy.ldm.flux.layers.DoubleStreamBlock": BlockKind(flux.double, ("img", "txt"), _parts("flux.layers", *_FLUX)),
    "comfy.ldm.flux.layers.SingleStreamBlock": BlockKind(flux.single, ("x",), _parts("flux.layers", *_FLUX)),
    "comfy.ldm.qwen_image.model.QwenImageTransformerBlock": BlockKind(
        qwen_image.forward,
        ("encoder_hidden_states", "hidden_states"),
        _parts("qwen_image.model", "Attention", "FeedForward", "GELU"),
    ),
    "comfy.ldm.wan.model.WanAttentionBlock": BlockKind(wan.forward, ("x",), _parts("wan.model", *_WAN)),
    "comfy.ldm.wan.model.WanFeedForward": BlockKind(feed_forward.wan, (), frozenset()),
    "comfy.ldm.lightricks.model.FeedForward": BlockKind(
        feed_forward.ltx_video, (), _parts("lightricks.model", "GELU_approx")
    ),
    "comfy.ldm.minimax.model.MLP": BlockKind(feed_forward.minimax, (), frozenset()),
}
