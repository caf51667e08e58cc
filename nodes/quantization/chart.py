"""What the pictures of a quantization show, as values that JSON has: the web and matplotlib draw the same."""

from dataclasses import dataclass

from .report import QuantizationReport, mean, rounded

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
    panels: tuple[Panel, ...]
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
        Panel(kind, blocks, mean(mark.before for mark in marks), mean(mark.after for mark in marks), tuple(marks))
        for blocks, of_blocks in kinds.items()
        for kind, marks in of_blocks.items()
    )
    marks = [mark for panel in panels for mark in panel.marks]
    errors = [max(error, _LOWEST) for mark in marks for error in (mark.before, mark.after or None) if error is not None]
    low, high = min(errors, default=0.01) / 1.5, max(errors, default=0.01) * 1.3
    inside = [tick for tick in _TICKS if low <= tick <= high]
    ticks = tuple(inside[:: -(-len(inside) // _MOST_TICKS) or 1])
    return Chart(report.title, report.headline, report.summary, report.plain, panels, low, high, ticks)
