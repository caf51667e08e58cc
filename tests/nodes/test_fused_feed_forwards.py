"""Feed-forwards whose second linear ComfyUI computes past its own forward: fused, with the activation before it."""

import pytest
import torch

from support.tensors import relative_error

AS_EXACT = 1.1  # which of two roundings is luckier with a few tokens is chance
NAMES = ("LTX-Video", "MiniMax", "Wan")
KINDS = ("plain", "smoothed", "rotated", "protected", "16 bits")


@pytest.fixture(params=NAMES)
def name(request, blocks):
    if request.param not in blocks.FEED_FORWARDS:
        pytest.skip("a Sequential in this ComfyUI, whose parts are called")
    return request.param


@pytest.fixture
def folded(pack, monkeypatch):
    """A list that grows with each activation that is folded into a quantizer."""
    from int8_dit.nodes.blocks import steps

    calls, run = [], steps.activate_quantize
    monkeypatch.setattr(steps, "activate_quantize", lambda *args: calls.append(1) or run(*args))
    return calls


@pytest.fixture
def warm(blocks, name, folded):
    """A fused feed-forward that has been compared with ComfyUI's own, and what that one computes."""
    block = blocks.fused(name)
    own = blocks.run(block, name)
    blocks.run(block, name)
    assert len(folded) == 2
    folded.clear()
    return block, own


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype, samples", ((torch.float32, 1), (torch.bfloat16, 3), (torch.float16, 3)))
def test_as_exact(blocks, folded, name, kind, dtype, samples):
    call = blocks.Call(samples=samples, tokens=7, dtype=dtype)
    (expected,) = blocks.run(blocks.exact(name), name, blocks.Call(samples=samples, tokens=7))
    (own,) = blocks.run(blocks.unfused(name, kind, dtype), name, call)
    block = blocks.fused(name, kind, dtype)
    (first,) = blocks.run(block, name, call)
    assert torch.equal(first, own) and len(folded) == 1
    (second,) = blocks.run(block, name, call)
    assert len(folded) == 2 and second.shape == own.shape
    assert relative_error(second, expected) <= AS_EXACT * relative_error(own, expected)


def test_hooks_are_called(blocks, name, warm, folded):
    block, own = warm
    first = next(module for module in block.modules() if hasattr(module, "int8_kernel"))
    calls = []
    handle = first.register_forward_hook(lambda *args: calls.append(1) and None)
    assert torch.equal(blocks.run(block, name)[0], own[0]) and calls and not folded
    handle.remove()
    blocks.run(block, name)
    assert folded


def test_in_training_comfyuis_own_runs(blocks, name, warm, folded, monkeypatch):
    import comfy.model_management

    block, own = warm
    (x,), _ = blocks.FEED_FORWARDS[name].arguments(blocks.Call())
    with torch.enable_grad():
        block(x)
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    assert torch.equal(blocks.run(block, name)[0], own[0]) and not folded


def test_named_arguments_and_other_axes(blocks, name, warm, folded):
    block, _own = warm
    (x,), _ = blocks.FEED_FORWARDS[name].arguments(blocks.Call())
    with torch.inference_mode():
        named, other = block(x=x), block(x[None, None])
    assert len(folded) == 1 and relative_error(other.flatten(), named.flatten()) < 0.02


def test_a_linear_that_is_patched_in_use_reads_floats(blocks, name, warm, folded):
    block, own = warm
    for module in block.modules():
        if hasattr(module, "int8_kernel"):
            module.weight_function, module.bias_function = [lambda weight: weight * 1.0], []
    for _ in range(2):
        assert relative_error(blocks.run(block, name)[0], own[0]) < 0.02 and not folded


def test_a_core_that_changed_it_is_noticed(blocks, name, folded, monkeypatch, caplog):
    own = type(blocks.unfused(name))
    forward = own.forward
    monkeypatch.setattr(own, "forward", lambda self, x: 1.2 * forward(self, x))
    caplog.set_level("INFO")
    block, expected = blocks.fused(name), blocks.run(blocks.unfused(name), name)
    for call in range(2):
        assert torch.equal(blocks.run(block, name)[0], expected[0]) and len(folded) == 1, call
    (line,) = [record for record in caplog.records if "runs ComfyUI's own forward" in record.getMessage()]
    assert own.__qualname__ in line.getMessage()


def test_a_block_around_one_is_fused_too(blocks, folded):
    block, own = blocks.fused("Wan t2v"), blocks.run(blocks.unfused("Wan t2v"), "Wan t2v")
    by_itself = type(block.ffn) is not torch.nn.Sequential
    if by_itself:
        blocks.fuse(block.ffn)
    for call in range(3):
        folded.clear()
        assert relative_error(blocks.run(block, "Wan t2v")[0], own[0]) < 0.02
        assert len(folded) == (2 if by_itself and call == 0 else 1)
    # Where the block's own forward runs, its feed-forward is fused all the same.
    folded.clear()
    patch = {"attn1_patch": [lambda arguments: arguments["x"]]}
    assert relative_error(blocks.run(block, "Wan t2v", patches=patch)[0], own[0]) < 0.02
    assert len(folded) == by_itself


# MODELs of ComfyUI: two blocks each


@pytest.mark.parametrize("name", ("LTX-Video", "Wan t2v"))
@pytest.mark.parametrize("native", (False, True), ids=("this pack's", "native INT8"))
def test_models(small, dit, folded, monkeypatch, tmp_path, name, native):
    import comfy.model_management
    import comfy.ops
    import comfy.sd

    from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8Kernel
    from int8_dit.nodes.saving.save import save_int8_model
    from support.architectures import ARCHITECTURES

    architecture = ARCHITECTURES[name]

    def output(candidate):
        comfy.model_management.load_models_gpu([candidate])
        return small.output_of(architecture, candidate)

    with small.known_to_comfyui(architecture):
        source = comfy.sd.load_diffusion_model_state_dict(small.tensors_of(architecture))
        model = dit.quantize(source)
        if native:
            stock = comfy.sd.load_diffusion_model(save_int8_model(model, str(tmp_path / "native.safetensors"), {}))
            model = ApplyFusedINT8Kernel.execute(stock, kernel="fused int8").result[0]
    expected = output(source)
    output(model)
    folded.clear()
    # What ComfyUI itself would compute the second linear with.
    monkeypatch.setattr(comfy.ops, "linear_input_act", None)
    assert dit.relative_error(output(model), expected) < 0.05
    assert len(folded) == 2
