"""What the pack's pictures share."""

import numpy
import torch
from PIL import Image

INK, MUTED = "#1c2733", "#5a6673"


def as_comfyui_image(image: Image.Image) -> torch.Tensor:
    """An RGB picture as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1."""
    return torch.from_numpy(numpy.asarray(image, dtype=numpy.float32) / 255)[None]
