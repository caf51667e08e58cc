"""The arithmetic of folding smoothing factors into what produces a layer's input."""

import pytest
import torch

from kernels import divide_modulation_scale, divide_rows, multiply_columns
from support.tensors import random_float


@pytest.fixture
def smooth():
    return random_float(32, seed=9).abs() + 0.25


def test_a_norm_and_the_rows_of_a_linear(smooth):
    u, w, b = random_float(5, 16, seed=1), random_float(32, 16, seed=2), random_float(32, seed=3)
    expected = (u @ w.t() + b) / smooth
    torch.testing.assert_close(u @ divide_rows(w, smooth).t() + divide_rows(b, smooth), expected)


def test_the_scale_of_an_int8_linear_takes_the_factors(smooth):
    scale = random_float(32, 1, seed=2).abs()
    torch.testing.assert_close(divide_rows(scale, smooth), scale / smooth[:, None])


def test_a_modulation(smooth):
    """x (1 + scale) + shift, divided by s, is the same with scale' and shift'."""
    x, u = random_float(5, 32, seed=1), random_float(5, 16, seed=2)
    w_scale, b_scale = random_float(32, 16, seed=3), random_float(32, seed=4)
    w_shift, b_shift = random_float(32, 16, seed=5), random_float(32, seed=6)

    def modulated(w_scale, b_scale, w_shift, b_shift):
        return x * (1 + u @ w_scale.t() + b_scale) + u @ w_shift.t() + b_shift

    folded = modulated(
        divide_rows(w_scale, smooth),
        divide_modulation_scale(b_scale, smooth),
        divide_rows(w_shift, smooth),
        divide_rows(b_shift, smooth),
    )
    expected = modulated(w_scale, b_scale, w_shift, b_shift) / smooth
    torch.testing.assert_close(folded, expected, rtol=1e-5, atol=1e-5)


def test_a_float_linear_that_reads_the_divided_input(smooth):
    x, w = random_float(5, 32, seed=1), random_float(7, 32, seed=2)
    torch.testing.assert_close((x / smooth) @ multiply_columns(w, smooth).t(), x @ w.t(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32))
def test_dtypes_stay(smooth, dtype):
    w = random_float(32, 32, seed=1, dtype=dtype)
    assert divide_rows(w, smooth).dtype == multiply_columns(w, smooth).dtype == dtype
    assert divide_modulation_scale(w[0], smooth).dtype == dtype
