"""The Ampere path on silicon: built for sm_80 by the same source, assembled for a Hopper card, and launched there."""

from dataclasses import replace

import pytest
import torch

from kernels.linear.linear_reference import int8_accumulate_reference
from kernels.linear.tiles import ARCHITECTURES, walks_twice
from support.tensors import random_float, random_int8

ON_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = pytest.mark.skipif(not ON_HOPPER, reason="needs a Hopper card")


# Each kernel once; a ring's is told its group at its launch.
CONFIGS = list({config.kernel: config for config in ARCHITECTURES["Ampere"].rates}.values())
FORMS = [
    (config, split_k, passes)
    for config in CONFIGS
    for split_k, passes in ((1, 1), (3, 1), (1, 2))
    if passes == 1 or walks_twice(config)
]


@pytest.mark.parametrize("config, split_k, passes", FORMS, ids=repr)
def test_bit_exact(config, split_k, passes):
    from support.ampere_kernel import AmpereKernel

    kernel = AmpereKernel(replace(config, split_k=split_k), passes=passes)
    for m, n, k in ((4352, 4608, 4608), (77, 4608, 12288), (301, 1008, 1280), (1, 16, 256 * split_k)):
        q, weight = random_int8(m, passes * k, seed=1), random_int8(n, k, seed=2)
        q_scale, weight_scale = random_float(m, seed=3).abs() / 100, random_float(n, seed=4).abs() / 100
        bias = random_float(n, seed=5, dtype=torch.bfloat16)
        out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
        kernel(out, q, q_scale, weight, weight_scale, bias)
        product = int8_accumulate_reference(q, weight).float() * q_scale[:, None] * weight_scale
        torch.testing.assert_close(out.float(), product + bias.float(), rtol=2.0**-8, atol=1e-5)
        # Scales of one leave the accumulator itself, where bf16 holds it.
        ones = torch.ones_like
        small_q, small_weight = q % 3 - 1, weight % 3 - 1
        small_q[:, 128:k] = 0
        expected = int8_accumulate_reference(small_q, small_weight)
        for _ in range(2):  # the second launch finds the workspace as the first one left it
            out.fill_(float("nan"))
            kernel(out, small_q, ones(q_scale), small_weight, ones(weight_scale), torch.zeros_like(bias))
            assert torch.equal(out.int(), expected)
