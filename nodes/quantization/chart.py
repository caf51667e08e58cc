"""What the pictures of a quantization show, as values that JSON has: the web and matplotlib draw the same."""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass

from .report import LayerReport, QuantizationReport, rounded

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
class Panel:
    """The layers of one kind.

    Attributes:
        blocks: what the model calls the blocks they are in ("layers"); "" outside the blocks.
        before, after: means of the layers' errors; None where none was called.
        marks: its layers, in the order of the model.
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
        title, headline, summary: a line each.
        error_of: what the errors are relative to.
        plain: what the errors before are those of.
        panels: kinds of the same blocks stand together.
        low, high: ends of the logarithmic scale of all panels.
        ticks: what to write at it.
    """

    title: str
    headline: str
    summary: str
    error_of: str
    plain: str
    panels: tuple[Panel, ...]
    low: float
    high: float
    ticks: tuple[float, ...]


def chart_of(report: QuantizationReport) -> Chart:
    """The chart of a report."""
    kinds: dict[tuple[str, str], list[LayerReport]] = {}
    for layer in report.layers:
        kinds.setdefault((layer.blocks, layer.kind), []).append(layer)
    order = list(dict.fromkeys(blocks for blocks, _ in kinds))
    panels = [_panel(blocks, kind, layers) for (blocks, kind), layers in kinds.items()]
    panels.sort(key=lambda panel: order.index(panel.blocks))
    low, high = _range(mark for panel in panels for mark in panel.marks)
    inside = [tick for tick in _TICKS if low <= tick <= high]
    ticks = inside[:: -(-len(inside) // _MOST_TICKS) or 1]
    lines = report.title, report.headline, report.summary
    return Chart(*lines, report.error_of, report.plain, tuple(panels), low, high, tuple(ticks))


def _panel(blocks: str, kind: str, layers: Iterable[LayerReport]) -> Panel:
    marks = tuple(
        Mark(
            layer.name,
            layer.number,
            rounded(layer.fragility),
            rounded(layer.error_as_held),
            layer.held_in,
            layer.protected,
        )
        for layer in layers
    )
    before = [mark.before for mark in marks if mark.before is not None]
    after = [mark.after for mark in marks if mark.after is not None]
    return Panel(kind, blocks, _mean(before), _mean(after), marks)


def _range(marks: Iterable[Mark]) -> tuple[float, float]:
    """Room around all errors but those of bf16, which has its own place."""
    errors = [max(error, _LOWEST) for mark in marks for error in (mark.before, mark.after or None) if error is not None]
    errors = errors or [0.01]
    return min(errors) / 1.5, max(errors) * 1.3


def _mean(errors: list[float]) -> float | None:
    return statistics.fmean(errors) if errors else None
