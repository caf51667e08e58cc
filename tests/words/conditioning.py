"""Text as the model sees it: one context token per letter, and nothing else.

A token holds one-hot codes of the letter, of its place from the start and from the end of its line, of the line's
length, of the line (the only one, the first or the second of two), of the font and of the size. Where a letter has to
stand in the image follows from the letters before it, whose widths depend on the font: the model has to find it out.
"""

import torch
import torch.nn.functional as F

from .alphabet import ALPHABET, FONTS, LINES, LONGEST, SHORTEST, SIZES, Text
from .drawing import Layout, layout

_CODES = (len(ALPHABET), LONGEST, LONGEST, LONGEST - SHORTEST + 1, LINES + 1, len(FONTS), len(SIZES))
TOKENS = LINES * LONGEST  # context tokens of an image; those without a letter are zero
WIDTH = sum(_CODES)  # of context and pooled vector: 64
_SCALE = 3.0  # of a code: seven of them give a token about unit mean square


def context_of(batch: Layout) -> torch.Tensor:
    """The context of a batch of texts, float32 [B, 20, 64] on its device."""
    letters = batch.letters
    present = letters >= 0
    lengths = present.sum(-1, keepdim=True)
    places = torch.arange(LONGEST, device=letters.device).expand_as(letters)
    lines = torch.arange(1, LINES + 1, device=letters.device)[:, None] * present[:, 1:, :1]  # 0: the only one
    codes = (
        letters,
        places,
        lengths - 1 - places,
        lengths - SHORTEST,
        lines,
        batch.font[:, None, None],
        batch.size[:, None, None],
    )
    parts = [F.one_hot(code.expand_as(letters).clamp(min=0), size) for code, size in zip(codes, _CODES, strict=True)]
    return (torch.cat(parts, -1) * (_SCALE * present[..., None])).flatten(1, 2)


def encode(texts: list[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """Conditioning for one image per text, float32 on the CPU: the context [B, 20, 64] and the pooled vector [B, 64].

    The pooled vector is zero, so the text reaches the image through attention alone.
    """
    return context_of(layout(texts)), torch.zeros(len(texts), WIDTH)
