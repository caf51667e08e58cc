"""ComfyUI's classes of blocks by name, in which smoothing is folded into what stands before a linear."""


def full_name(cls: type) -> str:
    """A class's module and name, as the names below have them."""
    return f"{cls.__module__}.{cls.__qualname__}"


IDEOGRAM4 = "comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel"
IDEOGRAM4_BLOCK = "comfy.ldm.ideogram4.model.Ideogram4TransformerBlock"
LUMINA_BLOCK = "comfy.ldm.lumina.model.JointTransformerBlock"
FLUX_DOUBLE_BLOCK = "comfy.ldm.flux.layers.DoubleStreamBlock"
FLUX_SINGLE_BLOCK = "comfy.ldm.flux.layers.SingleStreamBlock"
QWEN_IMAGE_BLOCK = "comfy.ldm.qwen_image.model.QwenImageTransformerBlock"
SD3_BLOCK_HALF = "comfy.ldm.modules.diffusionmodules.mmdit.DismantledBlock"
