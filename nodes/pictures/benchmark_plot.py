"""The benchmark's bar chart as an IMAGE."""

import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...kernels import FUSED
from ...kernels.benchmark import ATTENTION_METHODS, BF16, COMFYUI_CHOICE, FUSED_CODES, Times
from .drawing import (
    GRID,
    HEADLINE,
    INK,
    INT8,
    MARGIN,
    MUTED,
    PLAIN,
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

_LINE, _LETTERS = 0.15, 80  # of small text: height, and letters that surely fit
_HEADLINE, _HEADLINE_LETTERS = 0.26, 38
_BAR, _HEADING, _SCALE, _GAP = 0.145, 0.3, 0.16, 0.12
_COLUMN_GAP = 0.15
_FIGURES = 0.4  # room for the milliseconds
_WIDEST = 3.0  # times the reference; a longer bar ends there in an arrow


@dataclass(frozen=True)
class Chart:
    """What a sheet shows: its heading, the method that bars are relative to, and the methods of this pack."""

    heading: str
    reference: str
    ours: frozenset[str]


LINEARS = Chart("Time per linear", BF16, frozenset({FUSED, FUSED_CODES}))
ATTENTION = Chart(
    "Time per attention call",
    COMFYUI_CHOICE,
    frozenset(method.name for method in ATTENTION_METHODS if not method.foreign),
)


def plot(results: Sequence[Times], headline: str, environment: str, attention: Sequence[Times] = ()) -> torch.Tensor:
    """The picture of a benchmark as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1: linears, then attention."""
    sheets = [draw(results, headline, "" if attention else environment)]
    if attention:
        sheets.append(draw(attention, "", environment, ATTENTION))
    return torch.cat([as_comfyui_image(sheet) for sheet in sheets], 1)


def draw(results: Sequence[Times], headline: str, environment: str, chart: Chart = LINEARS) -> "Figure":
    """One panel per result, one bar per method: median time relative to the reference, and where the rounds lie.

    The fastest method is on top. Without the reference (bf16 found no memory) times are relative to the slowest
    method, and the panel says so.
    """
    names = _fastest_first(results, chart)
    large, small = textwrap.wrap(headline, _HEADLINE_LETTERS), textwrap.wrap(environment, _LETTERS)
    columns = 1 if len(results) < 3 else 2
    above = MARGIN + _HEADLINE * len(large)
    top = above + 0.24 + _LINE + 0.06
    row = _HEADING + _BAR * len(names) + _SCALE + _GAP
    bottom = top - (-len(results) // columns) * row
    figure = sheet(bottom + _LINE * len(small) + MARGIN)
    for number, line in enumerate(large):
        write(figure, MARGIN, MARGIN + _HEADLINE * number, line, HEADLINE, weight="bold")
    write(figure, MARGIN, above, chart.heading, TITLE, weight="bold")
    legend = f"Bars: relative to {chart.reference}, shorter is better. Figures: milliseconds."
    write(figure, MARGIN, above + 0.24, legend, color=MUTED)
    for number, line in enumerate(small):
        write(figure, MARGIN, bottom + _LINE * number, line, SMALL, MUTED)

    edge = MARGIN + 0.05 + max(width_of(figure, name, SMALL) for name in names)
    width = (WIDTH - MARGIN - edge - (columns - 1) * _COLUMN_GAP) / columns
    longest = max((time / _reference(r, chart)[1] for r in results for time in r.milliseconds.values()), default=1.0)
    scale = min(_WIDEST, max(1.0, longest))
    for index, result in enumerate(results):
        left, y = edge + index % columns * (width + _COLUMN_GAP), top + index // columns * row
        shorten(write(figure, left, y, result.name, TEXT, weight="bold"), width)
        shorten(write(figure, left, y + 0.14, result.place(), SMALL, MUTED), width)
        panel = axes(figure, left, y + _HEADING, width, _BAR * len(names))
        reference, milliseconds = _reference(result, chart)
        _bars(panel, result, milliseconds, names, chart.ours, scale, scale * width / (width - _FIGURES))
        panel.tick_params(labelleft=index % columns == 0)
        if reference != chart.reference:
            paper = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
            note = write(figure, left, y + _HEADING + 0.02, f"1 = {reference}", SMALL, MUTED, bbox=paper)
            shorten(note, width - _FIGURES)
    return figure


def _fastest_first(results: Sequence[Times], chart: Chart) -> list[str]:
    """The reference and the methods that ran anywhere, by the mean of their bars."""
    bars: dict[str, list[float]] = {chart.reference: []}
    for result in results:
        reference = _reference(result, chart)[1]
        for name, time in result.milliseconds.items():
            bars.setdefault(name, []).append(time / reference)
    return sorted(bars, key=lambda name: (statistics.fmean(bars[name]) if bars[name] else 1.0, name))


def _reference(result: Times, chart: Chart) -> tuple[str, float]:
    """The method that the bars of a result are relative to, and its milliseconds."""
    times = result.milliseconds
    name = chart.reference if chart.reference in times else max(times, key=times.__getitem__, default=chart.reference)
    return name, times.get(name, 1.0)


def _bars(
    panel: "Axes",
    result: Times,
    reference: float,
    names: Sequence[str],
    ours: frozenset[str],
    longest: float,
    end: float,
) -> None:
    """Bars up to `longest` times the reference, and the milliseconds in what is left of the axis up to `end`."""
    panel.set_xlim(0, end)
    panel.set_ylim(len(names) - 0.5, -0.5)
    panel.set_yticks(range(len(names)), names)
    ticks = [tick for tick in ((0.0, 0.5, 1.0, 1.5) if longest < 2 else (0.0, 1.0, 2.0, 3.0)) if tick <= longest]
    panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    panel.grid(axis="x", color=GRID, linewidth=0.6)
    panel.axvline(1.0, color=MUTED, linewidth=0.6, linestyle=(0, (3, 2)), zorder=3)
    for place, name in enumerate(names):
        color = INT8 if name in ours else PLAIN
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
