"""Native INT8 inside of GGUF files, as molbal's ComfyUI-GGUF has it (Q8_CR): read as its maker reads it, and written.

Damaged ones: test_damaged_files.py.
"""

import comfy.ops
import comfy.sd
import gguf
import pytest
import torch

from int8_dit.nodes.saving.save import save_gguf_model
from support import gguf_files as files
from support.file_formats import FORMATS, config_in

OTHERS = ("joint_blocks.1.x_block.mlp.fc1", "joint_blocks.2.x_block.mlp.fc2")


@pytest.fixture
def write(dit, tmp_path):
    """A function that writes the glyph model in Q8_CR; returns its path and the tensors that it stands for."""

    def write(*args, layers=dit.LINEARS, tensors=None, **options):
        path = tmp_path / "model.gguf"
        return path, files.write_q8_cr(path, tensors or dit.tensors(), layers, *args, **options)

    return write


def stock_of(tensors, compute_dtype=torch.float32):
    """ComfyUI's own loader with its operations for native INT8, as the file's maker loads it."""
    operations = comfy.ops.mixed_precision_ops({}, compute_dtype)
    return comfy.sd.load_diffusion_model_state_dict(tensors, model_options={"custom_operations": operations})


def as_raw(weight):
    return weight._qdata, weight._params.scale


@pytest.mark.parametrize("group", (64, 16, 4, None))
def test_it_is_read_as_its_maker_reads_it(dit, write, group):
    path, values = write(group)
    model, theirs = dit.load(path), stock_of(files.read_as_its_maker(path))
    weights = dit.int8_weights(model)
    assert set(weights) == set(dit.LINEARS)
    for layer, weight in weights.items():
        assert weight._params.rotation_group == group
        for own, other in zip(as_raw(weight), as_raw(dit.module(theirs, layer).weight), strict=True):
            assert torch.equal(own, other.reshape(own.shape)), layer
        assert dit.relative_error(weight.dequantize(), values[f"{layer}.weight"]) < 1e-5
    assert dit.relative_error(dit.output(model), dit.output(theirs)) < 2 * dit.int8_noise()
    assert dit.relative_error(dit.output(model), dit.output(stock_of(values))) < 2 * dit.int8_noise()


def test_where_nothing_says_that_it_is_rotated_it_is_not(dit, write):
    """So its maker reads files of an earlier converter."""
    path, _ = write(None, convrot=True, convrot_groupsize=64, weight_rotated=None)
    model, theirs = dit.load(path), stock_of(files.read_as_its_maker(path))
    assert {weight._params.rotation_group for weight in dit.int8_weights(model).values()} == {None}
    assert dit.relative_error(dit.output(model), dit.output(theirs)) < 2 * dit.int8_noise()


def test_a_hook_writes_into_no_file(dit, write):
    path, _ = write()
    before = path.read_bytes()
    for weight in dit.int8_weights(dit.load(path)).values():
        for part in as_raw(weight):
            part.add_(1)
    assert path.read_bytes() == before


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_a_file_of_a_target_size_mixes_it_with_blocks(dit, write, memory):
    """Their linears become INT8, or stay as stored; floats beside them have their reason and stay."""
    blocks = files.linears_in("Q5_0")
    left = "joint_blocks.0.x_block.attn.proj"

    def choose(name, shape):
        return blocks(name, shape) if name.removesuffix(".weight") in OTHERS else files.linears_in("F16")(name, shape)

    q8_cr = [layer for layer in dit.LINEARS if layer not in (*OTHERS, left)]
    path, values = write(layers=q8_cr, choose=choose)
    model = dit.load(path, memory=memory)
    assert set(dit.int8_weights(model)) == {*q8_cr, *(OTHERS if memory == "INT8" else ())}
    held = {layer: getattr(dit.module(model, layer), "quant_format", None) for layer in (*OTHERS, left)}
    assert held[left] is None and (memory == "INT8" or {held[layer] for layer in OTHERS} == {"GGUF Q5_0"})
    assert dit.relative_error(dit.output(model), dit.output(stock_of(values))) < 3 * dit.int8_noise()


def test_it_is_quantized_and_saved_as_any_int8_file(dit, write, tmp_path):
    path, _ = write()
    model = dit.load(path)
    saved = dit.save(model, tmp_path / "saved.safetensors")
    assert set(dit.formats(saved)) == set(dit.LINEARS)
    assert dit.relative_error(dit.output(dit.stock(saved)), dit.output(model)) < 2 * dit.int8_noise()
    config = dit.load(saved).model.diffusion_model.state_dict()[f"{dit.LAYER}.comfy_quant"]
    assert config_in(config) == {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 64}


def test_the_prefix_of_a_whole_checkpoint(dit, write):
    prefix = "model.diffusion_model."
    named = {f"{prefix}{name}": tensor for name, tensor in dit.tensors().items()}
    path, _ = write(tensors=named, layers=[f"{prefix}{layer}" for layer in dit.LINEARS])
    model = dit.load(path)
    assert set(dit.int8_weights(model)) == set(dit.LINEARS)
    assert dit.relative_error(dit.output(model), dit.output(dit.load(write()[0]))) == 0


def test_its_4_bits_are_w4a4(dit, write, tmp_path):
    """Q4_CR mixes W4A4 with Q8_CR; the first is ComfyUI's, in the file, computed, and saved."""
    four = dit.LINEARS[::3]
    path, values = write(four_bits=four)
    model = dit.load(path)
    held = {layer: getattr(dit.module(model, layer), "quant_format", None) for layer in four}
    assert set(held.values()) == {"convrot_w4a4"} and set(dit.int8_weights(model)) == set(dit.LINEARS) - set(four)
    for layer in four:
        assert dit.relative_error(dit.module(model, layer).weight.dequantize(), values[f"{layer}.weight"]) < 1e-5
    assert dit.relative_error(dit.output(model), dit.output(stock_of(values))) < 0.3  # activations of 4 bits
    saved = dit.save(model, tmp_path / "saved.safetensors")
    assert dit.relative_error(dit.output(dit.stock(saved)), dit.output(model)) < 2 * dit.int8_noise()


@pytest.fixture
def save(dit, tmp_path):
    """A function that saves a MODEL in Q8_CR, and returns the path of the new file."""

    def save(model, name="saved.gguf"):
        return save_gguf_model(model, str(tmp_path / name), {}, "Q8_CR")

    return save


def kinds(path):
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def test_what_is_saved_is_read_by_its_maker_and_here(dit, save):
    """Of a model in floats the layers that Load INT8 DiT would make INT8, rotated; all else as in every GGUF file."""
    original = dit.stock()
    with dit.untouched(original):
        path = save(original)
    weights = {f"{layer}.weight" for layer in dit.LINEARS}
    found = kinds(path)
    assert {name for name, kind in found.items() if kind == "I8"} == weights
    assert {found[f"{name}_scale"] for name in weights} == {"F32"}
    assert found.keys() == dit.tensors().keys() | {f"{name}_scale" for name in weights}
    model, theirs = dit.load(path), stock_of(files.read_as_its_maker(path))
    assert set(dit.int8_weights(model)) == set(dit.LINEARS)
    for layer, weight in dit.int8_weights(model).items():
        assert weight._params.rotation_group == (256 if weight.shape[1] % 256 == 0 else 64)
        assert torch.equal(as_raw(weight)[0], as_raw(dit.module(theirs, layer).weight)[0])
        assert dit.relative_error(weight.dequantize(), dit.module(original, layer).weight.float()) < 0.015, layer
    for loaded in (model, theirs):
        assert dit.relative_error(dit.output(loaded), dit.output(original)) < 2 * dit.int8_noise()
    header = {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}
    assert header["general.architecture"] == "sd3" and "general.file_type" not in header


SOURCES = [(source, loader) for source in ("native, ConvRot", "native, scalar scale") for loader in ("load", "stock")]
SOURCES += [("W4A8", "load"), ("W6A8", "load")]  # not every ComfyUI knows these


@pytest.mark.parametrize("source, loader", SOURCES)
def test_int8_weights_are_written_as_they_are(dit, save, tmp_path, source, loader):
    """Whoever loaded them; 4 and 6 bits as the INT8 weights that they stand for. Floats beside them stay floats."""
    left, *layers = dit.LINEARS
    path = dit.write_as(tmp_path, source, layers=layers)
    model = dit.load(path, memory="as stored") if loader == "load" else dit.stock(path)
    saved = save(model)
    assert {name for name, kind in kinds(saved).items() if kind == "I8"} == {f"{layer}.weight" for layer in layers}
    expected, found = dit.int8_weights(dit.load(path)), dit.int8_weights(dit.load(saved))
    assert found.keys() == expected.keys() and left not in found
    for layer, weight in found.items():
        assert weight._params.rotation_group == expected[layer]._params.rotation_group
        assert all(map(torch.equal, as_raw(weight), as_raw(expected[layer]))), layer


def test_what_the_format_cannot_say_is_not_written_as_int8_s(dit, save, smoothed, tmp_path):
    """Weights with smoothing factors are rounded anew without them, those with 16-bit activations are floats."""
    found = dit.int8_weights(dit.load(save(smoothed)))
    for layer, weight in dit.int8_weights(smoothed).items():
        assert found[layer]._params.smooth is None and found[layer]._params.rotation_group in (64, 256)
        assert dit.relative_error(found[layer].dequantize(), weight.dequantize()) < 0.015, layer
    wide, *layers = dit.LINEARS
    file = FORMATS["16-bit activations"]({name: t.float() for name, t in dit.tensors().items()}, [wide])
    rest = FORMATS["native"](file.tensors, layers)
    path = dit.write(tmp_path / "wide.safetensors", rest.tensors)
    assert kinds(save(dit.load(path), "wide.gguf"))[f"{wide}.weight"] == "F16"


@pytest.mark.parametrize("source", ("stock", "Q8_CR"))
def test_a_lora_is_baked_in(dit, write, save, source):
    """Also one that changes less than a step of weights that are INT8 already."""
    model = dit.stock() if source == "stock" else dit.load(write()[0])
    lora = dit.lora(dit.LINEARS, 0.02)
    before, after = (dit.int8_weights(dit.load(save(saved, name))) for saved, name in (
        (model, "before.gguf"), (dit.with_lora(model, lora), "after.gguf"),
    ))  # fmt: skip
    for layer in dit.LINEARS:
        delta, change = dit.delta(lora, layer), after[layer].dequantize() - before[layer].dequantize()
        kept = float((change * delta).sum() / delta.square().sum())
        assert kept == pytest.approx(1, abs=0.2), layer


def test_blocks_of_another_gguf_file_become_int8(dit, save, tmp_path):
    model = dit.load(dit.write_as(tmp_path, "Q8_0"), memory="as stored")
    saved = dit.load(save(model))
    assert set(dit.int8_weights(saved)) == set(dit.LINEARS)
    assert dit.relative_error(dit.output(saved), dit.output(model)) < 2 * dit.int8_noise()
