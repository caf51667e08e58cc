"""The quantization report as an IMAGE: what INT8 costs each layer, by kind of layer and block, before and after."""

from typing import TYPE_CHECKING

import torch

from ..quantization.chart import Chart, Mark, chart_of
from ..quantization.report import ACT16, BF16, INT8, QuantizationReport, percent
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


def plot(report: QuantizationReport) -> torch.Tensor:
    """The picture of a report as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1."""
    return as_comfyui_image(draw_chart(chart_of(report)))


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
