"""Exact attention for wide heads (the kernel interpreted where there is no card), against attention in float64."""

import pytest
import torch
import torch.nn.functional as F

from kernels.ops.attention import float_attention
from kernels.ops.exact_attention import TRITON, attend_by, exact_ways
from support.tensors import DEVICE, relative_error

# Triton's interpreter multiplies no bf16.
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float16
ROUNDING = 4e-3 if DEVICE == "cuda" else 1e-3


def heads(batch, count, tokens, width, seed):
    """[B, H, T, D] as models have it: a view of [B, T, H D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, count, width, generator=generator).to(DEVICE, DTYPE).transpose(1, 2)


def exact(q, k, v, mask=None, scale=None):
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


@pytest.mark.parametrize("kind", ("none", "bool", "float"))
@pytest.mark.parametrize(
    "shape", ((1, 1, 1, 65, 33, 256), (2, 4, 2, 20, 96, 192), (1, 2, 2, 1, 1, 136)), ids=lambda shape: str(shape)
)
def test_attention(shape, kind):
    batch, count, kv, tq, tk, width = shape
    q, k, v = heads(batch, count, tq, width, 0), heads(batch, kv, tk, width, 1), heads(batch, kv, tk, width, 2)
    generator = torch.Generator().manual_seed(7)
    seen = torch.rand(batch, 1, tq, tk, generator=generator) > 0.3
    seen[..., 0] = True
    mask = {"none": None, "bool": seen, "float": torch.randn(count, 1, tk, generator=generator)}[kind]
    mask = None if mask is None else mask.to(DEVICE)
    assert relative_error(float_attention(q, k, v, mask, 0.1), exact(q, k, v, mask, 0.1)) < ROUNDING


@pytest.mark.parametrize("scale", (-0.3, 0.0))
def test_scales_that_are_not_positive(scale):
    q, k, v = (heads(1, 2, 70, 256, seed) for seed in range(3))
    q = q * 8  # whose logits' powers of two do not fit float32 unless the highest is taken from them
    assert relative_error(float_attention(q, k, v, scale=scale), exact(q, k, v, scale=scale)) < ROUNDING


def test_rows_that_see_no_key_are_zeros():
    q, k, v = (heads(1, 1, 70, 256, seed) for seed in range(3))
    seen = torch.ones(70, 70, dtype=torch.bool, device=DEVICE)
    seen[3], seen[4, :69] = False, False
    result = float_attention(q, k, v, seen)
    assert (result[:, :, 3] == 0).all()
    assert relative_error(result, exact(q, k, v, seen)) < ROUNDING


def test_a_nan_stays_in_its_row():
    q, k, v = (heads(1, 1, 40, 256, seed) for seed in range(3))
    expected = exact(q, k, v)
    q[0, 0, 5, 3] = torch.nan
    result = float_attention(q, k, v)
    assert result[0, 0, 5].isnan().all()
    result[0, 0, 5] = expected[0, 0, 5]
    assert relative_error(result, expected) < ROUNDING


def test_empty_inputs():
    q, k, v = (heads(1, 2, 8, 256, seed) for seed in range(3))
    assert float_attention(q[:, :, :0], k, v).shape == (1, 2, 0, 256)
    assert (float_attention(q, k[:, :, :0], v[:, :, :0]) == 0).all()


@pytest.mark.parametrize("wrong", (torch.zeros(1, 2, 8, 128, dtype=DTYPE), torch.zeros(1, 2, 8, 256)))
def test_other_heads_are_refused(wrong):
    with pytest.raises(ValueError, match="heads of 129 to 256"):
        float_attention(wrong, wrong, wrong)


def test_operator():
    q, k, v = (heads(1, 1, 20, 256, seed) for seed in range(3))
    torch.library.opcheck(torch.ops.int8_dit.float_attention.default, (q, k, v, None, 0.1))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_it_is_a_way_of_exact_attention():
    q, k, v = (heads(1, 2, 300, 256, seed) for seed in range(3))
    assert TRITON in exact_ways(q, k, v)
    assert TRITON not in exact_ways(*(x[..., :128] for x in (q, k, v)))
    assert relative_error(attend_by(TRITON, q, k, v), exact(q, k, v)) < ROUNDING
