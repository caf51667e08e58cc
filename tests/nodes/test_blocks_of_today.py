"""Fused blocks on ComfyUI 0.36 to 0.38, as far as these are imitated: fused as before, and attention as a layer wants
it."""

import json

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from support.architectures import CHOOSING_BLOCKS, FUSED_BLOCKS
from support.tensors import relative_error

AS_EXACT = 1.1  # which of two roundings is luckier with a few tokens is chance
CONFIG = torch.tensor(list(json.dumps({"attention": "comfy_kitchen_int8"}).encode()), dtype=torch.uint8)
# Those whose attention takes a mask, and where that is in a call.
MASKED = {"Ideogram 4": 1, "Lumina 2": 1, "Z-Image": 1, "Flux.1 double": "attn_mask", "Flux.1 single": "attn_mask"}


@pytest.fixture
def blocks(of_today):
    from support import fusable_blocks

    return fusable_blocks


@pytest.fixture
def fused_runs(pack, monkeypatch):
    """A list that grows with what only fused forwards do."""
    from int8_dit.nodes.blocks import steps

    calls = []
    for name in ("gated_residual", "activate_quantize"):
        run = getattr(steps, name)
        monkeypatch.setattr(steps, name, lambda *args, run=run: calls.append(1) or run(*args))
    return calls


@pytest.fixture
def warm(blocks, fused_runs):
    """A fused block that has been compared with ComfyUI's own, and what that one computes."""

    def make(family, **call):
        block = blocks.fused(family)
        own = blocks.run(block, family, **call)
        fused_runs.clear()
        return block, own

    return make


@pytest.fixture
def preferred(of_today, monkeypatch):
    """The calls of the function that layers may prefer, which moves the channels that PyTorch's computes."""
    calls = []

    def int8(*args, **kwargs):
        calls.append(args[0])
        return of_today.attention_pytorch(*args, **kwargs).roll(1, -1)

    monkeypatch.setattr(of_today, "attention_comfy_kitchen_int8", int8)
    monkeypatch.setattr(of_today, "COMFY_KITCHEN_INT8_ATTENTION_IS_AVAILABLE", True)
    monkeypatch.setattr("comfy_kitchen.int8_attention_is_available", lambda *_: True, raising=False)
    return calls


def prefer(of_today, block):
    for module in block.modules():
        if isinstance(module, of_today.ComfyAttention):
            module.load_state_dict({"config": CONFIG})


def errors(outputs, expected):
    return [relative_error(a, b) for a, b in zip(outputs, expected, strict=True)]


def equal(outputs, others):
    return all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))


@pytest.mark.parametrize("family", (*FUSED_BLOCKS, "LTX-Video", "MiniMax", "Wan"))
def test_a_block_is_fused_and_as_exact(blocks, fused_runs, family):
    if family not in blocks.FAMILIES and family not in blocks.FEED_FORWARDS:
        pytest.skip("a Sequential in this ComfyUI, whose parts are called")
    expected = blocks.run(blocks.exact(family), family)
    own = blocks.run(blocks.unfused(family), family)
    block = blocks.fused(family)
    assert equal(blocks.run(block, family), own) and fused_runs
    fused_runs.clear()
    second = blocks.run(block, family)
    assert fused_runs
    for error, usual in zip(errors(second, expected), errors(own, expected), strict=True):
        assert error <= AS_EXACT * usual


@pytest.mark.parametrize("family", CHOOSING_BLOCKS)
def test_what_a_layer_prefers_computes_its_attention(of_today, blocks, preferred, warm, fused_runs, family):
    block, before = warm(family)
    prefer(of_today, block)
    own = blocks.unfused(family)
    prefer(of_today, own)
    expected = blocks.run(own, family)
    asked = len(preferred)
    assert asked and min(errors(before, expected)) > 0.05
    preferred.clear()
    output = blocks.run(block, family)
    assert max(errors(output, expected)) < 0.02 and fused_runs and len(preferred) == asked
    assert all(isinstance(q, of_today.AttentionTensorContainer) for q in preferred)


@pytest.mark.parametrize("kind", ("float", "bool"))
@pytest.mark.parametrize("family", MASKED)
def test_a_masked_call(blocks, warm, fused_runs, family, kind):
    args, kwargs = blocks.FAMILIES[family].arguments(blocks.Call())
    place = MASKED[family]
    tokens = blocks.TEXT + 5 if family == "Flux.1 double" else 5
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, -torch.finfo(torch.float32).max)
    args = tuple(mask if index == place else value for index, value in enumerate(args))
    kwargs = kwargs | ({place: mask} if isinstance(place, str) else {})
    block, unmasked = warm(family)
    results = []
    for candidate in (blocks.unfused(family), block, block):
        fused_runs.clear()
        with torch.inference_mode():
            outputs = candidate(*_copies(args), **_copies(kwargs), transformer_options={})
        results.append([output.double() for output in (outputs if isinstance(outputs, tuple) else (outputs,))])
    own, compared, fused = results
    # A call with a mask is compared by itself.
    assert equal(compared, own) and fused_runs and max(errors(fused, own)) < 0.01
    assert len(unmasked) == len(own)


def _copies(values):
    if isinstance(values, dict):
        return {name: _copies(value) for name, value in values.items()}
    if isinstance(values, tuple):
        return tuple(map(_copies, values))
    return values.clone() if isinstance(values, torch.Tensor) else values


@pytest.mark.parametrize("family", CHOOSING_BLOCKS)
def test_an_override_that_takes_containers(of_today, blocks, warm, fused_runs, family):
    calls, alive = [], []

    def override(function, *args, **kwargs):
        raise AssertionError("it has a function for containers")

    def containers(q, k, v, *args, **kwargs):
        calls.append((len(args), sorted(kwargs), q.peek().shape))
        taken = [container.take() for container in (q, k, v)]
        output = of_today.attention_pytorch(*taken, *args, **kwargs)
        storages = [StorageWeakRef(tensor.untyped_storage()) for tensor in taken[:2]]
        del taken
        alive.append(any(not storage.expired() for storage in storages))
        return output

    override.container_function = containers
    block, _ = warm(family)
    own = blocks.run(blocks.unfused(family), family, optimized_attention_override=override)
    its, count = list(calls), len(calls)
    compared = blocks.run(block, family, optimized_attention_override=override)
    calls.clear()
    alive.clear()
    fused_runs.clear()
    fused = blocks.run(block, family, optimized_attention_override=override)
    assert count and calls == its and equal(compared, own) and fused_runs and max(errors(fused, own)) < 0.02
    assert not alive[0]  # the fused forward's own call is the first; queries and keys are gone once they are read


def test_hooks_and_weights_of_the_child_are_not_passed_by(of_today, blocks, warm, fused_runs):
    block, own = warm("Ideogram 4")
    child = block.attention.comfy_attention
    handle = child.register_forward_hook(lambda *_: None)
    assert equal(blocks.run(block, "Ideogram 4"), own) and not fused_runs
    handle.remove()
    blocks.run(block, "Ideogram 4")
    assert fused_runs
    fused_runs.clear()
    other = of_today.ComfyAttention()
    other.scale = torch.nn.Parameter(torch.ones(1))
    block.attention.comfy_attention = other
    assert equal(blocks.run(block, "Ideogram 4"), own) and not fused_runs


def test_another_child_of_its_name_is_passed_on(blocks, warm, fused_runs):
    """Such as one whose class a later version has elsewhere."""

    class Preference(torch.nn.Module):
        function = None

    block, own = warm("Ideogram 4")
    block.attention.comfy_attention = Preference()
    output = blocks.run(block, "Ideogram 4")
    assert max(errors(output, own)) < 0.02 and fused_runs


# Blocks whose own forward runs, and gives the activation to the linear


@pytest.fixture
def activations(pack, monkeypatch):
    """A list that grows with each activation that a linear quantizes in the same pass."""
    from int8_dit.nodes.layers import linear_call

    calls, run = [], linear_call.activate_quantize
    monkeypatch.setattr(linear_call, "activate_quantize", lambda *args: calls.append(args[1]) or run(*args))
    return calls


@pytest.mark.parametrize("kind", ("plain", "smoothed", "protected"))
@pytest.mark.parametrize(
    "family, activation", (("MiniMax H3", "silu"), ("Wan t2v", "gelu_tanh"), ("LTX block", "gelu_tanh"))
)
def test_its_linears_take_the_activation(blocks, activations, fused_runs, family, activation, kind, monkeypatch):
    from int8_dit.nodes.layers.linear_call import LinearCall

    expected, block = blocks.run(blocks.exact(family), family), blocks.unfused(family, kind)
    output = blocks.run(block, family)
    second = [name for name, _ in block.named_modules() if name in ("mlp.fc2", "ffn.2", "ff.net.2")]
    in_int8 = block.get_submodule(second[0]).input_form() is not None
    assert activations == [activation] * in_int8 and not fused_runs
    monkeypatch.setattr(LinearCall, "quantizes", lambda *_: False)
    for error, usual in zip(errors(output, expected), errors(blocks.run(block, family), expected), strict=True):
        assert 0 < error <= AS_EXACT * usual < 0.1


# MODELs of ComfyUI


def test_a_model_is_fused(blocks, fused_runs, dit, monkeypatch):
    from support import small_models

    model = dit.quantize(small_models.ideogram4(monkeypatch))
    small_models.output(model)
    fused_runs.clear()
    small_models.output(model)
    assert len(fused_runs) == 6  # two sums and an activation a block


def test_a_lora_that_chooses_a_layers_attention(blocks, of_today, preferred, fused_runs, dit, monkeypatch):
    import comfy.lora

    from support import small_models

    model = dit.quantize(small_models.ideogram4(monkeypatch))
    before = small_models.output(model)
    chosen = model.clone()
    chosen.add_patches(comfy.lora.load_lora({"diffusion_model.layers.0.attention.comfy_attention.config": CONFIG}, {}))
    small_models.output(chosen)
    preferred.clear()
    fused_runs.clear()
    assert relative_error(small_models.output(chosen), before) > 0.01
    assert len(preferred) == 1 and len(fused_runs) == 6
    preferred.clear()
    assert relative_error(small_models.output(model), before) < 0.01 and not preferred
