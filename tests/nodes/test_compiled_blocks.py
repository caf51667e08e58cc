"""Fused blocks under torch.compile: their operators in one graph, and where they may not run, ComfyUI's own."""

from collections import Counter
from itertools import cycle

import pytest
import torch
from torch._functorch.aot_autograd import make_boxed_func

from support.architectures import FUSED_BLOCKS

# One of each fused forward, for what takes long.
FORWARDS = ("Ideogram 4", "Z-Image", "Flux.1 double", "Flux.2 single", "Qwen-Image", "Wan i2v")
KINDS = ("plain", "smoothed", "protected", "16 bits")
FUSED_OPS = ("norm_quantize", "activate_quantize", "gated_residual", "norm_rope")


class Operators:
    """Which operators of this pack's the graphs of a compiled block have; a backend of torch.compile."""

    def __init__(self):
        self.of_graphs = []

    def backend(self):
        return torch._dynamo.backends.common.aot_autograd(fw_compiler=self._compile)

    def _compile(self, graph, example_inputs):
        targets = [node.target for node in graph.graph.nodes if node.op == "call_function"]
        names = [str(target).split(".")[1] for target in targets if str(target).startswith("int8_dit.")]
        self.of_graphs.append(Counter(names))
        return make_boxed_func(graph.forward)

    def fused_ops(self):
        """How many of each kind the first graph has."""
        return {name: count for name, count in self.of_graphs[0].items() if name in FUSED_OPS}


@pytest.fixture
def blocks(pack):
    from support import fusable_blocks
    from support.inductor_kernels import plain_attention

    torch._dynamo.reset()
    with plain_attention():
        yield fusable_blocks


@pytest.fixture
def compiled(blocks):
    """A block that agreed with ComfyUI's own in an eager call, compiled whole, and its operators."""

    def make(family, kind="plain", agreed=True):
        block, operators = blocks.fused(family, kind), Operators()
        if agreed:
            blocks.run(block, family)
        block.compile(backend=operators.backend(), fullgraph=True)
        return block, operators

    return make


def eager(blocks, block, **options):
    """Call a compiled block as it is, so that it is compared with ComfyUI's own."""
    _, kwargs = blocks.FAMILIES["Flux.1 double"].arguments(blocks.Call())
    with torch.inference_mode():
        block.forward(**kwargs, transformer_options=options)


def close(outputs, expected):
    for output, wanted in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "family, kind",
    (
        *zip(("Ideogram 4", "Flux.1 double", "Qwen-Image", "Wan t2v"), KINDS, strict=True),
        *(pytest.param(*pair, marks=pytest.mark.slow) for pair in zip(FUSED_BLOCKS[1:], cycle(KINDS), strict=False)),
    ),
)
def test_a_fused_block_is_one_graph_of_its_operators(blocks, compiled, family, kind):
    eager = blocks.fused(family, kind)
    blocks.run(eager, family)
    block, operators = compiled(family, kind)
    close(blocks.run(block, family), blocks.run(eager, family))
    fused_ops = operators.fused_ops()
    assert fused_ops["gated_residual"] and bool(fused_ops.get("norm_rope")) == (family != "MiniMax H3")
    assert kind == "protected" or (fused_ops["norm_quantize"] and fused_ops["activate_quantize"])


@pytest.mark.slow
@pytest.mark.parametrize("family", FORWARDS)
def test_so_it_is_on_comfyui_of_today(blocks, compiled, family):
    """With what a layer prefers, and containers."""
    from support.comfyui_today import today

    with today():
        eager = blocks.fused(family)
        blocks.run(eager, family)
        block, operators = compiled(family)
        close(blocks.run(block, family), blocks.run(eager, family))
    assert operators.fused_ops()["gated_residual"] and len(operators.of_graphs) == 1


@pytest.mark.slow
@pytest.mark.parametrize("family", FORWARDS)
def test_new_resolutions_are_dynamic(blocks, compiled, family):
    (block, operators), (own, its_operators) = compiled(family), compiled(family, agreed=False)
    eager = blocks.fused(family)
    for tokens in (5, 7, 12):
        call = blocks.Call(tokens=tokens)
        blocks.run(own, family, call)
        blocks.run(eager, family, call)
        close(blocks.run(block, family, call), blocks.run(eager, family, call))
    assert len(operators.of_graphs) <= len(its_operators.of_graphs)


def test_a_block_that_was_never_compared_runs_comfyuis_own(blocks, compiled):
    block, operators = compiled("Flux.1 double", agreed=False)
    close(blocks.run(block, "Flux.1 double"), blocks.run(blocks.unfused("Flux.1 double"), "Flux.1 double"))
    assert not operators.fused_ops() and operators.of_graphs[0]["int8_gemm"]


def test_so_does_one_with_a_patch(blocks, compiled):
    block, operators = compiled("Flux.1 double")
    calls = []

    def patch(q, k, v, **_):
        calls.append(1)
        return {"q": q, "k": k, "v": v}

    blocks.run(block, "Flux.1 double", patches={"attn1_patch": [patch]})
    assert calls and not operators.fused_ops()


def test_options_that_change_in_each_step_compile_nothing_again(blocks, compiled):
    block, operators = compiled("Flux.1 double", agreed=False)
    for step in range(4):
        options = {"uuids": [object()], "sigmas": torch.ones(1) * step, "step": step, "text": str(step), "flag": True}
        if not step:
            eager(blocks, block, **options)
        blocks.run(block, "Flux.1 double", **options)
    assert operators.fused_ops() and len(operators.of_graphs) == 1


@pytest.mark.slow
def test_another_flag_than_what_was_compared_runs_comfyuis_own(blocks, compiled):
    block, operators = compiled("Flux.1 double", agreed=False)
    eager(blocks, block, flag=False)
    blocks.run(block, "Flux.1 double", flag=False)
    assert operators.fused_ops() and len(operators.of_graphs) == 1
    blocks.run(block, "Flux.1 double", flag=True)
    assert len(operators.of_graphs) == 2 and not set(operators.of_graphs[1]) & set(FUSED_OPS)


def test_and_one_with_a_hook(blocks, compiled):
    block, operators = compiled("Flux.1 double")
    calls = []
    block.img_attn.qkv.register_forward_hook(lambda *_: calls.append(1))
    blocks.run(block, "Flux.1 double")
    assert calls and not operators.fused_ops()


# MODELs of ComfyUI


@pytest.fixture
def model(blocks, monkeypatch):
    """A quantized MODEL of two Ideogram 4 blocks that is to be compiled, and its operators."""
    from comfy_api.torch_helpers.torch_compile import set_torch_compile_wrapper

    from support import glyph_dit, small_models

    operators = Operators()
    quantized = glyph_dit.quantize(small_models.ideogram4(monkeypatch))
    set_torch_compile_wrapper(quantized, backend=operators.backend(), fullgraph=True)
    return quantized, operators


@pytest.mark.slow
def test_a_model_is_compared_in_one_eager_call(model):
    from support import small_models

    compiled, operators = model
    first = small_models.output(compiled)
    assert len(operators.of_graphs) == 1 and operators.fused_ops()["gated_residual"] == 4
    assert torch.equal(small_models.output(compiled), first)
    assert len(operators.of_graphs) == 1


@pytest.mark.slow
def test_what_counts_calls_sees_one_a_step(model):
    from comfy.patcher_extension import WrappersMP

    from support import small_models

    compiled, operators = model
    calls = []

    def count(executor, *args, **kwargs):
        calls.append(1)
        return executor(*args, **kwargs)

    compiled.add_wrapper_with_key(WrappersMP.DIFFUSION_MODEL, "counter", count)
    small_models.output(compiled)
    assert len(calls) == 1 and not operators.fused_ops()


@pytest.mark.slow
@pytest.mark.parametrize("name", ("LTX-Video", "Wan t2v"))
def test_feed_forwards_of_native_layers(blocks, name, tmp_path):
    """Their second linear stays on the fused kernel."""
    import comfy.model_management
    import comfy.sd

    from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8Kernel
    from int8_dit.nodes.saving.save import save_int8_model
    from support import glyph_dit, small_models
    from support.architectures import ARCHITECTURES

    architecture = ARCHITECTURES[name]
    with small_models.known_to_comfyui(architecture):
        model = glyph_dit.quantize(comfy.sd.load_diffusion_model_state_dict(small_models.tensors_of(architecture)))
        stock = comfy.sd.load_diffusion_model(save_int8_model(model, str(tmp_path / "native.safetensors"), {}))
        model = ApplyFusedINT8Kernel.execute(stock, kernel="fused int8").result[0]
    comfy.model_management.load_models_gpu([model])
    operators = Operators()
    expected = [small_models.output_of(architecture, model) for _ in range(2)][1]
    model.model.diffusion_model.compile(backend=operators.backend(), fullgraph=True)
    torch.testing.assert_close(small_models.output_of(architecture, model), expected, rtol=1e-3, atol=1e-3)
    assert operators.fused_ops()["activate_quantize"] == 2
