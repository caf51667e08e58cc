"""Train the glyph model: a class-conditional DiT of 3.8 M parameters that stock ComfyUI loads as a small SD3.

    python tests/glyphs/train.py --comfyui PATH --out tests/data/glyph_dit.safetensors --minutes 6

tests/support/flow_training.py says how. Exits with 0 only if the template matcher reads at least 95 % of freshly
sampled glyphs correctly.
"""

import sys
from pathlib import Path

import torch

sys.path[0] = str(Path(__file__).resolve().parents[1])  # as a script, this folder would be there: `glyphs` must be

from glyphs import conditioning, latents
from glyphs.alphabet import ALPHABET
from glyphs.drawing import draw
from glyphs.matching import recognise
from support.flow_training import Sampler, Task, train

REQUIRED = 0.95  # recognised share


def drawn(count: int, generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    classes = torch.randint(len(ALPHABET), (count,), generator=generator, device=device)
    return latents.image_to_model(draw(classes, generator, device)), conditioning.CLASS_CODES.to(device)[classes]


def check(sampler: Sampler, device: torch.device) -> tuple[str, bool]:
    """Every class ten times: how many the matcher reads."""
    images = latents.model_to_image(sampler(conditioning.CLASS_CODES.to(device).repeat(10, 1, 1)))
    share = sum(map(str.__eq__, recognise(images), ALPHABET * 10)) / len(images)
    return f"recognised {share:.2%} of {len(images)}", share >= REQUIRED


TASK = Task("tests/glyphs/train.py", 3, (latents.SIDE, latents.SIDE), 12, (2048, 32), drawn, check)

if __name__ == "__main__":
    sys.exit(train(TASK, __doc__.splitlines()[0], minutes=6.0))
