"""The benchmark's bar chart as an IMAGE."""

from collections.abc import Sequence

import torch
from PIL import Image, ImageDraw, ImageFont

from ...kernels.benchmark import BF16, TICKS, ShapeResult, shown
from .drawing import INK, MUTED, as_comfyui_image

_WIDTH = 1100
_MARGIN = 24
_LABEL_WIDTH = 250
_BAR_HEIGHT = 20
_GROUP_GAP = 18


def plot(results: Sequence[ShapeResult], title: str) -> torch.Tensor:
    """Horizontal bars, one group per shape and one bar per method that ran: time relative to bf16, which is 1. A shape
    for which bf16 found no memory is left out.

    Returns a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1.
    """
    results = [result for result in results if BF16 in result.rounds]
    heading, text = ImageFont.load_default(16), ImageFont.load_default(15)
    bars = sum(len(result.rounds) for result in results)
    height = 3 * _MARGIN + 2 * 30 + bars * (_BAR_HEIGHT + 3) + len(results) * _GROUP_GAP
    image = Image.new("RGB", (_WIDTH, height), "#ffffff")
    draw = ImageDraw.Draw(image)
    draw.text((_MARGIN, _MARGIN), title, fill=INK, font=heading)
    draw.text((_MARGIN, _MARGIN + 32), "time per linear relative to bf16 (shorter is better)", fill=MUTED, font=text)

    ratios = [t / r.milliseconds[BF16] for r in results for t in r.milliseconds.values()]
    scale = (_WIDTH - _LABEL_WIDTH - 2 * _MARGIN - 150) / max([1.0, *ratios])
    y = 2 * _MARGIN + 54
    for result in results:
        draw.text((_MARGIN, y), result.shape.name, fill=INK, font=text)
        draw.text((_MARGIN, y + 20), result.place(), fill=MUTED, font=text)
        times = result.milliseconds
        for method in (method for method in shown(TICKS) if method.name in times):
            ratio = times[method.name] / times[BF16]
            x = _MARGIN + _LABEL_WIDTH
            draw.rectangle((x, y, x + ratio * scale, y + _BAR_HEIGHT - 2), fill=method.color)
            label = f"{method.name}  {times[method.name]:.3f} ms"
            draw.text((x + ratio * scale + 8, y), label, fill=INK, font=text)
            y += _BAR_HEIGHT + 3
        y += _GROUP_GAP
    return as_comfyui_image(image)
