"""What is learned about a linear from the inputs it gets while the model samples: ranges, spikiness, example rows."""

import math
from collections.abc import Sequence

import torch

from .row_sample import RowSample

# Calls whose channel magnitudes are kept back to be summed up together: fewer, larger operations on the device.
_CALLS_TOGETHER = 16
# Squares of sums of products with larger values leave float32, and errors are sums of squares.
_LARGEST = 2.0**40
_MOST_CALLS = 1 << 53
# Where more than half of the channels are zero in a call, no channel can be said to stand out by any number.
_LARGEST_SPIKINESS = 1e6


class ActivationStatistics:
    """Statistics of one linear's input, gathered call by call on the device the input lives on, which is the same until
    they are taken to the host.

    Attributes:
        calls: number of inputs seen.
        sample: some of their rows.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.sample = RowSample()
        self._absmax: torch.Tensor | None = None
        self._spikiness: torch.Tensor | float = 0.0  # summed over the calls
        self._finite_calls: torch.Tensor | int = 0  # before the first that was not
        self._recent: list[torch.Tensor] = []  # channel magnitudes of calls that are not in the two above yet

    def update(self, x: torch.Tensor) -> None:
        """Take in one input [..., K] of any floating dtype.

        Nothing is copied to the host, so the device never waits.
        """
        if x.numel() == 0:
            return
        rows = x.detach().reshape(-1, x.shape[-1])
        self.calls += 1
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
        # As long as all calls before these were finite, those of these before the first that is not count too.
        finite = (peak <= _LARGEST).cumprod(dim=0).sum()
        all_before = self._finite_calls == self.calls - len(peak)
        self._finite_calls = self._finite_calls + finite * all_before
        absmax = magnitudes.amax(dim=0)
        self._absmax = absmax if self._absmax is None else torch.maximum(self._absmax.to(absmax.device), absmax)

    @property
    def absmax(self) -> torch.Tensor | None:
        """float32 [K] largest magnitude seen in each channel, None before the first call. A NaN stays a NaN."""
        self._settle()
        return self._absmax

    def same_range_as(self, other: "ActivationStatistics") -> bool:
        """Whether the largest magnitudes of all channels agree in every bit: two linears that read the same tensor."""
        own, others = self.absmax, other.absmax
        return own is not None and others is not None and torch.equal(own, others)

    @property
    def finite_calls(self) -> int:
        """How many calls came before the first whose input held a NaN, an Inf or a value above 2^40; all of them where
        none did."""
        self._settle()
        return int(self._finite_calls)

    @property
    def latest_peak(self) -> torch.Tensor | None:
        """The largest magnitude of the latest calls as a scalar tensor, NaN or Inf if one was in them; None before the
        first call."""
        if self._recent:
            return self._recent[-1].max().float()
        return None if self._absmax is None else self._absmax.max()

    @property
    def spikiness(self) -> float:
        """How far the largest channel stands out: max_j a_j / median_j a_j of a call's channel magnitudes a, averaged
        over the calls, which are the denoising steps. 1 is flat; the larger, the more of the int8 range one channel
        takes from all others (the fragility of arXiv 2606.12280)."""
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
        """Statistics from the values of another object's attributes, `parts` being its sample's. Raises ValueError for
        what no calls could have left behind."""
        if not 0 < calls < _MOST_CALLS or not 0 <= spikiness <= _LARGEST_SPIKINESS:
            raise ValueError(f"{calls} calls with a spikiness of {spikiness}")
        if not bool(((absmax >= 0) & (absmax <= _LARGEST)).all()):
            raise ValueError(f"the absmax holds a value that is negative, NaN, Inf or above {_LARGEST:.0e}")
        if not 0 < len(parts) <= calls or not all(part.numel() for part in parts):
            raise ValueError(f"the sampled rows are of {len(parts)} calls out of {calls}, or some have none")
        if not all(bool((part.abs() <= absmax).all()) for part in parts):
            raise ValueError("the sampled rows hold a NaN or Inf, or a value above the largest of all rows")
        statistics = cls()
        statistics.calls = calls
        statistics.sample = RowSample(calls, parts)
        statistics._absmax = absmax
        statistics._spikiness = spikiness * calls
        statistics._finite_calls = calls
        return statistics

    @classmethod
    def merged(cls, several: Sequence["ActivationStatistics"]) -> "ActivationStatistics":
        """The statistics of all calls that went into several, in host memory; all of them finite. Raises ValueError if
        their channels differ in number."""
        several = [statistics for statistics in several if statistics.calls]
        for statistics in several:
            statistics.to_host()
        absmaxes = [absmax for absmax in (statistics.absmax for statistics in several) if absmax is not None]
        widths = {absmax.numel() for absmax in absmaxes}
        if len(widths) > 1:
            raise ValueError(f"statistics of {' and '.join(map(str, sorted(widths)))} channels cannot be merged")
        merged = cls()
        merged.calls = merged._finite_calls = sum(statistics.calls for statistics in several)
        merged.sample = RowSample.merged([statistics.sample for statistics in several])
        if several:
            merged._absmax = torch.stack(absmaxes).amax(dim=0)
            merged._spikiness = sum(statistics._spikiness for statistics in several)
        return merged
