"""Pictures of the package as small PNG files: few colours say as much, and every user downloads them."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = 96
"""Enough for antialiased text, plots and ComfyUI's nodes."""
GREYS = 16
"""Enough for letters: evenly spaced, so that paper with a little noise is white."""


def save_small_png(picture: Image.Image | Figure, path: Path) -> None:
    """Write an image, or a figure at its own resolution, in COLORS colours; one that has none in GREYS greys."""
    if not isinstance(picture, Image.Image):
        drawn = io.BytesIO()
        picture.savefig(drawn, format="png")
        picture = Image.open(drawn)
    if picture.mode == "L":
        step = 255 / (GREYS - 1)
        picture = picture.point([round(round(grey / step) * step) for grey in range(256)])
    picture.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
