"""The benchmark's bar chart as an IMAGE."""

from collections.abc import Sequence

import numpy
import torch
from PIL import Image, ImageDraw, ImageFont

from ..kernels.benchmark import BF16, METHODS, ShapeResult

_WIDTH = 1100
_MARGIN = 24
_LABEL_WIDTH = 250
_BAR_HEIGHT = 20
_GROUP_GAP = 18
_COLORS = ("#7f8c9b", "#d98841", "#c4a83a", "#4a9d8f", "#2f6fd0")


def plot(results: Sequence[ShapeResult], title: str) -> torch.Tensor:
    """Horizontal bars, one group per shape and one bar per method that ran: time relative to bf16, which is 1.

    Returns a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1.
    """
    heading, text = ImageFont.load_default(22), ImageFont.load_default(15)
    bars = sum(len(result.milliseconds) for result in results)
    height = 3 * _MARGIN + 2 * 30 + bars * (_BAR_HEIGHT + 3) + len(results) * _GROUP_GAP
    image = Image.new("RGB", (_WIDTH, height), "#ffffff")
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN, _MARGIN), title, fill="#1c2733", font=heading)
    draw.text(
        (_MARGIN, _MARGIN + 32), "time per linear relative to bf16 (shorter is better)", fill="#5a6673", font=text
    )

    ratios = [t / r.milliseconds[BF16] for r in results for t in r.milliseconds.values()]
    scale = (_WIDTH - _LABEL_WIDTH - 2 * _MARGIN - 150) / max(1.0, *ratios)
    y = 2 * _MARGIN + 54
    for result in results:
        draw.text((_MARGIN, y), result.shape.name, fill="#1c2733", font=text)
        draw.text((_MARGIN, y + 20), f"{result.m} x {result.shape.n} x {result.shape.k}", fill="#5a6673", font=text)
        for method, milliseconds in result.milliseconds.items():
            ratio = milliseconds / result.milliseconds[BF16]
            x = _MARGIN + _LABEL_WIDTH
            draw.rectangle((x, y, x + ratio * scale, y + _BAR_HEIGHT - 2), fill=_COLORS[METHODS.index(method)])
            label = f"{method}  {milliseconds:.3f} ms"
            draw.text((x + ratio * scale + 8, y), label, fill="#1c2733", font=text)
            y += _BAR_HEIGHT + 3
        y += _GROUP_GAP
    return torch.from_numpy(numpy.asarray(image, dtype=numpy.float32) / 255)[None]
