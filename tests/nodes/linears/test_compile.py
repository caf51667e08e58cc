"""torch.compile of ComfyUI's blocks and models with INT8 linears: one graph, the same result, no recompilation."""

import pytest
import torch
from comfy.model_patcher import LowVramPatch
from comfy.weight_adapter.lora import LoRAAdapter
from torch._dynamo.testing import CompileCounterWithBackend

from int8_dit.kernels import LowRank
from int8_dit.nodes.files.holding import is_stored
from int8_dit.nodes.linears.plain_loras import StoredLoRA
from support import ideogram_block
from support.architectures import ARCHITECTURES
from support.covering import covering
from support.inductor_kernels import quantizers_of

STORED = (None, "Q8_0", "W4A8")


@pytest.fixture
def ideogram(compilable):
    return ideogram_block


def assert_follows(compiled, block, ideogram, counter, frames):
    """A compiled block computes what it does eagerly, at each step in one graph, and at other sizes in one more."""
    for step in range(4):
        inputs = ideogram.inputs(seed=step)
        torch.testing.assert_close(compiled(*inputs), block(*inputs))
    assert counter.frame_count == 1
    for tokens in (12, 20, 28):
        inputs = ideogram.inputs(tokens)
        torch.testing.assert_close(compiled(*inputs), block(*inputs))
    assert counter.frame_count in frames


@pytest.mark.parametrize(
    "context, stored", covering((torch.no_grad, torch.inference_mode), ("smoothed", *STORED), slow_rounds=1)
)
def test_compiled_and_eager_are_equal_and_steps_do_not_recompile(ideogram, context, stored):
    """In one graph of the whole block."""
    smoothing = {"smoothing": lambda name, channels: torch.linspace(0.5, 2.0, channels)}
    block = ideogram.block(**(smoothing if stored == "smoothed" else {"stored": stored}))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    with context():
        assert_follows(compiled, block, ideogram, counter, (1, 2))


@pytest.mark.parametrize("stored", (False, True))
def test_what_stands_for_a_weight_in_a_graph_is_of_its_class(ideogram, stored):
    """PyTorch 2.15 refuses a call whose weight is of another class than the one that it was compiled with."""
    block = ideogram.block(stored=stored)
    weight = block.get_submodule(ideogram.INT8_LINEARS[0]).weight
    names, context = weight.__tensor_flatten__()
    parts = {name: getattr(weight, name) for name in names}
    rebuilt = type(weight).__tensor_unflatten__(parts, context, weight.shape, weight.stride())
    assert type(rebuilt) is type(weight)
    assert torch.equal(rebuilt.dequantize(), weight.dequantize())


@pytest.mark.slow
@pytest.mark.parametrize("name", ("Ideogram 4", "SD3"))
def test_all_quantizers_with_a_producer_are_folded_into_it(name):
    """Those of a whole model, by what Inductor's scheduler would do on a GPU."""
    quantizers, error = quantizers_of(ARCHITECTURES[name])
    assert quantizers.folded == quantizers.total["producer"] > 2 * quantizers.total["attention"]
    assert quantizers.graphs == 1 and error < 1e-3


def patched(patches):
    """What ComfyUI attaches to a streamed weight for these patches of it."""
    key = "diffusion_model.layer.weight"
    return [LowVramPatch(key, {key: [(0.5, patch, 1.0, None, None) for patch in patches]})]


def lora(weight):
    generator = torch.Generator().manual_seed(1)
    up, down = (torch.randn(shape, generator=generator) for shape in ((weight.shape[0], 4), (4, weight.shape[1])))
    return LoRAAdapter(set(), (up, down, 2.0, None, None, None))


def difference(weight):
    return "diff", (torch.randn(weight.shape, generator=torch.Generator().manual_seed(2)) * 0.1,)


def loras_of_stored(weight):
    """What the pack attaches instead to a weight in another form."""
    [patch] = patched([lora(weight)])
    if not is_stored(weight):
        return [patch]
    up, down, *_ = lora(weight).weights
    low_rank = LowRank(0.25 * up, down)
    return [StoredLoRA(patch.key, patch.patches[patch.key], low_rank, low_rank.channel_scales()[:, None])]


STREAMED = {
    "LoRA": lambda weight: patched([lora(weight)]),
    "two LoRAs": lambda weight: patched([lora(weight), lora(weight)]),
    "LoRAs of a stored weight": loras_of_stored,
    "difference": lambda weight: patched([difference(weight)]),
    "function": lambda weight: [lambda stored: stored * 2],
}


@pytest.mark.slow
@pytest.mark.parametrize("kind, stored", covering(STREAMED, STORED))
def test_patches_of_streamed_weights_are_in_the_one_graph(ideogram, kind, stored):
    """What ComfyUI attaches for a LoRA and the like: no break, no recompilation, and gone when it is taken away."""
    block, counter = ideogram.block(stored=stored), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    layers = [block.get_submodule(name) for name in ideogram.INT8_LINEARS]
    inputs = ideogram.inputs()
    with torch.inference_mode():
        plain = block(*inputs)
        for layer in layers:
            layer.weight_function = STREAMED[kind](layer.weight)
        functions = [layer.weight_function for layer in layers]
        assert not torch.allclose(block(*inputs), plain, rtol=1e-2, atol=1e-2)
        assert_follows(compiled, block, ideogram, counter, (2,))
        assert all(layer.weight_function is kept for layer, kept in zip(layers, functions, strict=True))
        for layer in layers:
            layer.weight_function = []
        torch.testing.assert_close(compiled(*ideogram.inputs()), plain)
