"""The times of a benchmark as an IMAGE."""

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import torch

from ...kernels import FUSED
from ...kernels.benchmark import ATTENTION_METHODS, BF16, COMFYUI_CHOICE, FUSED_CODES, Times
from .plot import INT8, PLAIN, Panel, Row, as_comfyui_image, draw

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SERIES = {"this pack": (INT8, "s"), "others": (PLAIN, "s")}
_ATTENTION = [method.name for method in ATTENTION_METHODS if not method.foreign]
_WIDEST = 3.0  # times the reference; a longer bar ends there in an arrow


def plot(results: Sequence[Times], headline: str, environment: str, attention: Sequence[Times] = ()) -> torch.Tensor:
    """The picture of a benchmark as a ComfyUI IMAGE, float32 [1, height, width, 3] in 0..1: linears, then attention."""
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
    ours: Collection[str] = (FUSED, FUSED_CODES),
) -> "Figure":
    """A panel per result, a bar per method: median time relative to the reference, and where the rounds lie.

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
    return draw(title, text, panels, _SERIES, (0.0, end), ticks)
