"""Hundreds of random shapes and the largest ones users bring, on a real GPU only; sums of integers bit for bit."""

import random
from dataclasses import replace

import pytest
import torch

from kernels.benchmark import IDEOGRAM4_SHAPES
from kernels.linear.int8_linear import int8_gemm
from kernels.linear.linear_reference import int8_accumulate_reference
from kernels.linear.tiles import ARCHITECTURES, gpu_architecture
from support.gpu import needs_gpu_memory
from support.tensors import int8_accumulate, random_int8

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def random_shape(seed: int) -> tuple[int, int, int]:
    """M, N, K between 1 and some thousands, small ones as likely as large; one K in three is no multiple of 16."""
    generator = random.Random(seed)
    m, n, k = (int(2 ** generator.uniform(0, 12.5)) for _ in range(3))
    return m, n, k if seed % 3 == 0 else -(-k // 16) * 16


def random_config(seed: int, passes: int):
    """Any configuration that the card can run; where K is walked once, it is split among several programs or not."""
    generator = random.Random(seed)
    own = gpu_architecture(torch.cuda.get_device_capability())
    configs = list(dict.fromkeys([*ARCHITECTURES["Ampere"].rates, *own.rates]))
    config = generator.choice(configs)
    return replace(config, split_k=generator.choice((1, 1, 2, 3, 5))) if passes == 1 else config


@pytest.mark.parametrize("passes", (1, 2))
@pytest.mark.parametrize("seed", range(320))
def test_accumulator_is_bit_exact(seed, passes):
    from kernels.linear.gemm import launch_config
    from kernels.linear.gemm_kernel import Operands

    m, n, k = random_shape(seed)
    config = random_config(seed, passes)
    q, weight = random_int8(m, passes * k, seed=seed), random_int8(n, k, seed=seed + 1)
    expected = int8_accumulate_reference(q, weight)
    out = torch.full((m, n), 12345, dtype=torch.int32, device="cuda")
    for _ in range(2):  # the second launch finds the workspace as the first one left it
        launch_config(config, Operands(q, weight, None, None, None, out))
        assert torch.equal(out, expected), (config, m, n, k)


LARGEST = ((80661, 21504, 5376), (512, 4608, 53248), (80661, 5376, 14336), (77, 13824, 4608))
IDEOGRAM4 = tuple((shape.tokens or tokens, shape.n, shape.k) for shape in IDEOGRAM4_SHAPES for tokens in (2304, 4352))
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


ROWS = 2048  # that are compared at a time


@pytest.mark.parametrize("out_dtype", ROUNDING)
@pytest.mark.parametrize("m, n, k", (*LARGEST, *IDEOGRAM4))
def test_the_largest_shapes(m, n, k, out_dtype):
    """Two outputs of up to 4 bytes, and what float64 makes of some rows: up to 17 GiB."""
    with needs_gpu_memory(1 + (8 * m + 80 * ROWS) * n / 2**30):
        compare_with_reference(m, n, k, out_dtype)


def compare_with_reference(m, n, k, out_dtype):
    q, weight = random_int8(m, k, seed=1), random_int8(n, k, seed=2)
    q_scale, weight_scale = torch.rand(m, device="cuda") / k, torch.rand(n, device="cuda") / 127
    out = int8_gemm(q, q_scale, weight, weight_scale, None, out_dtype)
    for rows in zip(*(x.split(ROWS) for x in (q, q_scale, out, int8_accumulate(q, weight))), strict=True):
        quantized, scale, result, accumulator = rows
        expected = int8_accumulate_reference(quantized, weight)
        assert torch.equal(accumulator, expected)
        scaled = expected.double() * scale[:, None].double() * weight_scale.double()
        assert ((result.double() - scaled).abs() <= ROUNDING[out_dtype] * scaled.abs() + 2.0**-20).all()
