"""Texts drawn: letters pasted from atlas.npz along centred lines, in one batched expression on any device."""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .alphabet import ALPHABET, FONTS, LINES, LONGEST, SHORTEST, SIZES, Text
from .bake_atlas import BASELINE, LEFT

HEIGHT, WIDTH = 64, 192  # of an image, px
WIDEST = 184  # of a line, px
SHIFT = (3, 1)  # largest random shift of a line in x and in y, px
_CAPITAL = 0.73  # height of a capital letter of these fonts, em
_MARGIN = 48  # around the image while letters are pasted, so that no box is cut off


@dataclass(frozen=True)
class Layout:
    """A batch of texts as tensors on one device."""

    letters: torch.Tensor
    """int64 [B, 2, 10], places in ALPHABET; -1 where there is no letter. A second line without letters is none."""
    font: torch.Tensor
    """int64 [B], places in FONTS."""
    size: torch.Tensor
    """int64 [B], places in SIZES."""


@cache
def _atlas(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The letters, float32 [fonts, sizes, 27, h, w] in [0, 1], and int64 [fonts, sizes, 27]; the last is no letter."""
    with np.load(Path(__file__).with_name("atlas.npz")) as stored:
        glyphs, advances = torch.from_numpy(stored["glyphs"]).float() / 255, torch.from_numpy(stored["advances"]).long()
    glyphs = torch.nn.functional.pad(glyphs, (0, 0, 0, 0, 0, 1))
    return glyphs.to(device), torch.nn.functional.pad(advances, (0, 1)).to(device)


def layout(texts: list[Text], device: torch.device | str = "cpu") -> Layout:
    """Texts as a batch."""
    letters = torch.full((len(texts), LINES, LONGEST), -1)
    for number, text in enumerate(texts):
        for place, line in enumerate(text.lines):
            letters[number, place, : len(line)] = torch.tensor([ALPHABET.index(letter) for letter in line])
    fonts, sizes = ([getattr(text, name) for text in texts] for name in ("font", "size"))
    return Layout(letters.to(device), torch.tensor(fonts).to(device), torch.tensor(sizes).to(device))


def random_layout(count: int, generator: torch.Generator, device: torch.device) -> Layout:
    """Random letters, 3 to 10 a line, every other text two lines; font or size change where they do not fit."""

    def draw(below: int, *shape: int) -> torch.Tensor:
        return torch.randint(below, shape, generator=generator, device=device)

    lengths = SHORTEST + draw(LONGEST - SHORTEST + 1, count, LINES)
    lengths[: count // 2, 1] = 0
    places = torch.arange(LONGEST, device=device)
    letters = draw(len(ALPHABET), count, LINES, LONGEST).masked_fill_(places >= lengths[..., None], -1)
    font, size = draw(len(FONTS), count), draw(len(SIZES), count)
    font = torch.where(_widths(letters, font)[:, 0] <= WIDEST, font, FONTS.index("mono"))
    fitting = (_widths(letters, font) <= WIDEST).sum(1) - 1
    return Layout(letters, font, torch.minimum(size, fitting))


def fits(text: Text) -> bool:
    """Whether the lines are not wider than WIDEST in their font and size."""
    batch = layout([text])
    return bool(_widths(batch.letters, batch.font)[0, text.size] <= WIDEST)


def _widths(letters: torch.Tensor, font: torch.Tensor) -> torch.Tensor:
    """The wider line of each text in every size, px: int64 [B, sizes]."""
    advances = _atlas(letters.device)[1][font]  # [B, sizes, 27]
    index = letters.flatten(1)[:, None].expand(-1, len(SIZES), -1) % (len(ALPHABET) + 1)
    return advances.gather(2, index).unflatten(2, letters.shape[1:]).sum(-1).amax(-1)


def draw(batch: Layout, generator: torch.Generator | None = None) -> torch.Tensor:
    """Images of a batch of texts, ink on nothing: float32 [B, 64, 192] in [0, 1].

    With a generator, which must live on the batch's device, each line is shifted by up to SHIFT pixels.
    """
    device, count = batch.letters.device, len(batch.letters)
    glyphs, advances = _atlas(device)
    font, size, letters = batch.font[:, None, None], batch.size[:, None, None], batch.letters
    steps = advances[font, size, letters]  # [B, lines, places]; -1 is the last, no letter
    ends = steps.cumsum(-1)
    x = ends - steps + (WIDTH - ends[..., -1:]) // 2
    two = (letters[:, 1, :1] >= 0).long()  # [B, 1]
    middles = torch.cat([HEIGHT // 2 - two * HEIGHT // 4, HEIGHT // 2 + two * HEIGHT // 4], 1)  # [B, lines]
    capitals = torch.tensor([round(_CAPITAL * px) for px in SIZES], device=device)[batch.size]
    y = (middles + capitals[:, None] // 2)[..., None].expand_as(x)
    if generator is not None:
        for axis, largest in ((0, SHIFT[0]), (1, SHIFT[1])):
            shift = torch.randint(-largest, largest + 1, (count, LINES, 1), generator=generator, device=device)
            x, y = (x + shift, y) if axis == 0 else (x, y + shift)
    boxes = glyphs[font, size, letters]  # [B, lines, places, h, w]
    rows = (y - BASELINE + _MARGIN)[..., None] + torch.arange(boxes.shape[-2], device=device)
    columns = (x - LEFT + _MARGIN)[..., None] + torch.arange(boxes.shape[-1], device=device)
    height, width = HEIGHT + 2 * _MARGIN, WIDTH + 2 * _MARGIN
    places = rows[..., :, None] * width + columns[..., None, :]
    canvas = torch.zeros(count, height * width, device=device).scatter_add_(1, places.flatten(1), boxes.flatten(1))
    inner = canvas.unflatten(1, (height, width))[:, _MARGIN:-_MARGIN, _MARGIN:-_MARGIN]
    return inner.clamp(max=1)
