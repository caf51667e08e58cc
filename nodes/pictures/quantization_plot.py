"""The quantization report as an IMAGE: how fragile each layer is, by kind of layer and depth, before and after."""

import math

import torch
from PIL import Image, ImageDraw, ImageFont

from ..quantization.report import ACT16, LayerReport, QuantizationReport
from .drawing import INK, MUTED, as_comfyui_image

_WIDTH, _MARGIN, _LABEL_WIDTH, _SCALE_WIDTH = 1100, 24, 190, 56
_HEADER, _ROW, _GAP, _FOOTER = 96, 92, 16, 16
_PLAIN, _INT8, _PROTECTED, _GRID = "#9aa5b1", "#2f6fd0", "#d03b3b", "#e3e8ee"
_RADIUS = 4
_TICKS = tuple(digit * 10.0**power for power in range(-4, 1) for digit in (1, 2, 5))
_LOWEST = 1e-4  # an error of zero has no place on a logarithmic scale


def plot(report: QuantizationReport) -> torch.Tensor:
    """One row per kind of layer, one column per block: on a logarithmic scale the layer's fragility in grey and its
    error as it was quantized in blue. A protected layer's fragility is a red square; a red circle is what 16-bit
    activations leave of it.

    Returns a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1.
    """
    rows: dict[str, list[LayerReport]] = {}
    for layer in report.layers:
        rows.setdefault(layer.kind, []).append(layer)
    blocks = list(dict.fromkeys(layer.block for layer in report.layers if layer.block != layer.name))
    errors = [
        max(error, _LOWEST) for layer in report.layers for error in (layer.error, layer.fragility) if error is not None
    ] or [0.01]
    low, high = min(errors) / 1.3, max(errors) * 1.3

    heading, text = ImageFont.load_default(16), ImageFont.load_default(13)
    height = _HEADER + len(rows) * (_ROW + _GAP) + _FOOTER
    image = Image.new("RGB", (_WIDTH, height), "#ffffff")
    draw = ImageDraw.Draw(image)
    kept = len(report.protected)
    draw.text(
        (_MARGIN, _MARGIN),
        f"{len(report.layers) - kept} layers in plain INT8, {kept} protected",
        fill=INK,
        font=heading,
    )
    _legend(draw, text, f"error relative to the layer's {report.error_of}:")

    left, right = _MARGIN + _LABEL_WIDTH + _SCALE_WIDTH, _WIDTH - _MARGIN
    top = _HEADER
    for kind, layers in rows.items():
        label = kind if draw.textlength(kind, text) <= _LABEL_WIDTH else "..." + kind[-24:]
        draw.text((_MARGIN, top + _ROW / 2 - 16), label, fill=INK, font=text)
        span = " to ".join(dict.fromkeys((layers[0].block, layers[-1].block)))
        if span != kind:
            draw.text((_MARGIN, top + _ROW / 2 + 2), span, fill=MUTED, font=text)

        def y_of(error: float, top: int = top) -> float:
            place = math.log(max(error, _LOWEST) / low) / math.log(high / low)
            return top + _ROW * (1 - place)

        for tick in _TICKS:
            if low <= tick <= high:
                draw.line((left, y_of(tick), right, y_of(tick)), fill=_GRID)
                draw.text((left - 8, y_of(tick)), f"{100 * tick:g} %", fill=MUTED, font=text, anchor="rm")
        draw.rectangle((left, top, right, top + _ROW), outline=_GRID)
        for layer in layers:
            # What is in no block has no depth: in the middle.
            place = (blocks.index(layer.block) + 0.5) / len(blocks) if layer.block in blocks else 0.5
            x = left + place * (right - left)
            if layer.error is None or layer.fragility is None:
                draw.text((x, top + _ROW - 10), "never called", fill=MUTED, font=text, anchor="mm")
                continue
            if layer.protected:
                if layer.held_in == ACT16:
                    draw.line((x, y_of(layer.fragility), x, y_of(layer.error)), fill=_PROTECTED)
                    _circle(draw, x, y_of(layer.error), _PROTECTED)
                _square(draw, x, y_of(layer.fragility), _PROTECTED)
                continue
            draw.line((x, y_of(layer.fragility), x, y_of(layer.error)), fill=_PLAIN)
            _circle(draw, x, y_of(layer.fragility), _PLAIN)
            _circle(draw, x, y_of(layer.error), _INT8)
        top += _ROW + _GAP
    return as_comfyui_image(image)


def _legend(draw: ImageDraw.ImageDraw, font: ImageFont.ImageFont | ImageFont.FreeTypeFont, title: str) -> None:
    x, y = _MARGIN, _MARGIN + 40
    draw.text((x, y), title, fill=MUTED, font=font, anchor="lm")
    x += draw.textlength(title, font) + 20
    for mark, color, label in (
        (_circle, _PLAIN, "fragility: plain INT8"),
        (_circle, _INT8, "as quantized"),
        (_square, _PROTECTED, "fragile and protected"),
        (_circle, _PROTECTED, "with 16-bit activations"),
    ):
        mark(draw, x, y, color)
        draw.text((x + 12, y), label, fill=INK, font=font, anchor="lm")
        x += draw.textlength(label, font) + 40


def _circle(draw: ImageDraw.ImageDraw, x: float, y: float, color: str) -> None:
    draw.ellipse((x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS), fill=color)


def _square(draw: ImageDraw.ImageDraw, x: float, y: float, color: str) -> None:
    draw.rectangle((x - _RADIUS - 1, y - _RADIUS - 1, x + _RADIUS + 1, y + _RADIUS + 1), fill=color)
