"""Blocks on the fused producers: as exact as ComfyUI's own, and run only where nothing needs those."""

import pytest
import torch

from support.tensors import relative_error

FAMILIES = (
    "Ideogram 4", "Lumina 2", "Z-Image", "context refiner", "Flux.1 double", "Flux.1 single", "Flux.2 double",
    "Flux.2 single", "yak double", "yak single", "Qwen-Image", "Wan t2v", "Wan i2v", "Wan 2.2",
)  # fmt: skip
# Both round to INT8, at slightly different values: which of them is luckier with a few tokens is chance.
AS_EXACT = 1.1
KINDS = ("plain", "smoothed", "rotated", "protected", "16 bits")


@pytest.fixture
def small(pack):
    from support import small_models

    return small_models


@pytest.fixture
def blocks(pack):
    from support import fusable_blocks

    return fusable_blocks


@pytest.fixture
def fused_runs(pack, monkeypatch):
    """A list that grows with what only fused forwards do."""
    from int8_dit.nodes.blocks import steps

    calls, run = [], steps.gated_residual
    monkeypatch.setattr(steps, "gated_residual", lambda *args: calls.append(1) or run(*args))
    return calls


def errors(outputs, expected):
    return [relative_error(a, b) for a, b in zip(outputs, expected, strict=True)]


def test_the_families_are_those_of_the_table(blocks):
    assert tuple(blocks.FAMILIES) == FAMILIES and blocks.KINDS == KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_fused_block_is_as_exact(blocks, fused_runs, family, kind):
    if kind == "16 bits" and not blocks.takes_activation_bits():
        pytest.skip("no layers with 16-bit activations yet")
    expected = blocks.run(blocks.exact(family), family)
    own = blocks.run(blocks.unfused(family, kind), family)
    block = blocks.fused(family, kind)
    first = blocks.run(block, family)
    assert all(torch.equal(a, b) for a, b in zip(first, own, strict=True))
    assert fused_runs
    fused_runs.clear()
    second = blocks.run(block, family)
    assert fused_runs
    for error, usual in zip(errors(second, expected), errors(own, expected), strict=True):
        assert error <= AS_EXACT * usual


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("family", FAMILIES)
def test_as_exact_in_half_precision_with_a_modulation_per_sample(blocks, fused_runs, family, dtype):
    call = blocks.Call(samples=3, tokens=7, dtype=dtype)
    expected = blocks.run(blocks.exact(family), family, blocks.Call(samples=3, tokens=7))
    own = blocks.run(blocks.unfused(family, dtype=dtype), family, call)
    block = blocks.fused(family, dtype=dtype)
    blocks.run(block, family, call)
    fused_runs.clear()
    outputs = blocks.run(block, family, call)
    clamps = dtype == torch.float16 and family in ("Lumina 2", "Z-Image", "context refiner")
    assert bool(fused_runs) != clamps
    for error, usual in zip(errors(outputs, expected), errors(own, expected), strict=True):
        assert error <= AS_EXACT * usual
