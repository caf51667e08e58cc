"""Calls that only video models make of their blocks."""

import pytest
import torch

from support.tensors import relative_error

AV = "LTX-2.3 block"


def outputs_of(block, family, call, change, **options):
    """What a block returns; `change` changes its arguments."""
    args, kwargs = block_arguments(family, call)
    args, kwargs = change(args, kwargs)
    with torch.inference_mode():
        outputs = block(*args, **kwargs, transformer_options=options)
    return [output.double() for output in (outputs if isinstance(outputs, tuple) else (outputs,))]


def block_arguments(family, call):
    from support import fusable_blocks

    return fusable_blocks.FAMILIES[family].arguments(call)


def unchanged(args, kwargs):
    return args, kwargs


def silent(args, kwargs):
    """A video without sound: a stream of no tokens."""
    (video, sound), *rest = args
    return ((video, sound[:, :0]), *rest), kwargs


def guided(args, kwargs):
    """A guide in the last two tokens."""
    from comfy.ldm.lightricks.model import GuideAttentionMask

    tokens = args[0][0].shape[1]
    return args, kwargs | {"self_attention_mask": GuideAttentionMask(tokens, tokens - 2, 2, torch.tensor([[0.5, 0.0]]))}


def of_one_frame(args, kwargs):
    """One time step for all frames."""
    from comfy.ldm.lightricks.av_model import CompressedTimestep

    def one(value):
        if not isinstance(value, CompressedTimestep):
            return value
        return CompressedTimestep(value.data[:, :1], 15, per_frame=True)

    return args, {name: one(value) for name, value in kwargs.items()}


@pytest.mark.parametrize(
    "change, options",
    (
        (unchanged, {"run_ax": False}),
        (unchanged, {"run_vx": False}),
        (unchanged, {"a2v_cross_attn": False}),
        (unchanged, {"v2a_cross_attn": False}),
        (unchanged, {"stg_skip_self_attn": True}),
        (silent, {}),
        (guided, {}),
        (of_one_frame, {}),
    ),
    ids=("no sound", "sound only", "no a2v", "no v2a", "skipped attention", "silent", "guided", "one time step"),
)
def test_calls_of_ltx_2(blocks, fused_runs, change, options):
    from comfy.ldm.lightricks.model import CrossAttention

    known = CrossAttention.forward.__code__.co_consts
    if "stg_skip_self_attn" in options and "stg_skip_self_attn" not in known:
        pytest.skip("this ComfyUI's attention cannot be skipped")
    own = outputs_of(blocks.unfused(AV), AV, blocks.Call(), change, **options)
    block = blocks.fused(AV)
    first = outputs_of(block, AV, blocks.Call(), change, **options)
    assert all(map(torch.equal, first, own))
    count = len(fused_runs)
    second = outputs_of(block, AV, blocks.Call(), change, **options)
    # In the second call the fused forward ran, and ComfyUI's own, which sums in place, did not.
    assert count and len(fused_runs) == 2 * count
    for output, expected in zip(second, own, strict=True):
        assert output.shape == expected.shape
        assert not expected.numel() or relative_error(output, expected) < 0.02


def test_sound_is_compared_even_after_a_silent_video(blocks, fused_runs):
    block = blocks.fused(AV)
    outputs_of(block, AV, blocks.Call(), silent)
    own = blocks.run(blocks.unfused(AV), AV)
    assert all(map(torch.equal, blocks.run(block, AV), own))


H3 = "MiniMax H3"


def in_segments(*segments):
    return lambda args, kwargs: ((*args[:2], list(segments), *args[3:]), kwargs)


@pytest.mark.parametrize(
    "segments, fits",
    (
        (((0, 5, 3),), True),
        (((0, 1, 1), (1, 3, 5), (3, 5, 0)), True),
        (((0, 2, 1), (2, 4, 0)), False),  # the last token has none
        (((0, 2, 1), (2, 5, -1)), False),
    ),
)
def test_segments_of_minimax(blocks, fused_runs, segments, fits):
    change = in_segments(*segments)
    own = outputs_of(blocks.unfused(H3), H3, blocks.Call(), change)
    block = blocks.fused(H3)
    assert all(map(torch.equal, outputs_of(block, H3, blocks.Call(), change), own))
    (output,), (expected,) = outputs_of(block, H3, blocks.Call(), change), own
    assert relative_error(output, expected) < 0.02 and len(fused_runs) == (4 if fits else 0)


@pytest.mark.parametrize("tokens", (15, 14))
def test_modulations_of_frames_are_those_of_their_tokens(blocks, tokens):
    """Three frames; with 14 tokens the last one is shorter."""
    from int8_dit.kernels import Norm
    from int8_dit.nodes.blocks import steps

    call = blocks.Call(samples=2, tokens=tokens)
    x, scale, shift = call.stream(), *(call.randn(2, 3, blocks.WIDTH, seed=seed) for seed in (4, 5))
    rows = steps.rows_of_groups(3, x)
    for layers in ((torch.nn.Identity(),), (torch.nn.Identity(), torch.nn.Identity())):
        outputs = [
            list(steps.project_normed(layers, x, Norm("rms", 1e-6), scale, shift, rows, grouped=grouped))
            for grouped in (True, False)
        ]
        assert all(torch.equal(*pair) for pair in zip(*outputs, strict=True)) and len(outputs[0]) == len(layers)
        assert outputs[0][0].shape == x.shape
