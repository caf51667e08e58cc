"""GGUF's blocks, read: as the `gguf` package, ggml's own, reads them, and as `quantize_weight` would round them."""

import re

import pytest
import torch

from kernels import (
    GGUF_FORMATS,
    LowRank,
    dequantize_gguf,
    expand_gguf,
    gguf_channel_scales,
    gguf_to_int8,
    quantize_gguf,
    quantize_weight,
)
from kernels.launching.launching import Layout
from kernels.linear.linear_reference import SMALLEST_SCALE
from support.tensors import DEVICE, low_rank_of_integers, random_float

# Blocks a row and rows: fewer and more than a program of the kernels takes, rows that end inside one.
SHAPES = {32: ((1, 1), (3, 5), (21, 13)), 256: ((1, 1), (2, 3), (9, 4))}


def random_blocks(name, rows, row_blocks, seed=0):
    """Random bytes on DEVICE whose fp16 scales are finite."""
    form = GGUF_FORMATS[name]
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.randint(0, 256, (rows, row_blocks, form.bytes), dtype=torch.uint8, generator=generator)
    for position in HIGH_BYTES[name]:
        blocks[..., position] &= 0b10111111  # below 2
    return blocks.flatten(1).to(DEVICE)


# Where the more significant bytes of the fp16 scales are.
HIGH_BYTES = {
    "Q4_0": (1,),
    "Q4_1": (1, 3),
    "Q5_0": (1,),
    "Q5_1": (1, 3),
    "Q8_0": (1,),
    "Q2_K": (81, 83),
    "Q3_K": (109,),
    "Q4_K": (1, 3),
    "Q5_K": (1, 3),
    "Q6_K": (209,),
}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
CASES = [(name, *shape) for name, form in GGUF_FORMATS.items() for shape in SHAPES[form.weights]]


def test_the_table_is_ggml_s():
    gguf = pytest.importorskip("gguf")
    for name, form in GGUF_FORMATS.items():
        kind = gguf.GGMLQuantizationType[name]
        assert (form.weights, form.bytes) == gguf.GGML_QUANT_SIZES[kind]


@pytest.mark.parametrize("name, rows, row_blocks", CASES)
def test_floats_are_those_of_ggml(path, name, rows, row_blocks):
    gguf = pytest.importorskip("gguf")
    blocks = random_blocks(name, rows, row_blocks)
    kind = gguf.GGMLQuantizationType[name]
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.cpu().numpy(), kind))
    assert expected.isfinite().all() and expected.unique().numel() > 4
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        weight = dequantize_gguf(blocks, name, dtype)
        assert weight.dtype == dtype
        if dtype == torch.bfloat16 and path == "kernel" and DEVICE == "cpu":  # Triton's interpreter cuts bits off
            torch.testing.assert_close(weight.float(), expected, rtol=2**-7, atol=0)
        else:
            assert torch.equal(weight.cpu(), expected.to(dtype))


@pytest.mark.parametrize("name, rows, row_blocks", CASES)
def test_int8_is_that_of_the_floats(path, name, rows, row_blocks):
    blocks = random_blocks(name, rows, row_blocks, seed=1)
    q, scale = quantize_weight(dequantize_gguf(blocks, name, torch.float32))
    found = gguf_channel_scales(blocks, name)
    assert found.dtype == torch.float32 and torch.equal(found, scale)
    for shape in ((rows,), (rows, 1)):
        expanded = expand_gguf(blocks, name, scale.view(shape))
        assert expanded.dtype == torch.int8 and torch.equal(expanded, q)
    both = gguf_to_int8(blocks, name)
    assert both[0].dtype == torch.int8 and torch.equal(both[0], q) and torch.equal(both[1], scale)


@pytest.mark.parametrize("name", GGUF_FORMATS)
def test_a_scale_of_another_is_divided_by_and_clamped(path, name):
    blocks = random_blocks(name, 4, 2, seed=2)
    values = dequantize_gguf(blocks, name, torch.float32)
    scale = gguf_channel_scales(blocks, name) * torch.tensor([0.3, 1.7, 1e-20, 1e30], device=DEVICE)
    expected = (values / scale[:, None]).round().clamp(-127, 127).to(torch.int8)
    assert torch.equal(expand_gguf(blocks, name, scale), expected) and (expected.abs() == 127).any()


# A format meets each shape and each dtype, a shape each dtype.
OF_LORAS = [(*case, DTYPES[(number + number // 3) % 3]) for number, case in enumerate(CASES)]


@pytest.mark.parametrize("name, rows, row_blocks, dtype", OF_LORAS)
def test_a_low_rank_is_added_before_rounding(path, name, rows, row_blocks, dtype):
    """Of ranks below and above what a step of the product takes."""
    blocks = random_blocks(name, rows, row_blocks, seed=3)
    decoded = dequantize_gguf(blocks, name, torch.float32)
    for rank in (1, 40):
        low_rank = low_rank_of_integers(rows, rank, decoded.shape[1], dtype, seed=rank)
        q, scale = quantize_weight(decoded + low_rank.up.float() @ low_rank.down.float())
        assert torch.equal(expand_gguf(blocks, name, scale, low_rank), q)


def test_the_scale_of_a_low_rank_holds_it_beside_any_weight(path):
    weight = random_float(70, 800)
    low_rank = LowRank(random_float(70, 24, seed=1) / 4, random_float(24, 800, seed=2) / 8)
    product = low_rank.up @ low_rank.down
    torch.testing.assert_close(low_rank.channel_scales(), product.abs().amax(1) / 127, rtol=1e-3, atol=0)
    for values in (weight, product / 2, -product / 2, weight * 0):
        blocks = quantize_gguf(values, "Q8_0")
        scale = gguf_channel_scales(blocks, "Q8_0") + low_rank.channel_scales()
        held = expand_gguf(blocks, "Q8_0", scale, low_rank) * scale[:, None]
        wanted = dequantize_gguf(blocks, "Q8_0", torch.float32) + product
        assert ((held - wanted).abs() <= 0.51 * scale[:, None]).all()


def test_a_low_rank_that_does_not_fit_is_refused():
    blocks = random_blocks("Q8_0", 4, 2)
    scale = gguf_channel_scales(blocks, "Q8_0")
    up, down = random_float(4, 3), random_float(3, 64)
    for wrong in ((up[:3], down), (up, down[:2]), (up, down[:, :32]), (up[:, :0], down[:0])):
        with pytest.raises(ValueError, match=r"up and down must be \[4, R\] and \[R, 64\]"):
            expand_gguf(blocks, "Q8_0", scale, LowRank(*wrong))
    with pytest.raises(TypeError, match="of one dtype"):
        expand_gguf(blocks, "Q8_0", scale, LowRank(up.half(), down))


def test_rows_without_a_scale_are_zeros(path):
    blocks = random_blocks("Q8_0", 6, 2)
    scale = torch.tensor([0.0, torch.nan, torch.inf, -1.0, 1e-40, 1.0], device=DEVICE)
    q = expand_gguf(blocks, "Q8_0", scale)
    assert not q[:5].any() and q[5].any()


@pytest.mark.parametrize("name", ("Q8_0", "Q4_K", "Q6_K"))
def test_rows_of_zeros_and_of_next_to_nothing(path, name):
    weight = random_float(3, 512)
    weight[1] = 0
    weight[2] *= 1e-30
    blocks = quantize_gguf(weight, name)
    scale = gguf_channel_scales(blocks, name)
    assert scale[0] > SMALLEST_SCALE and not scale[1:].any()
    assert not expand_gguf(blocks, name, scale)[1:].any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # of NumPy, under the interpreter
@pytest.mark.parametrize("bits", (0x7C00, 0x7E00), ids=("Inf", "NaN"))
@pytest.mark.parametrize("name", ("Q4_0", "Q6_K"))
def test_a_broken_scale_breaks_its_channel_and_no_other(path, name, bits):
    blocks = random_blocks(name, 3, 2)
    blocks[1, : GGUF_FORMATS[name].bytes] = 255  # no weight is 0: an Inf makes no NaN
    high = HIGH_BYTES[name][0]
    blocks[1, high - 1], blocks[1, high] = bits & 255, bits >> 8
    scale = gguf_channel_scales(blocks, name)
    assert scale[1].isnan() and scale[[0, 2]].isfinite().all()
    assert not expand_gguf(blocks, name, scale)[1].any()
    with pytest.raises(ValueError, match="weight has a NaN or Inf in output channel 1"):
        gguf_to_int8(blocks, name)


def test_rows_that_begin_anywhere(path):
    """A part of a larger tensor, as of a file mapped into memory."""
    blocks = random_blocks("Q4_K", 6, 2)
    shifted = torch.zeros(blocks.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view_as(blocks).copy_(blocks)
    for view in (shifted, blocks[::2], blocks[:, :144]):
        scale = gguf_channel_scales(view, "Q4_K")
        assert torch.equal(scale, gguf_channel_scales(view.clone(), "Q4_K"))
        q = expand_gguf(view, "Q4_K", scale)
        assert torch.equal(q, quantize_weight(dequantize_gguf(view, "Q4_K", torch.float32))[0])
        assert torch.equal(q, gguf_to_int8(view, "Q4_K")[0])


def test_blocks_that_begin_elsewhere_are_copied_after_others_that_were_not(nothing_kept, monkeypatch):
    operands, begins = Layout.operands, []

    def seen(layout, tensors, results):
        read = operands(layout, tensors, results)
        begins.append(read[0].data_ptr() % 16)
        return read

    monkeypatch.setattr(Layout, "operands", seen)
    blocks = random_blocks("Q4_K", 6, 2)
    shifted = torch.zeros(blocks.numel() + 1, dtype=torch.uint8, device=DEVICE)[1:].view_as(blocks).copy_(blocks)
    for view in (blocks, shifted):
        gguf_channel_scales(view, "Q4_K")
    assert begins == [0, 0]


def test_nothing_makes_nothing(path):
    for shape in ((0, 288), (3, 0)):
        blocks = torch.empty(shape, dtype=torch.uint8, device=DEVICE)
        scale = gguf_channel_scales(blocks, "Q4_K")
        assert torch.equal(scale, torch.zeros(shape[0], device=DEVICE))
        assert gguf_to_int8(blocks, "Q4_K")[0].shape == (shape[0], 2 * shape[1] * 256 // 288)
        assert expand_gguf(blocks, "Q4_K", scale).shape == (shape[0], 2 * shape[1] * 256 // 288)
        assert dequantize_gguf(blocks, "Q4_K").shape == (shape[0], 2 * shape[1] * 256 // 288)


def test_what_does_not_fit_is_refused():
    blocks, scale = random_blocks("Q4_K", 5, 2), torch.ones(5, device=DEVICE)
    readers = (dequantize_gguf, gguf_channel_scales, lambda *given: expand_gguf(*given, scale))
    for read in readers:
        with pytest.raises(ValueError, match=re.escape("'Q4_X' is no known GGUF format; known are Q4_0, Q4_1")):
            read(blocks, "Q4_X")
        with pytest.raises(TypeError, match="blocks must be uint8"):
            read(blocks.view(torch.int8), "Q4_K")
        with pytest.raises(ValueError, match="blocks must be 2-D"):
            read(blocks[0], "Q4_K")
        with pytest.raises(ValueError, match="rows of Q6_K must be a multiple of 210 bytes, got 288"):
            read(blocks, "Q6_K")
    with pytest.raises(TypeError, match="dtype must be bfloat16, float16 or float32"):
        dequantize_gguf(blocks, "Q4_K", torch.int8)
    with pytest.raises(ValueError, match="weight_scale must hold 1 or 5 values"):
        expand_gguf(blocks, "Q4_K", scale[:2])
    with pytest.raises(ValueError, match="different devices"):
        expand_gguf(blocks, "Q4_K", scale.to("meta"))
