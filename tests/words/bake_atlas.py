"""Draw every letter of the word model once: python tests/words/bake_atlas.py

Writes atlas.npz beside this script: `glyphs` uint8 [fonts, sizes, 26, height, width], ink 0 to 255, all on one baseline
and from one left edge, and `advances` uint8 [fonts, sizes, 26], pixels to the next letter. The fonts are the DejaVu
fonts that matplotlib ships. A machine without them trains and draws from the file.
"""

from pathlib import Path

import matplotlib
import numpy as np
from PIL import Image, ImageDraw, ImageFont

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
FILES = ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSansMono.ttf")  # alphabet.FONTS
SIZES = (18, 22, 26)  # alphabet.SIZES
HEIGHT, WIDTH = 32, 40
LEFT, BASELINE = 6, 22  # where the pen starts in the box of a letter


def main() -> None:
    glyphs = np.zeros((len(FILES), len(SIZES), len(ALPHABET), HEIGHT, WIDTH), np.uint8)
    advances = np.zeros(glyphs.shape[:3], np.uint8)
    folder = Path(matplotlib.get_data_path(), "fonts", "ttf")
    for f, file in enumerate(FILES):
        for s, size in enumerate(SIZES):
            font = ImageFont.truetype(str(folder / file), size)
            for n, letter in enumerate(ALPHABET):
                box = Image.new("L", (WIDTH, HEIGHT), 0)
                ImageDraw.Draw(box).text((LEFT, BASELINE), letter, fill=255, font=font, anchor="ls")
                drawn = np.asarray(box)
                if drawn[[0, -1]].any() or drawn[:, [0, -1]].any():
                    raise ValueError(f"{letter} of {file} at {size} px does not fit into {WIDTH} x {HEIGHT}.")
                glyphs[f, s, n] = drawn
                advances[f, s, n] = round(font.getlength(letter))
    np.savez_compressed(Path(__file__).with_name("atlas.npz"), glyphs=glyphs, advances=advances)


if __name__ == "__main__":
    main()
