"""GGUF's blocks as the `gguf` package, ggml's own, reads and writes them."""

import pytest
import torch

from kernels.numerics.gguf_blocks import Q4_K, Q8_0

gguf = pytest.importorskip("gguf")
FORMATS = {"Q8_0": (Q8_0, 0.0054), "Q4_K": (Q4_K, 0.079)}


@pytest.fixture
def weight():
    return torch.randn(256, 4608, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", FORMATS)
def test_ggml_reads_what_is_written_here(weight, name):
    blocks, error = FORMATS[name]
    kind = gguf.GGMLQuantizationType[name]
    assert (blocks.weights, blocks.bytes) == gguf.GGML_QUANT_SIZES[kind]
    written = blocks.quantize(weight)
    read = torch.from_numpy(gguf.quants.dequantize(written.flatten(1).numpy(), kind))
    assert torch.equal(blocks.dequantize(written, torch.float32), read)
    assert (read - weight).norm() / weight.norm() == pytest.approx(error, rel=0.02)


def test_q8_0_is_ggml_s_byte_for_byte(weight):
    theirs = torch.from_numpy(gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0))
    assert torch.equal(Q8_0.quantize(weight).flatten(1), theirs)


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_stay_zeros(name):
    blocks, _ = FORMATS[name]
    zeros = torch.zeros(2, 512)
    assert torch.equal(blocks.dequantize(blocks.quantize(zeros), torch.float32), zeros)
