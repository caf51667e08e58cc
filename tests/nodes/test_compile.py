"""torch.compile of a real block of ComfyUI with this pack's linears: one graph, the same result, no recompilation."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.aot_autograd import make_boxed_func


@pytest.fixture
def ideogram(pack, monkeypatch):
    import comfy.ldm.modules.attention

    from support import ideogram_block

    torch._dynamo.reset()
    # What ComfyUI picks on a GPU. Its choice for a CPU asks for the free memory in every call, which no compiler
    # traces.
    monkeypatch.setattr(
        ideogram_block.ideogram4, "optimized_attention_masked", comfy.ldm.modules.attention.attention_pytorch
    )
    return ideogram_block


def smooth_alike(name, channels):
    return torch.linspace(0.5, 2.0, channels)


@pytest.mark.parametrize("smoothing", ({}, {"smoothing": smooth_alike}))
def test_a_block_is_one_graph(ideogram, smoothing):
    block = ideogram.block(**smoothing)
    with torch.inference_mode():
        explanation = torch._dynamo.explain(block)(*ideogram.inputs())
    assert explanation.graph_break_count == 0, explanation.break_reasons
    assert explanation.graph_count == 1


@pytest.mark.parametrize("context", (torch.no_grad, torch.inference_mode))
def test_compiled_and_eager_are_equal_and_steps_do_not_recompile(ideogram, context):
    block, counter = ideogram.block(), CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True)
    with context():
        for step in range(4):
            inputs = ideogram.inputs(seed=step)
            torch.testing.assert_close(compiled(*inputs), block(*inputs))
        assert counter.frame_count == 1
        for tokens in (12, 20, 28):
            inputs = ideogram.inputs(tokens)
            torch.testing.assert_close(compiled(*inputs), block(*inputs))
    assert counter.frame_count <= 2


@pytest.mark.parametrize("sharing, quantizations", ((False, 5), (True, 4)))
def test_the_compiler_gets_the_operators(ideogram, sharing, quantizations):
    targets = []

    def compiler(graph, example_inputs):
        targets.extend(node.target for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    block = ideogram.block(sharing=sharing)
    backend = torch._dynamo.backends.common.aot_autograd(fw_compiler=compiler)
    with torch.inference_mode():
        torch.compile(block, backend=backend, fullgraph=True)(*ideogram.inputs())
    assert targets.count(torch.ops.int8_dit.quantize_activations.default) == quantizations
    assert targets.count(torch.ops.int8_dit.int8_gemm.default) == 5
    assert block.feed_forward.w1.input_reader is None or block.feed_forward.w1.input_reader.group.traced is None


def test_a_weight_function_splits_the_graph_and_is_applied(ideogram):
    """What ComfyUI attaches for a LoRA on streamed weights: requantizing looks for NaNs, which no graph can hold."""
    block = ideogram.block()
    inputs = ideogram.inputs()
    with torch.inference_mode():
        plain = block(*inputs)
        block.feed_forward.w2.weight_function = [lambda weight: weight * 2]
        expected = block(*inputs)
        compiled = torch.compile(block, backend="aot_eager")
        torch.testing.assert_close(compiled(*inputs), expected)
        block.feed_forward.w2.weight_function = []
        torch.testing.assert_close(compiled(*inputs), plain)
    assert not torch.allclose(expected, plain, rtol=1e-2, atol=1e-2)
