"""Files in W4A8 and W6A8 (asym_w4a8_int8, w6a8_int8): beside ComfyUI's, and saved. More: test_stored_weights.py.

comfy-kitchen's own quantizer makes them where there is one. ComfyUI 0.33 knows W4A8 by its name, and computes W6A8
under it. An older one knows neither.
"""

from functools import cache

import comfy.model_management
import comfy.sd
import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS
from safetensors.torch import load_file

from int8_dit.nodes.comfyui.quantized import stored
from int8_dit.nodes.loading.load_plan import checkpoint_plan
from support.file_formats import FORMATS, config_in, configs_in, decoded, encoded, in_metadata, unrotated

UNKNOWN = {"made_by": "a newer tool", "params": {"seed": 7}}
BITS = (4, 6)
pytestmark = pytest.mark.usefixtures("all_may_stay_stored")


def kitchen():
    """comfy-kitchen's quantizer (weight, group, rotation, bits=) -> codes, scales, ...; None where it has none."""
    try:
        from comfy_kitchen.tensor.w4a8_int8 import quantize_w4a8_int8_weight
    except ImportError:
        return None
    return quantize_w4a8_int8_weight


@pytest.fixture(scope="module")
def made(dit):
    """The file of codes of so many bits; comfy-kitchen's quantizer takes a while."""

    @cache
    def make(bits):
        file, quantize = FORMATS[f"W{bits}A8"](dit.tensors(), dit.LINEARS), kitchen()
        for layer in dit.LINEARS if quantize else ():
            weight = dit.tensors()[f"{layer}.weight"].float()
            rotation = config_in(file.tensors[f"{layer}.comfy_quant"])["convrot_groupsize"]
            codes, s_rel, s_channel, _, codebook = quantize(weight, 16, rotation, bits=bits)
            parts = {"": codes, "_s_rel": s_rel, "_s_channel": s_channel}
            parts |= {} if codebook is None else {"_codebook": codebook}
            file.tensors.update({f"{layer}.weight{part}": tensor for part, tensor in parts.items()})
            file.values[f"{layer}.weight"] = unrotated(decoded(parts, bits), rotation)
        return file

    return make


@pytest.fixture(scope="module")
def quantized(made):
    """The tensors of the file, with these options in its marks."""

    def make(bits, **options):
        tensors = made(bits).tensors
        marks = {f"{layer}.comfy_quant": encoded(mark | options) for layer, mark in configs_in(tensors).items()}
        return tensors | marks

    return make


@pytest.fixture
def write(dit, quantized, tmp_path):
    def write(bits, name="file", **options):
        return dit.write(tmp_path / f"{name}{bits}.safetensors", quantized(bits, **options))

    return write


@pytest.fixture
def load(dit, write):
    return lambda bits, memory="as stored", **options: dit.load(write(bits, **options), memory=memory)


@pytest.fixture
def stock(dit, write):
    """The MODEL of ComfyUI's own loader."""
    if "asym_w4a8_int8" not in QUANT_ALGOS or kitchen() is None:
        pytest.skip("this ComfyUI does not know W4A8")
    return lambda bits: dit.stock(write(bits, "for stock", format="asym_w4a8_int8"))


@pytest.fixture
def with_it(dit, made):
    """What the floats that a file stands for compute with a LoRA."""
    floats = lambda bits: comfy.sd.load_diffusion_model_state_dict(dict(made(bits).values))  # noqa: E731
    return lambda bits, lora: dit.output(dit.with_lora(floats(bits), lora))


@pytest.mark.parametrize("bits", BITS)
def test_each_layer_is_as_near_to_its_floats_as_stock(dit, load, stock, bits):
    floats, theirs, ours = models = dit.stock(), stock(bits), load(bits)
    comfy.model_management.load_models_gpu(models)
    for layer in dit.LINEARS:
        first, *others = (dit.module(model, layer) for model in (floats, theirs, ours))
        x = dit.rows(first, 64)
        with torch.inference_mode():
            their_error, our_error = (dit.relative_error(other(x), first(x)) for other in others)
        assert our_error <= 1.001 * their_error


@pytest.mark.parametrize("bits", BITS)
def test_as_int8_it_is_exactly_native_convrot(dit, quantized, load, bits):
    tensors, weights = quantized(bits), dit.int8_weights(load(bits, "INT8"))
    for layer, weight in weights.items():
        parts = {key.removeprefix(f"{layer}.weight"): t for key, t in tensors.items() if key.startswith(f"{layer}.w")}
        assert torch.equal(weight._params.scale.flatten(), parts["_s_channel"])
        assert torch.equal(weight._qdata * parts["_s_channel"][:, None], decoded(parts, bits))
        assert weight._params.rotation_group == config_in(tensors[f"{layer}.comfy_quant"])["convrot_groupsize"]


def test_codes_that_stay_do_not_go_to_the_card_to_be_loaded(dit, write, monkeypatch):
    def elsewhere(checkpoint, kernel, dtype, device, *others):
        """A plan whose device loses what is moved there."""
        return checkpoint_plan(checkpoint, kernel, dtype, torch.device("meta"), *others)

    path = write(4)
    expected = {name: stored(weight) for name, weight in dit.coded(dit.load(path, memory="as stored")).items()}
    monkeypatch.setattr("int8_dit.nodes.loading.load_plan.make_room_to_quantize", lambda *_: None)
    monkeypatch.setattr("int8_dit.nodes.loading.load.checkpoint_plan", elsewhere)
    held = {name: stored(weight) for name, weight in dit.coded(dit.load(path, memory="as stored")).items()}
    assert held.keys() == expected.keys() and all(map(torch.equal, held.values(), expected.values()))


def test_scales_as_plain_bytes_and_the_mark_in_the_metadata(dit, quantized, write, tmp_path, load):
    """As ComfyUI reads both."""
    tensors = quantized(4)
    marks = {layer: config_in(tensors.pop(f"{layer}.comfy_quant")) for layer in dit.LINEARS}
    for layer in dit.LINEARS:
        tensors[f"{layer}.weight_s_rel"] = tensors[f"{layer}.weight_s_rel"].view(torch.uint8)
    path = dit.write(tmp_path / "metadata.safetensors", tensors, in_metadata(marks))
    assert torch.equal(dit.output(dit.load(path, memory="as stored")), dit.output(load(4)))


@pytest.mark.parametrize("bits", BITS)
def test_saved_as_stored_it_is_the_file_again(dit, quantized, load, tmp_path, bits):
    model = load(bits, **UNKNOWN)
    path = dit.save(model, tmp_path / "saved.safetensors")
    saved, original = load_file(path), quantized(bits, **UNKNOWN)
    assert saved.keys() == original.keys()
    for key, tensor in original.items():
        if key.endswith("comfy_quant"):
            assert config_in(saved[key]) == config_in(tensor)
        elif any(key.startswith(f"{layer}.weight") for layer in dit.LINEARS):
            assert saved[key].dtype == tensor.dtype and torch.equal(saved[key], tensor)
    assert torch.equal(dit.output(dit.load(path, memory="as stored")), dit.output(model))


@pytest.mark.parametrize("bits", BITS)
def test_saved_as_int8_it_is_a_native_file_that_keeps_what_its_mark_said(dit, load, tmp_path, bits):
    model = load(bits, "INT8", **UNKNOWN)
    path = dit.save(model, tmp_path / "saved.safetensors")
    mark = config_in(load_file(path)[f"{dit.LAYER}.comfy_quant"])
    assert mark == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64, **UNKNOWN}
    assert torch.equal(dit.output(dit.load(path, memory="as stored")), dit.output(model))
    assert dit.relative_error(dit.output(dit.stock(path)), dit.output(model)) < 0.1


@pytest.mark.parametrize("bits", BITS)
def test_saved_with_a_lora_its_layers_are_int8(dit, with_it, load, lora, tmp_path, bits):
    """And the others stay: 4 bits would lose most of it."""
    some = {key: tensor for key, tensor in lora.items() if ".0." in key}
    patched = dit.with_lora(load(bits, **UNKNOWN), some)
    path = dit.save(patched, tmp_path / "saved.safetensors")
    again = dit.load(path, memory="as stored")
    changed = {layer for layer in dit.LINEARS if ".0." in layer}
    assert set(dit.int8_weights(again)) == changed and set(dit.coded(again)) == set(dit.LINEARS) - changed
    assert dit.relative_error(dit.output(again), with_it(bits, some)) < 0.1
    layer = next(iter(changed))
    saved = load_file(path)
    assert {key for key in saved if key.startswith(f"{layer}.weight")} == {f"{layer}.weight", f"{layer}.weight_scale"}
    assert config_in(saved[f"{layer}.comfy_quant"])["made_by"] == UNKNOWN["made_by"]


@pytest.mark.parametrize("bits", BITS)
def test_apply_computes_what_the_loader_computes(dit, stock, load, bits, multiplied):
    model = stock(bits)
    before = dit.output(model)
    assert torch.equal(dit.output(dit.apply(model)), dit.output(load(bits)))
    assert len(multiplied) == 2 * len(dit.LINEARS)
    assert torch.equal(dit.output(model), before)


def test_apply_says_what_runs(dit, stock):
    model = stock(4)
    assert "from W4A8" in str(dit.summarize(dit.apply(model)))
    declined = dit.apply(model, "auto")  # on a CPU
    assert "ComfyUI's W4A8 as in the file (" in str(dit.summarize(declined))


def test_apply_under_a_lora_of_a_streamed_weight(dit, stock, with_it, lora):
    patched = dit.with_lora(dit.apply(stock(4)), lora)
    dit.stream(patched)
    assert dit.module(patched, dit.LAYER).weight_function
    assert dit.relative_error(dit.forward(patched), with_it(4, lora)) < 0.1
