"""A forward whose fused form fails is called once more, with what the first call was given as it was before it."""

import dataclasses

import comfy.model_management
import pytest
import torch

from int8_dit.nodes.deferred import comparisons, consumers
from support import deferred_forwards as forwards
from support.architectures import ARCHITECTURES
from support.deferred_forwards import randn


def sized(name, kind=None, **sizes):
    architecture = ARCHITECTURES[name]
    return dataclasses.replace(architecture, kind=kind or architecture.kind, sizes={**architecture.sizes, **sizes})


class Growing:
    """A patch as ComfyUI's control of Z-Image: each block adds to what the one before left, the last leaves nothing."""

    def __init__(self, blocks):
        self.blocks, self.left = blocks, None

    def __call__(self, args):
        self.left = args["img"] * 0.1 if self.left is None else self.left + args["img"] * 0.1
        args["img"] = args["img"] + self.left
        if args["block_index"] == self.blocks - 1:
            self.left = None
        return args


def controls(model):
    """HunyuanDiT takes each of them off the list."""
    text = {name: value for name, value in ARCHITECTURES["HunyuanDiT"].inputs.items() if name.startswith("text")}
    text |= {"encoder_hidden_states_t5": randn(1, 5, 64, seed=2)}
    return randn(1, 4, 16, 16), {}, lambda: {"control": {"output": [randn(1, 64, 128, seed=3)]}, **text}


def keys_of_earlier_frames(model):
    causal = model.model.diffusion_model
    caches = {"kv_caches": causal.init_kv_caches(1, 48, "cpu", torch.float32)}
    caches["crossattn_caches"] = causal.init_crossattn_caches(1, "cpu", torch.float32)
    return randn(1, 16, 1, 8, 8), {"ar_state": {"start_frame": 0, **caches}}, dict


def a_patch_with_a_state(model):
    return randn(1, 16, 1, 8, 8), {"patches": {"double_block": [Growing(2)]}}, dict


GIVEN = {
    "controls": (sized("HunyuanDiT", depth=4), controls),
    "keys": (sized("Wan t2v", "WAN21_CausalAR_T2V", causal_ar=True), keys_of_earlier_frames),
    "a patch": (sized("Wan t2v"), a_patch_with_a_state),
}


def fails(monkeypatch):
    """In the last block."""
    own = consumers.linear

    def linear(layer, *args):
        if layer.linear_name.startswith(("blocks.3.", "blocks.1.ffn.2")):
            raise RuntimeError("no such kernel")
        return own(layer, *args)

    monkeypatch.setattr(consumers, "linear", linear)


def differs(monkeypatch):
    monkeypatch.setattr(comparisons.Comparisons, "agree", lambda self: False)


@pytest.mark.parametrize("defect", (fails, differs))
@pytest.mark.parametrize("architecture, given", GIVEN.values(), ids=GIVEN)
def test_the_model_as_its_own_is_given_the_same(small, monkeypatch, warned, architecture, given, defect):
    with small.known_to_comfyui(architecture):
        model = small.int8_of(architecture)
    comfy.model_management.load_models_gpu([model])

    def outputs(wrappers):
        """Of two steps. The second goes on from what the first left."""
        x, options, more = given(model)
        options["wrappers"] = wrappers
        for sigma in (0.7, 0.4):
            text = randn(1, 6, 64, seed=1)
            yield model.model.apply_model(
                x.clone(), torch.full((1,), sigma), c_crossattn=text, transformer_options=options, **more()
            )

    with torch.inference_mode():
        expected = list(outputs({}))
        defect(monkeypatch)
        found = list(outputs(model.wrappers))
    assert all(map(torch.equal, found, expected))
    assert "unfused" in [said[0] for said in warned]


def test_a_text_encoder_as_its_own_is_given_the_same(monkeypatch, warned):
    """A list of tokens, of which its forward takes the images."""

    tokens = [randn(forwards.SAMPLES, forwards.TOKENS, forwards.WIDTH, seed=seed) for seed in (1, 2)]
    encoder, own = forwards.deferring(forwards.Block(), lambda block, tokens: block.out(block.norm(tokens.pop())))
    with torch.no_grad():
        expected = own(list(tokens))
        differs(monkeypatch)
        assert torch.equal(encoder(list(tokens)), expected)
    assert [said[0] for said in warned] == ["unfused"]
