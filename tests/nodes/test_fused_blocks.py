"""Blocks on the fused ops: as exact as ComfyUI's own, and run only where nothing needs those."""

import functools
from contextlib import nullcontext

import pytest
import torch

from support.architectures import FUSED_BLOCKS
from support.tensors import relative_error

# Both round to INT8, at slightly different values: which of them is luckier with a few tokens is chance.
AS_EXACT = 1.1
KINDS = ("plain", "smoothed", "rotated", "protected", "16 bits")


def errors(outputs, expected):
    return [relative_error(a, b) for a, b in zip(outputs, expected, strict=True)]


def test_the_families_are_those_of_the_table(blocks):
    assert tuple(blocks.FAMILIES) == FUSED_BLOCKS and blocks.KINDS == KINDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FUSED_BLOCKS)
def test_a_fused_block_is_as_exact(blocks, fused_runs, family, kind):
    expected = blocks.run(blocks.exact(family), family)
    own = blocks.run(blocks.unfused(family, kind), family)
    block = blocks.fused(family, kind)
    first = blocks.run(block, family)
    assert all(torch.equal(a, b) for a, b in zip(first, own, strict=True))
    assert fused_runs
    fused_runs.clear()
    second = blocks.run(block, family)
    assert fused_runs
    for error, usual in zip(errors(second, expected), errors(own, expected), strict=True):
        assert error <= AS_EXACT * usual


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("family", FUSED_BLOCKS)
def test_as_exact_in_half_precision_with_a_modulation_per_sample(blocks, fused_runs, family, dtype):
    call = blocks.Call(samples=3, tokens=7, dtype=dtype)
    expected = blocks.run(blocks.exact(family), family, blocks.Call(samples=3, tokens=7))
    own = blocks.run(blocks.unfused(family, dtype=dtype), family, call)
    block = blocks.fused(family, dtype=dtype)
    blocks.run(block, family, call)
    fused_runs.clear()
    outputs = blocks.run(block, family, call)
    clamps = dtype == torch.float16 and family in ("Lumina 2", "Z-Image", "context refiner")
    assert bool(fused_runs) != clamps
    for error, usual in zip(errors(outputs, expected), errors(own, expected), strict=True):
        assert error <= AS_EXACT * usual


def equal(outputs, others):
    return all(torch.equal(a, b) for a, b in zip(outputs, others, strict=True))


@pytest.fixture
def warm(blocks, fused_runs):
    """A fused block that has been compared with ComfyUI's own, and what that one computes."""

    def make(family="Flux.1 double", **options):
        block = blocks.fused(family, **options)
        own = blocks.run(block, family)
        blocks.run(block, family)
        assert fused_runs
        fused_runs.clear()
        return block, own

    return make


def replaced(*names):
    return {"patches_replace": {"dit": dict.fromkeys(names)}}


@pytest.mark.parametrize(
    "options",
    (
        {"patches": {"attn1_patch": [lambda q, k, v, **_: {}]}},
        {"patches": {"attn1_output_patch": [lambda x, _: x]}},
        {"patches": {"a_kind_of_tomorrow": [lambda *_: None]}},
        replaced(("double_block", 0)),
    ),
    ids=("attention patch", "patch of its output", "unknown patch", "replaced block"),
)
def test_a_patched_block_runs_comfyuis_own(blocks, warm, fused_runs, options):
    block, own = warm()
    assert equal(blocks.run(block, "Flux.1 double", **options), own) and not fused_runs


def test_other_options_do_not_matter(blocks, warm, fused_runs):
    block, own = warm()
    options = {"patches": {"double_block": [None]}, "patches_replace": {"dit": {}}, "block_index": 0}
    # They are new to the block, so that it is compared again.
    assert equal(blocks.run(block, "Flux.1 double", **options), own) and fused_runs
    fused_runs.clear()
    blocks.run(block, "Flux.1 double", **options)
    assert fused_runs


@pytest.mark.parametrize("layer", ("img_attn", "img_attn.qkv", "txt_norm1", "img_mlp.1"))
@pytest.mark.parametrize("hook", ("register_forward_hook", "register_forward_pre_hook"))
def test_hooks_of_a_part_are_called(blocks, warm, fused_runs, layer, hook):
    block, own = warm()
    if layer == "img_attn":  # a module that ComfyUI's own forward does not call: nothing to miss, and no harm
        layer = "img_attn.norm"
    calls = []
    handle = getattr(block.get_submodule(layer), hook)(lambda *args: calls.append(1) and None)
    assert equal(blocks.run(block, "Flux.1 double"), own) and calls and not fused_runs
    handle.remove()
    blocks.run(block, "Flux.1 double")
    assert fused_runs


def test_global_hooks_are_called(blocks, warm, fused_runs):
    block, own = warm()
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        assert equal(blocks.run(block, "Flux.1 double"), own) and not fused_runs
    finally:
        handle.remove()


def test_a_replaced_forward_of_a_part_is_called(blocks, warm, fused_runs, monkeypatch):
    block, own = warm()
    run, calls = block.img_attn.norm.forward, []
    block.img_attn.norm.forward = lambda *args: calls.append(1) or run(*args)
    assert equal(blocks.run(block, "Flux.1 double"), own) and calls and not fused_runs


def test_a_part_of_another_class_is_called(blocks, warm, fused_runs):
    block, own = warm()

    class Another(type(block.img_attn.norm)):
        pass

    block.img_attn.norm.__class__ = Another
    assert equal(blocks.run(block, "Flux.1 double"), own) and not fused_runs


def test_a_replaced_part_is_called(blocks, warm, fused_runs):
    block, _ = warm()
    block.img_norm2 = torch.nn.Hardtanh()
    expected = blocks.unfused("Flux.1 double")
    expected.img_norm2 = torch.nn.Hardtanh()
    assert equal(blocks.run(block, "Flux.1 double"), blocks.run(expected, "Flux.1 double")) and not fused_runs


def test_gradients_and_training(blocks, warm, fused_runs, monkeypatch):
    import comfy.model_management

    block, _own = warm()
    args, kwargs = blocks.FAMILIES["Flux.1 double"].arguments(blocks.Call())
    with torch.enable_grad():
        block(*args, **kwargs, transformer_options={})
    assert not fused_runs
    monkeypatch.setattr(comfy.model_management, "in_training", True)
    assert blocks.run(block, "Flux.1 double") and not fused_runs


@pytest.mark.parametrize(
    "family, unusual",
    (
        ("Flux.2 double", {"modulation_dims_img": [(0, 5, 0)]}),
        ("Flux.1 single", {"modulation_dims": [(0, 4, 0)]}),
        ("Z-Image", {"timestep_zero_index": None, "adaln_input": None}),
    ),
)
def test_arguments_that_only_comfyuis_own_knows(blocks, warm, fused_runs, family, unusual):
    block, _ = warm(family)
    args, kwargs = blocks.FAMILIES[family].arguments(blocks.Call())
    with torch.inference_mode():
        if family == "Z-Image":
            with pytest.raises(AssertionError):
                block(*args[:3], transformer_options={}, **unusual)
        else:
            block(*args, **kwargs, **unusual, transformer_options={})
    assert not fused_runs


def test_a_kernel_that_is_not_for_this_device(blocks, warm, fused_runs):
    block, _ = warm()
    for layer in block.modules():
        if hasattr(layer, "int8_kernel"):
            type(layer).int8_kernel = "auto"
    block.__class__ = type(block).__mro__[1]
    blocks.fuse(block)
    blocks.run(block, "Flux.1 double")
    assert not fused_runs


@pytest.mark.parametrize("when", ("before the first call", "later"))
def test_a_core_that_changed_its_block_is_noticed(blocks, warm, fused_runs, monkeypatch, caplog, when):
    from comfy.ldm.ideogram4.model import Ideogram4TransformerBlock

    forward = Ideogram4TransformerBlock.forward

    @functools.wraps(forward)
    def changed(*args, **kwargs):
        return 1.2 * forward(*args, **kwargs)

    caplog.set_level("INFO")
    block = warm("Ideogram 4")[0] if when == "later" else blocks.fused("Ideogram 4")
    monkeypatch.setattr(Ideogram4TransformerBlock, "forward", changed)
    own = blocks.run(blocks.unfused("Ideogram 4"), "Ideogram 4")
    for call in range(3):
        assert equal(blocks.run(block, "Ideogram 4"), own)
        assert bool(fused_runs) == (call == 0)
        fused_runs.clear()
    (line,) = [record for record in caplog.records if "runs ComfyUI's own forward" in record.getMessage()]
    assert "Ideogram4TransformerBlock" in line.getMessage()


@pytest.mark.parametrize("when", ("at the first call", "later"))
def test_a_fused_form_that_fails_is_noticed(blocks, warm, fused_runs, monkeypatch, caplog, when):
    from int8_dit.nodes.blocks import ideogram4

    def fail(*args, **kwargs):
        raise AttributeError("this core has no such part")

    caplog.set_level("INFO")
    block = warm("Ideogram 4")[0] if when == "later" else blocks.fused("Ideogram 4")
    own = blocks.run(blocks.unfused("Ideogram 4"), "Ideogram 4")
    monkeypatch.setattr(ideogram4, "rotations", fail)
    for _ in range(2):
        assert equal(blocks.run(block, "Ideogram 4"), own) and not fused_runs
    (line,) = [record for record in caplog.records if "runs ComfyUI's own forward" in record.getMessage()]
    assert "AttributeError: this core has no such part" in line.getMessage()


def test_an_interrupted_block_is_not_at_fault(blocks, fused_runs, monkeypatch):
    import comfy.model_management

    from int8_dit.nodes.blocks import ideogram4

    def interrupt(*args, **kwargs):
        raise comfy.model_management.InterruptProcessingException

    block = blocks.fused("Ideogram 4")
    with monkeypatch.context() as patch:
        patch.setattr(ideogram4, "add", interrupt)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            blocks.run(block, "Ideogram 4")
    for _ in range(2):
        fused_runs.clear()
        blocks.run(block, "Ideogram 4")
        assert fused_runs


def test_attention_overrides_are_called_with_the_same(blocks, warm, fused_runs):
    for family in FUSED_BLOCKS:
        calls = []

        def override(function, *args, calls=calls, **kwargs):
            calls.append((len(args), {key for key in kwargs if not key.startswith("_")}, args[0].shape))
            return function(*args, **kwargs)

        block, _ = warm(family)
        blocks.run(block, family, optimized_attention_override=override)  # compared again, with this override
        calls.clear()
        fused_runs.clear()
        blocks.run(block, family, optimized_attention_override=override)
        assert fused_runs
        blocks.run(blocks.unfused(family), family, optimized_attention_override=override)
        assert calls and calls[: len(calls) // 2] == calls[len(calls) // 2 :], family


def test_a_mask_reaches_attention(blocks, warm, fused_runs):
    block, _ = warm("Qwen-Image")
    mask = torch.zeros(1, blocks.TEXT)
    mask[:, -1] = -1e9
    results = []
    for candidate in (block, blocks.unfused("Qwen-Image")):
        args, kwargs = blocks._qwen(blocks.Call(), mask)
        with torch.inference_mode():
            results.append(candidate(*args, **kwargs, transformer_options={}))
    assert max(errors(*results)) < 0.01 and fused_runs


# MODELs of ComfyUI


@pytest.fixture
def model(small, dit, monkeypatch):
    """A quantized MODEL of two Ideogram 4 blocks."""
    return dit.quantize(small.ideogram4(monkeypatch))


@pytest.fixture
def own_output(small, model, pack, monkeypatch):
    """What a MODEL computes with ComfyUI's own blocks, of those weights."""
    from int8_dit.nodes.blocks import install

    with monkeypatch.context() as patch:
        patch.setattr(install, "read_call", lambda *_: "a test wants it")
        return small.output(model)


def test_a_model_gives_the_same_image(small, dit, model, own_output, fused_runs):
    first = small.output(model)
    assert len(fused_runs) == 4 and dit.relative_error(first, own_output) < 0.02
    assert dit.relative_error(small.output(model), own_output) < 0.02 and len(fused_runs) == 8


def test_unpatched_it_has_comfyuis_classes(small, model, fused_runs):
    from comfy.ldm.ideogram4.model import Ideogram4TransformerBlock

    keys = list(model.model.diffusion_model.state_dict())
    small.output(model)
    block = model.model.diffusion_model.layers[0]
    assert type(block) is not Ideogram4TransformerBlock and type(block).__mro__[1] is Ideogram4TransformerBlock
    assert list(model.model.diffusion_model.state_dict()) == keys
    model.unpatch_model(model.offload_device)
    assert type(block) is Ideogram4TransformerBlock
    small.output(model)
    assert type(block) is not Ideogram4TransformerBlock


def test_a_clone_shares_what_is_known(small, model, fused_runs):
    small.output(model)
    small.output(model.clone())
    assert len(fused_runs) == 8  # and ComfyUI's own ran in the first call alone
    assert {model.clone().get_model_object(key) for key in model.object_patches} == set(model.object_patches.values())


def test_a_second_model_of_the_same_modules_asks_for_itself(small, dit, model, fused_runs, tmp_path):
    """Two clones of a stock MODEL, each with the kernel applied."""
    import comfy.sd

    from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8Kernel
    from int8_dit.nodes.saving.save import save_int8_model

    stock = comfy.sd.load_diffusion_model(save_int8_model(model, str(tmp_path / "native.safetensors"), {}))
    unfused = small.output(stock)
    one, other = (ApplyFusedINT8Kernel.execute(stock, kernel="fused int8").result[0] for _ in range(2))
    assert not set(one.object_patches.values()) & set(other.object_patches.values())
    for patched in (one, other, one):
        fused_runs.clear()
        assert dit.relative_error(small.output(patched), unfused) < 0.05 and fused_runs
    fused_runs.clear()
    assert torch.equal(small.output(stock), unfused) and not fused_runs


def test_a_copy_for_another_gpu(small, dit, model, own_output, fused_runs):
    small.output(model)
    copy = model.deepclone_multigpu()
    assert copy.model is not model.model
    fused_runs.clear()
    assert dit.relative_error(small.output(copy), own_output) < 0.02 and len(fused_runs) == 4


def test_it_can_be_quantized_again(small, dit, model):
    again = dit.quantize(model)
    assert again.object_patches.keys() == model.object_patches.keys()
    assert dit.relative_error(small.output(again), small.output(model)) < 0.02


@pytest.mark.parametrize("partially", (False, True))
def test_a_lora(small, dit, model, monkeypatch, fused_runs, partially):
    from support import adapters

    layers = model.model.diffusion_model.layers
    names = [
        f"layers.{index}.{name}"
        for index in range(2)
        for name in ("attention.qkv", "attention.o", *(f"feed_forward.w{part}" for part in (1, 2, 3)))
    ]
    weights = {name: layers.get_submodule(name.removeprefix("layers.")).weight.dequantize() for name in names}
    lora = adapters.lora(weights, 0.5)
    expected = small.output(dit.with_lora(small.ideogram4(monkeypatch), lora))
    patched = dit.with_lora(model, lora)
    small.output(patched)
    if partially:
        patched.unpatch_model(patched.offload_device)
        patched.patch_model(device_to=patched.load_device, lowvram_model_memory=1)
        assert layers[0].attention.qkv.weight_function
    monkeypatch.setattr("comfy.model_management.load_models_gpu", lambda models: None)
    for _ in range(2):
        fused_runs.clear()
        assert dit.relative_error(small.output(patched), expected) < 0.05
        assert bool(fused_runs) != partially  # where all linears are patched in use, no fused op could quantize for one
    assert dit.relative_error(small.output(small.ideogram4_again(small.ideogram4(monkeypatch))), expected) > 0.1


def test_a_linear_that_is_patched_in_use_reads_floats(blocks, warm, fused_runs):
    block, own = warm("Qwen-Image")
    for layer in (block.attn.to_k, block.img_mlp.net[2]):
        layer.weight_function = [lambda weight: weight * 1.0]
        layer.bias_function = []
    first = blocks.run(block, "Qwen-Image")
    assert fused_runs
    fused_runs.clear()
    second = blocks.run(block, "Qwen-Image")
    assert fused_runs and max(errors(first, own) + errors(second, own)) < 0.02


def test_smoothed_and_sampled(small, dit, model, monkeypatch, fused_runs):
    """A calibrated MODEL, sampled as a KSampler does."""
    source = small.ideogram4(monkeypatch)
    calibration = small.calibration(source)
    smoothed = dit.quantize(source, **calibration)
    text, latent = calibration["positive"]["positive_0"], calibration["latent_image"]["samples"]
    noise = small._randn(*latent.shape, seed=3)

    def sample(candidate):
        import comfy.sample

        return comfy.sample.sample(candidate, noise, 3, 1.0, "euler", "simple", text, text, latent, seed=0)

    expected = sample(source)
    fused_runs.clear()
    assert dit.relative_error(sample(smoothed), expected) < 0.03 and fused_runs


def test_while_it_is_calibrated_blocks_run_as_comfyui_has_them(small, model, fused_runs):
    small.output(model)
    fused_runs.clear()
    small.recorded(model)
    assert not fused_runs


# What one fused forward does of a MODEL of each kind: two sums a block, or one, three or four.
ARCHITECTURES_FUSED = {
    "Flux": 5, "Flux 2": 5, "Chroma": 5, "Hunyuan Video": 5, "Lumina 2": 8, "Z-Image": 12, "Qwen-Image": 8,
    "Mage Flow": 8, "Wan t2v": 6, "Wan i2v": 4, "LTX-Video": 6, "Ideogram 4": 4,
}  # fmt: skip


@pytest.fixture(params=(False, pytest.param(True, marks=pytest.mark.slow)), ids=("this ComfyUI", "of today"))
def any_comfyui(pack, request):
    """The ComfyUI that is there, and its interface of today."""
    from support.comfyui_today import today

    with today() if request.param else nullcontext():
        yield


@pytest.mark.parametrize("name", ARCHITECTURES_FUSED)
def test_models_of_every_family(any_comfyui, small, dit, fused_runs, monkeypatch, name):
    import comfy.sd

    from int8_dit.nodes.blocks import install
    from int8_dit.nodes.blocks.fusion import fusion_of
    from support.architectures import ARCHITECTURES

    architecture = ARCHITECTURES[name]
    with small.known_to_comfyui(architecture):
        source = comfy.sd.load_diffusion_model_state_dict(small.tensors_of(architecture))
        model = dit.quantize(source)

    def output(candidate):
        import comfy.model_management

        comfy.model_management.load_models_gpu([candidate])
        return small.output_of(architecture, candidate)

    with monkeypatch.context() as patch:
        patch.setattr(install, "read_call", lambda *_: "a test wants it")
        unfused = output(model)
    expected = output(source)
    output(model)
    fused_runs.clear()
    fused = output(model)
    assert len(fused_runs) == ARCHITECTURES_FUSED[name]
    assert all(kind.fused == kind.blocks and not kind.why for kind in fusion_of(model))
    assert dit.relative_error(fused, expected) < 1.1 * dit.relative_error(unfused, expected)
