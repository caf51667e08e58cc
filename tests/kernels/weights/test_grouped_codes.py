"""Weights in codes of 4 or 6 bits to INT8: by their definition, as comfy-kitchen does it, and with LoRAs added."""

import re

import pytest
import torch

from kernels.weights.weight_ops import expand_codes
from kernels.weights.weight_reference import GroupedCodes, LowRank
from support.covering import covering
from support.tensors import DEVICE, low_rank_of_integers, random_float

# Rows, K, group and bits: fewer and more quads than a program of the kernels takes, rows that end inside of one.
SHAPES = ((1, 16, 4, 4), (3, 48, 16, 4), (5, 1040, 8, 4), (37, 272, 16, 4), (2, 32, 32, 6), (19, 544, 16, 6))
CASES = [(*shape, codebook) for shape in SHAPES for codebook in ((False, True) if shape[3] == 4 else (False,))]


def random_codes(rows, channels, group, bits, codebook, seed=0, dtype=torch.float8_e4m3fn):
    """Random bytes on DEVICE, and scales of all the exponents that FP8 has, of either sign and none."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(-128, 128, (rows, channels * bits // 8), dtype=torch.int8, generator=generator)
    scale = torch.randint(0, 256, (rows, channels // group), dtype=torch.uint8, generator=generator)
    scale = torch.where(scale & 127 == 127, 0x45, scale).view(torch.float8_e4m3fn).to(dtype)
    levels = torch.randn(16, generator=generator).sort().values.to(DEVICE) if codebook else None
    return GroupedCodes(codes.to(DEVICE), scale.to(DEVICE), levels, group)


def defined(weight):
    """What codes stand for, column by column in float64: level times scale has at most 28 bits."""
    rows, channels = weight.shape
    codes = weight.codes.cpu().view(torch.uint8).int()
    out = torch.empty(rows, channels, dtype=torch.int8)
    for column in range(channels):
        code = codes[:, column // 2] >> 4 * (column % 2) & 15
        if weight.bits == 6:
            code = code | (codes[:, channels // 2 + column // 4] >> 2 * (column % 4) & 3) << 4
        level = code - (32 if weight.bits == 6 else 8) if weight.codebook is None else weight.codebook.cpu()[code]
        values = level.float() * weight.scale.cpu()[:, column // weight.group].float()
        out[:, column] = values.double().round().clamp(-127, 127).to(torch.int8)
    return out.to(DEVICE)


@pytest.mark.parametrize("rows, channels, group, bits, codebook", CASES)
def test_codes_stand_for_what_their_definition_says(path, rows, channels, group, bits, codebook):
    weight = random_codes(rows, channels, group, bits, codebook)
    assert weight.shape == (rows, channels) and weight.bits == bits
    whole = expand_codes(weight)
    assert whole.dtype == torch.int8 and torch.equal(whole, defined(weight))
    assert whole.unique().numel() > 1 and ((whole.abs() == 127).any() or channels < 100)


@pytest.mark.parametrize("dtype", (torch.float32, torch.float16, torch.bfloat16))
def test_scales_of_other_dtypes(path, dtype):
    weight = random_codes(5, 96, 16, 4, True, dtype=dtype)
    assert torch.equal(expand_codes(weight), defined(weight))


def test_halves_are_rounded_to_even(path):
    codes = torch.arange(-128, 128, dtype=torch.int8, device=DEVICE).view(8, 32)
    weight = GroupedCodes(codes, torch.full((8, 4), 0.5, device=DEVICE).to(torch.float8_e4m3fn), None, 16)
    assert torch.equal(expand_codes(weight), defined(weight))
    assert set(expand_codes(weight).unique().tolist()) == {-4, -3, -2, -1, 0, 1, 2, 3} | {4}


@pytest.mark.parametrize("bits", (4, 6))
@pytest.mark.parametrize("group", (16, 32))
@pytest.mark.parametrize("heavy", (False, True), ids=("normal", "heavy-tailed"))
def test_what_comfy_kitchen_quantizes_is_expanded_as_it_does(path, bits, group, heavy):
    """Both codebooks that it has, and none."""
    kitchen = pytest.importorskip("comfy_kitchen.tensor.w4a8_int8", reason="comfy-kitchen before W4A8")
    from comfy_kitchen.backends.eager.w4a8_int8 import _dequant_int4_grouped_to_int8

    weight = random_float(24, 512)
    weight = weight**3 if heavy else weight
    quantized = kitchen.quantize_w4a8_int8_weight(weight.cpu(), group, 256 if not heavy else 4, bits=bits)
    codes, scale, _, correction, codebook = quantized
    assert correction is None and (codebook is None) == (bits == 6)
    expected = _dequant_int4_grouped_to_int8(codes, scale, codebook, group)
    on_device = (None if tensor is None else tensor.to(DEVICE) for tensor in (codes, scale, codebook))
    assert torch.equal(expand_codes(GroupedCodes(*on_device, group)).cpu(), expected)


@pytest.mark.parametrize("case, dtype", covering(CASES, (torch.bfloat16, torch.float16, torch.float32)))
def test_a_low_rank_is_added_before_rounding(path, case, dtype):
    """Of ranks below and above what a step of the product takes; scales are powers of two, so that nothing rounds."""
    rows, channels, group, bits, codebook = case
    weight = random_codes(rows, channels, group, bits, codebook, seed=1)
    scale = 2.0 ** torch.arange(-rows, 0, device=DEVICE).clamp(min=-6)
    for rank in (1, 40):
        low_rank = low_rank_of_integers(rows, rank, channels, dtype, seed=rank)
        larger = scale + low_rank.channel_scales()
        values = expand_codes(weight) * scale[:, None] + low_rank.up.float() @ low_rank.down.float()
        expected = (values / larger[:, None]).round().clamp(-127, 127).to(torch.int8)
        for shape in ((rows,), (rows, 1)):
            assert torch.equal(expand_codes(weight, scale.view(shape), larger.view(shape), low_rank), expected)


def test_a_low_rank_of_many_rows_and_its_scale(path):
    weight = random_codes(70, 800, 16, 4, True, seed=2)
    scale = torch.rand(70, device=DEVICE) + 0.01
    low_rank = LowRank(random_float(70, 24, seed=1) / 4, random_float(24, 800, seed=2) / 8)
    larger = scale + low_rank.channel_scales()
    wanted = expand_codes(weight) * scale[:, None] + low_rank.up @ low_rank.down
    held = expand_codes(weight, scale, larger, low_rank)
    assert ((held * larger[:, None] - wanted).abs() <= 0.51 * larger[:, None]).all()


def test_rows_without_a_scale_are_zeros(path):
    weight = random_codes(6, 32, 16, 4, False)
    larger = torch.tensor([0.0, torch.nan, torch.inf, -1.0, 1e-40, 1.0], device=DEVICE)
    low_rank = low_rank_of_integers(6, 1, 32, torch.float32)
    whole = expand_codes(weight, torch.ones(6, device=DEVICE), larger, low_rank)
    assert not whole[:5].any() and whole[5].any()


# What is not well-formed


def test_nothing_makes_nothing(path):
    weight = random_codes(3, 32, 16, 4, True)
    assert expand_codes(weight._replace(codes=weight.codes[:0], scale=weight.scale[:0])).shape == (0, 32)
    assert expand_codes(weight._replace(codes=weight.codes[:, :0], scale=weight.scale[:, :0])).shape == (3, 0)


def test_rows_that_begin_anywhere(path):
    weight = random_codes(6, 64, 16, 6, False)
    shifted = torch.zeros(weight.codes.numel() + 1, dtype=torch.int8, device=DEVICE)[1:].view_as(weight.codes)
    shifted.copy_(weight.codes)
    assert torch.equal(expand_codes(weight._replace(codes=shifted)), defined(weight))
    every_second = weight._replace(codes=weight.codes[::2], scale=weight.scale[::2])
    assert torch.equal(expand_codes(every_second), defined(weight)[::2])


def test_what_does_not_fit_is_refused():
    weight = random_codes(4, 64, 16, 4, True)
    codes, scale = weight.codes, weight.scale
    for wrong, complaint in (
        (weight._replace(codes=codes[:, :24]), "rows of K = 64 codes must have 32 or 48 bytes, got 24"),
        (weight._replace(codes=codes[:3]), "must be rows, got shapes [3, 32] and [4, 4]"),
        (weight._replace(scale=scale[:, :2], codes=random_codes(4, 24, 4, 4, True).codes, group=12), "got 12"),
        (weight._replace(scale=scale[:, :3], codes=codes[:, :6], group=4), "must be a multiple of 16"),
        (weight._replace(codebook=weight.codebook[:8]), "must have 16 levels"),
        (random_codes(4, 64, 16, 6, True), "must have 16 levels, for 4 bits"),
        (random_codes(4, 48, 16, 6, False), "for 6 bits K must be one of 32"),
        (random_codes(4, 64, 8, 6, False), "the group one of 16"),
        (weight._replace(scale=scale.to("meta")), "different devices"),
    ):
        with pytest.raises(ValueError, match=re.escape(complaint)):
            expand_codes(wrong)
    for wrong, complaint in (
        (weight._replace(codes=codes.view(torch.uint8)), "codes must be int8"),
        (weight._replace(scale=scale.view(torch.uint8)), "float8_e4m3fn or floats, got torch.uint8"),
        (weight._replace(codebook=weight.codebook.half()), "the codebook must be float32"),
    ):
        with pytest.raises(TypeError, match=re.escape(complaint)):
            expand_codes(wrong)
    ones, low_rank = torch.ones(4, device=DEVICE), low_rank_of_integers(4, 2, 64, torch.float32)
    for wrong in (
        (ones, ones, low_rank._replace(up=low_rank.up[:3])),
        (ones[:2], ones, low_rank),
        (ones, ones[:2], low_rank),
        (ones, ones.to("meta"), low_rank),
    ):
        with pytest.raises(ValueError, match=r"must|different devices"):
            expand_codes(weight, *wrong)
    with pytest.raises(TypeError, match="a low_rank is added to a weight with a channel_scale"):
        expand_codes(weight, ones, None, low_rank)
