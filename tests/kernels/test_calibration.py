"""Activation statistics and row samples: exact figures, bounded and even samples, merging."""

import math

import pytest
import torch
from tensors import DEVICE, random_float

from kernels import ActivationStatistics, RowSample
from kernels.row_sample import ROWS_PER_CALL, SAMPLED_CALLS

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def calls(count, channels=24, tokens=10, dtype=torch.float32):
    return [random_float(tokens, channels, seed=seed, dtype=dtype) for seed in range(count)]


def statistics_of(inputs):
    statistics = ActivationStatistics()
    for x in inputs:
        statistics.update(x)
    return statistics


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", (1, 15, 16, 17, 40))
def test_absmax_and_spikiness(count, dtype):
    inputs = calls(count, dtype=dtype)
    statistics = statistics_of(inputs)
    magnitudes = torch.stack([x.float().abs().amax(0) for x in inputs])
    assert statistics.calls == statistics.finite_calls == count
    assert statistics.absmax.dtype == torch.float32
    assert torch.equal(statistics.absmax, magnitudes.amax(0))
    spikiness = (magnitudes.amax(1) / magnitudes.median(1).values).mean()
    assert statistics.spikiness == pytest.approx(float(spikiness), rel=1e-5)
    assert float(statistics.latest_peak) in (float(magnitudes[-1].max()), float(magnitudes.max()))


def test_leading_dimensions_and_empty_inputs():
    x = random_float(2, 3, 5, 8)
    statistics = statistics_of([x, x[:0]])
    assert statistics.calls == 1
    assert torch.equal(statistics.absmax, x.abs().amax((0, 1, 2)))


def test_before_the_first_call():
    statistics = ActivationStatistics()
    assert statistics.absmax is None and statistics.latest_peak is None
    assert statistics.calls == statistics.finite_calls == statistics.spikiness == 0


def test_figures_can_be_asked_for_between_calls():
    inputs = calls(5)
    statistics = ActivationStatistics()
    for index, x in enumerate(inputs):
        statistics.update(x)
        assert torch.equal(statistics.absmax, torch.cat(inputs[: index + 1]).abs().amax(0))


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf))
@pytest.mark.parametrize("bad", (0, 3, 15, 16, 20, 39))
def test_the_first_call_that_is_not_finite(value, bad):
    inputs = calls(40)
    inputs[bad][3, 5] = value
    inputs[-1][0, 0] = value
    statistics = statistics_of(inputs)
    assert statistics.finite_calls == bad
    assert not torch.isfinite(statistics.absmax[5])
    assert not torch.isfinite(statistics_of(inputs[: bad + 1]).latest_peak)


def sample_of(inputs):
    sample = RowSample()
    for x in inputs:
        sample.offer(x)
    return sample


def numbered(count, tokens=50):
    """Calls whose rows hold their call's and their own number."""
    return [torch.tensor([[float(call), float(row)] for row in range(tokens)], device=DEVICE) for call in range(count)]


@pytest.mark.parametrize("count", (1, SAMPLED_CALLS, SAMPLED_CALLS + 1, 500))
def test_a_sample_is_bounded_and_of_different_calls(count):
    sample = sample_of(numbered(count))
    assert sample.calls == count
    assert len(sample.parts) == min(count, SAMPLED_CALLS)
    assert sample.rows.shape == (len(sample.parts) * ROWS_PER_CALL, 2)
    assert len({int(part[0, 0]) for part in sample.parts}) == len(sample.parts)
    for part in sample.parts:
        assert (part[:, 0] == part[0, 0]).all()
        assert len(part[:, 1].diff().unique()) == 1 and part[0, 1] < part[-1, 1]  # equally spaced


def test_a_sample_is_spread_over_all_calls():
    """Also where branches alternate, as the two of guidance do: neither even nor odd calls are preferred."""
    chosen = torch.tensor([part[0, 0] for part in sample_of(numbered(400)).parts])
    assert chosen.min() < 120 and chosen.max() > 280
    assert 3 <= (chosen % 2).sum() <= SAMPLED_CALLS - 3


@pytest.mark.parametrize("tokens", (1, 2, ROWS_PER_CALL, ROWS_PER_CALL + 1, 4097))
def test_calls_of_any_length(tokens):
    (part,) = sample_of(numbered(1, tokens)).parts
    assert len(part) == min(tokens, ROWS_PER_CALL)
    assert part[-1, 1] < tokens


def test_a_sample_does_not_hold_on_to_the_input():
    x = random_float(1000, 64)
    sample = sample_of([x])
    assert sample.parts[0].untyped_storage().nbytes() < x.untyped_storage().nbytes() / 10
    rows = sample.rows.clone()
    x.zero_()
    assert torch.equal(sample.rows, rows)


def test_the_same_calls_give_the_same_sample():
    assert torch.equal(sample_of(numbered(300)).rows, sample_of(numbered(300)).rows)


def test_an_empty_sample_has_no_rows():
    with pytest.raises(ValueError, match="no call was sampled"):
        _ = RowSample().rows


def test_host_memory_changes_nothing():
    statistics = statistics_of(calls(20))
    absmax, spikiness, rows = statistics.absmax.cpu(), statistics.spikiness, statistics.sample.rows.cpu()
    statistics.to_host()
    assert statistics.absmax.device.type == statistics.sample.rows.device.type == "cpu"
    assert torch.equal(statistics.absmax, absmax) and torch.equal(statistics.sample.rows, rows)
    assert (statistics.spikiness, statistics.calls, statistics.finite_calls) == (spikiness, 20, 20)


@pytest.mark.parametrize("counts", ((3, 5), (1, 40), (30, 10), (20, 0), (7, 9, 24)))
def test_merged_statistics(counts):
    inputs = numbered(sum(counts))
    ends = torch.tensor(counts).cumsum(0).tolist()
    several = [statistics_of(inputs[end - count : end]) for end, count in zip(ends, counts, strict=True)]
    merged, whole = ActivationStatistics.merged(several), statistics_of(inputs)
    assert merged.calls == merged.finite_calls == merged.sample.calls == whole.calls
    assert torch.equal(merged.absmax, whole.absmax.cpu())
    assert merged.spikiness == pytest.approx(whole.spikiness, rel=1e-5)
    assert len(merged.sample.parts) == min(SAMPLED_CALLS, sum(counts))
    # Each has its share of the rows.
    sources = [sum(int(part[0, 0]) >= end for end in ends) for part in merged.sample.parts]
    for index, count in enumerate(counts):
        fair = len(sources) * count / sum(counts)
        assert abs(sources.count(index) - fair) <= 1


def test_statistics_of_different_widths_are_not_merged():
    with pytest.raises(ValueError, match="8 and 16 channels"):
        ActivationStatistics.merged([statistics_of(calls(1, channels)) for channels in (16, 8)])


def test_restored_statistics():
    statistics = statistics_of(calls(20))
    statistics.to_host()
    again = ActivationStatistics.restored(
        statistics.calls, statistics.spikiness, statistics.absmax, statistics.sample.parts
    )
    assert (again.calls, again.finite_calls) == (20, 20)
    assert again.spikiness == pytest.approx(statistics.spikiness)
    assert torch.equal(again.absmax, statistics.absmax) and torch.equal(again.sample.rows, statistics.sample.rows)
    with pytest.raises(ValueError, match="absmax holds a NaN or Inf"):
        ActivationStatistics.restored(1, 1.0, torch.tensor([1.0, math.nan]), [])
