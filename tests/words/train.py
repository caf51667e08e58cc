"""Train the word model: a DiT of 9.0 M parameters that writes words and that stock ComfyUI loads as a small SD3.

    python tests/words/train.py --comfyui PATH --out tests/data/word_dit.safetensors --minutes 9

tests/support/flow_training.py says how. There is no OCR here: `agreement` compares samples with drawn images.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

sys.path[0] = str(Path(__file__).resolve().parents[1])  # as a script, this folder would be there: `words` must be

from support.flow_training import Sampler, Task, train
from words import conditioning, latents
from words.alphabet import Text, random_texts
from words.drawing import SHIFT, draw, layout, random_layout

AGREES = 0.9  # cosine of a line with its drawing from which on it is taken to say the same


def drawn(count: int, generator: torch.Generator, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    texts = random_layout(count, generator, device)
    return latents.image_to_model(draw(texts, generator)), conditioning.context_of(texts)


def agreement(images: torch.Tensor, texts: list[Text]) -> torch.Tensor:
    """Cosine of each image's worse half with the drawn text at its best shift: [B]. Needs no OCR."""
    drawn, seen = draw(layout(texts)), images.unflatten(1, (2, -1))
    best = torch.zeros(len(texts), 2)
    for dy in range(-SHIFT[1] - 1, SHIFT[1] + 2):
        for dx in range(-SHIFT[0] - 2, SHIFT[0] + 3):
            moved = drawn.roll((dy, dx), (1, 2)).unflatten(1, (2, -1))
            best = torch.maximum(best, F.cosine_similarity(moved.flatten(2), seen.flatten(2), dim=2))
    return best.amin(1)


def check(sampler: Sampler, device: torch.device) -> tuple[str, bool]:
    """Some texts: how many agree with their drawings, by kind."""
    texts = random_texts(300, seed=1)
    context, _ = conditioning.encode(texts)
    images = latents.model_to_image(sampler(context.to(device))).clamp(0, 1).cpu()
    cosine = agreement(images, texts)
    kinds: dict[str, list[bool]] = {}
    for text, value in zip(texts, cosine.tolist(), strict=True):
        kinds.setdefault(text.category, []).append(value > AGREES)
    agreed = ", ".join(f"{kind} {np.mean(values):.0%}" for kind, values in kinds.items())
    return f"agreement {cosine.mean():.3f}; above {AGREES}: {agreed}", True


TASK = Task("tests/words/train.py", 4, (latents.ROWS, latents.COLUMNS), 18, (1024, 16), drawn, check)

if __name__ == "__main__":
    sys.exit(train(TASK, __doc__.splitlines()[0], minutes=9.0))
