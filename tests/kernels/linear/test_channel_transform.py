"""A transform of the input channels: what it does to activations it undoes in the weight, and what it refuses."""

import pytest
import torch

from kernels.linear.channel_transform import UNCHANGED, ChannelTransform
from support.tensors import DEVICE, random_float

CHANNELS, GROUP = 64, 16


def factors(seed=1):
    return random_float(CHANNELS, seed=seed).abs() + 0.5


def test_factors_move_and_become_float32():
    moved = ChannelTransform(factors().double().cpu(), GROUP).on(torch.device(DEVICE))
    assert (moved.smooth.dtype, moved.smooth.device.type, moved.rotation_group) == (torch.float32, DEVICE, GROUP)
    assert UNCHANGED.on(torch.device(DEVICE)).smooth is None


@pytest.mark.parametrize("group", (16.0, "16", True))
def test_a_group_of_the_wrong_type_is_no_transform(group):
    with pytest.raises(TypeError, match="rotation_group must be an int or None"):
        ChannelTransform(None, group)


@pytest.mark.parametrize(
    "smooth, group, error, message",
    [
        (torch.ones(CHANNELS - 1), None, ValueError, "smooth must have shape"),
        (torch.ones(CHANNELS, 1), None, ValueError, "smooth must have shape"),
        (torch.ones(CHANNELS, dtype=torch.int32), None, TypeError, "smooth must be a floating point tensor"),
        (None, 8, ValueError, "power of 4, got 8"),
        (None, -4, ValueError, "power of 4, got -4"),
        (None, 256, ValueError, "does not divide K = 64"),
    ],
)
def test_what_does_not_fit_the_channels_is_named(smooth, group, error, message):
    with pytest.raises(error, match=message):
        ChannelTransform(smooth, group).check(CHANNELS)
