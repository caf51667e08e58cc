"""The fidelity of one or two sets of images as a table, with what chance can make of it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy

from ...kernels.benchmark import markdown
from .bootstrap import RESAMPLES, finite, interval, minus
from .fidelity import SSIM_WINDOW, Fidelity

_FEWEST_PAIRS = 6  # below it not even one sign in all pairs is significant at 5 %: 2 / 2^5 is 6 %
_METRICS_NOTE = (
    f"PSNR and SSIM of values in 0..1. SSIM: Gaussian window of {SSIM_WINDOW} x {SSIM_WINDOW} pixels, sigma 1.5; the "
    "mean over channels and over all places where it lies inside the image."
)
# From so many dB on: with 8 bits a channel, 30 to 50 dB is what good lossy compression leaves.
_SEEN = (
    (40.0, "most people see no difference"),
    (30.0, "small differences, seen side by side"),
    (20.0, "differences that are seen at once"),
    (-math.inf, "another picture"),
)
_INTERVAL_NOTE = f"95 % interval: of the mean, by the bootstrap over the pairs ({RESAMPLES} resamples, percentiles)."


@dataclass(frozen=True)
class _Metric:
    """A figure of a pair: its name, its unit, how it is written, and where it stands."""

    name: str
    unit: str
    digits: int
    of: Callable[[Fidelity], float]


_METRICS = (
    _Metric("PSNR", " dB", 2, lambda fidelity: fidelity.psnr),
    _Metric("SSIM", "", 4, lambda fidelity: fidelity.ssim),
)


@dataclass(frozen=True)
class ResultTable:
    """A table with its verdict and notes, all of it text."""

    title: str
    columns: list[str]
    rows: list[list[str]]
    notes: list[str]

    def markdown(self) -> str:
        return "\n\n".join([self.title, markdown(self.columns, self.rows), *self.notes])


def comparison_table(results: Mapping[str, Sequence[Fidelity]]) -> ResultTable:
    """The fidelity of each pair, the mean and its 95 % interval.

    Args:
        results: by name, one or two candidates for the same references. With two, the first minus the second too.
    """
    names = list(results)
    columns, cells, verdicts = ["pair"], [], []
    pairs = len(results[names[0]])
    for metric in _METRICS:
        values = {name: [metric.of(fidelity) for fidelity in results[name]] for name in names}
        for name in names:
            columns.append(f"{metric.name}{metric.unit}" + (f", {name}" if len(names) > 1 else ""))
            cells.append(_column(values[name], f".{metric.digits}f"))
        if len(names) > 1:
            differences = [minus(a, b) for a, b in zip(*values.values(), strict=True)]
            columns.append(f"{metric.name}{metric.unit}, difference")
            cells.append(_column(differences, f"+.{metric.digits}f"))
            verdicts += _verdict(metric, differences, names)
    heads = [*(str(number) for number in range(1, pairs + 1)), "mean", *(["95 % interval"] if pairs > 1 else [])]
    rows = [list(row) for row in zip(heads, *cells, strict=True)]
    notes = [*verdicts[1:], *_identical_notes(results), *([_INTERVAL_NOTE] if pairs > 1 else []), _METRICS_NOTE]
    title = verdicts[0] if verdicts else _seen([fidelity.psnr for fidelity in results[names[0]]])
    return ResultTable(title, columns, rows, notes)


def _seen(psnrs: Sequence[float]) -> str:
    """What a person sees of the mean PSNR of one candidate, in words."""
    finites = finite(psnrs)
    if not finites:
        return "identical to the reference"
    mean = float(numpy.mean(finites))
    words = next(words for least, words in _SEEN if mean >= least)
    return f"{mean:.1f} dB: {words}"


def _column(values: Sequence[float], form: str) -> list[str]:
    """A cell for each value, for the mean of those that are finite, and for its interval where there are pairs."""
    finites = finite(values)
    cells = [_cell(value, form) for value in values]
    cells.append(_cell(float(numpy.mean(finites)) if finites else values[0], form))
    if len(values) > 1:
        bounds = interval(finites)
        cells.append(" to ".join(format(bound, form) for bound in bounds) if bounds else "-")
    return cells


def _cell(value: float, form: str) -> str:
    return "identical" if math.isinf(value) else "-" if math.isnan(value) else format(value, form)


def _verdict(metric: _Metric, differences: Sequence[float], names: Sequence[str]) -> list[str]:
    """A line that says which of two candidates is closer to the reference, or that this is not known."""
    finites = finite(differences)
    bounds = interval(finites)
    if bounds is None:
        return [f"{metric.name}: two pairs or more are needed to tell a difference from noise."]
    mean, form = float(numpy.mean(finites)), f".{metric.digits}f"
    closer = names[0] if mean > 0 else names[1]
    if bounds[0] <= 0 <= bounds[1]:
        return [f"{metric.name}: {names[0]} and {names[1]} differ within noise."]
    if len(finites) < _FEWEST_PAIRS:
        return [f"{metric.name}: {closer} looks closer to the reference, but {len(finites)} pairs are too few to tell."]
    by = f"{abs(mean):{form}}{metric.unit}"
    return [f"{metric.name}: {closer} is closer to the reference by {by}, more than noise."]


def _identical_notes(results: Mapping[str, Sequence[Fidelity]]) -> list[str]:
    notes = []
    for name, fidelities in results.items():
        count = sum(math.isinf(fidelity.psnr) for fidelity in fidelities)
        if count:
            notes.append(
                f"{count} of {len(fidelities)} in {name} are identical to the reference; their PSNR is infinite and in "
                "no mean."
            )
    return notes
