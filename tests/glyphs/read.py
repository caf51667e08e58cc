"""Read glyph images: python tests/glyphs/read.py STRIP IMAGE...

Prints the characters that the template matcher sees, one per image, and writes the images side by side to STRIP. A
script of its own because the demo runs on a Python that need not have torch or PIL.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

sys.path[0] = str(Path(__file__).resolve().parents[1])  # as a script, this folder would be there: `glyphs` must be

from glyphs.matching import recognise


def main(strip_path: str, *image_paths: str) -> None:
    images = [Image.open(path).convert("L") for path in image_paths]
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).float() / 255
    print("".join(recognise(pixels)))

    width = images[0].width
    strip = Image.new("L", (width * len(images), images[0].height))
    for index, image in enumerate(images):
        strip.paste(image, (width * index, 0))
    strip.save(strip_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
