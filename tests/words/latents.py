"""Images and latents of the word model.

There is no VAE: a latent pixel is a 4x4 block of image pixels, spread over 16 channels. Three value ranges meet here:

image   float [B, 64, 192] in [0, 1], ink on nothing
model   float [B, 16, 16, 48], what the diffusion model is trained on; about zero mean and unit variance
node    float [B, 16, 16, 48], what ComfyUI's nodes pass around; for the SD3 family, model = (node - shift) * scale
"""

import torch
import torch.nn.functional as F

from glyphs.latents import node_to_model as node_to_model  # both models are of the SD3 family

BLOCK = 4  # image pixels per latent pixel, each way
CHANNELS = BLOCK * BLOCK
ROWS, COLUMNS = 16, 48  # of latent pixels

# Mean and standard deviation of a drawn pixel, rounded to binary fractions.
PIXEL_MEAN = 0.0625
PIXEL_STD = 0.25


def image_to_model(images: torch.Tensor) -> torch.Tensor:
    """Images [B, 64, 192] in [0, 1] -> model-space latents [B, 16, 16, 48]."""
    return F.pixel_unshuffle((images.unsqueeze(1) - PIXEL_MEAN) / PIXEL_STD, BLOCK)


def model_to_image(latents: torch.Tensor) -> torch.Tensor:
    """Model-space latents [B, 16, 16, 48] -> images [B, 64, 192]; not clamped."""
    return F.pixel_shuffle(latents, BLOCK).squeeze(1) * PIXEL_STD + PIXEL_MEAN
