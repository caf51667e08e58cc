"""The quantization report as an IMAGE: what INT8 costs each layer, by kind of layer and block, before and after."""

import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ..quantization.chart import Chart, Mark, Panel, chart_of
from ..quantization.report import ACT16, BF16, CODES, INT8, QuantizationReport, percent
from .drawing import (
    GRID,
    INK,
    MARGIN,
    MUTED,
    PLAIN,
    PROTECTED,
    SMALL,
    TITLE,
    WIDTH,
    as_comfyui_image,
    axes,
    sheet,
    shorten,
    width_of,
    write,
)
from .drawing import INT8 as BLUE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINE, _LETTERS = 0.15, 80  # of the summary: height, and letters that surely fit
_PANEL, _PANEL_TITLE, _GAP, _FOOT = 0.5, 0.16, 0.1, 0.3
_LEFT = 0.45  # of the panels: room for their scale
_POINTS_PER_NUMBER = 13  # two digits and a gap
_NEVER = "never called"
_BEFORE = "plain INT8"  # or as the chart calls it
_MARKS = {
    _BEFORE: {"marker": "o", "color": PLAIN, "markersize": 3},
    "as quantized": {"marker": "o", "color": BLUE, "markersize": 3.6},
    "8-bit weights": {"marker": "o", "color": PROTECTED, "markersize": 3.6},
    "16-bit activations": {"marker": "D", "color": PROTECTED, "markersize": 3.4},
    "kept in bf16": {"marker": "s", "color": PROTECTED, "markersize": 3.6},
    _NEVER: {"marker": "x", "color": MUTED, "markersize": 3.4},
}
_HELD = {CODES: "as quantized", INT8: "8-bit weights", ACT16: "16-bit activations", BF16: "kept in bf16"}


def plot(report: QuantizationReport) -> torch.Tensor:
    """The picture of a report as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1."""
    return as_comfyui_image(draw(chart_of(report)))


def draw(chart: Chart) -> "Figure":
    """One panel per kind of layer, one column per block, all on one logarithmic scale.

    A layer's error in plain INT8 is grey. A line leads from it to the error as quantized: blue, or red where the layer
    is protected. bf16 has none and stands at the foot of the panel.
    """
    summary = textwrap.wrap(chart.summary, _LETTERS)
    top = MARGIN + 0.22 + _LINE * len(summary) + 0.06 + _LINE + 0.08
    footed = [_ends_its_blocks(chart.panels, index) for index in range(len(chart.panels))]
    height = top + sum(_PANEL_TITLE + _PANEL + _GAP + _FOOT * foot for foot in footed) + MARGIN
    figure = sheet(height)
    write(figure, MARGIN, MARGIN, chart.title, TITLE, weight="bold")
    for number, line in enumerate(summary):
        write(figure, MARGIN, MARGIN + 0.22 + _LINE * number, line)
    _legend(figure, chart, MARGIN + 0.22 + _LINE * len(summary) + 0.06)
    width = WIDTH - MARGIN - _LEFT
    for panel, foot in zip(chart.panels, footed, strict=True):
        means = "" if panel.before is None else f"{percent(panel.before)} → {percent(panel.after)}"
        write(figure, WIDTH - MARGIN, top, means, SMALL, MUTED, ha="right")
        shorten(write(figure, _LEFT, top, panel.kind), width - width_of(figure, means, SMALL) - 0.1)
        _panel(axes(figure, _LEFT, top + _PANEL_TITLE, width, _PANEL), chart, panel, foot)
        if foot:
            of, below = f"number of the block in {panel.blocks}", top + _PANEL_TITLE + _PANEL + 0.15
            shorten(write(figure, _LEFT + width / 2, below, of, SMALL, MUTED, ha="center"), width)
        top += _PANEL_TITLE + _PANEL + _GAP + _FOOT * foot
    return figure


def _ends_its_blocks(panels: Sequence[Panel], index: int) -> bool:
    """Whether a panel is the last of its blocks: under it are their numbers."""
    after = panels[index + 1].blocks if index + 1 < len(panels) else ""
    return bool(panels[index].blocks) and panels[index].blocks != after


def _legend(figure: "Figure", chart: Chart, top: float) -> None:
    from matplotlib.lines import Line2D

    names = {_BEFORE, *(_name(mark) for panel in chart.panels for mark in panel.marks)}
    figure.legend(
        handles=[
            Line2D([], [], linestyle="", label=chart.plain if name == _BEFORE else name, **mark)
            for name, mark in _MARKS.items()
            if name in names
        ],
        loc="upper left",
        bbox_to_anchor=(MARGIN / WIDTH, 1 - top / figure.get_figheight()),
        ncols=len(_MARKS),
        fontsize=SMALL,
        labelcolor=INK,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=0.8,
        handletextpad=0.3,
        columnspacing=1.0,
    )


def _name(mark: Mark) -> str:
    if mark.before is None:
        return _NEVER
    return _HELD[mark.held_in] if mark.protected else "as quantized"


def _panel(axes: "Axes", chart: Chart, panel: Panel, foot: bool) -> None:
    axes.set_yscale("log")
    axes.set_ylim(chart.low / 1.3, chart.high)  # so that marks at the foot do not touch the numbers below
    axes.set_yticks(chart.ticks, [f"{100 * tick:g} %" for tick in chart.ticks])
    axes.grid(axis="y", color=GRID, linewidth=0.6)
    axes.spines["bottom"].set(visible=True, color=PLAIN, linewidth=0.6)
    _columns(axes, chart, panel.blocks, foot)

    called = [mark for mark in panel.marks if mark.before is not None]
    floor = chart.low
    axes.vlines(
        [mark.block or 0 for mark in called],
        [max(mark.after or 0.0, floor) for mark in called],
        [max(mark.before or 0.0, floor) for mark in called],
        colors=[PROTECTED if mark.protected else PLAIN for mark in called],
        linewidth=0.8,
    )
    _draw(axes, _BEFORE, ((mark, mark.before) for mark in called), floor)
    for name in _MARKS:
        _draw(axes, name, ((mark, mark.after) for mark in panel.marks if _name(mark) == name), floor)


def _draw(axes: "Axes", name: str, marks: Iterable[tuple[Mark, float | None]], floor: float) -> None:
    places = [(mark.block or 0, max(error or 0.0, floor)) for mark, error in marks]
    axes.plot([x for x, _ in places], [y for _, y in places], linestyle="", clip_on=False, **_MARKS[name])


def _columns(axes: "Axes", chart: Chart, blocks: str, foot: bool) -> None:
    """One per block of this name; what is in no block has no depth and stands in the middle."""
    if not blocks:
        axes.set_xlim(-0.5, 0.5)
        axes.set_xticks([])
        return
    numbers = [mark.block or 0 for panel in chart.panels if panel.blocks == blocks for mark in panel.marks]
    first, last = min(numbers), max(numbers)
    room = 72 * (WIDTH - MARGIN - _LEFT) / (last - first + 1)  # points for a column
    step = next(step for digit in range(9) for step in (10**digit, 2 * 10**digit, 5 * 10**digit) if _fits(step * room))
    axes.set_xlim(first - 0.5, last + 0.5)
    axes.set_xticks([number for number in range(first, last + 1) if number % step == 0])
    axes.tick_params(labelbottom=foot)


def _fits(room: float) -> bool:
    return room >= _POINTS_PER_NUMBER
