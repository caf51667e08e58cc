"""What the pack's pictures share: sheets of one width, places on them in inches from the top left, and their colours.

matplotlib takes a second to import, so that is done when something is drawn. Only its objects are used: what pyplot
keeps is one for the whole process, which other packs draw in too.
"""

import importlib.util
from typing import TYPE_CHECKING

import numpy
import torch

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Text

INK, MUTED, GRID = "#1c2733", "#5a6673", "#e3e8ee"
PLAIN, INT8, PROTECTED = "#9aa5b1", "#2f6fd0", "#d03b3b"
WIDTH, MARGIN = 4.5, 0.12
HEADLINE, TITLE, TEXT, SMALL = 14.0, 9.5, 7.5, 6.5
"""Sizes of letters, in points: legible also where a node shows a sheet half as large as it is."""
_DOTS_PER_INCH = 220


def check_matplotlib() -> None:
    """Raise ImportError with what to do where matplotlib is missing; for before the work whose result is drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "the report is drawn with matplotlib, which is not installed: run `pip install matplotlib` with ComfyUI's "
            "Python"
        )


def sheet(height: float) -> "Figure":
    """An empty sheet, WIDTH x `height` inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((WIDTH, height), _DOTS_PER_INCH, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """An empty panel without spines and ticks."""
    whole = figure.get_figheight()
    panel = figure.add_axes((left / WIDTH, 1 - (top + height) / whole, width / WIDTH, height / whole))
    panel.spines[:].set_visible(False)
    panel.tick_params(length=0, pad=3, labelsize=SMALL, labelcolor=MUTED)
    panel.tick_params(which="minor", length=0, labelleft=False, labelbottom=False)
    panel.set_axisbelow(True)
    return panel


def write(figure: "Figure", left: float, top: float, text: str, size: float = TEXT, color: str = INK, **how) -> "Text":
    """A line of text whose top is there."""
    place = left / WIDTH, 1 - top / figure.get_figheight()
    return figure.text(*place, text, size=size, color=color, va="top", parse_math=False, **how)


def width_of(figure: "Figure", text: str, size: float) -> float:
    """Inches that a line of text takes."""
    measured = write(figure, 0.0, 0.0, text, size)
    width = measured.get_window_extent().width / _DOTS_PER_INCH
    measured.remove()
    return width


def shorten(text: "Text", width: float) -> None:
    """Leave out the middle of a text that is longer than `width` inches."""
    whole = text.get_text()
    for length in range(len(whole) - 1, 2, -1):
        if text.get_window_extent().width <= width * _DOTS_PER_INCH:
            return
        text.set_text(f"{whole[: length // 2]}…{whole[len(whole) - (length - length // 2) :]}")


def as_comfyui_image(figure: "Figure") -> torch.Tensor:
    """A sheet as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = figure.canvas
    assert isinstance(canvas, FigureCanvasAgg)
    canvas.draw()
    pixels = numpy.asarray(canvas.buffer_rgba())[..., :3]
    return torch.from_numpy(pixels.astype(numpy.float32) / 255)[None]
