"""Smoothing factors: their formula, channels without weight or signal, and what they cost the others."""

import pytest
import torch

from kernels import ChannelTransform, quantize_weight
from kernels.linear.int8_linear import quantize_activations
from kernels.quantization.smoothing import channel_absmax, smoothing_factors
from support.tensors import random_float


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_channel_absmax(dtype):
    w = random_float(7, 50, seed=1, dtype=dtype)
    absmax = channel_absmax(w)
    assert absmax.dtype == torch.float32
    assert absmax.tolist() == [max(abs(value) for value in column) for column in w.t().tolist()]
    w[3, 11] = float("nan")
    with pytest.raises(ValueError, match="NaN or Inf in input channel 11"):
        channel_absmax(w)


@pytest.mark.parametrize("alpha", (0.0, 0.3, 0.5, 1.0))
def test_smoothing_factors_formula(alpha):
    activation, weight = random_float(50, seed=1).abs(), random_float(50, seed=2).abs()
    expected = activation.double() ** alpha / weight.double() ** (1 - alpha)
    torch.testing.assert_close(smoothing_factors(activation, weight, alpha).double(), expected, rtol=1e-6, atol=0)


def test_smoothing_factors_of_dead_channels():
    """What is left of such a channel becomes as large as what is usual: smoothed activations and weights are 3 here."""
    activation, weight = torch.tensor([0.0, 600.0, 9.0, 0.0]), torch.tensor([0.1, 0.0, 1.0, 0.0])
    factors = smoothing_factors(activation, weight, 0.5)
    assert factors.tolist() == pytest.approx([30.0, 200.0, 3.0, 1.0])
    assert smoothing_factors(torch.tensor([0.0, 2.0]), torch.tensor([1.0, 0.0]), 0.5).tolist() == [1.0, 1.0]


def test_smoothing_factors_stay_within_what_a_float_can_take():
    factors = smoothing_factors(torch.tensor([1e30, 1e-30]), torch.tensor([1e-30, 1e30]), 0.5)
    assert factors.tolist() == pytest.approx([1e6, 1e-6])


@pytest.mark.parametrize("outlier", (1.0, 60.0))
@pytest.mark.parametrize("dead", ("weight", "activation"))
def test_a_dead_channel_costs_the_others_nothing(dead, outlier):
    x, w = random_float(64, 512, seed=1), random_float(256, 512, seed=2) * 0.02
    seen = x.abs().amax(0)
    if dead == "weight":
        w[:, 7] = 0
        x[:, 7] *= outlier
        seen = x.abs().amax(0)
    else:
        seen[7] = 0  # in calibration; later it is small
        x[:, 7] *= 1e-3
        w[:, 7] *= outlier
    others = [j for j in range(512) if j != 7]
    smooth = smoothing_factors(seen, w.abs().amax(0), 0.5)
    without = smoothing_factors(seen[others], w[:, others].abs().amax(0), 0.5)
    assert linear_error(x, w, smooth) < 1.1 * linear_error(x[:, others], w[:, others], without)


@pytest.mark.parametrize("alpha", (-0.1, 1.1, float("nan")))
def test_alpha_outside_its_range_is_refused(alpha):
    with pytest.raises(ValueError, match="alpha must be between 0 and 1"):
        smoothing_factors(torch.ones(3), torch.ones(3), alpha)


def linear_error(x, w, smooth):
    """The relative error of the INT8 product."""
    exact = x.double() @ w.double().t()
    transform = ChannelTransform(smooth)
    weight, weight_scale = quantize_weight(w, transform)
    q, q_scale = quantize_activations(x.contiguous(), transform)
    product = (q.double() * q_scale.double()[:, None]) @ (weight.double() * weight_scale.double()[:, None]).t()
    return ((product - exact).norm() / exact.norm()).item()
