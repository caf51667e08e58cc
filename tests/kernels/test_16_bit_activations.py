"""Activations of 16 bits, K walked twice: bit for bit against integers, and as exact as the weight allows."""

import pytest
import torch

from kernels import ChannelTransform, int8_linear, quantize_weight
from kernels.ops.linear import int8_accumulate, int8_gemm, quantize_activations
from kernels.reference.linear import int8_accumulate_reference
from kernels.triton_kernels.gemm import launch_config
from kernels.triton_kernels.tiles import ARCHITECTURES, GemmConfig, gpu_architecture
from support.tensors import DEVICE, random_float, random_int8, relative_error

# Odd in each direction, K of one column, below a block, a multiple of blocks or of 16 only.
SHAPES = [(1, 1, 1), (2, 7, 15), (5, 123, 40), (17, 33, 65), (31, 32, 128), (33, 17, 129), (64, 40, 96), (45, 70, 144)]
INTERPRETED = [GemmConfig(32, 32, 64, 4, 4, 1), GemmConfig(16, 64, 32, 1, 4, 3), GemmConfig(64, 32, 128, 8, 4, 2)]


def configs():
    """All that a card here can run; a few small ones where an interpreter runs them."""
    if DEVICE == "cpu":
        return INTERPRETED
    own = gpu_architecture(torch.cuda.get_device_capability())
    return list(dict.fromkeys([*ARCHITECTURES["Ampere"].rates, *own.rates]))


def exact_accumulator(q, weight):
    """The sums in int64: over the left half, and over the remainders in steps of 254, halves away from zero."""
    left, right = (half.cpu().long() @ weight.cpu().long().t() for half in q.split(weight.shape[1], dim=1))
    return left + right.sign() * ((right.abs() + 127) // 254)


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_accumulator_is_bit_exact(m, n, k):
    q, weight = random_int8(m, 2 * k, seed=1), random_int8(n, k, seed=2)
    expected = exact_accumulator(q, weight)
    assert torch.equal(int8_accumulate(q, weight).cpu().long(), expected)
    assert torch.equal(int8_accumulate_reference(q, weight).cpu().long(), expected)


@pytest.mark.parametrize("config", configs(), ids=repr)
def test_every_configuration_is_bit_exact(config):
    for m, n, k in (*SHAPES, *([(301, 1008, 1280), (77, 515, 4608)] if DEVICE == "cuda" else [])):
        q, weight = random_int8(m, 2 * k, seed=1), random_int8(n, k, seed=2)
        out = torch.full((m, n), 12345, dtype=torch.int32, device=DEVICE)
        launch_config(config, out, q, None, weight, None, None)
        assert torch.equal(out.cpu().long(), exact_accumulator(q, weight)), (m, n, k)


@pytest.mark.parametrize("remainder, steps", ((126, 0), (127, 1), (380, 1), (381, 2)))
def test_halves_are_rounded_away_from_zero(remainder, steps):
    parts = [min(127, max(0, remainder - 127 * place)) for place in range(3)]
    q = torch.tensor([[1, 0, 0, *parts], [1, 0, 0, *(-part for part in parts)]], dtype=torch.int8, device=DEVICE)
    weight = torch.ones(1, 3, dtype=torch.int8, device=DEVICE)
    for accumulate in (int8_accumulate, int8_accumulate_reference):
        assert accumulate(q, weight).flatten().tolist() == [1 + steps, 1 - steps]


def test_the_extremes_of_int8():
    q = torch.full((33, 2 * 300), -127, dtype=torch.int8, device=DEVICE)
    weight = torch.full((17, 300), 127, dtype=torch.int8, device=DEVICE)
    assert torch.equal(int8_accumulate(q, weight).cpu().long(), exact_accumulator(q, weight))


def test_strided_operands():
    q, weight = random_int8(80, 96, seed=1)[::2, 16:80], random_int8(40, 64, seed=2)[:, ::2]
    assert torch.equal(int8_accumulate(q, weight).cpu().long(), exact_accumulator(q, weight))


def test_k_is_not_split():
    config = GemmConfig(32, 32, 64, 4, 4, 1, split_k=2)
    out = torch.empty(4, 4, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="cannot be split"):
        launch_config(config, out, random_int8(4, 256), None, random_int8(4, 128), None, None)


# One rounding to each output dtype. Triton's interpreter truncates to bfloat16 where the hardware rounds to nearest.
ROUNDING = {torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


@pytest.mark.parametrize("out_dtype", ROUNDING)
@pytest.mark.parametrize("with_bias", (False, True))
def test_epilogue_against_float64(out_dtype, with_bias):
    m, n, k = 45, 70, 123
    q, weight = random_int8(m, 2 * k, seed=1), random_int8(n, k, seed=2)
    q_scale, weight_scale = (random_float(size, seed=size).abs() / 1000 for size in (m, n))
    bias = random_float(n, seed=5) if with_bias else torch.zeros(n, device=DEVICE)
    out = int8_gemm(q, q_scale, weight, weight_scale, bias if with_bias else None, out_dtype)
    scales = q_scale.double()[:, None] * weight_scale.double()
    product = exact_accumulator(q, weight).to(DEVICE).double() * scales
    expected, largest = product + bias.double(), product.abs() + bias.double().abs()
    smallest = torch.finfo(out_dtype).smallest_normal * ROUNDING[out_dtype]  # subnormals are spaced evenly
    assert out.dtype == out_dtype
    tolerance = ROUNDING[out_dtype] * expected.abs() + 2.0**-22 * largest + smallest
    assert ((out.double() - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("with_smooth, group", ((False, None), (True, None), (True, 16)))
def test_outliers_cost_nothing_beyond_the_weight(with_smooth, group):
    """Four channels of 256 are a hundred times as large: what is left is the rounding of the weight."""
    tokens, n, k = 37, 50, 256
    x, w = random_float(tokens, k, seed=1), random_float(n, k, seed=2)
    x[:, [3, 77, 130, 201]] *= 100
    transform = ChannelTransform(random_float(k, seed=3).abs() + 0.5 if with_smooth else None, group)
    weight, scale = quantize_weight(w, transform)
    bias = random_float(n, seed=4)
    # The exact transform in float64, which the weight's rounding is told apart with.
    prepared = transform.to_activations(x).double()
    of_weight = prepared @ (weight.double() * scale.double()[:, None]).t() + bias.double()
    exact = x.double() @ w.double().t() + bias.double()
    errors = {}
    for bits in (8, 16):
        out = int8_linear(x, weight, scale, bias, transform, activation_bits=bits)
        errors[bits] = relative_error(out.double(), of_weight)
        if bits == 16:
            assert relative_error(out.double(), exact) < 1.02 * relative_error(of_weight, exact)
    assert errors[16] < errors[8] / 50


@pytest.mark.parametrize("bad", (float("nan"), float("inf")))
def test_non_finite_row_stays_in_its_row(bad):
    x = random_float(6, 64, seed=1)
    clean = x.clone()
    x[2, 5] = bad
    weight, scale = quantize_weight(random_float(20, 64, seed=2))
    out, expected = (int8_linear(values, weight, scale, activation_bits=16) for values in (x, clean))
    others = [0, 1, 3, 4, 5]
    assert out[2].isnan().all() and torch.equal(out[others], expected[others])


def test_row_of_zeros_gives_exactly_the_bias():
    x, bias = random_float(3, 64, seed=1), random_float(20, seed=3)
    x[1] = 0
    weight, scale = quantize_weight(random_float(20, 64, seed=2))
    assert torch.equal(int8_linear(x, weight, scale, bias, activation_bits=16)[1], bias)


@pytest.mark.parametrize("leading", ((), (0,), (2, 3)))
def test_leading_dimensions(leading):
    x = random_float(*leading, 64, seed=1)
    weight, scale = quantize_weight(random_float(24, 64, seed=2))
    out = int8_linear(x, weight, scale, activation_bits=16)
    flat = int8_linear(x.reshape(x.numel() // 64, 64), weight, scale, activation_bits=16)
    assert out.shape == (*leading, 24) and torch.equal(out.reshape(-1, 24), flat)


@pytest.mark.parametrize("bits", (12, 0, 32, None))
def test_other_numbers_of_bits_are_refused(bits):
    weight, scale = quantize_weight(random_float(8, 16))
    with pytest.raises(ValueError, match=f"activation_bits must be 8 or 16, got {bits}"):
        int8_linear(random_float(2, 16), weight, scale, activation_bits=bits)
    with pytest.raises(ValueError, match="activation_bits must be 8 or 16"):
        quantize_activations(random_float(2, 16), activation_bits=bits)


def test_gradient_is_refused():
    weight, scale = quantize_weight(random_float(8, 16, seed=2))
    with pytest.raises(RuntimeError, match="no gradient"):
        int8_linear(random_float(2, 16).requires_grad_(), weight, scale, activation_bits=16)
