"""Weights rounded by recorded inputs: GPTQ's own result, better outputs, and nearest rounding where it does not win.

In steps of INT8, and in codes of 4 bits: what the format can hold, nearest.
"""

import pytest
import torch

import kernels.quantization.weight_rounding as weight_rounding
from kernels import (
    ChannelTransform,
    TransformPlan,
    expand_codes,
    interruptible,
    quantize_group,
    quantize_weight,
)
from kernels.quantization.output_error import OutputError, relative_rounding_error
from kernels.quantization.weight_rounding import (
    CalibratedRounding,
    ColumnFeedback,
    RoundedWeight,
    quantize_to_codes,
    round_columns,
    round_columns_reference,
)
from kernels.weights.weight_reference import CANDIDATES, DEFAULT_CODEBOOK
from support.tensors import DEVICE, random_float, relative_error, statistics_of

NEAREST = TransformPlan()


@pytest.fixture(autouse=True)
def in_plain_pytorch(monkeypatch):
    """Triton's interpreter takes seconds for what the reference does at once."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def correlated(tokens, channels, seed=0, common=6):
    """Rows in which the channels follow a few common causes; the same ones for every seed."""
    causes = random_float(common, channels, seed=100)
    return random_float(tokens, common, seed=seed) @ causes + 0.2 * random_float(tokens, channels, seed=seed + 1)


def output_error(x, w, q, scale):
    return relative_error(x @ (q.float() * scale[:, None]).t(), x @ w.t())


def dense_gptq(x, w, scale):
    """Frantar et al.'s algorithm with the whole K x K matrix in float64, strongest channels first."""
    s = x.double().t() @ x.double() / len(x)
    strength = s.diagonal()
    damping = weight_rounding._DAMPING
    diagonal = damping * strength.clamp(min=weight_rounding._WEAKEST * strength.mean())
    h = (1 - damping) * s + torch.diag(diagonal)
    order = strength.argsort(descending=True, stable=True)
    upper = torch.linalg.cholesky(torch.linalg.inv(h[order][:, order]), upper=True)
    left, q = w.double()[:, order], torch.empty_like(w)
    for column in range(w.shape[1]):
        steps = (left[:, column] / scale).round().clamp(-127, 127)
        error = (left[:, column] - steps * scale) / upper[column, column]
        left[:, column:] -= error[:, None] * upper[column, column:]
        q[:, order[column]] = steps.float()
    return q


@pytest.mark.parametrize("channels", (100, 128, 300))
def test_it_is_gptq_without_the_large_matrix(channels):
    x, w = correlated(24, channels), random_float(40, channels, seed=5)
    _, scale = quantize_weight(w)
    rounded, expected = ColumnFeedback.of(x).round(w, scale).q, dense_gptq(x, w, scale.double())
    # A value between two steps may land on the other side in float32; what follows then differs too.
    assert (rounded != expected).float().mean() < 0.02
    exact = output_error(x, w, expected, scale)
    assert output_error(x, w, rounded, scale) == pytest.approx(exact, rel=0.05)
    assert torch.equal(rounded, ColumnFeedback.of(x).round(w, scale).q)


def test_independent_channels_are_rounded_to_nearest():
    """Rows of one channel each: what one loses no other can make good."""
    w = random_float(40, 64, seed=5)
    q, scale = quantize_weight(w)
    assert torch.equal(ColumnFeedback.of(torch.diag(random_float(64, seed=1))).round(w, scale).q, q)


def test_channels_without_weight_or_signal():
    x, w = correlated(24, 200), random_float(40, 200, seed=5)
    x[:, 7], w[3] = 0, 0
    q, scale = quantize_weight(w)
    rounded = ColumnFeedback.of(x).round(w, scale).q
    assert not rounded[3].any()
    assert torch.equal(rounded[:, 7], q[:, 7])


@pytest.mark.parametrize("activation_bits", (8, 16))
@pytest.mark.parametrize("transform", (ChannelTransform(), ChannelTransform(None, 64)))
def test_what_it_says_it_gains_is_gained_on_new_inputs(transform, activation_bits):
    w = random_float(96, 192, seed=5)
    q, scale = quantize_weight(w, transform)
    rounding = CalibratedRounding(correlated(64, 192).split(4), transform, activation_bits)
    better, ratio = rounding.improve(w, RoundedWeight(q, scale))
    assert ratio < (0.95 if activation_bits == 8 else 0.6)
    error = OutputError(correlated(256, 192, 50), w)
    nearest, calibrated = (error.of(each, scale, transform, activation_bits) for each in (q, better.q))
    assert calibrated / nearest == pytest.approx(ratio, abs=0.15)


def test_nearest_where_nothing_is_gained_or_nothing_can_be_held_out():
    w = random_float(64, 64, seed=5)
    q, scale = quantize_weight(w)
    noise = random_float(16, 64, seed=1)  # no row says anything about another
    zeros = torch.zeros(16, 64, device=DEVICE)
    for parts in (noise.split(1), zeros.split(4), [correlated(16, 64)], []):
        assert CalibratedRounding(parts, ChannelTransform(), 16).improve(w, RoundedWeight(q, scale)) is None


@pytest.mark.parametrize("clip", (False, True))
@pytest.mark.parametrize("activation_bits", (8, 16))
@pytest.mark.parametrize("plans", ([TransformPlan(0.5)], [NEAREST, TransformPlan(0.5, 64)]), ids=("one", "two"))
def test_a_group(plans, clip, activation_bits):
    """The transform and the scales are those of nearest rounding, and errors are never larger."""
    weights = {name: random_float(48, 192, seed=ord(name)) for name in "ab"}
    group = {name: (lambda w=w: w) for name, w in weights.items()}
    statistics = statistics_of(correlated(64, 192).split(4))
    nearest, calibrated = (
        quantize_group(group, plans, statistics, clip, activation_bits, rounding)
        for rounding in ("nearest", "calibrated")
    )
    for name in weights:
        before, after = nearest[name], calibrated[name]
        assert after.plan == before.plan and torch.equal(after.scale, before.scale)
        assert not torch.equal(after.q, before.q) and before.nearest_error is None
        assert after.nearest_error == before.error > after.error
        assert after.plain_error == before.plain_error


def test_without_statistics_it_is_nearest():
    w = random_float(48, 192, seed=1)
    (result,) = quantize_group({"a": lambda: w}, [NEAREST], None, rounding="calibrated").values()
    assert result.nearest_error is None and torch.equal(result.q, quantize_weight(w)[0].cpu())


def test_it_can_be_stopped_inside_of_a_layer():
    class Stop(Exception):
        pass

    def stop():
        raise Stop

    w = random_float(48, 192, seed=1)
    with interruptible(stop), pytest.raises(Stop):
        quantize_group({"a": lambda: w}, [NEAREST], statistics_of(correlated(64, 192).split(4)), rounding="calibrated")


def codebook():
    return torch.tensor(DEFAULT_CODEBOOK, device=DEVICE)


@pytest.mark.parametrize("in_codes", (False, True))
@pytest.mark.parametrize("rows, columns", ((1, 16), (33, 32), (20, 128)))
def test_the_kernel_has_the_bits_of_the_reference(interpreter, rows, columns, in_codes):
    target = random_float(rows, columns, seed=1)
    target[0, :2] = torch.tensor([200.0, 2.5])  # far beyond the range, and between two steps
    scale = target.abs().amax(1) / torch.linspace(60, 127, rows, device=DEVICE)
    scale[0] = 1.0
    if in_codes:
        scale[rows // 3] *= 10_000  # scales below FP8's normal numbers
    scale[rows // 2 :: 7] = 0 if rows > 1 else 1
    feedback = torch.eye(columns, device=DEVICE) + (0.3 * random_float(columns, columns, seed=2)).triu(1)
    given = (target, scale, feedback, codebook() if in_codes else None)
    actual, expected = round_columns(*given), round_columns_reference(*given)
    assert actual[0].dtype == torch.int8 and not actual[0][scale == 0].any()
    assert len(actual) == len(expected) == (3 if in_codes else 1) and all(map(torch.equal, actual, expected))
    if in_codes:
        group_scale = actual[2]
        assert not group_scale[scale == 0].any()
        assert torch.equal(group_scale.to(torch.float8_e4m3fn).float(), group_scale)


@pytest.mark.parametrize("interpreted", (False, True))
def test_a_part_of_the_channels_is_rounded_as_among_all(request, interpreted):
    """Tensors that are not contiguous, as every fifth channel's scales."""
    if interpreted:
        request.getfixturevalue("interpreter")
    target = random_float(15, 8)
    scale = target.abs().amax(dim=1) / 127
    feedback = torch.eye(8, device=DEVICE) + 0.3 * random_float(8, 8, seed=1).triu(1)
    expected = round_columns(target, scale, feedback)[0][::5]
    assert torch.equal(round_columns(target[::5], scale[::5], feedback.t().contiguous().t())[0], expected)


# Codes of 4 bits.


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
    q, *_ = round_columns(values, scale, torch.eye(16, device=DEVICE), levels)
    wanted = values / scale[:, None]
    whole = wanted.abs().amax(dim=1) / levels.abs().max()
    least = []
    for candidate in CANDIDATES:
        tried = (whole * candidate).to(torch.float8_e4m3fn).float()
        steps = (tried[:, None] * levels).round().clamp(-127, 127)
        least.append((wanted[:, :, None] - steps[:, None, :]).abs().amin(dim=2).square().sum(dim=1))
    torch.testing.assert_close((wanted - q).square().sum(dim=1), torch.stack(least).amin(dim=0))


@pytest.mark.parametrize("channels", (192, 256))
def test_correlated_inputs_lose_less_in_codes_too(channels):
    w, transform = random_float(64, channels, seed=5), ChannelTransform(None, 64)
    nearest = quantize_to_codes(w, 64)
    better, ratio = CalibratedRounding(correlated(64, channels).split(4), transform, in_codes=True).improve(w, nearest)
    assert ratio < 0.7 and torch.equal(better.scale, nearest.scale)
    assert torch.equal(expand_codes(better.codes), better.q)
    x = transform.to_activations(correlated(256, channels, 50))

    errors = [output_error(x, transform.to_weight(w), each.q, each.scale) for each in (better, nearest)]
    assert errors[0] < 0.7 * errors[1]


@pytest.mark.parametrize("recorded", (False, True))
def test_a_group_in_codes(recorded):
    x, weights = correlated(64, 128), {name: random_float(32, 128, seed=seed) for seed, name in enumerate("qkv")}
    statistics = statistics_of(x.split(4))
    loads = {name: lambda w=w: w for name, w in weights.items()}
    results = quantize_group(
        loads, [TransformPlan(None, 64)], statistics if recorded else None, rounding="calibrated", in_codes=True
    )
    for name, result in results.items():
        assert result.q.bits == 4 and result.q.codes.device.type == "cpu" and result.plan.rotation_group == 64
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
