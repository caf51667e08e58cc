"""ComfyUI's merge nodes and hooks on INT8 MODELs: what they do to float MODELs, and gone without a trace."""

import gc
import weakref
from functools import partial

import comfy.hooks
import comfy.model_management
import comfy.sample
import comfy.sd
import comfy.utils
import comfy_extras.nodes_lora_extract as node
import comfy_extras.nodes_model_merging as merging
import folder_paths
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from torch.multiprocessing.reductions import StorageWeakRef

from glyphs import conditioning, latents
from int8_dit.nodes.files.holding import is_gguf
from int8_dit.nodes.linears.patched_weights import float_weight
from int8_dit.nodes.linears.stored_weights import put_hooked
from support.file_formats import fp8_scaled, int8

NOISE = 0.1  # INT8's own is a few percent; a merge or a hook that is lost moves the output by over 40 %


@pytest.fixture
def other_file(dit, lora, tmp_path):
    """A second model of the same architecture."""
    return dit.write(tmp_path / "other.safetensors", dit.with_delta(dit.tensors(), lora))


def merged(node, *inputs):
    return getattr(merging, node)().merge(*inputs)[0]


MERGES = {
    "simple": lambda a, b: merged("ModelMergeSimple", a, b, 0.3),
    "subtracted and added again": lambda a, b: merged("ModelAdd", merged("ModelSubtract", b, a, 1.0), a),
}


@pytest.fixture
def load_stored(dit, tmp_path):
    """A MODEL whose weights stay in blocks of GGUF, or as W4A8."""
    return lambda kind="Q8_0", tensors=None: dit.load(dit.write_as(tmp_path, kind, tensors), memory="as stored")


@pytest.fixture
def stored(load_stored):
    return load_stored()


@pytest.mark.parametrize("held", ("smoothed", "stored", "applied"))
@pytest.mark.parametrize("merge", MERGES.values(), ids=MERGES)
def test_merging(request, dit, other_file, merge, held):
    """With another INT8 MODEL, with a float one, into either, and with itself."""
    model, other = request.getfixturevalue(held), dit.stock(other_file)
    model = model()[1] if held == "applied" else model
    expected = dit.output(merge(dit.stock(), other))
    assert dit.relative_error(expected, dit.output(dit.stock())) > 3 * NOISE
    with dit.untouched(model):
        result = merge(model, dit.load(other_file))
        assert dit.relative_error(dit.output(result), expected) < NOISE
        assert held != "smoothed" or set(dit.int8_weights(result)) == set(dit.LINEARS)
        assert dit.relative_error(dit.output(merged("ModelMergeSimple", model, model, 0.3)), dit.output(model)) < NOISE
    assert dit.relative_error(dit.output(merge(model, other)), expected) < NOISE
    expected = dit.output(merge(dit.stock(other_file), dit.stock()))
    for base in (other, dit.load(other_file)):
        assert dit.relative_error(dit.output(merge(base, model)), expected) < NOISE


def test_a_merged_model_is_saved_as_it_computes(dit, smoothed, other_file, tmp_path):
    result = MERGES["simple"](smoothed, dit.load(other_file))
    saved = dit.load(dit.save(result, tmp_path / "merged.safetensors"))
    assert dit.relative_error(dit.output(saved), dit.output(result)) < NOISE / 2


@pytest.fixture
def loaded(dit, other_file, load_stored, tmp_path):
    """The second model in a form that a node holds it in."""

    def load(held):
        if held in ("Q8_0", "W4A8"):
            return load_stored(held, torch_file(other_file))
        if held == "floats":
            return dit.stock(other_file)
        native = int8(torch_file(other_file), dit.LINEARS, rotate=64).tensors
        path = dit.write(tmp_path / "int8.safetensors", native)
        return dit.load(path) if held == "INT8" else dit.apply(dit.stock(path))

    return load


def torch_file(path):
    return comfy.utils.load_torch_file(path)


@pytest.fixture
def extracted(dit, monkeypatch, tmp_path):
    """What the file of ComfyUI's Extract and Save Lora, made of a difference, makes of the float model."""
    monkeypatch.setattr(folder_paths, "output_directory", str(tmp_path / "output"))

    def extract(difference, kind, streams):
        def stream(models):
            models[0].patch_model(models[0].load_device, lowvram_model_memory=1)

        with monkeypatch.context() as patched:
            if streams:
                patched.setattr(comfy.model_management, "load_models_gpu", stream)
            node.LoraSave.execute("extracted", 4, kind, True, difference)
        (file,) = (tmp_path / "output").rglob("*.safetensors")
        made = torch_file(str(file))
        file.unlink()
        # Streamed, ComfyUI takes whole norms for their differences, also of floats.
        linears = {key: tensor for key, tensor in made.items() if any(f".{layer}." in key for layer in dit.LINEARS)}
        return dit.output(dit.with_lora(dit.stock(), linears))

    return extract


@pytest.mark.parametrize("streams", (False, True), ids=("resident", "streamed"))
@pytest.mark.parametrize("kind", ("standard", "full_diff"))
@pytest.mark.parametrize("held", ("INT8", "Q8_0", "W4A8", "native, applied"))
def test_a_lora_extracted_of_a_difference(dit, loaded, extracted, held, kind, streams):
    """It is that of the weights as floats."""
    expected = extracted(merged("ModelSubtract", loaded("floats"), dit.stock(), 1.0), kind, False)
    assert dit.relative_error(expected, dit.output(dit.stock())) > 3 * NOISE
    output = extracted(merged("ModelSubtract", loaded(held), dit.stock(), 1.0), kind, streams)
    assert dit.relative_error(output, expected) < (0.3 if held == "W4A8" else NOISE)


def hooked(dit, model, hooks, steps=1):
    """Sample with hooks on the positive conditioning alone, so that they come and go within a step."""
    context, pooled = conditioning.encode("A")
    empty = torch.zeros(1, latents.CHANNELS, latents.SIDE, latents.SIDE)
    noise = comfy.sample.prepare_noise(empty, 0)
    positive = [[context, {"pooled_output": pooled, **({"hooks": hooks} if hooks else {})}]]
    negative = [[context * 0, {"pooled_output": pooled * 0}]]
    return comfy.sample.sample(model, noise, steps, 2.0, "euler", "simple", positive, negative, empty, seed=0)


def lora_hook(dit, lora, other_file):
    return comfy.hooks.create_hook_lora(lora, 1.0, 0.0)


def model_hook(dit, lora, other_file, load="stock"):
    weights = comfy.hooks.get_patch_weights_from_model(getattr(dit, load)(other_file))
    return comfy.hooks.create_hook_model_as_lora(weights, None, 1.0, 0.0)


int8_model_hook = partial(model_hook, load="load")


@pytest.fixture
def applied(dit, tmp_path):
    """Loads a MODEL of ComfyUI's own loader in native INT8, and what Apply makes of it."""
    path = dit.write(tmp_path / "native.safetensors", dit.native_int8(rotation_group=64))

    def load():
        stock = dit.stock(path)
        return stock, dit.apply(stock)

    return load


@pytest.mark.parametrize("held", ("smoothed", "stored", "applied"))
@pytest.mark.parametrize("make", (lora_hook, model_hook, int8_model_hook))
@pytest.mark.parametrize("steps, mode", ((1, torch.no_grad), (2, torch.inference_mode)))  # ComfyUI's nodes: the latter
def test_hooks(dit, lora, other_file, load_stored, applied, make, steps, mode, held):
    float_hook = lora_hook(dit, lora, other_file)
    expected = hooked(dit, dit.stock(), float_hook, steps)
    assert dit.relative_error(expected, hooked(dit, dit.stock(), None, steps)) > 3 * NOISE
    with mode():
        if held == "applied":
            under, model = applied()
        else:
            model = load_stored() if held == "stored" else dit.quantize(dit.stock(), calibration=dit.recorded())
            under = model
        before = dit.output(under)
        with dit.untouched(model):
            first = hooked(dit, model, make(dit, lora, other_file), steps)
            assert dit.relative_error(first, expected) < NOISE
            assert torch.equal(hooked(dit, model.clone(), make(dit, lora, other_file), steps), first)
        assert torch.equal(dit.output(under), before)


@pytest.mark.parametrize("kind", ("INT8", "Q8_0", "W4A8", "fp8", "floats", "applied"))
def test_a_hook_frees_no_pinned_memory(dit, lora, load_stored, applied, tmp_path, monkeypatch, kind):
    """ComfyUI pins the weights that it streams. Memory that is freed without its knowledge stays registered with CUDA,
    and a later copy from what lies there fails."""
    layers, expired, patch_hooks = dit.LINEARS, [], ModelPatcher.patch_hooks

    def look(patcher, hooks):
        patch_hooks(patcher, hooks)
        gc.collect()
        expired.extend(weak.expired() for weak in memory.values())

    monkeypatch.setattr(ModelPatcher, "patch_hooks", look)
    with torch.inference_mode():
        if kind == "applied":
            model = applied()[1]
        elif kind == "fp8":
            layers = dit.LINEARS[:1]
            model = dit.load(dit.write(tmp_path / "fp8.safetensors", fp8_scaled(dit.tensors(), layers)))
        elif kind == "floats":
            layers = dit.LINEARS[:1]
            model = dit.load(dit.write_as(tmp_path, "native", layers=dit.LINEARS[1:]))
        else:
            model = dit.load() if kind == "INT8" else load_stored(kind)
        dit.output(model)
        memory = {name: StorageWeakRef(memory_of(dit.module(model, name).weight)) for name in layers}
        addresses = {name: dit.module(model, name).weight.data_ptr() for name in layers}
        hooked(dit, model, lora_hook(dit, lora, None), 2)
    assert expired and not any(expired)
    assert {name: dit.module(model, name).weight.data_ptr() for name in layers} == addresses


def memory_of(weight):
    return (weight._qdata if isinstance(weight, QuantizedTensor) else weight).untyped_storage()


def test_hooks_on_layers_that_stay_fp8(dit, lora, tmp_path):
    """Their weights take other scales under a hook, and have their own again after it."""
    layer = "joint_blocks.0.x_block.adaLN_modulation.1"
    model = dit.load(dit.write(tmp_path / "fp8.safetensors", fp8_scaled(dit.tensors(), [layer])))
    with dit.untouched(model):
        hooked(dit, model, lora_hook(dit, dit.lora([layer], 0.5), None))


@pytest.mark.parametrize(
    "kind, layer",
    [
        ("Q4_0", "joint_blocks.1.x_block.mlp.fc2"),  # of this format blocks are read and never made
        ("Q4_0", "joint_blocks.0.x_block.adaLN_modulation.1"),  # computes in floats
        ("Q4_K", "joint_blocks.1.x_block.mlp.fc2"),
        ("Q6_K", "joint_blocks.1.x_block.mlp.fc2"),
    ],
)
@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_a_hook_is_not_rounded_to_blocks(dit, load_stored, monkeypatch, kind, layer, mode):
    """Where a weight has few values, a small change would round back to the one that it was."""
    with mode():
        model, lora = load_stored(kind), dit.lora([layer], 0.02)
    module, change = dit.module(model, layer), dit.delta(lora, layer)
    before, kept, patch_hooks = module.weight.dequantize().clone(), [], ModelPatcher.patch_hooks

    def look(patcher, hooks):
        patch_hooks(patcher, hooks)
        if hooks is not None:
            kept.append(float(((module.weight.detach().dequantize() - before) * change).sum() / change.square().sum()))

    monkeypatch.setattr(ModelPatcher, "patch_hooks", look)
    with mode(), dit.untouched(model):
        hooked(dit, model, lora_hook(dit, lora, None), 2)
    assert is_gguf(module.weight) and len(kept) == 2 and kept == pytest.approx([1, 1], abs=0.1)


@pytest.mark.parametrize("kind", ("Q8_0", "W4A8", "native, ConvRot", "bf16"))
def test_a_hooks_weight_is_streamed_as_it_is(dit, load_stored, kind):
    """ComfyUI copies a weight in host memory over an empty one like it: here to `cpu:0`, which is no other memory."""
    linear = dit.module(dit.stock() if kind == "bf16" else load_stored(kind), dit.LAYER)
    put_hooked(linear, 1.5 * float_weight(linear.weight), 1)
    hooked = linear.weight
    copied = comfy.model_management.cast_to(hooked, None, torch.device("cpu:0"))
    assert copied is not hooked and linear.weight is hooked
    assert torch.equal(float_weight(copied), float_weight(hooked))


@pytest.mark.parametrize("layer", (None, "t_embedder.mlp.0"), ids=("INT8", "floats"))
@pytest.mark.parametrize("kind", ("Q8_0", "W4A8", "INT8"))
def test_a_hook_goes_where_its_linear_was_unloaded_meanwhile(dit, load_stored, all_may_stay_stored, kind, layer):
    """Its old weight does not come back to the card, where ComfyUI counts it no more, and has its form again."""
    model = dit.load() if kind == "INT8" else load_stored(kind)
    linear = dit.module(model, layer or dit.LAYER)
    before = linear.weight
    backup = before.to(device=before.device, copy=True)
    put_hooked(linear, 1.5 * float_weight(before), 1)
    linear.to(torch.device("cpu"))
    linear.to(torch.device("meta"))  # another place, as the host is for a linear on a card
    comfy.utils.copy_to_param(linear, "weight", backup)
    assert linear.weight.device.type == "meta" and type(linear.weight.data) is type(before.data)


def test_a_hook_beside_a_lora_on_stored_blocks(dit, stored, lora, other_file):
    hook = lora_hook(dit, lora, other_file)
    expected = hooked(dit, dit.with_lora(dit.stock(), lora), hook)
    assert dit.relative_error(hooked(dit, dit.with_lora(stored, lora), hook), expected) < NOISE


def test_a_hook_stays_when_its_model_is_loaded_again(dit, applied, lora):
    """ComfyUI takes object patches off and puts them back while a hook's weights are in place."""
    stock, model = applied()
    expected, native = dit.output(dit.with_lora(dit.stock(), lora)), dit.output(stock)
    model, group = model.clone(), lora_hook(dit, lora, None)
    model.register_all_hook_patches(group, comfy.hooks.create_target_dict(comfy.hooks.EnumWeightTarget.Model))
    before = dit.output(model)
    model.forced_hooks = group
    model.patch_hooks(group)
    assert dit.relative_error(dit.forward(model), expected) < NOISE
    model.partially_load(model.load_device, 1 << 30)
    assert dit.relative_error(dit.forward(model), expected) < NOISE
    model.forced_hooks = None
    model.detach()
    assert torch.equal(dit.output(model), before)
    assert torch.equal(dit.output(stock), native)


FOLDED = "LoRA or merge on a folded INT8 file"


@pytest.fixture
def folded(dit, tmp_path):
    """Loads a MODEL whose weights have smoothing factors folded into them."""
    model = dit.quantize(dit.stock(), smooth_only_foldable=True, calibration=dit.recorded())
    path = dit.save(model, tmp_path / "folded.safetensors", fold=True)
    return lambda: dit.load(path)


def test_a_hook_on_a_folded_file_warns(dit, folded, lora, logged):
    others = {key.replace("diffusion_model", "text_encoders"): tensor for key, tensor in lora.items()}
    for weights in ({}, others):
        hooked(dit, folded(), lora_hook(dit, weights, None))
    assert not logged(FOLDED)
    hooked(dit, folded(), lora_hook(dit, lora, None))
    assert logged(FOLDED)


def test_a_bypass_lora_on_a_folded_file_warns(dit, folded, lora, logged):
    dit.sample(comfy.sd.load_bypass_lora_for_models(folded(), None, lora, 1.0, 0.0)[0])
    assert logged(FOLDED)


def test_a_folded_file_that_is_merged_into_another_model_warns(dit, folded, smoothed, logged):
    model, other = dit.stock(), folded().clone()
    merged("ModelMergeSimple", model, smoothed, 0.3)
    assert not logged(FOLDED)
    merged("ModelMergeSimple", model, other, 0.3)
    assert logged(FOLDED)


def test_a_dropped_model_waits_for_no_garbage_collection(dit, applied):
    _, model = applied()
    gc.disable()
    try:
        gone = weakref.ref(model.clone())
        assert gone() is None
    finally:
        gc.enable()
