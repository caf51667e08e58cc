"""Caches of whole steps around this pack's MODELs: ComfyUI's EasyCache and LazyCache, and the ways in which packs like
TeaCache wrap a MODEL. They skip what they skip of ComfyUI's own MODEL, and nothing is learned of a skipped step.
"""

from functools import partial
from unittest.mock import patch

import comfy.sample
import pytest
import torch
from comfy.patcher_extension import WrappersMP
from comfy_extras.nodes_easycache import EasyCacheNode, LazyCacheNode

from int8_dit.nodes.deferred import install
from int8_dit.nodes.linears.layer_selection import quantizable_linears
from support.architectures import ARCHITECTURES

STEPS = 16
# How much may change. None of a cache's decisions is within 10 % of these, which is far more than INT8 moves them.
THRESHOLDS = {"Flux": 0.5, "Qwen-Image": 0.7, "Wan t2v": 0.5, "Ideogram 4": 0.2}


def easycache(model, threshold):
    return EasyCacheNode.execute(model, threshold, 0.15, 0.95, False).result[0]


def lazycache(model):
    return LazyCacheNode.execute(model, THRESHOLDS["Flux"], 0.15, 0.95, False).result[0]


class EverySecond:
    """Which calls compute: all but the odd ones. `kept` is what those give in place."""

    def __init__(self):
        self.calls, self.kept = 0, None

    def computes(self):
        self.calls += 1
        return self.calls % 2 == 1


def diffusion_model_wrapper(model):
    """A wrapper of the diffusion model, which adds what it did last to its input."""
    every, wrapped = EverySecond(), model.clone()

    def wrapper(executor, x, *args, **kwargs):
        if every.computes():
            every.kept = executor(x, *args, **kwargs) - x
        return x + every.kept

    wrapped.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "a cache", wrapper)
    return wrapped


def other_forward(model):
    """While a step runs, a part of the diffusion model is another function, which skips the blocks."""
    every, wrapped = EverySecond(), model.clone()
    diffusion_model = wrapped.model.diffusion_model
    own = diffusion_model.forward_orig

    def forward_orig(img, *args, **kwargs):
        if every.computes():
            every.kept = own(img, *args, **kwargs)
        return every.kept

    def wrapper(apply_model, arguments):
        with patch.object(diffusion_model, "forward_orig", forward_orig):
            return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    wrapped.set_model_unet_function_wrapper(wrapper)
    return wrapped


CACHES = {
    **{f"EasyCache, {name}": (name, partial(easycache, threshold=least)) for name, least in THRESHOLDS.items()},
    "LazyCache": ("Flux", lazycache),
    "a wrapper of the diffusion model": ("Flux", diffusion_model_wrapper),
    "another forward": ("Flux", other_forward),
}


def sampled(architecture, model):
    """What is sampled, and the steps in which layers ran, each time that they did."""
    shape = architecture.inputs["x"]
    text = torch.randn(architecture.inputs["context"], generator=torch.Generator().manual_seed(0))
    cond = [[text, {"pooled_output": torch.zeros(1, 64)}]]
    empty = torch.zeros(*shape[:-2], 8, 8)
    ran, step = [], [0]

    def count(*_):
        step[0] += 1

    first = next(iter(quantizable_linears(model).values()))
    hook = first.register_forward_pre_hook(lambda *_: ran.append(step[0]))
    noise = comfy.sample.prepare_noise(empty, 0)
    output = comfy.sample.sample(
        model, noise, STEPS, 1.0, "euler", "simple", cond, cond, empty, seed=0, callback=count, disable_pbar=True
    )
    hook.remove()
    return output, ran


@pytest.mark.parametrize("name, cache", CACHES.values(), ids=CACHES)
def test_the_same_steps_are_skipped(dit, small, name, cache, warned):
    architecture = ARCHITECTURES[name]
    with small.known_to_comfyui(architecture):
        stock, model = small.stock_of(architecture), small.int8_of(architecture)
        del warned[:]  # of the quantization
        expected, steps = sampled(architecture, cache(stock))
        output, ran = sampled(architecture, cache(model))
        assert ran == steps and 0 < len(steps) < STEPS
        uncached, all_steps = sampled(architecture, model)
        assert all_steps == [*range(STEPS)]
        int8_alone = dit.relative_error(uncached, sampled(architecture, stock)[0])
    assert dit.relative_error(output, expected) < 4 * int8_alone < dit.relative_error(output, uncached)
    assert not warned


def test_a_call_that_was_skipped_shows_nothing_and_is_made_once(dit):
    """Nothing was compared in it: the first one with layers is."""
    model, skips, made = dit.load(), [True, True, False], []

    def cache(executor, x, *args, **kwargs):
        made.append(skips.pop(0))
        return torch.zeros_like(x) if made[-1] else executor(x, *args, **kwargs)

    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, "a cache", cache)
    compared = []
    own = install._compared

    def seen(root, call, called):
        compared.append(own(root, call, called))
        return compared[-1]

    with patch.object(install, "_compared", seen):
        dit.sample(model, steps=3)
    assert made == [True, True, False]
    assert [found for _, found in compared] == [None, None, True]
