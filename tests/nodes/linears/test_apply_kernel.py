"""Apply Fused INT8 Kernel: the pack's arithmetic under a MODEL of ComfyUI's own loader, and nothing left behind."""

import contextlib

import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy.patcher_extension import CallbacksMP
from safetensors.torch import load_file

from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8Kernel
from int8_dit.nodes.linears.layer_selection import quantizable_linears
from support.architectures import ARCHITECTURES
from support.comfyui_today import today
from support.file_formats import int8

NATIVE = {"scalar scale": {"per_channel": False}, "rows": {}, "ConvRot": {"rotation_group": 64}}


@pytest.fixture
def native(dit, tmp_path):
    return dit.write(tmp_path / "native.safetensors", dit.native_int8())


@pytest.mark.parametrize("options", NATIVE.values(), ids=NATIVE)
def test_computes_what_load_int8_dit_computes(dit, tmp_path, options):
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8(**options))
    assert torch.equal(dit.output(dit.apply(dit.stock(path))), dit.output(dit.load(path)))


@pytest.mark.parametrize("make", (lambda dit, path: dit.apply(dit.stock(path)), lambda dit, path: dit.load(path)))
def test_a_saved_model_is_the_stock_one(dit, native, tmp_path, make):
    """ComfyUI's own save node sees the same weights."""
    comfy.sd.save_checkpoint(str(tmp_path / "saved.safetensors"), make(dit, native), metadata={})
    saved = load_file(tmp_path / "saved.safetensors")
    for key, tensor in load_file(native).items():
        assert torch.equal(saved[f"model.diffusion_model.{key}"].to(tensor.dtype), tensor), key


def test_auto_without_a_gpu_leaves_the_model_and_warns(dit, native, logged):
    model = dit.stock(native)
    patched = dit.apply(model, kernel="auto")
    assert torch.equal(dit.output(patched), dit.output(model))
    dit.sample(patched)
    assert logged("The fused INT8 kernel is not applied")


def test_a_model_without_int8_is_refused(dit):
    with pytest.raises(ValueError, match=r"this MODEL holds no INT8 linears.*use Load INT8 DiT"):
        dit.apply(dit.stock())


def test_a_model_of_this_pack_passes_through(dit, native):
    model = dit.load(native)
    assert torch.equal(dit.output(dit.apply(model)), dit.output(model)) and not dit.apply(model).object_patches


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_bypassed_between_models_with_a_lora_it_leaves_nothing_behind(dit, native, lora, mode):
    """ComfyUI keeps the weight below a LoRA while the kernel is applied, and puts it back later."""
    with mode():
        stock = dit.stock(native)
        patched = dit.with_lora(stock, lora)
        applied, behind = dit.apply(patched), dit.with_lora(dit.apply(stock), lora)
        assert dit.apply(patched).patches_uuid == applied.patches_uuid  # one is not loaded again for the other
        expected = dit.output(stock), dit.output(patched)
        comfy.model_management.unload_all_models()
        for models in ((applied, patched), (behind, patched), (dit.apply(applied), applied, patched, behind)):
            outputs = [dit.output(model) for model in models]
            comfy.model_management.unload_all_models()
            assert torch.equal(dit.output(stock), expected[0])
            assert torch.equal(dit.output(patched), expected[1])
            assert all(torch.equal(dit.output(model), output) for model, output in zip(models, outputs, strict=True))
            comfy.model_management.unload_all_models()


def test_what_runs_where(dit, native):
    model = dit.stock(native)
    text = ApplyFusedINT8Kernel.execute(model, "fused int8").result[1]
    assert text.startswith(f"{len(dit.LINEARS)} of 34 linears INT8 in plain PyTorch (no GPU), ")
    text = ApplyFusedINT8Kernel.execute(model, "auto").result[1]
    assert f"{len(dit.LINEARS)} of 34 linears ComfyUI's INT8 as in the file (the model runs on cpu" in text


def test_a_copy_for_another_gpu(dit, native):
    """ComfyUI loads the file again for each GPU; the patch must act on the copy's own layers."""
    patched = dit.apply(dit.stock(native))
    expected = dit.output(patched)
    copy = patched.deepclone_multigpu()
    assert copy.model is not patched.model
    assert torch.equal(dit.output(copy), expected)


def test_an_engine_may_share_tokens_among_cards(dit, small):
    """What it replaces of the blocks when a MODEL is loaded calls linears with a part of the tokens each."""
    parts = []

    def shared(own, part):
        parts.append(part.shape)
        return own(part)

    def split(patcher, *_):
        for block in patcher.model.diffusion_model.blocks:
            for layer in (*block.self_attn.children(), *block.ffn):
                if hasattr(layer, "in_features"):
                    own = layer.forward
                    layer.forward = lambda x, own=own: torch.cat([shared(own, part) for part in x.chunk(2, 1)], 1)

    floats = small.wan()
    file = int8(floats.model.diffusion_model.state_dict(), [*quantizable_linears(floats)])
    model = dit.apply(comfy.sd.load_diffusion_model_state_dict(dict(file.tensors)))
    expected = small.output(model)
    model.detach()
    model.add_callback(CallbacksMP.ON_LOAD, split)
    assert dit.relative_error(small.output(model), expected) < 1e-4 and len(parts) > 20


def called(architecture, small, model, layers):
    """A forward of a MODEL, and which of its linears were called."""
    comfy.model_management.load_models_gpu([model])
    names, modules = set(), dict(model.model.diffusion_model.named_modules())
    hooks = [modules[name].register_forward_pre_hook(lambda *_, name=name: names.add(name)) for name in layers]
    output = small.output_of(architecture, model)
    for hook in hooks:
        hook.remove()
    return output, names


@pytest.fixture
def in_floats_and_int8(small):
    """By the name of an architecture: a MODEL in floats, its linears that become INT8, and the MODEL of these."""

    def make(name):
        tensors = small.tensors_of(ARCHITECTURES[name])
        floats = small.stock_of(ARCHITECTURES[name], tensors)
        layers = [*quantizable_linears(floats)]
        return floats, layers, small.stock_of(ARCHITECTURES[name], int8(tensors, layers).tensors)

    return make


@pytest.fixture
def interface(request):
    """This ComfyUI's way to ask linears for more than a product, or one that it has had since."""
    with contextlib.nullcontext() if request.param == "its own" else today(request.param):
        yield


PAST_FORWARDS = ("MiniMax H3", "Wan t2v", "Wan i2v", "LTX-Video", "LTX-2")
CALLED = [(name, "its own") for name in ARCHITECTURES]
CALLED += [(name, way) for name in PAST_FORWARDS for way in ("arguments", "linear_input_act")]


@pytest.mark.parametrize("name, interface", CALLED, indirect=["interface"])
def test_no_linear_is_called_past_its_forward(dit, small, interface, in_floats_and_int8, name):
    """ComfyUI's `linear_input_act` multiplies by INT8 weights itself where they look like its own."""
    floats, layers, stock = in_floats_and_int8(name)
    expected, all_called = called(ARCHITECTURES[name], small, floats, layers)
    own, _ = called(ARCHITECTURES[name], small, stock, layers)
    output, ran = called(ARCHITECTURES[name], small, dit.apply(stock), layers)
    assert ran == all_called
    assert dit.relative_error(output, expected) <= 1.05 * dit.relative_error(own, expected)
    assert torch.equal(called(ARCHITECTURES[name], small, stock, layers)[0], own)


def test_calls_past_a_forward_stay_where_another_node_says_so(dit, small, in_floats_and_int8):
    architecture = ARCHITECTURES["MiniMax H3"]
    _, layers, stock = in_floats_and_int8("MiniMax H3")
    own = called(architecture, small, stock, layers)
    output, ran = called(architecture, small, applied := dit.apply(stock), layers)
    for model, (wanted, theirs) in {
        dit.apply(stock): (output, ran),  # while the first is loaded
        dit.apply(applied, kernel="auto"): own,
        dit.apply(dit.apply(stock, kernel="auto")): (output, ran),
        stock: own,
    }.items():
        found, its = called(architecture, small, model, layers)
        assert torch.equal(found, wanted) and its == theirs
