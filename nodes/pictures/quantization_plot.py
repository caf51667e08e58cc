"""What INT8 costs each layer, by kind of layer and block, before and after: an IMAGE, and as values that JSON has."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..quantization.report import ACT16, BF16, INT8, QuantizationReport, mean, percent, rounded
from .plot import INT8 as BLUE
from .plot import MUTED, PLAIN, PROTECTED, Panel, Row, as_comfyui_image, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_QUANTIZED, _NEVER = "as quantized", "never called"
_PROTECTED = {INT8: "8-bit weights", ACT16: "16-bit activations", BF16: "kept in bf16"}
_SERIES = {
    _QUANTIZED: (BLUE, "o"),
    **{name: (PROTECTED, marker) for name, marker in zip(_PROTECTED.values(), "oDs", strict=True)},
    _NEVER: (MUTED, "x"),
}
_TICKS = tuple(digit * 10.0**power for power in range(-4, 1) for digit in (1, 2, 5))
_MOST_TICKS = 4
_LOWEST = 1e-4  # an error of zero has no place on a logarithmic scale


@dataclass(frozen=True)
class Mark:
    """One layer.

    Attributes:
        block: the number of its block; None outside the blocks.
        before: its fragility, the error of plain INT8; None for a layer that was never called.
        after: its error as it was quantized, 0 in bf16; None as for `before`.
        held_in, protected: LayerReport's.
    """

    layer: str
    block: int | None
    before: float | None
    after: float | None
    held_in: str
    protected: bool


@dataclass(frozen=True)
class Kind:
    """The layers of one kind, in the order of the model, and the means of their errors; None where none was called.

    `blocks` is what the model calls the blocks they are in ("layers"); "" outside the blocks.
    """

    kind: str
    blocks: str
    before: float | None
    after: float | None
    marks: tuple[Mark, ...]


@dataclass(frozen=True)
class Chart:
    """A quantization, kind by kind.

    Attributes:
        title, headline, summary, plain: QuantizationReport's.
        panels: kinds of the same blocks stand together.
        low, high: ends of the logarithmic scale of all panels, with room around all errors but those of bf16.
        ticks: what to write at it.
    """

    title: str
    headline: str
    summary: str
    plain: str
    panels: tuple[Kind, ...]
    low: float
    high: float
    ticks: tuple[float, ...]


def chart_of(report: QuantizationReport) -> Chart:
    """The chart of a report."""
    kinds: dict[str, dict[str, list[Mark]]] = {}
    for layer in report.layers:
        blocks, number, kind = layer.place
        before, after = rounded(layer.fragility), rounded(layer.error_as_held)
        mark = Mark(layer.name, number, before, after, layer.held_in, layer.protected)
        kinds.setdefault(blocks, {}).setdefault(kind, []).append(mark)
    panels = tuple(
        Kind(kind, blocks, mean(mark.before for mark in marks), mean(mark.after for mark in marks), tuple(marks))
        for blocks, of_blocks in kinds.items()
        for kind, marks in of_blocks.items()
    )
    marks = [mark for panel in panels for mark in panel.marks]
    errors = [max(error, _LOWEST) for mark in marks for error in (mark.before, mark.after or None) if error is not None]
    low, high = min(errors, default=0.01) / 1.5, max(errors, default=0.01) * 1.3
    inside = [tick for tick in _TICKS if low <= tick <= high]
    ticks = tuple(inside[:: -(-len(inside) // _MOST_TICKS) or 1])
    return Chart(report.title, report.headline, report.summary, report.plain, panels, low, high, ticks)


def plot(chart: Chart) -> torch.Tensor:
    """The picture of a report as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1."""
    return as_comfyui_image(draw_chart(chart))


def draw_chart(chart: Chart) -> "Figure":
    """One panel per kind of layer, all on one logarithmic scale, at whose foot bf16 stands, which has no error.

    A layer's error in plain INT8 is grey. A line leads from it to the error as quantized: blue, or red where the layer
    is protected.
    """
    panels = []
    for panel in chart.panels:
        means = "" if panel.before is None else f"   {percent(panel.before)} → {percent(panel.after)}"
        axis = panel.blocks and f"number of the block in {panel.blocks}"
        panels.append(Panel(panel.kind + means, axis, [row for mark in panel.marks for row in _rows(mark, chart)]))
    ticks = {tick: f"{100 * tick:g} %" for tick in chart.ticks}
    series = {chart.plain: (PLAIN, "o"), **_SERIES}
    return draw(chart.title, chart.summary, panels, series, (chart.low, chart.high), ticks)


def _rows(mark: Mark, chart: Chart) -> list[Row]:
    """A layer before and after; what is in no block has no depth."""
    block, before, after = mark.block or 0, max(mark.before or 0.0, chart.low), max(mark.after or 0.0, chart.low)
    if mark.before is None:
        return [Row(block, _NEVER, chart.low, (chart.low, chart.low))]
    name = _PROTECTED[mark.held_in] if mark.protected else _QUANTIZED
    return [Row(block, chart.plain, before, (before, before)), Row(block, name, after, (before, after))]
