"""Text read from images by OCR (rapidocr: PP-OCR, its models in the package), and how far it is from what was asked."""

from functools import cache

import numpy as np
from PIL import Image

_SMALL = 96  # pixels of height up to which an image is read at twice its size
_BORDER = 16  # white pixels around an image: letters at the very edge are not found


@cache
def _engine():
    from rapidocr import RapidOCR

    params = {
        "Global.log_level": "error",
        # Its own limit enlarges small images tenfold, which takes five times as long and finds no more.
        "Det.limit_type": "max",
        "Det.limit_side_len": 2000,
        # On images of this size a second thread waits more than it computes.
        "EngineConfig.onnxruntime.intra_op_num_threads": 1,
    }
    return RapidOCR(params=params)


def read(image: np.ndarray) -> str:
    """The lines of text in an image, uint8 [H, W] or [H, W, 3], joined by line breaks; empty where there is none."""
    picture = Image.fromarray(image).convert("RGB")
    framed = Image.new("RGB", (picture.width + 2 * _BORDER, picture.height + 2 * _BORDER), "white")
    framed.paste(picture, (_BORDER, _BORDER))
    if picture.height <= _SMALL:
        framed = framed.resize((2 * framed.width, 2 * framed.height), Image.Resampling.BICUBIC)
    found = _engine()(np.asarray(framed), use_cls=False)
    if not found.txts or found.boxes is None:
        return ""
    return "\n".join(in_reading_order(found.boxes, found.txts))


def in_reading_order(boxes: np.ndarray, texts: tuple[str, ...]) -> list[str]:
    """Texts as lines from top to bottom. boxes: [B, 4 corners, 2 (x, y)]; what is side by side is one line."""
    lines: list[list[tuple[float, str]]] = []
    middle = -np.inf
    for box, text in sorted(zip(boxes, texts, strict=True), key=lambda pair: pair[0][:, 1].mean()):
        if box[:, 1].mean() - middle > np.ptp(box[:, 1]) / 2:
            lines.append([])
            middle = box[:, 1].mean()
        lines[-1].append((box[:, 0].min(), text))
    return [" ".join(text for _, text in sorted(line)) for line in lines]


def normalised(text: str) -> str:
    """What is compared: letters and digits alone, in capitals. 0 and O are one, and so are 1 and I."""
    return "".join(c for c in text.upper() if c.isalnum()).translate(str.maketrans("01", "OI"))


def edit_distance(a: str, b: str) -> int:
    """Levenshtein's distance: the fewest letters inserted, deleted or replaced that make one text the other."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        diagonal, row[0] = row[0], i
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, diagonal + (x != y))
    return row[-1]
