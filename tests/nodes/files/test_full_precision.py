"""Layers that a file marks with `full_precision_matrix_mult`: 16-bit activations, and the mark survives.

What the mark asks for is the product of floats; newer ComfyUI computes that. 0.30 and 0.33 compute INT8 all the same,
so that the expectation here is made of the weights that the file stands for.
"""

import pytest
import torch
from safetensors.torch import load_file

from int8_dit.nodes.linears.weight_form import known_form
from int8_dit.nodes.loading.load import rebuild_int8_model
from int8_dit.nodes.saving.save import save_int8_model
from support.file_formats import FORMATS, configs_in, encoded, fp8_scaled

UNKNOWN = {"made_by": "a newer tool"}
FLAG = {"full_precision_matrix_mult": True}


def marked(tensors, *layers, **options):
    marks = configs_in(tensors)
    return tensors | {f"{layer}.comfy_quant": encoded({**marks[layer], **options}) for layer in layers or marks}


@pytest.fixture(params=(None, 64), ids=("plain", "ConvRot"))
def native(dit, request):
    return dit.native_int8(rotation_group=request.param)


def floats(dit, path):
    """What the product of floats computes: the MODEL of the loader, its INT8 weights dequantized."""
    return dit.output(dit.load(path, "bf16"))


def save(model, path):
    return load_file(save_int8_model(model, str(path), {}))


@pytest.mark.parametrize("node", ("load", "apply"))
def test_marked_layers_are_five_times_as_near(dit, native, tmp_path, node):
    plain = dit.write(tmp_path / "plain.safetensors", native)
    path = dit.write(tmp_path / "marked.safetensors", marked(native, **FLAG))
    expected = floats(dit, path)
    run = dit.load if node == "load" else lambda path: dit.apply(dit.stock(path))
    unmarked = dit.relative_error(dit.output(run(plain)), expected)
    assert unmarked > 0.005
    assert dit.relative_error(dit.output(run(path)), expected) <= 0.2 * unmarked


def test_only_the_marked_layers_have_16_bits(dit, native, tmp_path):
    path = dit.write(tmp_path / "marked.safetensors", marked(native, dit.LAYER, **FLAG))
    for model in (dit.load(path), dit.apply(dit.stock(path))):
        dit.output(model)
        assert [layer for layer in dit.LINEARS if bits_of(dit.module(model, layer)) == 16] == [dit.LAYER]
        assert "with 16-bit activations" in str(dit.summarize(model))


def bits_of(layer):
    return known_form(layer.weight, layer).unsmoothed.activation_bits


def test_a_mark_that_says_false_asks_for_nothing(dit, native, tmp_path):
    tensors = marked(native, full_precision_matrix_mult=False)
    model = dit.load(dit.write(tmp_path / "marked.safetensors", tensors))
    assert bits_of(dit.module(model, dit.LAYER)) == 8
    assert configs_in(save(model, tmp_path / "saved.safetensors")) == configs_in(tensors)


FORMS = {
    "native": (lambda dit: dit.native_int8(), FLAG | UNKNOWN),
    "ConvRot": (lambda dit: dit.native_int8(rotation_group=64), FLAG | UNKNOWN),
    "FP8 beside native": (lambda dit: fp8_scaled(dit.native_int8(), [dit.LAYER]), FLAG | UNKNOWN),
    "smoothed": (lambda dit: dit.smoothed_int8(), UNKNOWN),
    "smoothed, 16 bits": (lambda dit: dit.smoothed_int8(), FLAG),
}


@pytest.mark.parametrize("form", FORMS)
def test_marks_are_saved_as_they_were(dit, tmp_path, form):
    """Also what the pack does not know. Other loaders read the file, unless it is in the pack's own formats."""
    make, options = FORMS[form]
    tensors = marked(make(dit), dit.LAYER, **options)
    model = dit.load(dit.write(tmp_path / "marked.safetensors", tensors))
    saved = configs_in(save(model, tmp_path / "saved.safetensors"))
    if "smoothed" not in form:
        assert saved == configs_in(tensors)
        assert dit.output(dit.stock(tmp_path / "saved.safetensors")).isfinite().all()
    assert options.items() <= saved[dit.LAYER].items()
    again = dit.load(tmp_path / "saved.safetensors")
    assert torch.equal(dit.output(again), dit.output(model))


def test_marks_survive_a_lora_and_a_second_gpu(dit, native, lora, tmp_path):
    tensors = marked(native, **FLAG, **UNKNOWN)
    model = dit.load(dit.write(tmp_path / "marked.safetensors", tensors))
    assert configs_in(save(dit.with_lora(model, lora), tmp_path / "saved.safetensors")) == configs_in(tensors)

    rebuilt = rebuild_int8_model(model.model, "fused int8")
    assert configs_in(rebuilt.model.diffusion_model.state_dict()) == configs_in(tensors)
    assert torch.equal(dit.output(rebuilt), dit.output(model))


def test_a_layer_that_is_quantized_again_has_a_mark_of_its_own(dit, native, tmp_path):
    model = dit.load(dit.write(tmp_path / "marked.safetensors", marked(native, **FLAG, **UNKNOWN)))
    marks = configs_in(save(dit.quantize(model, method="none"), tmp_path / "saved.safetensors"))
    assert all(not {*FLAG, *UNKNOWN} & mark.keys() for mark in marks.values())


def test_fp8_that_becomes_int8_has_8_bits(dit, tmp_path):
    """Of FP8 the mark says that its inputs are not rounded to FP8."""
    tensors = marked(fp8_scaled(dit.tensors(), dit.LINEARS), **FLAG)
    model = dit.load(dit.write(tmp_path / "fp8.safetensors", tensors))
    assert set(dit.int8_weights(model)) == set(dit.LINEARS)
    assert bits_of(dit.module(model, dit.LAYER)) == 8
    marks = configs_in(save(model, tmp_path / "saved.safetensors"))
    assert all(mark == {"format": "int8_tensorwise"} for mark in marks.values())


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_codes_of_4_bits_too(dit, tmp_path, memory, monkeypatch):
    monkeypatch.setattr("int8_dit.nodes.loading.memory_choice.SMALLEST_STORED", 0)
    tensors = FORMATS["W4A8"]({key: tensor.float() for key, tensor in dit.tensors().items()}, dit.LINEARS).tensors
    plain = dit.write(tmp_path / "plain.safetensors", tensors)
    path = dit.write(tmp_path / "marked.safetensors", marked(tensors, **FLAG, **UNKNOWN))
    expected = floats(dit, path)
    unmarked = dit.relative_error(dit.output(dit.load(plain, memory=memory)), expected)
    model = dit.load(path, memory=memory)
    assert dit.relative_error(dit.output(model), expected) <= 0.2 * unmarked
    saved = save(model, tmp_path / "saved.safetensors")
    assert all({**FLAG, **UNKNOWN}.items() <= mark.items() for mark in configs_in(saved).values())
    if memory == "as stored":
        assert configs_in(saved) == configs_in(marked(tensors, **FLAG, **UNKNOWN))
