"""Activation statistics and row samples: exact figures, bounded and even samples, merging."""

import math
import random

import pytest
import torch

from kernels import ActivationStatistics
from kernels.quantization.statistics import ROWS_PER_CALL, SAMPLED_CALLS, RowSample
from support.tensors import DEVICE, random_float, statistics_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def calls(count, channels=24, tokens=10, dtype=torch.float32):
    return [random_float(tokens, channels, seed=seed, dtype=dtype) for seed in range(count)]


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


@pytest.mark.parametrize("value", (math.nan, math.inf, -math.inf, 1e30))
@pytest.mark.parametrize("bad", (0, 3, 15, 16, 20, 39))
def test_the_first_call_that_is_not_finite(value, bad):
    inputs = calls(40)
    inputs[bad][3, 5] = value
    inputs[-1][0, 0] = value
    statistics = statistics_of(inputs)
    assert statistics.finite_calls == bad
    for seen in (statistics.absmax[5], statistics_of(inputs[: bad + 1]).latest_peak):
        assert not seen <= 2.0**40


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


def test_every_call_is_as_likely_to_be_sampled():
    """Early, middle and late ones; and of branches that alternate, as the two of guidance do, both."""
    count, seeds, tenth = 60, 400, 6
    inputs, times_chosen = numbered(count, tokens=4), torch.zeros(60)
    for seed in range(seeds):
        sample = RowSample()
        sample._random = random.Random(seed)
        for x in inputs:
            sample.offer(x)
        times_chosen[[int(part[0, 0]) for part in sample.parts]] += 1
    rate = times_chosen / seeds
    expected = SAMPLED_CALLS / count
    # Six calls in 400 seeds: a standard deviation of 0.009.
    for first in range(0, count, tenth):
        assert rate[first : first + tenth].mean() == pytest.approx(expected, abs=0.04)
    assert rate[::2].mean() == pytest.approx(expected, abs=0.02)


def test_rows_come_from_all_over_the_input():
    """From the start to the end of an image, not always the same ones, and not neighbours."""
    parts = [part[:, 1] for part in sample_of(numbered(SAMPLED_CALLS, tokens=4001)).parts]
    step = 4001 // ROWS_PER_CALL
    assert all(part[-1] - part[0] == (ROWS_PER_CALL - 1) * step for part in parts)
    starts = torch.stack(parts)[:, 0]
    assert starts.unique().numel() > SAMPLED_CALLS // 2 and starts.min() < step / 3 and starts.max() > 2 * step / 3


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


def test_of_many_that_are_merged_none_comes_first():
    """64 equal ones cannot all be in a sample of 16 calls; those that are come from all over."""
    inputs = numbered(64 * 5)
    merged = ActivationStatistics.merged([statistics_of(inputs[5 * i : 5 * i + 5]) for i in range(64)])
    sources = [int(part[0, 0]) // 5 for part in merged.sample.parts]
    assert len(sources) == SAMPLED_CALLS
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in merged.sample.parts)
    assert sorted({source // 16 for source in sources}) == [0, 1, 2, 3]
    assert all(sum(source // 16 == quarter for source in sources) == 4 for quarter in range(4))


@pytest.mark.parametrize("times", (1, 600))  # float32 adds so many to a little more than their mean
def test_an_input_of_which_most_channels_are_zero(times):
    x = torch.zeros(8, 16, device=DEVICE)
    x[:, :3] = 5
    statistics = statistics_of([x, torch.zeros_like(x) if times == 1 else x] * times)
    assert 1e3 < statistics.spikiness < math.inf
    statistics.to_host()
    ActivationStatistics.restored(2 * times, statistics.spikiness, statistics.absmax, statistics.sample.parts)


@pytest.mark.parametrize(
    "calls, spikiness, absmax, row, message",
    (
        (0, 1.0, 1.0, 1.0, "0 calls"),
        (1 << 60, 1.0, 1.0, 1.0, f"{1 << 60} calls"),
        (1, math.nan, 1.0, 1.0, "spikiness of nan"),
        (1, 1e7, 1.0, 1.0, "spikiness of 10000000.0"),
        (1, 1.0, math.nan, 1.0, "absmax holds a value that is negative, NaN, Inf or above 1e\\+12"),
        (1, 1.0, 1e30, 1.0, "absmax holds a value that is .* above"),
        (1, 1.0, 1.0, math.nan, "rows hold a NaN or Inf"),
        (1, 1.0, 1.0, 1e30, "rows hold .* a value above the largest"),
    ),
)
def test_what_no_calls_leave_behind_is_not_restored(calls, spikiness, absmax, row, message):
    with pytest.raises(ValueError, match=message):
        ActivationStatistics.restored(calls, spikiness, torch.tensor([1.0, absmax]), [torch.tensor([[1.0, row]])])


def test_what_does_not_fit_together_is_refused():
    with pytest.raises(ValueError, match="rows are of 2 calls out of 1"):
        ActivationStatistics.restored(1, 1.0, torch.ones(2), [torch.ones(1, 2)] * 2)
    with pytest.raises(ValueError, match="8 and 16 channels"):
        ActivationStatistics.merged([statistics_of(calls(1, channels)) for channels in (16, 8)])
    with pytest.raises(ValueError, match="no call was sampled"):
        _ = RowSample().rows


def test_statistics_go_on_after_they_were_taken_to_the_host():
    """As a node's second sampling goes on with what its first left; on a GPU, from two devices."""
    inputs = calls(40)
    taken = ActivationStatistics()
    for index, x in enumerate(inputs):
        taken.update(x)
        if index % 7 == 0:
            taken.to_host()
    at_once = statistics_of(inputs)
    taken.to_host()
    at_once.to_host()
    storages = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in taken.sample.parts}
    assert sum(storages.values()) == taken.sample.rows.nbytes  # nothing is held of rows that were replaced
    assert (taken.calls, taken.finite_calls) == (40, 40)
    assert taken.spikiness == pytest.approx(at_once.spikiness, rel=1e-6)
    assert torch.equal(taken.absmax, at_once.absmax) and torch.equal(taken.sample.rows, at_once.sample.rows)
