"""Activation and weight quantization and rotation against float64 and against their eager references."""

import pytest
import torch

from kernels import ChannelTransform, dequantize_weight, quantize_weight, requantize_weight
from kernels.linear.channel_transform import rotate
from kernels.linear.int8_linear import quantize_activations
from kernels.linear.linear_reference import quantize_activations_reference
from support.tensors import DEVICE, random_float, rotation_matrix


def assert_same_quantization(result, expected, rounding=1e-6):
    """Equal up to a relative rounding error: a value near a rounding boundary may land one step aside."""
    (q, scale), (q_expected, scale_expected) = result, expected
    torch.testing.assert_close(scale, scale_expected, rtol=rounding, atol=0)
    difference = (q.int() - q_expected.int()).abs()
    assert difference.max() <= 1
    assert (difference > 0).float().mean() < max(1e-3, 127 * rounding)


DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = ((1, 1), (3, 5), (7, 64), (5, 123), (4, 1000), (2, 4096), (2, 16500), (2, 40000))
ROTATED = ((3, 64, 4), (3, 96, 16), (3, 64, 64), (2, 768, 256), (2, 1024, 1024), (2, 40960, 256), (1, 16384, 16384))


@pytest.mark.parametrize("m, k, group", (*((*shape, None) for shape in PLAIN), *ROTATED))
@pytest.mark.parametrize("with_smooth", (False, True))
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_reference(m, k, group, with_smooth, dtype):
    x = random_float(m, k, seed=k, dtype=dtype) * 3
    transform = ChannelTransform(random_float(k, seed=1).abs() + 0.1 if with_smooth else None, group)
    result, expected = quantize_activations(x, transform), quantize_activations_reference(x, transform)
    assert result[0].dtype == torch.int8 and result[1].dtype == torch.float32
    # of what comes from 16-bit floats the kernel rotates 16 bits
    assert_same_quantization(result, expected, 1e-6 if dtype == torch.float32 or group is None else 2.0**-15)
    if group is None and (not with_smooth or DEVICE == "cpu"):  # a GPU's reciprocal may be off in its last bit
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])


@pytest.mark.parametrize("m, k, group", ((3, 5, None), (5, 123, None), (2, 40000, None), (3, 96, 16), (2, 768, 256)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
def test_sixteen_bits_against_the_reference(m, k, group, dtype):
    x = random_float(m, k, seed=k, dtype=dtype) * 3
    x[1, 2] = 300
    x[-1, -1] = float("inf")
    result = quantize_activations(x, ChannelTransform(None, group), 16)
    expected = quantize_activations_reference(x, ChannelTransform(None, group), 16)
    assert result[0].shape == (m, 2 * k) and result[0].is_contiguous()
    assert not result[0][-1].any() and result[1][-1].isnan() and result[1][:-1].isfinite().all()
    if group is None:
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1][:-1], expected[1][:-1])
        return
    # a step of q that falls aside comes back in r
    steps, steps_expected = (q[:-1, :k].int() * 254 + q[:-1, k:].int() for q in (result[0], expected[0]))
    assert (steps - steps_expected).abs().max() <= 1
    torch.testing.assert_close(result[1][:-1], expected[1][:-1], rtol=1e-6, atol=0)


def test_ties_round_to_even():
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]], device=DEVICE)
    q, scale = quantize_activations(x)
    assert scale.item() == 1.0
    assert q.tolist() == [[127, 0, 2, 2, 0, -2, -2, 126]]


def test_tiny_and_huge_rows():
    x = torch.ones(3, 32, device=DEVICE) * torch.tensor([[1e-36], [3e38], [1.0]], device=DEVICE)
    q, scale = quantize_activations(x)
    assert (q == 127).all()
    torch.testing.assert_close(scale, torch.tensor([1e-36, 3e38, 1.0], device=DEVICE) / 127, rtol=1e-5, atol=0)
    x[:, ::2] = 0
    x[:, 1::2] = 3e-37  # 127 of it is no float32 any more
    for quantize in (quantize_activations, quantize_activations_reference):
        q, _ = quantize(x)
        assert not q[:, ::2].any() and (q[:, 1::2] > 100).all()


@pytest.mark.parametrize("options", ({}, {"clip": True}, {"seed": None}, {"seed": 1}), ids=str)
def test_weights_that_are_zero_or_too_small_for_a_scale(options):
    """A scale that float32 holds with fewer bits would be refused when its file is loaded."""
    w = torch.ones(4, 32, device=DEVICE) * torch.tensor([[1e-37], [1e-40], [0.0], [1.0]], device=DEVICE)
    q, scale = (requantize_weight if "seed" in options else quantize_weight)(w, **options)
    assert scale[:3].tolist() == [0, 0, 0] and scale[3] >= torch.finfo(torch.float32).tiny
    assert not q[:3].any() and q[3].all() and not dequantize_weight(q, scale)[:3].any()


def test_strided_rows():
    x = random_float(20, 96, seed=1)[::2, 8:72]
    q, scale = quantize_activations(x)
    q_expected, scale_expected = quantize_activations_reference(x.contiguous())
    assert torch.equal(q, q_expected) and torch.equal(scale, scale_expected)


@pytest.mark.parametrize("group", (4, 16, 64, 256))
def test_rotation_is_the_regular_hadamard_matrix(group):
    x = random_float(5, 2 * group, seed=1)
    expected = (x.double().reshape(5, 2, group) @ rotation_matrix(group)).reshape(5, 2 * group)
    torch.testing.assert_close(rotate(x, group).double(), expected, rtol=0, atol=1e-5)


def test_weight_slices_agree_with_one_pass(monkeypatch):
    import kernels.weights.weight_reference

    w = random_float(37, 64, seed=1)
    whole = quantize_weight(w, ChannelTransform(None, 16))
    monkeypatch.setattr(kernels.weights.weight_reference, "_SLICE_ELEMENTS", 5 * 64)
    sliced = quantize_weight(w, ChannelTransform(None, 16))
    assert torch.equal(whole[0], sliced[0]) and torch.equal(whole[1], sliced[1])
    assert torch.equal(dequantize_weight(*whole), dequantize_weight(*sliced))


@pytest.mark.parametrize("clip", (False, True))
@pytest.mark.parametrize("value", (float("nan"), float("inf")))
def test_non_finite_weight_is_refused_with_its_channel(value, clip):
    w = random_float(4, 32, seed=1)
    w[3, 1] = value
    with pytest.raises(ValueError, match="output channel 3"):
        quantize_weight(w, clip=clip)
