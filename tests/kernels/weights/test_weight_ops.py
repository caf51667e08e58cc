"""Weights to INT8 and back by the Triton kernels, against the formulas in plain PyTorch."""

import pytest
import torch

from kernels import ChannelTransform, dequantize_weight, requantize_weight
from support.covering import covering
from support.tensors import DEVICE, random_float

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# Rows in registers with and without a tail, rows in chunks, rows shorter than a block.
SHAPES = ((1, 1, None), (5, 123, None), (3, 4608, None), (2, 40000, None), (3, 64, 4), (3, 96, 16), (2, 768, 256))
SHAPES += ((2, 6144, 256), (2, 5120, 1024), (2, 40960, 256), (1, 16384, 16384))


def transform_for(k, group, with_smooth):
    return ChannelTransform(random_float(k, seed=1).abs() + 0.1 if with_smooth else None, group)


def steps_of(w, transform):
    """w' / scale before rounding, and the scale: from the formulas, in float32."""
    values = transform.to_weight(w)
    scale = values.abs().amax(1) / torch.full((w.shape[0],), 127.0, device=w.device)
    return values / torch.where(scale > 0, scale, 1.0)[:, None], scale


@pytest.mark.parametrize("shape, dtype", covering([(*shape, smooth) for shape in SHAPES for smooth in (0, 1)], DTYPES))
def test_to_int8_and_back(shape, dtype):
    n, k, group, with_smooth = shape
    w, transform = random_float(n, k, seed=k, dtype=dtype), transform_for(k, group, with_smooth)
    q, scale = requantize_weight(w, transform)
    steps, expected_scale = steps_of(w, transform)
    assert q.dtype == torch.int8 and scale.shape == (n,)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    difference = (q.float() - steps.round()).abs()
    # Rotated sums come in another order: a value on a boundary may land one step aside.
    assert difference.max() <= (0 if group is None else 1) and (difference > 0).float().mean() < 1e-3

    back = dequantize_weight(q, scale, transform, dtype)
    expected = transform.from_weight(q.float() * scale[:, None])
    tolerance = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    assert back.dtype == dtype
    torch.testing.assert_close(back.float(), expected, rtol=tolerance, atol=3e-6 * float(expected.abs().max()))


@pytest.mark.parametrize(
    "scale", (torch.tensor(0.5), torch.tensor([0.5]), torch.full((6, 1), 0.5), torch.full((6,), 0.5))
)
def test_every_shape_of_scale(scale):
    q = torch.randint(-127, 128, (6, 40), dtype=torch.int8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(dequantize_weight(q, scale.to(DEVICE), dtype=torch.float32), q.float() * 0.5)


@pytest.mark.parametrize("group, k", ((None, 40960), (256, 3840)))
def test_stochastic_rounding(group, k):
    """Up or down to the next step, as often as the distance says, the same for a seed and another for another."""
    w = random_float(8, k, seed=3, dtype=torch.bfloat16)
    transform = transform_for(k, group, True)
    q, scale = requantize_weight(w, transform, seed=2**32 - 5)
    steps, _ = steps_of(w, transform)
    assert ((q.float() >= (steps - 1e-3).floor()) & (q.float() <= (steps + 1e-3).ceil())).all()
    # The mean of n roundings with a variance of at most a quarter is within 5 standard deviations.
    assert abs(float((q.float() - steps).mean())) < 5 * 0.5 / w.numel() ** 0.5
    half = (steps - steps.floor() - 0.5).abs() < 0.05
    assert 0.4 < float((q.float() > steps)[half].float().mean()) < 0.6
    again, same_scale = requantize_weight(w, transform, seed=2**32 - 5)
    assert torch.equal(again, q) and torch.equal(same_scale, scale)
    assert not torch.equal(requantize_weight(w, transform, seed=7)[0], q)


def test_rounding_differs_between_rows_and_columns():
    w = torch.full((8, 512), 0.3, device=DEVICE)
    w[:, 0] = 1.0  # the largest: every other value lies between two steps
    q, _ = requantize_weight(w, seed=1)
    assert not torch.equal(q[0], q[1]) and q[0, 1:].unique().numel() == 2


@pytest.mark.parametrize("value", (float("nan"), float("inf")))
@pytest.mark.parametrize("seed", (None, 1))
def test_a_nan_breaks_its_channel_and_no_other(value, seed):
    w = random_float(4, 32, seed=1)
    w[3, 1] = value
    _, scale = requantize_weight(w, seed=seed)
    assert scale[3].isnan() and scale[:3].isfinite().all()


def test_strided_weights():
    w = random_float(16, 96, seed=1)
    for view in (w[:, :64], w[::2], w.t()):
        q, scale = requantize_weight(view)
        expected_q, expected_scale = requantize_weight(view.contiguous())
        assert torch.equal(q, expected_q) and torch.equal(scale, expected_scale)
