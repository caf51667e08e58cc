"""GGUF's blocks, made: their error beside llama.cpp's, read by the `gguf` package, ggml's own."""

from pathlib import Path

import pytest
import torch

from kernels import GGUF_FORMATS, dequantize_gguf, quantize_gguf
from support.tensors import DEVICE, random_float, relative_error

gguf = pytest.importorskip("gguf")

MADE = ("Q4_K", "Q5_K", "Q6_K", "Q8_0")
# Relative error of llama.cpp's blocks (llama-cpp-python 0.3.36) for weights [1024, 4608], and for one of a model.
LLAMA_CPP = {
    "normal": (0.07134, 0.03611, 0.01773, 0.00535),
    "normal x 0.001": (0.07154, 0.03698, 0.02052, 0.00543),
    "Student t, 4 degrees": (0.08665, 0.04384, 0.02286, 0.00731),
    "uniform": (0.05458, 0.02761, 0.01325, 0.00376),
    "trained": (0.06813, 0.03450, 0.01690, 0.00512),
}
MODEL = Path(__file__).resolve().parents[2] / "data" / "glyph_dit.safetensors"
CASES = [(name, kind, error) for kind, errors in LLAMA_CPP.items() for name, error in zip(MADE, errors, strict=True)]


def weight_of(kind):
    if kind == "trained":
        safetensors = pytest.importorskip("safetensors.torch")
        (weight,) = (
            tensor for key, tensor in safetensors.load_file(MODEL).items() if key.endswith("0.x_block.mlp.fc2.weight")
        )
        return weight.float().to(DEVICE)
    normal = random_float(64, 4608, seed=3)
    if kind == "uniform":
        return torch.erf(normal / 2**0.5)
    if kind.startswith("Student"):
        return normal / (sum(random_float(64, 4608, seed=seed).square() for seed in range(4, 8)) / 4).sqrt()
    return normal * (0.001 if "0.001" in kind else 1)


def read(blocks, name):
    """By ggml's own reader."""
    decoded = gguf.quants.dequantize(blocks.cpu().numpy(), gguf.GGMLQuantizationType[name])
    return torch.from_numpy(decoded).to(blocks.device)


@pytest.mark.parametrize("name, kind, error", CASES)
def test_no_worse_than_llama_cpp(name, kind, error):
    weight = weight_of(kind)
    blocks = quantize_gguf(weight, name)
    form = GGUF_FORMATS[name]
    assert blocks.dtype == torch.uint8
    assert blocks.shape == (weight.shape[0], weight.shape[1] // form.weights * form.bytes)
    assert relative_error(read(blocks, name), weight) <= 1.02 * error


def test_q8_0_is_ggml_s_byte_for_byte():
    weight = torch.cat(
        [random_float(64, 512), random_float(64, 512, seed=1) * 1e-5, torch.zeros(1, 512, device=DEVICE)]
    )
    theirs = gguf.quants.quantize(weight.cpu().numpy(), gguf.GGMLQuantizationType.Q8_0)
    assert torch.equal(quantize_gguf(weight, "Q8_0").cpu(), torch.from_numpy(theirs))


# The coarsest step of a block, relative to its largest weight: a block of the first two spans both signs.
STEPS = {"Q4_K": 2 / 15, "Q5_K": 2 / 31, "Q6_K": 1 / 31, "Q8_0": 1 / 127}


def outliers():
    weight = random_float(4, 512) * 0.01
    weight[:, 5] = 1000
    return weight


EDGES = {
    "zeros": lambda: torch.zeros(2, 512, device=DEVICE),
    "a constant": lambda: torch.full((2, 512), 0.3, device=DEVICE),
    "a negative constant": lambda: torch.full((2, 512), -0.3, device=DEVICE),
    "all positive": lambda: random_float(4, 512).abs(),
    "all negative": lambda: -random_float(4, 512).abs(),
    "far from zero": lambda: 5 + 0.1 * random_float(4, 512),
    "outliers": outliers,
    "one weight that is not zero": lambda: torch.eye(256, device=DEVICE)[[0, 31, 200, 255]].repeat(1, 2),
    "two signs": lambda: random_float(4, 512).sign(),
    "the largest": lambda: torch.linspace(-63 * 65504, 63 * 65504, 512, device=DEVICE).repeat(2, 1),
}


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("edge", EDGES)
def test_every_weight_is_within_a_step(name, edge):
    weight = EDGES[edge]()
    decoded = read(quantize_gguf(weight, name), name)
    largest = weight.unflatten(1, (-1, GGUF_FORMATS[name].weights)).abs().amax(-1, keepdim=True)
    error = (decoded - weight).unflatten(1, (-1, GGUF_FORMATS[name].weights)).abs()
    assert (error <= STEPS[name] * largest).all()
    assert torch.equal(decoded, dequantize_gguf(quantize_gguf(weight, name), name, torch.float32))


@pytest.mark.parametrize("name", MADE)
@pytest.mark.parametrize("factor", (1e-6, 1e-8, 1e-20, 1e-38))
def test_what_fp16_cannot_scale_becomes_small_or_zero(name, factor):
    weight = random_float(4, 512) * factor
    decoded = read(quantize_gguf(weight, name), name)
    assert decoded.abs().max() <= 2 * weight.abs().max()


@pytest.mark.parametrize("name", ("Q4_K", "Q5_K", "Q6_K"))
def test_the_smallest_scales_keep_what_they_can(name):
    """fp16's smallest number is a scale like any other where the nearest one would be zero, or half of what is due."""
    weight = random_float(64, 512) * 1e-6
    assert relative_error(read(quantize_gguf(weight, name), name), weight) < 0.1


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_other_dtypes(dtype):
    weight = random_float(8, 512, dtype=dtype)
    assert torch.equal(quantize_gguf(weight, "Q4_K"), quantize_gguf(weight.float(), "Q4_K"))


def test_slices_make_the_same(monkeypatch):
    weight = random_float(24, 512)
    whole = {name: quantize_gguf(weight, name) for name in MADE}
    monkeypatch.setattr("kernels.weights.weight_reference._SLICE_ELEMENTS", 5 * 512)
    for name, blocks in whole.items():
        assert torch.equal(quantize_gguf(weight, name), blocks)
        assert torch.equal(dequantize_gguf(blocks, name, torch.float32), read(blocks, name))
    weight[17, 3] = torch.nan
    with pytest.raises(ValueError, match="weight has a NaN or Inf in output channel 17"):
        quantize_gguf(weight, "Q4_K")


@pytest.mark.parametrize("name", MADE)
def test_what_cannot_be_made_is_refused(name):
    weight = random_float(5, 512)
    for value, complaint in (
        (torch.nan, "a NaN or Inf"),
        (-torch.inf, "a NaN or Inf"),
        (5e6, "a value beyond 4126752"),
    ):
        broken = weight.clone()
        broken[3, 17] = value
        with pytest.raises(ValueError, match=f"weight has {complaint}.* in output channel 3"):
            quantize_gguf(broken, name)
    with pytest.raises(TypeError, match="weight must be bfloat16, float16 or float32"):
        quantize_gguf(weight.to(torch.int8), name)
    with pytest.raises(ValueError, match="weight must be 2-D"):
        quantize_gguf(weight[0], name)
    with pytest.raises(ValueError, match=f"K must be a multiple of {GGUF_FORMATS[name].weights} for {name}, got 500"):
        quantize_gguf(weight[:, :500], name)


def test_formats_that_are_only_read():
    with pytest.raises(ValueError, match="Q4_0 can be read but not made; the formats that can are Q8_0, Q4_K"):
        quantize_gguf(random_float(2, 32), "Q4_0")
    with pytest.raises(ValueError, match="'IQ4_XS' is no known GGUF format"):
        quantize_gguf(random_float(2, 32), "IQ4_XS")
