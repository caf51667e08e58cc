"""Statistics of a linear's inputs while the model samples: ranges, spikiness, example rows."""

import math
import random
from collections.abc import Sequence

import torch

SAMPLED_CALLS = 16
ROWS_PER_CALL = 8
"""With 8, the word model's velocities lose 0.65 of what rounding its weights to the nearest of 4 bits loses. With 16,
at twice the memory, they lose 0.60."""

# Calls whose channel magnitudes are summed up together: fewer, larger operations on the device.
_CALLS_TOGETHER = 16
# Squares of sums of products with larger values leave float32, and errors are sums of squares.
_LARGEST = 2.0**40
_MOST_CALLS = 1 << 53
# Where more than half of the channels are zero in a call, the median is zero too.
_LARGEST_SPIKINESS = 1e6


class RowSample:
    """At most `SAMPLED_CALLS` x `ROWS_PER_CALL` rows of a linear's inputs, whatever the number of calls.

    Calls are drawn by reservoir sampling (Vitter 1985, Algorithm R): each call so far is equally likely to be in it. So
    all denoising steps, prompts and guidance branches count alike. The rows of a call are equally spaced from a random
    start: image tokens come from all over the image. The same numbers of calls and rows give the same draws.
    """

    def __init__(self, calls: int = 0, parts: Sequence[torch.Tensor] = ()) -> None:
        self.calls = calls  # that were offered
        self.parts = list(parts)  # [at most ROWS_PER_CALL, K] of each sampled call, where and as the inputs were
        self._random = random.Random(0)

    def offer(self, rows: torch.Tensor) -> None:
        """Take in one call's input [M, K], M > 0; only the drawn rows are copied, and nothing waits for the device."""
        self.calls += 1
        slot = len(self.parts)
        if slot == SAMPLED_CALLS:
            slot = self._random.randrange(self.calls)
            if slot >= SAMPLED_CALLS:
                return
        count = min(ROWS_PER_CALL, rows.shape[0])
        step = rows.shape[0] // count
        span = (count - 1) * step + 1
        start = self._random.randrange(rows.shape[0] - span + 1)
        self.parts[slot : slot + 1] = [rows[start : start + span : step].clone()]

    def to_host(self) -> None:
        """Move the rows to host memory, in place, in one copy: many small ones take as long as the sampling."""
        away = [part.device for part in self.parts if part.device.type != "cpu"]
        if away:  # with those in host memory: their block also holds rows that have been replaced
            rows = torch.cat([part.to(away[0]) for part in self.parts]).cpu()
            self.parts = list(rows.split([part.shape[0] for part in self.parts]))

    @property
    def rows(self) -> torch.Tensor:
        """All sampled rows [R, K]. Raises ValueError before the first call."""
        if not self.parts:
            raise ValueError("no call was sampled")
        return torch.cat(self.parts)

    @classmethod
    def merged(cls, samples: Sequence["RowSample"]) -> "RowSample":
        """Return one sample of all calls that went into several, each with a share by its calls; offer it no more."""
        total = sum(sample.calls for sample in samples)
        draw = random.Random(0)
        # Systematic sampling, at equal steps through all calls from a random start: none of many comes first.
        step = max(1.0, total / SAMPLED_CALLS)
        position = step * draw.random()
        end, parts = 0, []
        for sample in samples:
            end += sample.calls
            share = 0
            while position < end:
                share += 1
                position += step
            chosen = draw.sample(range(len(sample.parts)), min(share, len(sample.parts)))
            parts += [sample.parts[index].clone() for index in sorted(chosen)]
        return cls(total, parts)


class ActivationStatistics:
    """Statistics of one linear's input, gathered call by call on the input's device, the same until `to_host`; some of
    the rows are in its `sample`."""

    def __init__(
        self, sample: RowSample | None = None, absmax: torch.Tensor | None = None, spikiness: float = 0.0
    ) -> None:
        """`absmax` and `spikiness`, a sum, are those of the sample's calls, all of them finite."""
        self.sample, self._absmax = sample or RowSample(), absmax
        self._spikiness: torch.Tensor | float = spikiness
        self._finite_calls: torch.Tensor | int = self.calls  # before the first that was not
        self._recent: list[torch.Tensor] = []  # channel magnitudes of calls that are not in the two above yet

    def update(self, x: torch.Tensor) -> None:
        """Take in one input [..., K] of any floating dtype. Nothing waits for the device."""
        if x.numel() == 0:
            return
        rows = x.detach().reshape(-1, x.shape[-1])
        self.sample.offer(rows)
        self._recent.append(torch.linalg.vector_norm(rows, ord=math.inf, dim=0))
        if len(self._recent) == _CALLS_TOGETHER:
            self._settle()

    def _settle(self) -> None:
        if not self._recent:
            return
        magnitudes = torch.stack(self._recent).float()
        self._recent = []
        tiny = torch.finfo(torch.float32).tiny
        peak = magnitudes.amax(dim=1)
        spikiness = peak / magnitudes.median(dim=1).values.clamp(min=tiny)
        self._spikiness = self._spikiness + spikiness.clamp(max=_LARGEST_SPIKINESS).sum()
        # Where all earlier calls were finite, those before the first of these that is not count too.
        finite = (peak <= _LARGEST).cumprod(dim=0).sum()
        all_before = self._finite_calls == self.calls - len(peak)
        self._finite_calls = self._finite_calls + finite * all_before
        absmax = magnitudes.amax(dim=0)
        self._absmax = absmax if self._absmax is None else torch.maximum(self._absmax.to(absmax.device), absmax)

    @property
    def calls(self) -> int:
        """Number of inputs seen."""
        return self.sample.calls

    @property
    def absmax(self) -> torch.Tensor | None:
        """float32 [K], the largest magnitude of each channel; None before the first call. A NaN stays a NaN."""
        self._settle()
        return self._absmax

    @property
    def finite_calls(self) -> int:
        """How many calls came before the first with a NaN, an Inf or a value above 2^40; all where there is none."""
        self._settle()
        return int(self._finite_calls)

    @property
    def latest_peak(self) -> torch.Tensor | None:
        """Scalar tensor, the largest magnitude of the latest calls, NaN or Inf included; None before the first call."""
        if self._recent:
            return self._recent[-1].max().float()
        return None if self._absmax is None else self._absmax.max()

    @property
    def spikiness(self) -> float:
        """How far the largest channel stands out: max_j a_j / median_j a_j of a call's channel magnitudes a, averaged
        over the calls. 1 is flat; the larger, the more of the int8 range one channel takes from all others (the
        fragility of arXiv 2606.12280)."""
        self._settle()
        return float(self._spikiness) / max(1, self.calls)

    def to_host(self) -> None:
        """Move everything to host memory, in place. More calls can follow, from any device."""
        self._settle()
        if self._absmax is not None:
            self._absmax = self._absmax.cpu()
        self._spikiness = float(self._spikiness)
        self._finite_calls = int(self._finite_calls)
        self.sample.to_host()

    @classmethod
    def restored(
        cls, calls: int, spikiness: float, absmax: torch.Tensor, parts: Sequence[torch.Tensor]
    ) -> "ActivationStatistics":
        """Return statistics from another object's attributes, `parts` being its sample's.

        Raises ValueError for values that no calls could have left behind.
        """
        if not 0 < calls < _MOST_CALLS or not 0 <= spikiness <= 1.001 * _LARGEST_SPIKINESS:  # a mean, of float32 sums
            raise ValueError(f"{calls} calls with a spikiness of {spikiness}")
        if not bool(((absmax >= 0) & (absmax <= _LARGEST)).all()):
            raise ValueError(f"the absmax holds a value that is negative, NaN, Inf or above {_LARGEST:.0e}")
        if not 0 < len(parts) <= calls or not all(part.numel() for part in parts):
            raise ValueError(f"the sampled rows are of {len(parts)} calls out of {calls}, or some have none")
        if not all(bool((part.abs() <= absmax).all()) for part in parts):
            raise ValueError("the sampled rows hold a NaN or Inf, or a value above the largest of all rows")
        return cls(RowSample(calls, parts), absmax, spikiness * calls)

    @classmethod
    def merged(cls, several: Sequence["ActivationStatistics"]) -> "ActivationStatistics":
        """Return the statistics of all calls that went into several, all finite, in host memory.

        Raises ValueError if their channels differ in number.
        """
        several = [statistics for statistics in several if statistics.calls]
        for statistics in several:
            statistics.to_host()
        absmaxes = [absmax for absmax in (statistics.absmax for statistics in several) if absmax is not None]
        widths = {absmax.numel() for absmax in absmaxes}
        if len(widths) > 1:
            raise ValueError(f"statistics of {' and '.join(map(str, sorted(widths)))} channels cannot be merged")
        return cls(
            RowSample.merged([statistics.sample for statistics in several]),
            torch.stack(absmaxes).amax(dim=0) if absmaxes else None,
            sum(float(statistics._spikiness) for statistics in several),
        )
