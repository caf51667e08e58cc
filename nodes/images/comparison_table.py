"""The fidelity of one or two sets of images as a table, with what chance can make of it: intervals by the bootstrap."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy

from .fidelity import SSIM_WINDOW, Fidelity

RESAMPLES = 9999  # of the bootstrap
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
# Fields of Fidelity by name, each with its unit and decimals.
_METRICS = (("PSNR", " dB", 2), ("SSIM", "", 4))


def comparison_table(results: Mapping[str, Sequence[Fidelity]]) -> dict[str, Any]:
    """The fidelity of each pair, the mean and its 95 % interval: `title`, `columns`, `rows` and `notes` of a table, all
    of it text.

    Args:
        results: by name, one or two candidates for the same references. With two, the first minus the second too.
    """
    names = list(results)
    columns, cells, verdicts = ["pair"], [], []
    pairs = len(results[names[0]])
    for metric, unit, digits in _METRICS:
        values = {name: [getattr(fidelity, metric.lower()) for fidelity in results[name]] for name in names}
        for name in names:
            columns.append(f"{metric}{unit}" + (f", {name}" if len(names) > 1 else ""))
            cells.append(_column(values[name], f".{digits}f"))
        if len(names) > 1:
            differences = [minus(a, b) for a, b in zip(*values.values(), strict=True)]
            columns.append(f"{metric}{unit}, difference")
            cells.append(_column(differences, f"+.{digits}f"))
            verdicts.append(f"{metric}: {_verdict(differences, names, unit, digits)}")
    heads = [*(str(number) for number in range(1, pairs + 1)), "mean", *(["95 % interval"] if pairs > 1 else [])]
    rows = [list(row) for row in zip(heads, *cells, strict=True)]
    notes = verdicts[1:]
    for name in names:
        if count := sum(math.isinf(fidelity.psnr) for fidelity in results[name]):
            same = f"{count} of {pairs} in {name} are identical to the reference"
            notes.append(f"{same}; their PSNR is infinite and in no mean.")
    notes += [*([_INTERVAL_NOTE] if pairs > 1 else []), _METRICS_NOTE]
    title = verdicts[0] if verdicts else _seen([fidelity.psnr for fidelity in results[names[0]]])
    return {"title": title, "columns": columns, "rows": rows, "notes": notes}


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


def _verdict(differences: Sequence[float], names: Sequence[str], unit: str, digits: int) -> str:
    """Which of two candidates is closer to the reference, or that this is not known."""
    finites = finite(differences)
    bounds = interval(finites)
    if bounds is None:
        return "two pairs or more are needed to tell a difference from noise."
    mean = float(numpy.mean(finites))
    closer = names[0] if mean > 0 else names[1]
    if bounds[0] <= 0 <= bounds[1]:
        return f"{names[0]} and {names[1]} differ within noise."
    if len(finites) < _FEWEST_PAIRS:
        return f"{closer} looks closer to the reference, but {len(finites)} pairs are too few to tell."
    return f"{closer} is closer to the reference by {abs(mean):.{digits}f}{unit}, more than noise."


def finite(values: Sequence[float]) -> list[float]:
    """Those that are neither infinite nor NaN."""
    return [value for value in values if math.isfinite(value)]


def minus(a: float, b: float) -> float:
    """a - b; 0 for two that are infinite, NaN where only one is."""
    return 0.0 if a == b else a - b if math.isfinite(a) and math.isfinite(b) else math.nan


def interval(
    *samples: Sequence[float] | numpy.ndarray, statistic: Callable[..., numpy.ndarray] = numpy.mean
) -> tuple[float, float] | None:
    """The 95 % interval of a statistic of as many arrays, along its keyword argument `axis`, by the percentile
    bootstrap; None of fewer than two items. Samples of equal length belong together item by item, and are drawn so."""
    from scipy.stats import bootstrap  # comes with ComfyUI; too large to import at each start

    if len(samples[0]) < 2:
        return None
    drawn = bootstrap(
        samples,
        statistic,
        paired=len(samples) > 1,
        n_resamples=RESAMPLES,
        batch=1000,
        method="percentile",
        random_state=0,  # pyright: ignore[reportCallIssue]  (its name in every scipy; newer ones call it rng as well)
    )
    return float(drawn.confidence_interval.low), float(drawn.confidence_interval.high)
