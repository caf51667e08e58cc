"""Choosing what is done to a layer by the error it brings: measured right, never worse, fragile layers found."""

import math

import pytest
import torch

from kernels import (
    ALPHAS,
    METHODS,
    UNCHANGED,
    ChannelTransform,
    TransformPlan,
    dequantize_weight,
    quantize_group,
    quantize_weight,
    transform_candidates,
)
from kernels.quantization.groups import least_worst, rotation_group_of
from kernels.quantization.output_error import OutputError, relative_rounding_error
from kernels.quantization.smoothing import smoothing_factors
from support.tensors import DEVICE, random_float, relative_error, rotation_matrix, statistics_of


def outlier_inputs(tokens=64, channels=128, seed=0, factor=60.0, outliers=(7, 100)):
    x = random_float(tokens, channels, seed=seed)
    x[:, list(outliers)] *= factor
    return x


def statistics_of_rows(x):
    return statistics_of(x.split(4))


def exact_error(x, w, transform=UNCHANGED, clip=False):
    """||Y' - Y|| / ||Y|| in float64, written out apart from the code under test."""
    q, scale = quantize_weight(w, transform, clip=clip)
    exact = x.double() @ w.double().t()
    x = x.double() if transform.smooth is None else x.double() / transform.smooth.double()
    if (group := transform.rotation_group) is not None:
        x = (x.reshape(len(x), -1, group) @ rotation_matrix(group)).reshape(x.shape)
    step = x.abs().amax(1, keepdim=True) / 127
    product = ((x / step).round() * step) @ (q.double() * scale.double()[:, None]).t()
    return float((product - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("group", (None, 64))
@pytest.mark.parametrize("smoothed", (False, True))
def test_output_error(dtype, group, smoothed):
    x, w = outlier_inputs().to(dtype), random_float(40, 128, seed=1, dtype=dtype)
    smooth = smoothing_factors(x.abs().amax(0), w.abs().amax(0), 0.5) if smoothed else None
    transform = ChannelTransform(smooth, group)
    q, scale = quantize_weight(w, transform)
    expected = exact_error(x.float(), w.float(), transform)
    assert OutputError(x, w).of(q, scale, transform) == pytest.approx(expected, rel=0.02)


def test_output_error_is_the_same_in_slices(monkeypatch):
    import kernels.weights.weight_reference

    x, w = outlier_inputs(), random_float(37, 128, seed=1)
    q, scale = quantize_weight(w)
    whole = OutputError(x, w).of(q, scale)
    monkeypatch.setattr(kernels.weights.weight_reference, "_SLICE_ELEMENTS", 5 * 128)
    assert OutputError(x, w).of(q, scale) == pytest.approx(whole, rel=1e-5)


def test_nothing_lost_where_there_is_no_output():
    w = torch.zeros(8, 64, device=DEVICE)
    assert OutputError(random_float(4, 64), w).of(*quantize_weight(w)) == 0
    assert relative_rounding_error(w, *quantize_weight(w)) == 0


def test_an_output_that_is_not_finite_is_no_lossless_one():
    w = random_float(8, 64, seed=1)
    with pytest.raises(ValueError, match="not finite"):
        OutputError(random_float(4, 64) * 1e38, w * 1e30).of(*quantize_weight(w))


@pytest.mark.parametrize("group", (None, 64))
def test_rounding_error_of_a_weight(group):
    w, transform = random_float(40, 128, seed=1), ChannelTransform(None, group)
    q, scale = quantize_weight(w, transform)
    expected = relative_error(dequantize_weight(q, scale, transform, torch.float32), w)
    assert relative_rounding_error(w, q, scale, transform) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("columns", (200, 1 << 16))
def test_a_clipped_scale_is_the_best_of_its_grid(columns):
    w = torch.distributions.StudentT(3.0).sample((6, columns)).clamp(-40, 40).to(DEVICE)
    if columns > 200:
        w.clamp_(-5, 5)[:, 0] = -20  # so many others gain that it is clipped far
    q, scale = quantize_weight(w, clip=True)
    assert q.min() >= -127
    full = w.abs().amax(1) / 127

    def squares(candidate):
        return ((w / candidate[:, None]).round().clamp(-127, 127) * candidate[:, None] - w).square().sum(1)

    best = torch.stack([squares(full * ratio) for ratio in torch.linspace(1, 0.5, 26).tolist()]).amin(0)
    torch.testing.assert_close(squares(scale), best, rtol=1e-4, atol=0)
    assert columns == 200 or (scale < 0.8 * full).all()
    plain, whole = quantize_weight(w), scale == full
    assert torch.equal(q[whole], plain[0][whole])


@pytest.mark.parametrize("channels, group", ((4608, 256), (768, 256), (192, 64), (100, None)))
def test_rotation_groups(channels, group):
    assert rotation_group_of(channels) == group


NONE, SMOOTH, ROTATE, BOTH = TransformPlan(), TransformPlan(0.5), TransformPlan(None, 256), TransformPlan(0.5, 256)


@pytest.mark.parametrize(
    "method, alphas, channels, tried",
    (
        ("none", [0.5], 256, [NONE]),
        ("smooth", [0.5], 256, [SMOOTH]),
        ("smooth", [], 256, [NONE]),
        ("rotate", [0.5], 256, [ROTATE]),
        ("smooth + rotate", [0.5], 256, [BOTH]),
        ("smooth + rotate", [], 256, [ROTATE]),
        ("best per layer", [0.5], 256, [SMOOTH, NONE, ROTATE, BOTH]),
        ("best per layer", [0.5], 100, [SMOOTH, NONE]),  # nothing can be rotated
        ("best per layer", [], 256, [NONE, ROTATE]),
    ),
)
def test_what_methods_try(method, alphas, channels, tried):
    assert transform_candidates(method, alphas, channels) == tried
    # With 16 bits what is lost is the rounding of the weight, whatever the method is against.
    every = [*alphas, *ALPHAS] if alphas else []
    assert transform_candidates(method, alphas, channels, 16) == transform_candidates("best per layer", every, channels)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"method must be one of best per layer, .* got 'other'"):
        transform_candidates("other", [0.5], 256)


@pytest.mark.parametrize("method", METHODS)
def test_a_result_is_what_its_transform_says(method):
    x, w = outlier_inputs(), random_float(48, 128, seed=1)
    result = quantize_group({"layer": lambda: w}, transform_candidates(method, [0.5], 128), statistics_of_rows(x))[
        "layer"
    ]
    smooth = None
    if result.plan.alpha is not None:
        smooth = smoothing_factors(x.abs().amax(0), w.abs().amax(0), result.plan.alpha)
        torch.testing.assert_close(result.transform.smooth, smooth.cpu(), rtol=1e-5, atol=0)
    else:
        assert result.transform.smooth is None
    transform = ChannelTransform(smooth, result.plan.rotation_group)
    q, scale = quantize_weight(w, transform)
    assert torch.equal(result.q, q.cpu()) and torch.equal(result.scale, scale.cpu())
    assert result.error == pytest.approx(exact_error(x, w, transform), rel=0.02)
    assert result.plain_error == pytest.approx(exact_error(x, w), rel=0.02)


@pytest.mark.parametrize("alpha", (0.5, 0.0, 0.85))
@pytest.mark.parametrize("seed", range(6))
def test_a_searched_alpha_is_never_worse(seed, alpha):
    x, w = outlier_inputs(seed=seed, factor=3.0 ** (seed + 1)), random_float(48, 128, seed=seed + 1)
    alphas = list(dict.fromkeys([alpha, *ALPHAS]))
    given, searched = (
        quantize_group({"layer": lambda: w}, transform_candidates("smooth", tried, 128), statistics_of_rows(x))["layer"]
        for tried in ([alpha], alphas)
    )
    assert searched.error <= given.error
    errors = [
        exact_error(x, w, ChannelTransform(smoothing_factors(x.abs().amax(0), w.abs().amax(0), tried)))
        for tried in alphas
    ]
    assert searched.error == pytest.approx(min(errors), rel=0.02)


@pytest.mark.parametrize("method", ("smooth", "best per layer"))
@pytest.mark.parametrize("seed", range(4))
def test_no_member_of_a_group_loses_by_the_search(method, seed):
    """The members of a group would choose differently alone."""
    x = outlier_inputs(seed=seed, factor=2.0 + 20 * seed)
    weights = {"a": random_float(48, 128, seed=1), "b": random_float(48, 128, seed=2)}
    weights["b"][:, 7] *= 30
    group = {name: (lambda w=w: w) for name, w in weights.items()}
    given, searched = (
        quantize_group(group, plans, statistics_of_rows(x))
        for plans in (transform_candidates("smooth", [0.5], 128), transform_candidates(method, [0.5, *ALPHAS], 128))
    )
    assert searched["a"].plan == searched["b"].plan
    if searched["a"].transform.smooth is not None:
        assert torch.equal(searched["a"].transform.smooth, searched["b"].transform.smooth)
        assert searched["a"].transform.smooth.data_ptr() != searched["b"].transform.smooth.data_ptr()
    for name in weights:
        assert searched[name].error <= given[name].error
    largest = torch.cat(list(weights.values())).abs().amax(0)
    expected = smoothing_factors(x.abs().amax(0), largest, given["a"].plan.alpha)
    torch.testing.assert_close(given["a"].transform.smooth, expected.cpu(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("names, alphas", (("ab", [0.5]), ("a", [0.5, 0.6])))
def test_least_error_scales_are_used_where_they_are_asked_for(names, alphas):
    x = outlier_inputs(channels=4096)
    weights = {name: random_float(48, 4096, seed=ord(name)) for name in names}
    group = {name: (lambda w=w: w) for name, w in weights.items()}
    for plans in (transform_candidates("smooth", alphas, 4096), transform_candidates("none", alphas, 4096)):
        plain, clipped = (quantize_group(group, plans, statistics_of_rows(x), clip) for clip in (False, True))
        for name, w in weights.items():
            result = clipped[name]
            transform = result.transform.on(torch.device(DEVICE))
            q, scale = quantize_weight(w, transform, clip=True)
            assert torch.equal(result.q, q.cpu()) and torch.equal(result.scale, scale.cpu())
            assert not torch.equal(scale, quantize_weight(w, transform)[1])
            assert result.error == pytest.approx(exact_error(x, w, transform, clip=True), rel=0.02)
            assert result.plain_error == plain[name].plain_error == pytest.approx(exact_error(x, w), rel=0.02)


def test_the_least_worst_candidate():
    assert least_worst([[1.0, 0.5, 0.9], [1.0, 1.1, 0.8]]) == 2  # the second would cost a member
    assert least_worst([[1.0, 1.0]]) == 0  # the first of equals
    assert least_worst([[0.0, 0.1], [1.0, 0.5]]) == 0  # what is lossless must stay so
    assert least_worst([[0.0, 0.0], [1.0, 0.5]]) == 1


def test_without_statistics_errors_are_those_of_the_weight():
    w = random_float(48, 128, seed=1)
    result = quantize_group({"layer": lambda: w}, transform_candidates("rotate", [], 128), None)["layer"]
    assert result.plain_error == pytest.approx(relative_rounding_error(w, *quantize_weight(w)))
    rotation = ChannelTransform(None, 64)
    assert result.error == pytest.approx(relative_rounding_error(w, *quantize_weight(w, rotation), rotation))


@pytest.mark.parametrize("method", ("none", "smooth", "best per layer"))
def test_a_bad_weight_is_named(method):
    weights = {name: random_float(8, 64, seed=1) for name in ("good", "bad")}
    weights["bad"][2, 3] = math.nan
    group = {name: (lambda w=w: w) for name, w in weights.items()}
    with pytest.raises(ValueError, match=r"layer bad cannot be quantized: .*NaN or Inf"):
        quantize_group(
            group,
            transform_candidates(method, [0.5], 64),
            statistics_of_rows(outlier_inputs(channels=64, outliers=(7,))),
        )


@pytest.mark.parametrize("group", (None, 64))
def test_output_error_with_16_bits(group):
    """That of the weight alone: outliers of the input add nothing."""
    x, w = outlier_inputs(factor=1000.0), random_float(40, 128, seed=1)
    transform = ChannelTransform(None, group)
    q, scale = quantize_weight(w, transform)
    held = dequantize_weight(q, scale, transform, torch.float32)
    expected = float((x.double() @ (held - w).double().t()).norm() / (x.double() @ w.double().t()).norm())
    error = OutputError(x, w)
    assert error.of(q, scale, transform, 16) == pytest.approx(expected, rel=0.05)
    assert error.of(q, scale, transform, 8) > 0


def test_a_group_with_16_bits_says_so():
    x, w = outlier_inputs(), random_float(40, 128, seed=1)
    tried = transform_candidates("smooth", [0.5], 128, 16)
    (result,) = quantize_group({"a": lambda: w}, tried, statistics_of_rows(x), activation_bits=16).values()
    (with_8,) = quantize_group({"a": lambda: w}, tried, statistics_of_rows(x)).values()
    assert (result.activation_bits, with_8.activation_bits) == (16, 8)
    assert result.error < with_8.error
