"""Workflows of ComfyUI's own nodes with INT8 models in a real server: each result is checked against the float model's
in the same workflow, and each node must leave the INT8 model as it found it. Merges and hooks alone, without a server:
test_merges_and_hooks.py."""

from dataclasses import dataclass

import pytest
import torch

from support import workflows
from support.server import ExecutionFailed
from support.tensors import relative_error
from support.workflow_bench import (
    CFG,
    FIRST,
    OTHER_TEXT,
    SECOND,
    TEXT,
    Guider,
    plain,
    prepare,
    sampled,
    sampled_after,
)  # fmt: skip


@pytest.fixture(scope="module")
def bench(server):
    return prepare(server)


def plain_second(graph):
    return graph.basic(graph.second)


def plain_cfg(graph):
    return graph.cfg(graph.first)


def bypassed_lora(graph):
    model = graph.node("LoraLoaderBypassModelOnly", model=graph.first, lora_name="lora.safetensors", strength_model=0.7)
    return graph.basic(model)


def keyframed_hook(graph):
    """The LoRA at its full strength in the first step, at half of it later."""
    frames = graph.node("CreateHookKeyframe", strength_mult=1.0, start_percent=0.0)
    frames = graph.node("CreateHookKeyframe", strength_mult=0.5, start_percent=0.4, prev_hook_kf=frames)
    hooks = graph.node("SetHookKeyframes", hooks=graph.hook_lora(), hook_kf=frames)
    return graph.basic(graph.first, graph.hooked(hooks))


def dual_model(graph):
    return graph.node(
        "DualModelGuider",
        model=graph.first,
        model_negative=graph.second,
        positive=graph.text(TEXT),
        negative=graph.text(OTHER_TEXT),
        cfg=CFG,
    )


def skipped_layer(graph):
    model = graph.node(
        "SkipLayerGuidanceSD3", model=graph.first, layers="1", scale=1.0, start_percent=0.0, end_percent=1.0
    )
    return graph.cfg(model)


def compiled_lora(graph):
    return graph.basic(graph.node("GlyphCompile", model=graph.lora(graph.first)))


@dataclass(frozen=True)
class Workflow:
    """A guider, and the one without what is tested here: what INT8 costs there, it may cost here.

    Where both models take part that is the second one, which costs more: it is rounded while it is loaded.
    """

    guider: Guider
    without: Guider = plain


WORKFLOWS = {
    "LoRA": Workflow(lambda graph: graph.basic(graph.lora(graph.first))),
    "LoKr": Workflow(lambda graph: graph.basic(graph.lora(graph.first, "lokr"))),
    "LoHa": Workflow(lambda graph: graph.basic(graph.lora(graph.first, "loha"))),
    "bypassed LoRA": Workflow(bypassed_lora),
    "LoRA of the second model": Workflow(lambda graph: graph.basic(graph.lora(graph.second)), plain_second),
    "hook with keyframes": Workflow(keyframed_hook),
    "hook of one conditioning": Workflow(
        lambda graph: graph.cfg(graph.first, graph.hooked(graph.hook_lora())), plain_cfg
    ),
    "hook on a LoRA": Workflow(
        lambda graph: graph.basic(graph.lora(graph.first, "other_lora"), graph.hooked(graph.hook_lora())),
        lambda graph: graph.basic(graph.lora(graph.first, "other_lora")),
    ),
    "CFG": Workflow(plain_cfg),
    "two models": Workflow(dual_model, plain_cfg),
    "skipped layer": Workflow(skipped_layer, plain_cfg),
}


def bound(usual: float) -> float:
    """The most that INT8 may cost where it usually costs `usual`: patched weights are rounded once more."""
    return 2 * usual + 0.01


@pytest.mark.parametrize("workflow", WORKFLOWS.values(), ids=WORKFLOWS)
def test_int8_costs_no_more_than_without_the_node_and_the_model_stays(bench, workflow):
    expected = bench.sample("float", workflow.guider)
    effect = relative_error(expected, bench.sample("float", workflow.without))
    error, usual = bench.error(workflow.guider), bench.error(workflow.without)
    assert error < bound(usual)
    assert effect > 4 * error
    assert torch.equal(bench.plain_afterwards(workflow.guider), bench.sample("INT8", plain))


def test_two_models_take_turns(bench):
    """In one prompt, and each in a prompt of its own: the same latents."""
    turns = (
        plain,
        plain_second,
        WORKFLOWS["LoRA"].guider,
        plain,
        WORKFLOWS["LoRA of the second model"].guider,
        plain_second,
    )
    graph = bench.graph("INT8")
    latents = [sampled(graph, turns[0](graph))]
    for guider in turns[1:]:
        latents.append(sampled_after(graph, latents[-1], guider(graph)))
    together = bench.run(graph, *latents)
    for guider, expected in zip(turns, together, strict=True):
        graph = bench.graph("INT8")
        (alone,) = bench.run(graph, sampled(graph, guider(graph)))
        assert torch.equal(alone, expected)


@pytest.mark.slow
def test_a_compiled_model_with_a_lora(bench):
    lora = WORKFLOWS["LoRA"].guider
    compiled = bench.sample("INT8", compiled_lora)
    assert relative_error(compiled, bench.sample("float", lora)) < bound(bench.error(lora))
    assert torch.equal(bench.plain_afterwards(compiled_lora), bench.sample("INT8", plain))


@pytest.fixture(scope="module")
def stock_files(bench):
    """The names of the files that ComfyUI's own node makes of the two INT8 MODELs."""
    graph, prefix = bench.graph("INT8"), "diffusion_models/stock_"
    for name in (FIRST, SECOND):
        graph.add("ModelSave", model=graph.model(name), filename_prefix=prefix + name)
    bench.server.queue(graph)
    return {name: next((bench.server.base / "output").glob(f"{prefix}{name}_*")).name for name in (FIRST, SECOND)}


def reloaded(bench, load, file):
    """The latents of a file."""
    graph = bench.graph("INT8")
    return bench.run(graph, sampled(graph, graph.basic(load(graph, file))))[0]


@pytest.mark.parametrize("name, guider", ((FIRST, plain), (SECOND, plain_second)))
def test_this_pack_reads_what_comfyuis_node_saves(bench, stock_files, name, guider):
    assert torch.equal(reloaded(bench, workflows.int8_model, stock_files[name]), bench.sample("INT8", guider))


def test_comfyuis_own_nodes_save_and_load_int8(bench, stock_files):
    latents = reloaded(bench, workflows.stock_model, stock_files[SECOND])
    assert relative_error(latents, bench.sample("float", plain_second)) < bound(bench.error(plain_second))


def test_comfyuis_loader_refuses_the_smoothed_weights_of_its_save_node(bench, stock_files):
    with pytest.raises(ExecutionFailed, match="int8"):
        reloaded(bench, workflows.stock_model, stock_files[FIRST])


def test_the_fused_kernel_under_a_model_of_comfyuis_loader(bench, stock_files):
    """What Load INT8 DiT draws of that file; with a LoRA; and ComfyUI's own bits when the node is taken out."""

    def fused(graph, file):
        model = workflows.stock_model(graph, file)
        return workflows.link(graph.add("ApplyFusedINT8Kernel", model=model, kernel="fused int8"))

    stock = reloaded(bench, workflows.stock_model, stock_files[SECOND])
    expected = bench.sample("INT8", plain_second)
    assert torch.equal(reloaded(bench, fused, stock_files[SECOND]), expected)
    lora = WORKFLOWS["LoRA of the second model"].guider
    graph = bench.graph("INT8")
    model = graph.lora(fused(graph, stock_files[SECOND]), "lora", 0.7)
    (patched,) = bench.run(graph, sampled(graph, graph.basic(model)))
    assert relative_error(patched, bench.sample("float", lora)) < bound(bench.error(lora))
    assert torch.equal(reloaded(bench, workflows.stock_model, stock_files[SECOND]), stock)
