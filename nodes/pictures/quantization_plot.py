"""What INT8 costs each layer, by kind of layer and block, before and after: an IMAGE, and as values that JSON has."""

from typing import TYPE_CHECKING, Any

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


def chart_of(report: QuantizationReport) -> dict[str, Any]:
    """A quantization, kind by kind, in values that JSON has.

    `title`, `headline`, `summary` and `plain` are the report's. `low` and `high` are the ends of the logarithmic scale,
    with room around all errors but those of bf16; `ticks` is what to write at it. Each of `panels` has the layers of a
    `kind` in the `blocks` of that name, "" outside the blocks, and the means of their errors; kinds of the same blocks
    stand together. Of its `marks` each is a layer: the number of its `block`, its error in plain INT8 (`before`) and as
    it was quantized (`after`), and LayerReport's `held_in` and `protected`. Errors that are not known are None.
    """
    kinds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for layer in report.layers:
        blocks, number, kind = layer.place
        mark = {"layer": layer.name, "block": number, "before": rounded(layer.fragility)}
        mark |= {"after": rounded(layer.error_as_held), "held_in": layer.held_in, "protected": layer.protected}
        kinds.setdefault(blocks, {}).setdefault(kind, []).append(mark)
    panels, errors = [], []
    for blocks, of_blocks in kinds.items():
        for kind, marks in of_blocks.items():
            before, after = ([mark[when] for mark in marks] for when in ("before", "after"))
            of_kind = {"kind": kind, "blocks": blocks, "before": mean(before), "after": mean(after), "marks": marks}
            panels.append(of_kind)
            errors += [max(error, _LOWEST) for error in (*before, *filter(None, after)) if error is not None]
    low, high = min(errors, default=0.01) / 1.5, max(errors, default=0.01) * 1.3
    inside = [tick for tick in _TICKS if low <= tick <= high]
    said = {"title": report.title, "headline": report.headline, "summary": report.summary, "plain": report.plain}
    ticks = inside[:: -(-len(inside) // _MOST_TICKS) or 1]
    return {**said, "panels": panels, "low": low, "high": high, "ticks": ticks}


def plot(chart: dict[str, Any]) -> torch.Tensor:
    """The picture of a chart as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1."""
    return as_comfyui_image(draw_chart(chart))


def draw_chart(chart: dict[str, Any]) -> "Figure":
    """One panel per kind of layer, all on one logarithmic scale, at whose foot bf16 stands, which has no error.

    A layer's error in plain INT8 is grey. A line leads from it to the error as quantized: blue, or red where the layer
    is protected.
    """
    panels, low = [], chart["low"]
    for panel in chart["panels"]:
        means = "" if panel["before"] is None else f"   {percent(panel['before'])} → {percent(panel['after'])}"
        axis, rows = panel["blocks"] and f"number of the block in {panel['blocks']}", []
        for mark in panel["marks"]:
            block = mark["block"] or 0  # what is in no block has no depth
            before, after = (max(mark[when] or 0.0, low) for when in ("before", "after"))
            if mark["before"] is None:
                rows.append(Row(block, _NEVER, low, (low, low)))
            else:
                name = _PROTECTED[mark["held_in"]] if mark["protected"] else _QUANTIZED
                rows += [Row(block, chart["plain"], before, (before, before)), Row(block, name, after, (before, after))]
        panels.append(Panel(panel["kind"] + means, axis, rows))
    ticks = {tick: f"{100 * tick:g} %" for tick in chart["ticks"]}
    series = {chart["plain"]: (PLAIN, "o"), **_SERIES}
    return draw(chart["title"], chart["summary"], panels, series, (low, chart["high"]), ticks)
