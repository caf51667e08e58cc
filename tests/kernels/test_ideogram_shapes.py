"""The five Ideogram 4 linears at full size, on a real GPU only."""

import pytest
import torch

from kernels import ChannelTransform, int8_linear, quantize_weight
from kernels.benchmark import IDEOGRAM4_SHAPES
from kernels.ops.linear import int8_accumulate, int8_gemm, quantize_activations
from kernels.reference.linear import int8_accumulate_reference

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHAPES = [(shape.tokens or tokens, shape.n, shape.k) for shape in IDEOGRAM4_SHAPES for tokens in (2304, 4352)]


def operands(m, n, k):
    generator = torch.Generator("cuda").manual_seed(m + n + k)
    x = torch.randn(m, k, device="cuda", generator=generator).bfloat16()
    w = torch.randn(n, k, device="cuda", generator=generator).bfloat16() / k**0.5
    bias = torch.randn(n, device="cuda", generator=generator).bfloat16()
    return x, w, bias


@pytest.mark.parametrize("m, n, k", SHAPES)
def test_accumulator_is_bit_exact(m, n, k):
    x, w, _ = operands(m, n, k)
    q, weight = quantize_activations(x)[0], quantize_weight(w)[0]
    assert torch.equal(int8_accumulate(q, weight), int8_accumulate_reference(q, weight))


@pytest.mark.parametrize("out_dtype", (torch.bfloat16, torch.float16, torch.float32))
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_output_is_one_rounding_from_float64(m, n, k, out_dtype):
    x, w, bias = operands(m, n, k)
    (q, q_scale), (weight, weight_scale) = quantize_activations(x), quantize_weight(w)
    out = int8_gemm(q, q_scale, weight, weight_scale, bias, out_dtype).double()
    product = int8_accumulate(q, weight).double() * q_scale.double()[:, None] * weight_scale.double()
    expected = product + bias.double()
    rounding = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}[out_dtype]
    tolerance = rounding * expected.abs() + 2.0**-22 * (product.abs() + bias.double().abs()) + 2.0**-25
    assert ((out - expected).abs() <= tolerance).all()


@pytest.mark.parametrize("group", (None, 256))
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_linear_is_close_to_bf16(m, n, k, group):
    x, w, bias = operands(m, n, k)
    transform = ChannelTransform(None, group)
    weight, weight_scale = quantize_weight(w, transform)
    out = int8_linear(x, weight, weight_scale, bias, transform).float()
    expected = torch.nn.functional.linear(x.float(), w.float(), bias.float())
    assert ((out - expected).norm() / expected.norm()) < 0.02
    assert torch.nn.functional.cosine_similarity(out.flatten(), expected.flatten(), dim=0) > 0.9998
