"""The benchmark's bar chart as an IMAGE."""

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...kernels.benchmark import ATTENTION_METHODS, BENCHMARK_METHODS, BF16, COMFYUI_CHOICE, Times
from .drawing import (
    GRID,
    INK,
    MARGIN,
    MUTED,
    SMALL,
    TEXT,
    TITLE,
    WIDTH,
    as_comfyui_image,
    axes,
    sheet,
    shorten,
    width_of,
    write,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINE, _LETTERS = 0.15, 80  # of the heading: height, and letters that surely fit
_BAR, _HEADING, _SCALE, _GAP = 0.145, 0.3, 0.16, 0.12
_COLUMN_GAP = 0.15
_FIGURES = 0.4  # room for the milliseconds
_WIDEST = 3.0  # times the reference; a longer bar ends there in an arrow
# For methods without a colour of their own, which only the command line times.
_OTHERS = ("#b5679b", "#6f9fd8", "#8a6d3b", "#5fa35f", "#c77f7f", "#7a78c4", "#3f9aa8", "#a89a3f", "#9a9a9a")


@dataclass(frozen=True)
class Chart:
    """What a sheet shows: its heading, the method that bars are relative to, and each method's colour, in order."""

    heading: str
    reference: str
    colors: Mapping[str, str | None]


LINEARS = Chart("Time per linear", BF16, {method.name: method.color for method in BENCHMARK_METHODS})
ATTENTION = Chart(
    "Time per attention call", COMFYUI_CHOICE, {method.name: method.color for method in ATTENTION_METHODS}
)


def plot(results: Sequence[Times], title: str, attention: Sequence[Times] = ()) -> torch.Tensor:
    """The picture of a benchmark as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1: linears, then attention."""
    sheets = [draw(results, title), *([draw(attention, "", ATTENTION)] if attention else [])]
    return torch.cat([as_comfyui_image(sheet) for sheet in sheets], 1)


def draw(results: Sequence[Times], title: str, chart: Chart = LINEARS) -> "Figure":
    """One panel per result, one bar per method: median time relative to the reference, and where the rounds lie.

    Without the reference (bf16 found no memory) times are relative to the slowest method, and the panel says so.
    """
    colors = _colors(results, chart)
    heading = textwrap.wrap(title, _LETTERS)
    columns = 1 if len(results) < 3 else 2
    top = MARGIN + 0.24 + _LINE * (len(heading) + 1) + 0.06
    row = _HEADING + _BAR * len(colors) + _SCALE + _GAP
    figure = sheet(top - (-len(results) // columns) * row + MARGIN)
    write(figure, MARGIN, MARGIN, chart.heading, TITLE, weight="bold")
    legend = f"Bars: relative to {chart.reference}, shorter is better. Figures: milliseconds."
    for number, line in enumerate([*heading, legend]):
        write(figure, MARGIN, MARGIN + 0.24 + _LINE * number, line, color=MUTED if number == len(heading) else INK)

    names = MARGIN + 0.05 + max(width_of(figure, name, SMALL) for name in colors)
    width = (WIDTH - MARGIN - names - (columns - 1) * _COLUMN_GAP) / columns
    longest = max((time / _reference(r, chart)[1] for r in results for time in r.milliseconds.values()), default=1.0)
    scale = min(_WIDEST, max(1.0, longest))
    for index, result in enumerate(results):
        left, y = names + index % columns * (width + _COLUMN_GAP), top + index // columns * row
        shorten(write(figure, left, y, result.name, TEXT, weight="bold"), width)
        shorten(write(figure, left, y + 0.14, result.place(), SMALL, MUTED), width)
        panel = axes(figure, left, y + _HEADING, width, _BAR * len(colors))
        reference, milliseconds = _reference(result, chart)
        _bars(panel, result, milliseconds, colors, scale, scale * width / (width - _FIGURES))
        panel.tick_params(labelleft=index % columns == 0)
        if reference != chart.reference:
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            note = write(figure, left, y + _HEADING + 0.02, f"1 = {reference}", SMALL, MUTED, bbox=paper)
            shorten(note, width - _FIGURES)
    return figure


def _colors(results: Sequence[Times], chart: Chart) -> dict[str, str]:
    """The reference and the methods that ran anywhere, in the chart's order, with their colours."""
    ran = {chart.reference}.union(*(result.rounds for result in results))
    own = {name: color for name, color in chart.colors.items() if name in ran}
    own |= dict.fromkeys(sorted(ran - own.keys()))
    others = [name for name, color in own.items() if color is None]
    return {name: color or _OTHERS[others.index(name) % len(_OTHERS)] for name, color in own.items()}


def _reference(result: Times, chart: Chart) -> tuple[str, float]:
    """The method that the bars of a result are relative to, and its milliseconds."""
    times = result.milliseconds
    name = chart.reference if chart.reference in times else max(times, key=times.__getitem__, default=chart.reference)
    return name, times.get(name, 1.0)


def _bars(
    panel: "Axes", result: Times, reference: float, colors: Mapping[str, str], longest: float, end: float
) -> None:
    """Bars up to `longest` times the reference, and the milliseconds in what is left of the axis up to `end`."""
    panel.set_xlim(0, end)
    panel.set_ylim(len(colors) - 0.5, -0.5)
    panel.set_yticks(range(len(colors)), list(colors))
    ticks = [tick for tick in ((0.0, 0.5, 1.0, 1.5) if longest < 2 else (0.0, 1.0, 2.0, 3.0)) if tick <= longest]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.grid(axis="x", color=GRID, linewidth=0.6)
    panel.axvline(1.0, color=MUTED, linewidth=0.6, linestyle=(0, (3, 2)), zorder=3)
    for place, (name, color) in enumerate(colors.items()):
        if name not in result.rounds:
            panel.text(end, place, "-", size=SMALL, color=MUTED, ha="right", va="center_baseline")
            continue
        time, rounds = result.milliseconds[name], result.rounds[name]
        panel.barh(place, min(time / reference, longest), height=0.72, color=color)
        if time / reference > longest:
            panel.plot(longest, place, marker=">", markersize=5, color=color, clip_on=False)
        else:
            ends = [min(edge / reference, longest) for edge in (min(rounds), max(rounds))]
            panel.plot(ends, [place, place], color=INK, linewidth=1.0, marker="|", markersize=3, zorder=4)
        panel.text(
            end,
            place,
            f"{time:.3f}" if time < 10 else f"{time:.1f}",
            size=SMALL,
            color=INK,
            ha="right",
            va="center_baseline",
        )
