"""Blocks of many families whose own forwards run with their work deferred: as exact as one by one, in every form."""

from contextlib import nullcontext

import pytest
import torch

from support.architectures import BLOCKS
from support.tensors import relative_error

# Both round to INT8, at slightly different values: which of them is luckier with a few tokens is chance.
AS_EXACT = 1.1
KINDS = ("plain", "smoothed", "rotated", "protected", "16 bits")


@pytest.fixture
def blocks(pack):
    from support import small_blocks

    return small_blocks


@pytest.fixture(params=(False, pytest.param(True, marks=pytest.mark.slow)), ids=("this ComfyUI", "of today"))
def any_comfyui(pack, request):
    """The ComfyUI that is there, and its interface of today."""
    from support.comfyui_today import today

    with today() if request.param else nullcontext():
        yield


@pytest.fixture
def taken(pack, monkeypatch):
    """How many linears and residuals took a deferred operand."""
    from int8_dit.nodes.deferred import mode, takers

    counts = {"linear": 0, "residual": 0}

    def counting(name):
        own = getattr(takers, name)

        def take(*args, **kwargs):
            result = own(*args, **kwargs)
            counts[name] += result is not None
            return result

        return take

    monkeypatch.setattr(mode, "LEAST_ROWS", 2)
    for name in counts:
        monkeypatch.setattr(takers, name, counting(name))
    return counts


def assert_as_exact(outputs, own, expected):
    for output, usual, exact in zip(outputs, own, expected, strict=True):
        assert relative_error(output, exact) <= AS_EXACT * relative_error(usual, exact)


def test_the_families_are_those_of_the_table(blocks):
    assert tuple(blocks.FAMILIES) == BLOCKS and blocks.KINDS == KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", BLOCKS)
def test_a_deferred_block_is_as_exact(any_comfyui, blocks, taken, family, kind):
    block = blocks.int8(family, kind)
    own = blocks.run(block, family)
    outputs = blocks.run(block, family, defers=True)
    assert taken["linear"]
    assert_as_exact(outputs, own, blocks.run(blocks.exact(family), family))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("family", BLOCKS)
def test_as_exact_in_half_precision_with_a_modulation_per_sample(blocks, taken, family, dtype):
    call = blocks.Call(samples=3, tokens=7, dtype=dtype)
    block = blocks.int8(family, dtype=dtype)
    own = blocks.run(block, family, call)
    outputs = blocks.run(block, family, call, defers=True)
    assert taken["linear"]
    assert_as_exact(outputs, own, blocks.run(blocks.exact(family), family, blocks.Call(samples=3, tokens=7)))
