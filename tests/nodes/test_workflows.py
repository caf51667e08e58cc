"""Workflows of ComfyUI's own nodes with INT8 MODELs: each result is checked against the float MODEL's in the same
workflow, and each node must leave the INT8 MODEL as it found it. More of merges and hooks: test_merges_and_hooks.py."""

from functools import cache
from types import SimpleNamespace

import comfy.hooks
import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy_extras import nodes_custom_sampler
from comfy_extras.nodes_custom_sampler import RandomNoise, SamplerCustomAdvanced
from comfy_extras.nodes_sd3 import SkipLayerGuidanceSD3

from glyphs import conditioning
from support import adapters
from support.tensors import relative_error

TEXT, OTHER_TEXT, STEPS, CFG = "INT8", "DIT3", 3, 3.0
KINDS = ("lora", "loha", "lokr")


@pytest.fixture(scope="module")
def files(dit, tmp_path_factory):
    """LoRAs of three kinds, another one, and a second model's file."""
    tensors = dit.tensors()
    weights = {layer: tensors[f"{layer}.weight"].float() for layer in dit.LINEARS}
    loras = {kind: getattr(adapters, kind)(weights, 0.2) for kind in KINDS}
    loras["other lora"] = adapters.lora(dict(reversed(weights.items())), 0.2)
    second = dit.with_delta(tensors, adapters.lora(weights, 0.4, rank=16))
    return loras, dit.write(tmp_path_factory.mktemp("second") / "second.safetensors", second)


@pytest.fixture(scope="module")
def graphs(dit, files):
    """What workflows are made of: two float MODELs, or the first smoothed and the second quantized while loading."""
    (loras, second), calibration = files, dit.recorded()
    comfy.model_management.unload_all_models()  # those of other tests, which need not be of inference mode
    with torch.inference_mode():  # as ComfyUI runs nodes
        smoothed = dit.quantize(dit.stock(), calibration=calibration)
        models = {"float": (dit.stock(), dit.stock(second)), "INT8": (smoothed, dit.load(second))}
    yield {kind: SimpleNamespace(dit=dit, first=a, second=b, loras=loras) for kind, (a, b) in models.items()}
    with torch.inference_mode():
        comfy.model_management.unload_all_models()


def text(words, hooks=None):
    context, pooled = conditioning.encode(words)
    return [[context, {"pooled_output": pooled, **({"hooks": hooks} if hooks else {})}]]


def guider(name, *arguments, **named):
    """A guider of comfy_extras' node."""
    return getattr(nodes_custom_sampler, name).execute(*arguments, **named).result[0]


def basic(model, hooks=None):
    return guider("BasicGuider", model, text(TEXT, hooks))


def cfg(model, hooks=None):
    return guider("CFGGuider", model, text(TEXT, hooks), text(OTHER_TEXT), CFG)


def patched(graph, model, kind="lora"):
    return graph.dit.with_lora(model, graph.loras[kind], 0.7)


def bypassed(graph):
    return comfy.sd.load_bypass_lora_for_models(graph.first, None, graph.loras["lora"], 0.7, 0.0)[0]


def hook(graph, *keyframes):
    """The LoRA as a hook, with these strengths from these shares of the steps on."""
    hooks = comfy.hooks.create_hook_lora(graph.loras["lora"], 0.7, 0.0)
    frames = comfy.hooks.HookKeyframeGroup()
    for strength, start in keyframes:
        frames.add(comfy.hooks.HookKeyframe(strength, start))
    if keyframes:
        hooks.set_keyframes_on_hooks(frames)
    return hooks


def two_models(graph):
    return guider("DualModelGuider", graph.first, text(TEXT), CFG, graph.second, text(OTHER_TEXT))


def skipped_layer(graph):
    return cfg(SkipLayerGuidanceSD3.execute(graph.first, "1", 1.0, 0.0, 1.0).result[0])


def plain(graph):
    return basic(graph.first)


def plain_second(graph):
    return basic(graph.second)


def plain_cfg(graph):
    return cfg(graph.first)


def with_lora(graph):
    return basic(patched(graph, graph.first))


def second_with_lora(graph):
    return basic(patched(graph, graph.second))


# A guider, and the one without what is tested here: what INT8 costs there, it may cost here. Where both models take
# part that is the second one, which costs more: it is rounded while it is loaded.
WORKFLOWS = {
    "LoRA": (with_lora, plain),
    "LoKr": (lambda graph: basic(patched(graph, graph.first, "lokr")), plain),
    "LoHa": (lambda graph: basic(patched(graph, graph.first, "loha")), plain),
    "bypassed LoRA": (lambda graph: basic(bypassed(graph)), plain),
    "LoRA of the second model": (second_with_lora, plain_second),
    "hook with keyframes": (lambda graph: basic(graph.first, hook(graph, (1.0, 0.0), (0.5, 0.4))), plain),
    "hook of one conditioning": (lambda graph: cfg(graph.first, hook(graph)), plain_cfg),
    "hook on a LoRA": (
        lambda graph: basic(patched(graph, graph.first, "other lora"), hook(graph)),
        lambda graph: basic(patched(graph, graph.first, "other lora")),
    ),
    "CFG": (plain_cfg, plain),
    "two models": (two_models, plain_cfg),
    "skipped layer": (skipped_layer, plain_cfg),
}


@pytest.fixture(scope="module")
def sample(dit, graphs):
    """The latents of a guider, made of the MODELs of a kind."""
    inputs = dit.calibration(graphs["float"].first, TEXT, STEPS)
    run = [inputs[name] for name in ("sampler", "sigmas", "latent_image")]

    def sample(kind, make):
        with torch.inference_mode():
            (noise,) = RandomNoise.execute(0).result
            return SamplerCustomAdvanced.execute(noise, make(graphs[kind]), *run).result[0]["samples"].clone()

    return sample


@pytest.fixture(scope="module")
def error(sample):
    """What INT8 costs a workflow, the latents of the float MODELs, and those of the INT8 ones."""

    @cache
    def compute(make):
        expected, latents = sample("float", make), sample("INT8", make)
        return relative_error(latents, expected), expected, latents

    return compute


def bound(usual):
    """The most that INT8 may cost where it usually costs `usual`: patched weights are rounded once more."""
    return 2 * usual + 0.01


@pytest.mark.parametrize("make, without", WORKFLOWS.values(), ids=WORKFLOWS)
def test_int8_costs_no_more_than_without_the_node_and_the_model_stays(sample, error, make, without):
    _, _, untouched = error(plain)
    (cost, expected, _), (usual, without_it, _) = error(make), error(without)
    assert cost < bound(usual)
    assert relative_error(expected, without_it) > 4 * cost
    sample("INT8", make)
    assert torch.equal(sample("INT8", plain), untouched)


@torch.inference_mode()
def test_two_models_take_turns(sample, error):
    """One after the other, and each alone on the device: the same latents."""
    turns = (plain, plain_second, with_lora, plain, second_with_lora, plain_second)
    together = [sample("INT8", make) for make in turns]
    for make, expected in zip(turns, together, strict=True):
        comfy.model_management.unload_all_models()
        assert torch.equal(sample("INT8", make), expected)
