"""The word model sampled by ComfyUI."""

import numpy as np
import torch

from . import latents
from .alphabet import Text
from .conditioning import encode

STEPS = 18
BATCH = 100


def sample(model, texts: list[Text], seed: int = 0, steps: int = STEPS, batch: int = BATCH) -> torch.Tensor:
    """Model-space latents [B, 16, 16, 48], float32 on the CPU, of a MODEL: Euler steps from noise of the seed alone."""
    import comfy.sample

    parts = []
    for start in range(0, len(texts), batch):
        context, pooled = encode(texts[start : start + batch])
        condition = [[context, {"pooled_output": pooled}]]
        empty = torch.zeros(len(context), latents.CHANNELS, latents.ROWS, latents.COLUMNS)
        noise = comfy.sample.prepare_noise(empty, seed + start)
        sampled = comfy.sample.sample(
            model, noise, steps, 1.0, "euler", "simple", condition, condition, empty, disable_pbar=True, seed=seed
        )
        parts.append(latents.node_to_model(sampled.float().cpu()))
    return torch.cat(parts)


def pictures(sampled: torch.Tensor) -> np.ndarray:
    """Model-space latents as images, black on white: uint8 [B, 64, 192]."""
    return ((1 - latents.model_to_image(sampled).clamp(0, 1)) * 255).round().byte().numpy()
