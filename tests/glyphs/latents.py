"""Images and latents.

There is no VAE: a latent pixel is a 4x4 block of image pixels, spread over 16 channels. Three value ranges meet here:

image   float [B, 64, 64] in [0, 1]
model   float [B, 16, 16, 16], what the diffusion model is trained on; about zero mean and unit variance
node    float [B, 16, 16, 16], what ComfyUI's nodes pass around; for the SD3 family, model = (node - shift) * scale
"""

import torch
import torch.nn.functional as F

BLOCK = 4  # image pixels per latent pixel, each way
CHANNELS = BLOCK * BLOCK
SIDE = 16  # latent height and width

# Mean and standard deviation of a drawn pixel, rounded to binary fractions.
PIXEL_MEAN = 0.125
PIXEL_STD = 0.3125

# comfy.latent_formats.SD3
NODE_SCALE = 1.5305
NODE_SHIFT = 0.0609


def image_to_model(images: torch.Tensor, mean: float = PIXEL_MEAN, std: float = PIXEL_STD) -> torch.Tensor:
    """Images [B, 64, 64] in [0, 1] -> model-space latents [B, 16, 16, 16]."""
    return F.pixel_unshuffle((images.unsqueeze(1) - mean) / std, BLOCK)


def model_to_image(latents: torch.Tensor, mean: float = PIXEL_MEAN, std: float = PIXEL_STD) -> torch.Tensor:
    """Model-space latents [B, 16, 16, 16] -> images [B, 64, 64]; not clamped."""
    return F.pixel_shuffle(latents, BLOCK).squeeze(1) * std + mean


def model_to_node(latents: torch.Tensor) -> torch.Tensor:
    """Model-space latents -> what a ComfyUI sampler node returns for them."""
    return latents / NODE_SCALE + NODE_SHIFT


def node_to_model(latents: torch.Tensor) -> torch.Tensor:
    """Latents as ComfyUI's nodes pass them -> model space."""
    return (latents - NODE_SHIFT) * NODE_SCALE
