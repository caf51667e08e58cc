"""Text as the model sees it: one image per character, and a few fixed +-1 vectors per class.

The codes are a stretch of the Legendre sequence of a prime: whether n is a square modulo that prime. It looks random,
any two stretches are nearly orthogonal, and it needs no random generator that could change between versions.
"""

import torch

from .alphabet import ALPHABET, classes

TOKENS = 4  # context tokens per character
WIDTH = 64  # context and pooled width

_PRIME = 9221  # the first prime above 36 * 4 * 64 = 9216, so that no stretch repeats


def _class_codes() -> torch.Tensor:
    """float32 [36, 4, 64] of +-1."""
    squares = torch.zeros(_PRIME, dtype=torch.bool)
    squares[torch.arange(1, _PRIME).square() % _PRIME] = True
    count = len(ALPHABET) * TOKENS * WIDTH
    return torch.where(squares[1 : count + 1], 1.0, -1.0).reshape(len(ALPHABET), TOKENS, WIDTH)


CLASS_CODES = _class_codes()


def encode(text: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Conditioning for one image per character of `text`, float32 on the CPU.

    Returns the context [B, 4, 64] and the pooled vector [B, 64], B = len(text). The pooled vector is zero, so the class
    reaches the image through attention alone. Raises ValueError on a character outside ALPHABET.
    """
    numbers = classes(text)
    return CLASS_CODES[numbers], torch.zeros(len(numbers), WIDTH)
