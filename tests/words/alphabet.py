"""What the word model writes: one or two lines of capital letters, in a font and a size."""

import random
from dataclasses import dataclass

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FONTS = ("sans", "sans bold", "serif", "mono")
SIZES = (18, 22, 26)  # font sizes, px
SHORTEST, LONGEST = 3, 10  # letters of a line
LINES = 2
CATEGORIES = ("short", "long", "two lines")
_VOWELS = "AEIOUY"
_CONSONANTS = "BCDFGHJKLMNPQRSTVWXZ"


@dataclass(frozen=True)
class Text:
    """One or two lines of letters, and the places of their font and size in FONTS and SIZES."""

    lines: tuple[str, ...]
    font: int = 0
    size: int = 0

    @property
    def category(self) -> str:
        """Its place in CATEGORIES by lines and letters: `short` is up to five letters."""
        return CATEGORIES[2 if len(self.lines) == 2 else 0 if len(self.lines[0]) <= 5 else 1]


def random_texts(count: int, seed: int = 0) -> list[Text]:
    """Texts that depend on the seed alone: the categories in turn, half of the words pronounceable, all fitting."""
    from .drawing import fits

    source = random.Random(seed)
    texts: list[Text] = []
    while len(texts) < count:
        category = len(texts) % len(CATEGORIES)
        lengths = ((SHORTEST, 5), (6, LONGEST), (SHORTEST, LONGEST))[category]
        lines = tuple(_word(source, source.randint(*lengths)) for _ in range(2 if category == 2 else 1))
        text = Text(lines, source.randrange(len(FONTS)), source.randrange(len(SIZES)))
        if fits(text):
            texts.append(text)
    return texts


def _word(source: random.Random, length: int) -> str:
    if source.random() < 0.5:
        return "".join(source.choice(ALPHABET) for _ in range(length))
    first = source.randrange(2)
    return "".join(source.choice(_VOWELS if (first + place) % 2 else _CONSONANTS) for place in range(length))
