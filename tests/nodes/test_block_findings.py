"""Slower, never wrong: a fused block is compared with ComfyUI's own again whenever a call may take another path."""

import functools

import pytest
import torch

from support.tensors import relative_error

FAMILY = "Ideogram 4"


@pytest.fixture
def changed_core(blocks, monkeypatch):
    """Let ComfyUI's own block give twice as much where `condition(args, options)`."""
    from comfy.ldm.ideogram4.model import Ideogram4TransformerBlock

    forward = Ideogram4TransformerBlock.forward

    def change(condition):
        @functools.wraps(forward)
        def changed(self, *args, transformer_options, **kwargs):
            output = forward(self, *args, transformer_options=transformer_options, **kwargs)
            return 2 * output if condition(args, transformer_options) else output

        monkeypatch.setattr(Ideogram4TransformerBlock, "forward", changed)

    return change


def call(block, blocks, mask=None, dtype=torch.float32, **options):
    (x, _, freqs, adaln), _ = blocks.FAMILIES[FAMILY].arguments(blocks.Call(dtype=dtype))
    with torch.inference_mode():
        return block(x, mask, freqs, adaln, transformer_options=options)


class Override:
    """An attention override; all are equal, and none is another."""

    def __call__(self, function, *args, **kwargs):
        return function(*args, **kwargs)


def override(value):
    def twice(function, *args, **kwargs):
        return value * function(*args, **kwargs)

    return twice


@pytest.mark.parametrize(
    "condition, options",
    (
        (lambda args, options: "new" in options, {"new": None}),
        (lambda args, options: options.get("flag") is True, {"flag": True}),
        (lambda args, options: options.get("number") is not None, {"number": 1.0}),
        (lambda args, options: args[1] is not None, {"mask": torch.zeros(1, 1, 5, 5)}),
        (lambda args, options: "post_input" in options.get("patches", {}), {"patches": {"post_input": [None]}}),
    ),
    ids=("another option", "a flag", "another kind of value", "a mask", "patches"),
)
def test_a_path_that_only_some_calls_take(blocks, fused_runs, changed_core, condition, options):
    changed_core(condition)
    block, own = blocks.fused(FAMILY), blocks.unfused(FAMILY)
    before = {"flag": False, "number": None}
    for _ in range(2):
        fused_runs.clear()
        call(block, blocks, **before)
        assert fused_runs
    for _ in range(3):
        assert torch.equal(call(block, blocks, **before | options), call(own, blocks, **before | options))
        fused_runs.clear()
        output = call(block, blocks, **before)
        assert fused_runs and relative_error(output, call(own, blocks, **before)) < 0.01


def test_another_override_is_asked_for_itself(blocks, fused_runs):
    block, own = blocks.fused(FAMILY), blocks.unfused(FAMILY)
    for one in (Override(), override(2.0), override(-1.0)):
        for times in range(2):
            fused_runs.clear()
            output, expected = (call(b, blocks, optimized_attention_override=one) for b in (block, own))
            assert torch.equal(output, expected) if times == 0 else relative_error(output, expected) < 0.01
            assert fused_runs


def test_nothing_holds_an_override(blocks, fused_runs):
    import gc
    import weakref

    block, one = blocks.fused(FAMILY), Override()
    for _ in range(2):
        call(block, blocks, optimized_attention_override=one)
    gone = weakref.ref(one)
    del one
    gc.collect()
    assert gone() is None


def test_an_override_that_cannot_be_recognised(blocks, fused_runs):
    class Unhashable(Override):
        __hash__ = None

    block, own = blocks.fused(FAMILY), blocks.unfused(FAMILY)
    for _ in range(2):
        output = call(block, blocks, optimized_attention_override=Unhashable())
        assert torch.equal(output, call(own, blocks)) and not fused_runs


def test_a_block_that_is_built_otherwise_is_asked_for_itself(blocks, fused_runs, monkeypatch):
    """Blocks of one class share what is known, but not with one that has another switch."""
    from int8_dit.nodes.blocks.install import fused_class
    from int8_dit.nodes.blocks.table import BLOCKS

    first, second = (blocks.unfused("Flux.1 single") for _ in range(2))
    shared = fused_class(type(first), BLOCKS["comfy.ldm.flux.layers.SingleStreamBlock"])
    first.__class__ = second.__class__ = shared
    second.yak_mlp = None  # falsy as well, so that the block computes the same
    own = blocks.run(blocks.unfused("Flux.1 single"), "Flux.1 single")
    blocks.run(first, "Flux.1 single")
    assert all(torch.equal(a, b) for a, b in zip(blocks.run(second, "Flux.1 single"), own, strict=True))


def test_another_dtype_is_asked_for_itself(blocks, fused_runs):
    block = blocks.fused(FAMILY, dtype=torch.bfloat16)
    own = blocks.unfused(FAMILY, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float16):
        assert torch.equal(call(block, blocks, dtype=dtype), call(own, blocks, dtype=dtype))
        fused_runs.clear()
        call(block, blocks, dtype=dtype)
        assert fused_runs


# What is said of it


def lines(caplog):
    return [record.getMessage() for record in caplog.records if "runs ComfyUI's own forward" in record.getMessage()]


def test_an_unknown_part_is_said_once(blocks, fused_runs, caplog):
    class Novelty(torch.nn.Module):
        pass

    block = blocks.fused(FAMILY)
    block.attention.novelty = Novelty()
    for _ in range(2):
        call(block, blocks)
    (line,) = lines(caplog)
    assert line.endswith(f"unknown part {Novelty.__qualname__} of Ideogram4Attention") and not fused_runs


def test_so_is_a_patch(blocks, fused_runs, caplog):
    block = blocks.fused(FAMILY)
    for _ in range(2):
        call(block, blocks, patches={"mlp_patch": [print]})
    (line,) = lines(caplog)
    assert line.endswith("the MODEL has the patch mlp_patch")


def test_weights_that_a_fused_forward_would_not_read(blocks, fused_runs, caplog):
    block = blocks.fused(FAMILY)
    block.attention.register_parameter("temperature", torch.nn.Parameter(torch.ones(1)))
    call(block, blocks)
    assert not fused_runs and lines(caplog)[0].endswith("unknown part Ideogram4Attention of Ideogram4TransformerBlock")


def test_a_part_of_comfyuis_own_that_is_new_is_compared(blocks, fused_runs, monkeypatch):
    """A class that a later ComfyUI has split off."""
    import comfy.ldm.lumina.model as lumina

    class SplitOff(lumina.FeedForward):
        def forward(self, x):
            return super().forward(x)

    SplitOff.__module__ = SplitOff.forward.__module__ = lumina.__name__
    block = blocks.fused(FAMILY)
    block.feed_forward.__class__ = SplitOff
    own = call(blocks.unfused(FAMILY), blocks)
    assert torch.equal(call(block, blocks), own) and fused_runs
    fused_runs.clear()
    assert relative_error(call(block, blocks), own) < 0.01 and fused_runs
