"""ComfyUI's classes of blocks and of their parts, by name: what the pack knows the inside of."""


def full_name(cls: type) -> str:
    """A class's module and name, as the names below have them."""
    return f"{cls.__module__}.{cls.__qualname__}"


PACKAGE = "comfy."
"""What the names of all modules of ComfyUI's own models begin with."""

IDEOGRAM4 = "comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel"
IDEOGRAM4_BLOCK = "comfy.ldm.ideogram4.model.Ideogram4TransformerBlock"
LUMINA_BLOCK = "comfy.ldm.lumina.model.JointTransformerBlock"
FLUX_DOUBLE_BLOCK = "comfy.ldm.flux.layers.DoubleStreamBlock"
FLUX_SINGLE_BLOCK = "comfy.ldm.flux.layers.SingleStreamBlock"
QWEN_IMAGE_BLOCK = "comfy.ldm.qwen_image.model.QwenImageTransformerBlock"
SD3_BLOCK_HALF = "comfy.ldm.modules.diffusionmodules.mmdit.DismantledBlock"
WAN_BLOCK = "comfy.ldm.wan.model.WanAttentionBlock"
WAN_VACE_BLOCK = "comfy.ldm.wan.model.VaceWanAttentionBlock"
WAN_AUDIO_BLOCK = "comfy.ldm.wan.model.WanAttentionBlockAudio"
WAN_FEED_FORWARD = "comfy.ldm.wan.model.WanFeedForward"
LTX_BLOCK = "comfy.ldm.lightricks.model.BasicTransformerBlock"
LTX_AV_BLOCK = "comfy.ldm.lightricks.av_model.BasicAVTransformerBlock"
LTX_FEED_FORWARD = "comfy.ldm.lightricks.model.FeedForward"
KANDINSKY5_BLOCK = "comfy.ldm.kandinsky5.model.TransformerDecoderBlock"
KANDINSKY6_BLOCK = "comfy.ldm.kandinsky6.model.FusedTransformerDecoderBlock"
MINIMAX_BLOCK = "comfy.ldm.minimax.model.DiTBlock"
MINIMAX_FEED_FORWARD = "comfy.ldm.minimax.model.MLP"

NORM_MODULES = ("comfy.ops", "torch.nn.modules.normalization")
"""Where the forwards of norms stand that compute what PyTorch's norms do."""

FUSED_CLASSES: dict[str, tuple[int, ...]] = {
    IDEOGRAM4_BLOCK: (0, 30),
    LUMINA_BLOCK: (0, 30),
    FLUX_DOUBLE_BLOCK: (0, 30),
    FLUX_SINGLE_BLOCK: (0, 30),
    QWEN_IMAGE_BLOCK: (0, 30),
    WAN_BLOCK: (0, 30),
    WAN_VACE_BLOCK: (0, 30),
    WAN_AUDIO_BLOCK: (0, 30),
    WAN_FEED_FORWARD: (0, 33),
    LTX_BLOCK: (0, 30),
    LTX_AV_BLOCK: (0, 30),
    LTX_FEED_FORWARD: (0, 30),
    KANDINSKY5_BLOCK: (0, 30),
    KANDINSKY6_BLOCK: (0, 39),  # or a little before: seen in single files, of a version that does not say itself
    MINIMAX_BLOCK: (0, 30),
    MINIMAX_FEED_FORWARD: (0, 33),
}
"""The blocks that have a fused forward, and the ComfyUI that they were first seen in."""
