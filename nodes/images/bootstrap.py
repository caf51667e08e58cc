"""What chance can make of a figure: paired differences and their intervals by the bootstrap."""

import math
from collections.abc import Callable, Sequence

import numpy

RESAMPLES = 9999


def finite(values: Sequence[float]) -> list[float]:
    """Those that are neither infinite nor NaN."""
    return [value for value in values if math.isfinite(value)]


def minus(a: float, b: float) -> float:
    """a - b; 0 for two that are infinite, NaN where only one is."""
    return 0.0 if a == b else a - b if math.isfinite(a) and math.isfinite(b) else math.nan


def interval(
    *samples: Sequence[float] | numpy.ndarray, statistic: Callable[..., numpy.ndarray] = numpy.mean
) -> tuple[float, float] | None:
    """The 95 % interval of a statistic by the percentile bootstrap; None of fewer than two items.

    Args:
        samples: one or more of equal length, whose items belong together: they are drawn together.
        statistic: of as many arrays, along its keyword argument `axis`.
    """
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
