"""The plots that nodes draw as an IMAGE: panels of rows, each a bar beside a name or a mark above a number.

matplotlib takes a second to import, so that is done when something is drawn. Only its objects are used, because
pyplot's state belongs to the whole process, and other packs draw in it too.
"""

import importlib.util
import statistics
import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy
import torch

from ...kernels import FUSED
from ...kernels.benchmark import ATTENTION_METHODS, BF16, COMFYUI_CHOICE, FUSED_CODES, FUSED_GGUF, Times
from ..quantization import report

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

PLAIN, INT8, PROTECTED, MUTED = "#9aa5b1", "#2f6fd0", "#d03b3b", "#5a6673"
_INK, _GRID = "#1c2733", "#e3e8ee"
_DOTS_PER_INCH = 220
_LARGE, _TEXT, _SMALL = 14.0, 7.5, 6.5  # points: legible also where a node shows a sheet half as large as it is
# Inches: a sheet, its lines, what stands around the inside of a panel, and that: a bar, and marks.
_WIDTH, _MARGIN, _LARGE_LINE, _LINE, _LEGEND = 4.5, 0.12, 0.26, 0.15, 0.25
_NAMES, _TICKS, _FIGURES, _BELOW = 1.3, 0.48, 0.42, 0.36
_BAR, _MARKS = 0.145, 0.5
_TALLEST = 140.0  # all panels of a sheet: no side has 2^16 dots, which matplotlib before 3.10 cannot draw
_LETTERS_PER_INCH = 19  # of small text that surely fit

_BENCHMARK = {"this pack": (INT8, "s"), "others": (PLAIN, "s")}
_ATTENTION = [method.name for method in ATTENTION_METHODS if not method.foreign]
_WIDEST = 3.0  # times the reference; a longer bar ends there in an arrow
_QUANTIZED, _NEVER = "as quantized", "never called"
_PROTECTED = {report.INT8: "8-bit weights", report.ACT16: "16-bit activations", report.BF16: "kept in bf16"}
_QUANTIZATION = {
    _QUANTIZED: (INT8, "o"),
    **{name: (PROTECTED, marker) for name, marker in zip(_PROTECTED.values(), "oDs", strict=True)},
    _NEVER: (MUTED, "x"),
}


class Row(NamedTuple):
    """One value: `place` is the name beside a bar or the number below a mark, `series` its name in the legend, `span`
    the ends of a line along it, and `figure` the text behind a bar."""

    place: str | int
    series: str
    value: float
    span: tuple[float, float]
    figure: str = ""


class Panel(NamedTuple):
    """The rows of a chart, with the lines above it and below it."""

    title: str
    axis: str
    rows: Sequence[Row]


def check_matplotlib() -> None:
    """Raise ImportError with what to do where matplotlib is missing. Call before the work whose result is drawn."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ImportError(
            "the report is drawn with matplotlib, which is not installed: run `pip install matplotlib` with ComfyUI's "
            "Python"
        )


def as_comfyui_image(figure: "Figure") -> torch.Tensor:
    """Render a sheet as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = numpy.asarray(canvas.buffer_rgba())[..., :3]
    return torch.from_numpy(pixels.astype(numpy.float32) / 255)[None]


def draw(
    title: str,
    text: str,
    panels: Sequence[Panel],
    series: Mapping[str, tuple[str, str]],
    ends: tuple[float, float],
    ticks: Mapping[float, str],
) -> "Figure":
    """Draw a sheet: a title and a text, a legend of the series, and the panels, all on one scale of values.

    Panels that do not fit are left out, which the text then says.

    Args:
        panels: all with names, of which the one with the least values is on top, or all with numbers.
        series: by name a color and a marker.
        ends, ticks: of the scale, which is logarithmic for marks; a longer bar ends there in an arrow.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    values: dict[str, list[float]] = {}
    for row in (row for panel in panels for row in panel.rows):
        if isinstance(row.place, str):
            values.setdefault(row.place, []).append(row.value)
    names = sorted(values, key=lambda name: (statistics.fmean(values[name]), name))
    columns = 2 if names and len(panels) > 2 else 1
    above = 0.05 + _LINE * max((1 + panel.title.count("\n") for panel in panels), default=0)
    inside = _BAR * len(names) or _MARKS
    line = above + inside + _BELOW
    if (left_out := len(panels) - columns * int(_TALLEST / line)) > 0:
        panels = panels[:-left_out]
        text += f" {left_out} more panels do not fit here; the table has their figures."
    large, small = textwrap.wrap(title, 38), textwrap.wrap(text, 80)
    text_top = _MARGIN + _LARGE_LINE * len(large)
    legend_top = text_top + _LINE * len(small) + 0.05
    height = legend_top + _LEGEND + line * -(-len(panels) // columns)
    figure = Figure((_WIDTH, height), _DOTS_PER_INCH, facecolor="white")
    left = _MARGIN / _WIDTH
    figure.text(left, 1 - _MARGIN / height, "\n".join(large), size=_LARGE, weight="bold", color=_INK, va="top")
    figure.text(left, 1 - text_top / height, "\n".join(small), size=_TEXT, color=_INK, va="top", linespacing=1.25)
    handles = [
        Line2D([], [], linestyle="", label=name, color=color, marker=marker, markersize=3.6)
        for name, (color, marker) in series.items()
        if any(row.series == name for panel in panels for row in panel.rows)
    ]
    figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left, 1 - legend_top / height),
        ncols=len(series),
        fontsize=_SMALL,
        labelcolor=_INK,
        frameon=False,
        borderpad=0,
        borderaxespad=0,
        handlelength=0.8,
        handletextpad=0.3,
        columnspacing=1.0,
    )
    beside, behind = (_NAMES, _FIGURES) if names else (_TICKS, _MARGIN)
    width = (_WIDTH - beside) / columns - behind
    for index, panel in enumerate(panels):
        x, y = beside + index % columns * (width + behind), height - legend_top - _LEGEND - index // columns * line
        axes = figure.add_axes((x / _WIDTH, (y - above - inside) / height, width / _WIDTH, inside / height))
        numbers = [row.place for other in panels if other.axis == panel.axis for row in other.rows]
        scale = _fill(axes, panel.rows, names or numbers, series, ends)
        scale.set_ticks([*ticks], [*ticks.values()])
        scale.set_ticks([], minor=True)
        scale.grid(color=_GRID, linewidth=0.6)
        heading, axis = (_shortened(text, width + behind) for text in (panel.title, panel.axis))
        axes.set_title(heading, loc="left", pad=3, size=_SMALL, color=_INK)
        axes.set_xlabel(axis, size=_SMALL, color=MUTED, labelpad=1)
        axes.tick_params(length=0, pad=4, labelsize=_SMALL, labelcolor=MUTED)
        axes.tick_params(labelleft=index % columns == 0, labelbottom=panel.axis != "")
    return figure


def _fill(
    axes: "Axes",
    rows: Sequence[Row],
    places: Sequence,
    series: Mapping[str, tuple[str, str]],
    ends: tuple[float, float],
) -> "Axis":
    """Draw bars beside names or marks above numbers, with room for all `places`. Return the axis of values."""
    from matplotlib.ticker import MaxNLocator

    axes.spines[:].set_visible(False)
    axes.set_axisbelow(True)
    for row in rows:
        color, marker = series[row.series]
        if isinstance(row.place, str):
            place = places.index(row.place)
            axes.barh(place, row.value, height=0.72, color=color)
            axes.hlines(place, *row.span, color=_INK, linewidth=1.0)
            if row.value > ends[1]:  # an arrow: it is longer
                axes.plot(ends[1], place, ">", color=color, markersize=4.5, clip_on=False)
            where = {"xycoords": axes.get_yaxis_transform(), "xytext": (72 * _FIGURES - 4, 0)}  # behind the panel
            how = {"ha": "right", "va": "center_baseline", "size": _SMALL, "color": _INK}
            axes.annotate(row.figure, (1, place), textcoords="offset points", **where, **how)
        else:
            axes.vlines(row.place, *row.span, color=color, linewidth=0.8)
            axes.plot(row.place, row.value, marker, color=color, markersize=3.4, clip_on=False)
    if isinstance(places[0], str):
        axes.set_yticks(range(len(places)), places)
        axes.set_ylim(len(places) - 0.5, -0.5)
        axes.set_xlim(ends)
        return axes.xaxis
    axes.set_xlim(min(places) - 0.5, max(places) + 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(20, integer=True, min_n_ticks=1))
    axes.set_yscale("log")
    axes.set_ylim(ends)
    return axes.yaxis


def _shortened(text: str, width: float) -> str:
    """Cut off the beginning of lines of small text that are wider than `width` inches."""
    letters = int(_LETTERS_PER_INCH * width)
    return "\n".join(line if len(line) <= letters else f"…{line[1 - letters :]}" for line in text.split("\n"))


def plot_times(
    results: Sequence[Times], headline: str, environment: str, attention: Sequence[Times] = ()
) -> torch.Tensor:
    """Draw a benchmark as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1: linears, then attention."""
    sheets = [draw_times(results, headline, "Times of linears", environment)]
    if attention:
        sheets.append(draw_times(attention, "", "Times of attention calls", "", COMFYUI_CHOICE, _ATTENTION))
    return torch.cat([as_comfyui_image(sheet) for sheet in sheets], 1)


def draw_times(
    results: Sequence[Times],
    title: str,
    what: str,
    environment: str,
    reference: str = BF16,
    ours: Collection[str] = (FUSED, FUSED_CODES, FUSED_GGUF),
) -> "Figure":
    """Draw a panel per result, a bar per method: median time relative to the reference, and the span of the rounds.

    Without the reference (bf16 found no memory) times are relative to the slowest method.
    """
    panels = []
    for result in (result for result in results if result.rounds):
        times = result.milliseconds
        known = reference if reference in times else max(times, key=times.__getitem__)
        rows, unit = [], times[known]
        for name, time in times.items():
            span = min(result.rounds[name]) / unit, max(result.rounds[name]) / unit
            figure = f"{time:.3f}" if time < 10 else f"{time:.1f}"
            rows.append(Row(name, "this pack" if name in ours else "others", time / unit, span, figure))
        panels.append(Panel(f"{result.name}\n{result.place()}", f"1 = {known}", rows))
    end = min(_WIDEST, max([1.0, *(row.value for panel in panels for row in panel.rows)]))
    ticks = {tick: f"{tick:g}" for tick in ((0.0, 0.5, 1.0, 1.5) if end < 2 else (0.0, 1.0, 2.0, 3.0)) if tick <= end}
    text = f"{what}: shorter is better, figures are milliseconds. {environment}"
    return draw(title, text, panels, _BENCHMARK, (0.0, end), ticks)


def plot_chart(chart: dict[str, Any]) -> torch.Tensor:
    """Draw a QuantizationReport's chart as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1."""
    return as_comfyui_image(draw_chart(chart))


def draw_chart(chart: dict[str, Any]) -> "Figure":
    """Draw a panel per kind of layer, all on one logarithmic scale; bf16, without error, stands at its foot.

    A layer's error in plain INT8 is grey. A line leads from it to the error as quantized: blue, or red where the layer
    is protected.
    """
    panels, low = [], chart["low"]
    for panel in chart["panels"]:
        title, axis, rows = panel["kind"], panel["blocks"] and f"number of the block in {panel['blocks']}", []
        if panel["before"] is not None:
            title += f"   {report.percent(panel['before'])} → {report.percent(panel['after'])}"
        for mark in panel["marks"]:
            block = mark["block"] or 0  # what is in no block has no depth
            before, after = (max(mark[when] or 0.0, low) for when in ("before", "after"))
            if mark["before"] is None:
                rows.append(Row(block, _NEVER, low, (low, low)))
            else:
                name = _PROTECTED[mark["held_in"]] if mark["protected"] else _QUANTIZED
                rows += [Row(block, chart["plain"], before, (before, before)), Row(block, name, after, (before, after))]
        panels.append(Panel(title, axis, rows))
    ticks = {tick: f"{100 * tick:g} %" for tick in chart["ticks"]}
    series = {chart["plain"]: (PLAIN, "o"), **_QUANTIZATION}
    return draw(chart["title"], chart["summary"], panels, series, (low, chart["high"]), ticks)
