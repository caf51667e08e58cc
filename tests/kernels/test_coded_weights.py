"""Weights rounded to codes of 4 bits: what the format can hold, nearest, and less lost on inputs like recorded ones."""

import pytest
import torch

from kernels import ActivationStatistics, ChannelTransform, TransformPlan, expand_codes, quantize_group
from kernels.numerics.calibrated_rounding import CalibratedRounding
from kernels.numerics.column_feedback import ColumnFeedback
from kernels.numerics.output_error import relative_rounding_error
from kernels.numerics.rounded_weight import quantize_to_codes
from kernels.reference.grouped_codes import CANDIDATES, DEFAULT_CODEBOOK
from kernels.weights.code_rounding import round_to_codes, round_to_codes_reference
from support.tensors import DEVICE, random_float

ROTATED = TransformPlan(None, 64)


@pytest.fixture(autouse=True)
def in_plain_pytorch(monkeypatch):
    """Triton's interpreter takes seconds for what the reference does at once."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def correlated(tokens, channels, seed=0, common=6):
    """Rows in which the channels follow a few common causes; the same ones for every seed."""
    causes = random_float(common, channels, seed=100)
    return random_float(tokens, common, seed=seed) @ causes + 0.2 * random_float(tokens, channels, seed=seed + 1)


def codebook():
    return torch.tensor(DEFAULT_CODEBOOK, device=DEVICE)


@pytest.mark.parametrize("channels", (64, 192, 320))
def test_the_codes_stand_for_the_weight_that_was_measured(channels):
    w = random_float(40, channels, seed=5)
    w[3] = 0
    rounded = quantize_to_codes(w, 64)
    assert rounded.codes is not None
    rounded.codes.check()
    assert rounded.codes.bits == 4 and rounded.codes.scale.dtype == torch.float8_e4m3fn
    assert torch.equal(expand_codes(rounded.codes), rounded.q) and not rounded.q[3].any()
    # Rounding to 16 levels costs a normally distributed weight about 7 %; other scales than the largest's are worth it.
    assert 0.05 < relative_rounding_error(w, rounded.q, rounded.scale, ChannelTransform(None, 64)) < 0.08


def test_no_other_code_or_scale_is_nearer():
    """Every candidate and every level, tried one by one."""
    values, scale, levels = random_float(9, 16), torch.full((9,), 0.02, device=DEVICE), codebook()
    coded = round_to_codes(values, scale, torch.eye(16, device=DEVICE), levels)
    wanted = values / scale[:, None]
    whole = wanted.abs().amax(dim=1) / levels.abs().max()
    least = []
    for candidate in CANDIDATES:
        tried = (whole * candidate).to(torch.float8_e4m3fn).float()
        steps = (tried[:, None] * levels).round().clamp(-127, 127)
        least.append((wanted[:, :, None] - steps[:, None, :]).abs().amin(dim=2).square().sum(dim=1))
    torch.testing.assert_close((wanted - coded.q).square().sum(dim=1), torch.stack(least).amin(dim=0))


@pytest.mark.parametrize("rows, columns", ((1, 16), (33, 32), (20, 128)))
def test_the_kernel_has_the_bits_of_the_reference(monkeypatch, rows, columns):
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    target = random_float(rows, columns, seed=1)
    target[0, :2] = torch.tensor([200.0, 2.5])  # beyond the range of INT8, and between two steps
    scale = target.abs().amax(1) / torch.linspace(60, 127, rows, device=DEVICE)
    scale[0] = 1.0
    scale[rows // 3] *= 10_000  # scales below FP8's normal numbers
    scale[rows // 2 :: 7] = 0 if rows > 1 else 1
    feedback = torch.eye(columns, device=DEVICE) + (0.3 * random_float(columns, columns, seed=2)).triu(1)
    actual, expected = (
        compute(target, scale, feedback, codebook()) for compute in (round_to_codes, round_to_codes_reference)
    )
    assert all(map(torch.equal, actual, expected))
    assert torch.equal(actual.group_scale.to(torch.float8_e4m3fn).float(), actual.group_scale)
    assert not actual.q[scale == 0].any() and not actual.group_scale[scale == 0].any()


@pytest.mark.parametrize("channels", (192, 256))
def test_correlated_inputs_lose_less_also_where_they_are_new(channels):
    w, transform = random_float(64, channels, seed=5), ChannelTransform(None, 64)
    nearest = quantize_to_codes(w, 64)
    better, ratio = CalibratedRounding(correlated(64, channels).split(4), transform, in_codes=True).improve(w, nearest)
    assert ratio < 0.7 and torch.equal(better.scale, nearest.scale)
    assert torch.equal(expand_codes(better.codes), better.q)
    x = transform.to_activations(correlated(256, channels, 50))

    def lost(rounded):
        exact = x @ transform.to_weight(w).t()
        return (x @ (rounded.q.float() * rounded.scale[:, None]).t() - exact).norm() / exact.norm()

    assert lost(better) < 0.7 * lost(nearest)


def test_nothing_recorded_rounds_each_column_by_itself():
    w = random_float(24, 128, seed=5)
    alone, nothing = quantize_to_codes(w, 64), ColumnFeedback.of(torch.diag(random_float(128, seed=1)), codes=True)
    rotated = quantize_to_codes(w, 64, nothing)
    # Inputs of which each speaks to one channel alone leave nothing to make good.
    assert torch.equal(alone.q, rotated.q)


@pytest.mark.parametrize("recorded", (False, True))
def test_a_group_of_linears(recorded):
    x, weights = correlated(64, 128), {name: random_float(32, 128, seed=seed) for seed, name in enumerate("qkv")}
    statistics = ActivationStatistics()
    for rows in x.split(4):
        statistics.update(rows)
    loads = {name: lambda w=w: w for name, w in weights.items()}
    results = quantize_group(loads, [ROTATED], statistics if recorded else None, rounding="calibrated", in_codes=True)
    for name, result in results.items():
        assert result.q.bits == 4 and result.q.codes.device.type == "cpu" and result.plan == ROTATED
        assert result.nearest_error == (result.plain_error if recorded else None)
        assert result.error < 0.8 * result.plain_error if recorded else result.error == result.plain_error
        if not recorded:
            q, scale = expand_codes(result.q).to(DEVICE), result.scale.to(DEVICE)
            assert result.error == pytest.approx(relative_rounding_error(weights[name], q, scale, result.transform))


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_what_is_not_finite_is_refused(value):
    w = random_float(4, 64)
    w[1, 2] = value
    with pytest.raises(ValueError, match="NaN or Inf in output channel 1"):
        quantize_to_codes(w, 64)
