"""Weights that stay in the form of their file, GGUF's blocks and codes of 4 or 6 bits: held, computed with, patched.

What is of one of these forms alone: test_gguf_file.py, test_grouped_weights.py.
"""

import os
from functools import cache
from types import SimpleNamespace

import comfy.sd
import pytest
import torch
from comfy.patcher_extension import WrappersMP

from int8_dit.nodes.comfyui.compiling import COMPILE_KEY
from int8_dit.nodes.files.reading.gguf_file import read_gguf
from int8_dit.nodes.linears import stored_weights
from support.file_formats import FORMATS

GROUPED = ("W4A8", "W6A8")
FORMS = ("Q8_0", "Q4_0", "Q4_K", *GROUPED)
DECODED = ("IQ4_NL", "MXFP4")  # by the package gguf, and by no kernel
ONE_OF_EACH = pytest.mark.parametrize("form", ("Q8_0", "W4A8"))
SMALLEST = "int8_dit.nodes.loading.memory_choice.SMALLEST_STORED"


@pytest.fixture(scope="module")
def file(dit, tmp_path_factory):
    """A file of the glyph model in a form: its path, the MODEL of the floats that it stands for, what that computes."""
    folder = tmp_path_factory.mktemp("files")

    @cache
    def make(form):
        tensors = {name: tensor.float() for name, tensor in dit.tensors().items()}
        if form in GROUPED:
            made = FORMATS[form](tensors, dit.LINEARS)
            path, values = dit.write(folder / f"{form}.safetensors", made.tensors), made.values
        else:
            path = dit.write_as(folder, form)
            read, _ = read_gguf(path)
            values = {key: t.dequantize() if hasattr(t, "_qdata") else t.clone() for key, t in read.items()}
        floats = lambda: comfy.sd.load_diffusion_model_state_dict(dict(values))  # noqa: E731
        return SimpleNamespace(path=path, floats=floats, output=dit.output(floats()))

    return make


@pytest.fixture
def load(dit, file, monkeypatch):
    """A file's MODEL, whose small layers stay as stored too."""
    monkeypatch.setattr(SMALLEST, 0)
    return lambda form, memory="as stored", kernel="fused int8": dit.load(file(form).path, kernel, memory)


@pytest.mark.parametrize("form", (*FORMS, *DECODED))
def test_it_computes_what_its_file_stands_for(dit, file, load, form):
    """In floats nearly; resident, streamed and made INT8 while loading the same, as the INT8 weights are the same."""
    model, as_int8 = load(form), load(form, "INT8")
    output = dit.output(model)
    assert dit.relative_error(output, file(form).output) < 2 * dit.int8_noise()
    assert set(dit.int8_weights(as_int8)) == set(dit.LINEARS)
    assert dit.stored(model).keys() | dit.int8_weights(model).keys() >= set(dit.LINEARS)
    assert bool(dit.stored(model)) == (form in FORMS) == (f"{form} " in str(dit.summarize(model)))
    assert bool(dit.int8_weights(model)) == (form in ("Q4_K", *DECODED))  # Q4_K: its blocks do not divide every row
    assert torch.equal(dit.output(as_int8), output)
    streamed = load(form)
    dit.stream(streamed)
    assert torch.equal(dit.forward(streamed), output)


def mapped(path):
    """Where a file lies in the memory of this process, as ranges of addresses."""
    with open("/proc/self/maps") as maps:
        lines = [line.split(maxsplit=5) for line in maps]
    return [tuple(int(end, 16) for end in line[0].split("-")) for line in lines if line[5:] == [f"{path}\n"]]


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="only Linux shows where files are mapped")
@pytest.mark.parametrize("form", FORMS)
def test_weights_stay_in_their_file_as_those_of_comfyuis_loaders_do(dit, file, load, form):
    """To copy them took most of a load, and the host's memory once more."""
    held = [tensor for weight in dit.stored(load(form)).values() for tensor in weight.state_dict("").values()]
    assert all(tensor.device.type == "cpu" for tensor in held)
    assert sum(tensor.nbytes for tensor in held) < 1.05 * os.path.getsize(file(form).path)
    places = [(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes) for tensor in held]
    ranges = mapped(file(form).path)
    assert places and all(any(a <= begin and end <= b for a, b in ranges) for begin, end in places)


@ONE_OF_EACH
def test_small_weights_become_int8_all_the_same(dit, file, monkeypatch, form):
    monkeypatch.setattr(SMALLEST, 1 << 16)
    model = dit.load(file(form).path, memory="as stored")
    assert dit.LAYER in dit.stored(model) and dit.int8_weights(model)
    assert dit.stored(model).keys() | dit.int8_weights(model).keys() >= set(dit.LINEARS)


@pytest.mark.parametrize(
    "form, memory", (("Q8_0", "as stored"), ("IQ4_NL", "as stored"), ("IQ4_NL", "INT8"), ("W4A8", "INT8"))
)
def test_with_the_kernel_bf16_it_computes_in_floats(dit, file, load, form, memory):
    model = load(form, memory, "bf16")
    assert bool(dit.stored(model)) == (form == "Q8_0") and not dit.int8_weights(model)
    torch.testing.assert_close(dit.output(model), file(form).output, rtol=1e-3, atol=1e-3)
    assert form != "W4A8" or "instead of the file's INT8" in str(dit.summarize(model))


@pytest.mark.parametrize("form", ("Q4_0", "W4A8"))
def test_loras_are_rounded_with_the_weight_once(dit, load, lora, form):
    """To INT8, in its basis, in each product, and not to the file's format; all of them, with their strengths."""
    model = dit.with_lora(dit.with_lora(load(form), lora), lora, -0.25)
    dit.output(model)
    layer = dit.module(model, dit.LAYER)
    x, weight = dit.rows(layer, 2, 5), layer.weight.dequantize() + 0.75 * dit.delta(lora, dit.LAYER)
    with torch.inference_mode():
        error = dit.relative_error(layer(x), torch.nn.functional.linear(x, weight, layer.bias))
    assert error < 0.02


@pytest.mark.parametrize("form, memory", (("Q8_0", "INT8"), ("Q8_0", "as stored"), ("W4A8", "as stored")))
def test_a_lora_for_other_shapes_is_left_out_as_comfyui_does(dit, load, lora, form, memory, caplog):
    """ComfyUI logs which weights it does not fit, and goes on without it."""
    key = f"diffusion_model.{dit.LAYER}.lora_down.weight"
    others = {name: tensor for name, tensor in lora.items() if dit.LAYER not in name}
    expected = dit.output(dit.with_lora(load(form, memory), others))
    wrong = dit.with_lora(load(form, memory), {**lora, key: lora[key][:, :-8]})
    dit.stream(wrong)
    assert dit.relative_error(dit.forward(wrong), expected) < 0.1
    assert "ERROR lora" in caplog.text and dit.LAYER in caplog.text


@pytest.mark.parametrize("room", (0, 1))
def test_unloaded_nothing_of_a_lora_stays_on_the_device(dit, load, lora, room):
    """ComfyUI itself takes patches off only the models that it loaded in part."""
    model = dit.with_lora(load("Q8_0"), lora)
    model.patch_model(device_to=model.load_device, lowvram_model_memory=room)
    layer = dit.module(model, dit.LAYER)
    assert layer.weight_function
    model.detach()
    assert not layer.weight_function


@pytest.mark.parametrize("form, kernel", (("Q8_0", "fused int8"), ("W4A8", "bf16")))
def test_a_lora_acts_once_where_a_part_is_unloaded(dit, load, form, kernel):
    """ComfyUI attaches its patches to what it unloads, and calls nothing back. Its products in floats apply each."""
    model = load(form, kernel=kernel)
    in_floats = [name for name in dit.stored(model) if kernel == "bf16" or name not in dit.LINEARS]
    patched = dit.with_lora(model, dit.lora(in_floats, 0.5))
    output = dit.output(patched)
    patched.partially_unload(patched.offload_device, patched.model_size())
    torch.testing.assert_close(dit.forward(patched), output, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "form, message",
    (
        ("Q8_0", r"GGUF's blocks.*Save GGUF.*memory.*INT8"),
        ("W4A8", r"in 4 or 6 bits. Connect Save INT8 DiT, or set memory"),
    ),
)
def test_comfyuis_own_save_nodes_are_refused(load, tmp_path, form, message):
    """They would leave out patches, or write blocks that no loader takes for a weight."""
    path = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match=message):
        comfy.sd.save_checkpoint(str(path), load(form))
    assert not path.exists()
    comfy.sd.save_checkpoint(str(path), load(form, "INT8"))


@ONE_OF_EACH
def test_it_can_be_quantized_again_and_saved_as_gguf(dit, file, load, tmp_path, form):
    """From the floats that it stands for."""
    quantized = dit.quantize(load(form), calibration=dit.recorded())
    assert set(dit.int8_weights(quantized)) == set(dit.LINEARS)
    saved = dit.load(dit.save(load(form), tmp_path / "model.gguf"))
    for made in (quantized, saved):
        assert dit.relative_error(dit.output(made), file(form).output) < 0.1


@pytest.mark.parametrize("form, copied", (("Q8_0", True), ("W4A8", False)))
def test_a_compiled_model_reads_once_what_has_to_be_found(dit, load, monkeypatch, form, copied):
    """The scales of blocks; codes have theirs beside them."""
    model, given = load(form), []
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, lambda call, *args, **kwargs: call(*args, **kwargs))
    own = stored_weights.to_device
    monkeypatch.setattr(stored_weights, "to_device", lambda *args: given.append(args) or own(*args))
    dit.sample(model)
    first = len(given)
    dit.sample(model)
    assert bool(first) == copied and len(given) == first
