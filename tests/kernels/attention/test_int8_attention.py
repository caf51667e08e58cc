"""Attention in INT8 and exact for wide heads: the kernels and the reference, against attention in float64."""

import pytest
import torch
import torch.nn.functional as F

from kernels.attention import attention_launch as attention
from kernels.attention.attention_launch import attend_in_int8, tiles_for
from kernels.attention.attention_operands import quantized_operands
from kernels.attention.attention_reference import _quantized, _rotated, int8_attention_reference
from kernels.attention.int8_attention import float_attention, int8_attention
from support.tensors import DEVICE, relative_error

# Error on normal data: 8 bits of q and of k. Of few keys it is larger than the 0.010 of thousands.
NORMAL = 0.016
# Triton's interpreter multiplies no bf16.
FLOATS = {"width": 256, "dtype": torch.bfloat16 if DEVICE == "cuda" else torch.float16}


def heads(batch, count, tokens, width, seed, dtype=torch.bfloat16):
    """[B, H, T, D] as models have it: a view of [B, T, H D]."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, tokens, count, width, generator=generator).to(DEVICE, dtype).transpose(1, 2)


def operands(batch=1, count=2, kv=None, tq=40, tk=70, width=64, dtype=torch.bfloat16):
    kv = kv or count
    return (
        heads(batch, count, tq, width, 0, dtype),
        heads(batch, kv, tk, width, 1, dtype),
        heads(batch, kv, tk, width, 2, dtype),
    )


def exact(q, k, v, mask=None, scale=None):
    """In float64."""
    mask = mask if mask is None or mask.dtype == torch.bool else mask.double()
    return F.scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def of_reference(q, k, v, mask=None, scale=None):
    full = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    return int8_attention_reference(q, k, v, full, scale)


# What computes, with which operands and how near. Exact attention has heads of 129 channels and more.
COMPUTED = {
    "int8": (int8_attention, {}, NORMAL),
    "reference": (of_reference, {}, NORMAL),
    "floats": (float_attention, FLOATS, 4e-3 if DEVICE == "cuda" else 1e-3),
}
both = pytest.mark.parametrize("compute", (int8_attention, of_reference), ids=("kernels", "reference"))
each = pytest.mark.parametrize("compute, form, rounding", COMPUTED.values(), ids=COMPUTED)


def masks(batch, count, tq, tk):
    generator = torch.Generator().manual_seed(7)
    seen = torch.rand(batch, 1, tq, tk, generator=generator) > 0.3
    seen[..., 0] = True
    bias = torch.randn(count, 1, tk, generator=generator)
    return {"none": None, "bool": seen.to(DEVICE), "float": bias.to(DEVICE), "bf16": bias.to(DEVICE, torch.bfloat16)}


SHAPES = (
    {"batch": 2, "tq": 33, "tk": 77},  # ragged
    {"count": 4, "kv": 2, "tq": 20, "tk": 128, "width": 128},  # grouped queries
    {"count": 1, "tq": 65, "tk": 31, "width": 256},
    {"count": 3, "tq": 16, "tk": 130, "width": 40},
    {"count": 1, "tq": 1, "tk": 1, "width": 96},
)
WIDE = (
    {"count": 1, "tq": 65, "tk": 33, "width": 256},
    {"batch": 2, "count": 4, "kv": 2, "tq": 20, "tk": 96, "width": 192},
    {"tq": 1, "tk": 1, "width": 136},
)


@pytest.mark.parametrize("kind", ("none", "bool", "float", "bf16"))
@pytest.mark.parametrize(
    "shape, computed",
    [(shape, name) for shape in SHAPES for name in ("int8", "reference")] + [(shape, "floats") for shape in WIDE],
    ids=str,
)
def test_attention(shape, computed, kind):
    compute, form, rounding = COMPUTED[computed]
    q, k, v = operands(**{**form, **shape})
    mask = masks(q.shape[0], q.shape[1], q.shape[2], k.shape[2])[kind]
    result = compute(q, k, v, mask)
    assert result.shape == q.shape and relative_error(result, exact(q, k, v, mask)) < rounding
    assert computed == "reference" or result.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    ("heads_of", "rows"),
    (
        ((30, 4352), 128),  # Z-Image: 1020 programs of 128 rows, of 1056 places
        ((40, 32760), 128),  # Wan
        ((24, 4608), 64),  # Flux.1: 864 of 1056
        ((0, 0), 64),
    ),
)
def test_a_call_that_fills_the_card_has_larger_tiles(heads_of, rows):
    assert tiles_for((9, 0), 128, ("none", "one"), heads_of, 132).rows == rows
    masked, other_card = tiles_for((9, 0), 128, ("bool", "one"), heads_of, 132), tiles_for((8, 6), 128)
    assert masked.rows == 64 and tiles_for((8, 6), 128, ("none", "one"), heads_of, 82) == other_card


def test_larger_tiles(monkeypatch):
    capability = torch.cuda.get_device_capability() if DEVICE == "cuda" else (8, 6)
    (larger,) = attention._FILLING_TILES[9, 0].values()
    monkeypatch.setattr(attention, "_FILLING_TILES", {capability: {128: larger}})
    monkeypatch.setattr(attention, "_fills", lambda *_: True)
    q, k, v = operands(count=3, tq=300, tk=333, width=128)
    assert tiles_for(capability, 128) is larger
    assert relative_error(int8_attention(q, k, v), exact(q, k, v)) < NORMAL


@pytest.mark.skipif(DEVICE != "cuda" or not attention.HAS_GLUON, reason="needs a GPU and Gluon")
@pytest.mark.parametrize("capability", ((8, 0), (8, 6)))
@pytest.mark.parametrize("width", (40, 64, 128, 256))
def test_the_kernel_in_gluon(monkeypatch, capability, width):
    """On any card that runs Ampere's instructions; where it has no tiles, and for values in pieces, Triton's does."""
    launched, launch = [], attention._attend_on_ampere
    monkeypatch.setattr(attention, "_capability", lambda _: capability)
    monkeypatch.setattr(
        attention, "_attend_on_ampere", lambda *given, **named: launched.append(launch(*given, **named))
    )
    half_sums = capability == (8, 6)
    for shape in ({"batch": 2, "count": 4, "kv": 2, "tq": 333, "tk": 777}, {"tq": 65, "tk": 31}, {"tq": 1, "tk": 512}):
        launched.clear()
        q, k, v = operands(**shape, width=width)
        out = torch.empty_like(q)
        attend_in_int8(half_sums, width**-0.5, (q, k, v, None), (out.transpose(1, 2),))
        assert relative_error(out, exact(q, k, v)) < NORMAL
        assert bool(launched) == (half_sums or width in (64, 128))


def quantized_together(x, share):
    """Steps and scales of rows [..., T, D]. In windows of 4 `share` rows, 2 i and 2 i + 1 of all eights have a scale in
    common."""
    *more, tokens, width = x.shape
    padded = F.pad(x, (0, 0, 0, -tokens % (4 * share)))
    together = padded.view(*more, -1, share // 2, 4, 2, width).transpose(-4, -3)
    steps, scale = _quantized(together.flatten(-3))
    of_each = scale[..., None, None].expand(*together.shape[:-1], 1)
    steps, scale = (part.transpose(-4, -3).flatten(-5, -2) for part in (steps.view(together.shape), of_each))
    return steps[..., :tokens, :], scale[..., :tokens, :]


@pytest.mark.parametrize("share, width", ((8, 40), (8, 256), (16, 64), (16, 128)))
def test_keys_that_share_scales_are_quantized_together(share, width):
    q, k, v = operands(batch=2, tk=300, width=width, dtype=torch.float32)
    sample = torch.arange(64)
    token = sample * 5 + sample * 7 % 5  # one of each 64th part of all
    mean = k[:, :, token[token < 300]].mean(2)
    keys = quantized_operands(q, k, v, 0.1, True, share)
    steps, scale = quantized_together(_rotated(k - mean.unsqueeze(2)), share)
    token = torch.arange(300, device=DEVICE)
    group = token // (4 * share) * 4 + token % 8 // 2
    rounding = 1e-2 if DEVICE == "cuda" else 1e-5  # a card rotates in 16 bits
    torch.testing.assert_close(keys.k_scale.unflatten(0, (2, 2))[..., group], scale[..., 0], rtol=rounding, atol=0)
    apart = keys.k.unflatten(0, (2, 2))[:, :, :300].float() - steps
    assert apart.abs().max() <= 1 + 127 * rounding


@both
def test_a_common_vector_of_keys_costs_nothing(compute):
    q, k, v = operands(tk=200)
    strong = k + 20 * heads(1, 2, 1, 64, 5)
    assert relative_error(compute(q, strong, v), exact(q, strong, v)) < NORMAL


def test_channels_with_outliers_are_rotated():
    q, k, v = operands(tk=200, width=128)
    outliers = torch.ones(128, device=DEVICE)
    outliers[::32] = 4
    q, k = q * outliers.bfloat16(), k * outliers.bfloat16()
    assert relative_error(int8_attention(q, k, v), exact(q, k, v)) < 1.3 * NORMAL


@pytest.mark.parametrize(
    ("dtype", "size"),
    ((torch.float16, 4), (torch.float32, 4), (torch.bfloat16, 1e4), (torch.bfloat16, 1e30), (torch.float16, 1e4)),
)
@pytest.mark.parametrize("half_sums", (False, True))
def test_other_dtypes_sums_and_large_values(dtype, size, half_sums):
    q, k, v = operands(tk=200, width=128, dtype=dtype)
    v = (v.float() * size / v.float().abs().max()).to(dtype)
    out = torch.empty_like(q)
    attend_in_int8(half_sums, 0.05, (q, k, v, None), (out.transpose(1, 2),))
    assert relative_error(out, exact(q, k, v, scale=0.05)) < (1 if size == 4 else 2) * NORMAL


@each
@pytest.mark.parametrize("kind", ("bool", "float"))
def test_rows_that_see_no_key_are_zeros(compute, form, rounding, kind):
    q, k, v = operands(tq=10, tk=150, **form)
    seen = torch.ones(10, 150, dtype=torch.bool, device=DEVICE)
    seen[3], seen[4, :149], seen[5, 1:] = False, False, False
    mask = seen if kind == "bool" else torch.zeros(10, 150, device=DEVICE).masked_fill(~seen, -torch.inf)
    result = compute(q, k, v, mask)
    assert (result[:, :, 3] == 0).all()
    assert relative_error(result, exact(q, k, v, seen)) < rounding


@each
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_rows_masked_by_the_lowest_number_see_all_keys_alike(compute, form, rounding, dtype):
    """As in PyTorch: it is finite, also in the powers of two that the kernel counts in."""
    q, k, v = operands(tq=10, tk=150, **form)
    mask = torch.zeros(10, 150, dtype=dtype, device=DEVICE)
    mask[3], mask[4, 1:], mask[5, :80] = (torch.finfo(dtype).min,) * 3
    mask[6], mask[6, :75] = torch.finfo(dtype).min, -torch.inf
    result = compute(q, k, v, mask)
    assert relative_error(result, exact(q, k, v, mask)) < rounding
    for row, keys in ((3, v), (6, v[:, :, 75:])):
        mean = keys.double().mean(2).repeat_interleave(q.shape[1] // v.shape[1], 1)
        assert relative_error(result[:, :, row], mean) < rounding


@each
@pytest.mark.parametrize("broken", (torch.nan, torch.inf))
def test_a_broken_query_stays_in_its_row(compute, form, rounding, broken):
    q, k, v = operands(**form)
    expected = exact(q, k, v)
    q[0, 1, 5, 3] = broken
    result = compute(q, k, v)
    assert result[0, 1, 5].isnan().all()
    result[0, 1, 5] = expected[0, 1, 5]
    assert relative_error(result, expected) < rounding


@pytest.mark.parametrize("which", (1, 2), ids=("key", "value"))
def test_a_broken_key_or_value_is_seen(which):
    tensors = list(operands())
    expected = exact(*tensors)
    tensors[which][0, 1, 5, 3] = torch.nan
    result = int8_attention(*tensors)
    assert result[0, 1, :, 3].isnan().all()
    assert relative_error(result[0, 0], expected[0, 0]) < NORMAL


@pytest.mark.parametrize("computed, times", (("int8", 0.05), ("floats", 1), ("floats", 8)))
@pytest.mark.parametrize("scale", (-0.2, 0.0, 3.0))
def test_scales_of_the_logits(computed, times, scale):
    """Also such that their powers of two do not fit float32 unless the highest is taken from them."""
    compute, form, rounding = COMPUTED[computed]
    q, k, v = operands(tk=200, **form)
    q = q * times
    assert relative_error(compute(q, k, v, scale=scale), exact(q, k, v, scale=scale)) < rounding


@each
def test_zeros_and_empty_inputs(compute, form, rounding):
    q, k, v = operands(**form)
    assert relative_error(compute(0 * q, k, v), exact(0 * q, k, v)) < rounding
    assert relative_error(compute(q, 0 * k, v), exact(q, 0 * k, v)) < rounding
    assert (compute(q, k, 0 * v) == 0).all()
    if compute is not of_reference:
        assert compute(q[:, :, :0], k, v).shape == (1, 2, 0, q.shape[3])
        assert (compute(q, k[:, :, :0], v[:, :, :0]) == 0).all()


def test_any_strides():
    q, k, v = operands(tq=40, tk=40)
    joined = torch.stack((q, k, v), dim=-1)
    assert torch.equal(int8_attention(*joined.unbind(-1)), int8_attention(q, k, v))
    mask = masks(1, 2, 40, 40)["bool"]
    assert torch.equal(int8_attention(q, k, v, mask.mT.contiguous().mT), int8_attention(q, k, v, mask))


@pytest.mark.parametrize(
    ("change", "error", "text"),
    (
        ({"k": torch.float32}, TypeError, "q, k and v must all be"),
        ({"q": (1, 2, 40, 32)}, ValueError, "q must be"),
        ({"k": (1, 3, 70, 64), "v": (1, 3, 70, 64)}, ValueError, "divide"),
        ({"mask": (2, 40, 71)}, ValueError, "broadcastable"),
        ({"mask": torch.int32}, TypeError, "mask must be"),
    ),
    ids=str,
)
def test_bad_arguments(change, error, text):
    given = dict(zip("qkv", operands(), strict=True))
    for name, value in change.items():
        like = given.get(name, torch.zeros(2, 40, 70, device=DEVICE))
        given[name] = like.to(value) if isinstance(value, torch.dtype) else like.new_zeros(value)
    with pytest.raises(error, match=text):
        int8_attention(**given)


def test_gradients_and_narrow_heads_are_refused():
    q, k, v = operands()
    with pytest.raises(ValueError, match="heads of 129 to 256"):
        float_attention(q, k, v)
    with pytest.raises(ValueError, match="heads of 129 to 256"):
        float_attention(*operands(width=256, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="no gradient"):
        int8_attention(q.requires_grad_(), k, v)


def test_operators():
    q, k, v = operands(tq=20, tk=30)
    mask = masks(1, 2, 20, 30)["bool"]
    torch.library.opcheck(torch.ops.int8_dit.int8_attention.default, (q, k, v, mask, 0.1))
    torch.library.opcheck(torch.ops.int8_dit.float_attention.default, (*operands(tq=20, tk=30, **FLOATS), mask, 0.1))


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
def test_captured_in_a_graph():
    q, k, v = operands(tq=300, tk=700, width=128)
    expected = int8_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = int8_attention(q, k, v)
    graph.replay()
    assert torch.equal(result, expected)


def test_a_gradient_passes_exact_attention():
    """It is PyTorch's own: the kernel has none."""
    gradients = []
    for attend in (float_attention, F.scaled_dot_product_attention):
        given = [x.detach().requires_grad_() for x in operands(tq=5, tk=7, width=136)]
        attend(*given).sum().backward()
        gradients.append([x.grad for x in given])
    assert all(torch.equal(one, other) for one, other in zip(*gradients, strict=True))
