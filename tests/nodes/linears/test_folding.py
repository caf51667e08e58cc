"""Folded smoothing factors: every rule on ComfyUI's own class, whole files in the stock loader, and what is refused."""

import json

import comfy.sd
import pytest
import torch
from comfy.quant_ops import QuantizedTensor
from safetensors import safe_open
from safetensors.torch import load_file

from int8_dit.nodes.linears import folding
from support.architectures import ARCHITECTURES
from support.tensors import relative_error

# Float32's own rounding, through a whole model; and how much more INT8 may lose, since it rounds other numbers.
FLOAT_ROUNDING = 1e-4
INT8_ALIKE = 1.5

# What the names of the linears end with whose input can be divided.
SWIGLU = ("attention.qkv", "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
FOLDABLE = {
    "Lumina 2": SWIGLU,  # grouped queries: v is repeated before the output
    "Z-Image": (*SWIGLU, "attention.out"),
    "SD3": (".attn.qkv", "mlp.fc1"),
    "Flux": ("img_attn.qkv", "txt_attn.qkv", "img_mlp.0", "txt_mlp.0", "linear1"),
    "Qwen-Image": ("to_q", "to_k", "to_v", "q_proj", "k_proj", "v_proj", "mlp.net.0.proj"),
}


@pytest.fixture
def smoothed(small, dit):
    """A small model in INT8, each group of linears that can be smoothed alike with seeded factors; and the groups."""

    def make(name):
        model = small.int8_of(ARCHITECTURES[name])
        groups = sorted(map(sorted, folding.foldable_groups(model, dit.int8_weights(model))))
        for seed, group in enumerate(groups):
            smooth = small._randn(dit.module(model, group[0]).in_features, seed=100 + seed).exp()
            for layer in group:
                small.hold_int8(dit.module(model, layer), smooth)
        return model, groups

    return make


def use_float_weights(model):
    """Let every quantized linear, of this pack or of ComfyUI's own, multiply by the float weight that it stands for.

    An input that lies halfway between two INT8 steps is rounded up by one CPU and down by another.
    """
    quantized = [layer for layer in model.modules() if isinstance(getattr(layer, "weight", None), QuantizedTensor)]
    assert quantized
    for layer in quantized:
        layer.weight = torch.nn.Parameter(layer.weight.dequantize().float(), requires_grad=False)
        layer.layout_type = layer.quant_format = None


def assert_same_models(folded, unfolded, output):
    """Two MODELs compute the same in real arithmetic, and INT8 loses as much in one as in the other.

    `output` gives the output of one. Leaves them without INT8.
    """
    with torch.no_grad():
        folded_int8, unfolded_int8 = output(folded), output(unfolded)
        for model in (folded, unfolded):
            use_float_weights(model.model.diffusion_model)
        folded_exact, exact = output(folded), output(unfolded)
    assert relative_error(folded_exact, exact) < FLOAT_ROUNDING
    assert relative_error(folded_int8, exact) < INT8_ALIKE * relative_error(unfolded_int8, exact)


@pytest.fixture
def assert_folds(small, dit, tmp_path):
    """A small MODEL, saved folded, is the same in ComfyUI's own loader."""

    def check(name, model):
        architecture = ARCHITECTURES[name]
        with small.known_to_comfyui(architecture):
            path = dit.save(model, tmp_path / "folded.safetensors", fold=True)
            folded = dit.stock(path)
        assert formats(dit, path) == {"int8_tensorwise"}
        assert_same_models(folded, model, lambda model: small.output_of(architecture, model))

    return check


@pytest.mark.parametrize("name", FOLDABLE)
def test_every_rule_on_comfyuis_own_classes(small, dit, smoothed, assert_folds, name):
    model, groups = smoothed(name)
    assert {layer for group in groups for layer in group} == {
        layer for layer in dit.int8_weights(model) if layer.endswith(FOLDABLE[name])
    }
    factors = {layer: dit.module(model, layer).weight.params.smooth for group in groups for layer in group}
    assert_folds(name, model)  # and leaves it without INT8
    expected = small.output_of(ARCHITECTURES[name], model)
    unseen = []
    for group in groups:  # forgotten factors would be seen
        for layer in group:
            dit.module(model, layer).weight.mul_(factors[layer])
        if relative_error(small.output_of(ARCHITECTURES[name], model), expected) < 5 * FLOAT_ROUNDING:
            unseen += group
        for layer in group:
            dit.module(model, layer).weight.div_(factors[layer])
    # What becomes of the text in the last block of a Qwen-Image goes nowhere.
    assert unseen == (["transformer_blocks.1.txt_mlp.net.0.proj"] if name == "Qwen-Image" else [])


@pytest.mark.parametrize("name", FOLDABLE)
def test_other_layers_of_a_folded_model(small, dit, smoothed, assert_folds, name):
    """A protected reader is multiplied by the factors that its input was divided by; a protected producer takes them in
    its rows. An INT8 modulation, of a file that others made, takes them in its scales."""
    model, groups = smoothed(name)
    protected = [group[-1] for group in groups if len(group) > 1]
    for layer in protected:
        small.hold(dit.module(model, layer), dit.module(model, layer).weight.dequantize())
    modules = dict(model.model.diffusion_model.named_modules())
    modulations = [layer for layer in modules if layer.endswith(("adaLN_modulation.1", "_mod.lin", "_mod.1"))]
    assert protected or modulations
    for layer in modulations:
        small.hold_int8(modules[layer])
    assert_folds(name, model)


@pytest.mark.parametrize("smoothed_too", (True, False))
def test_layers_that_share_an_input_but_not_its_factors_are_not_folded(small, dit, smoothed, smoothed_too):
    model, _ = smoothed("Z-Image")
    w1, w3 = (f"layers.0.feed_forward.{name}" for name in ("w1", "w3"))
    smooth = dit.module(model, w1).weight.params.smooth
    small.hold_int8(dit.module(model, w3), 2 * smooth if smoothed_too else None)
    with pytest.raises(ValueError, match=rf"of {1 + smoothed_too} layers, {w1} first, cannot be folded"):
        folding.fold(model, model.model.diffusion_model.state_dict())


def test_a_producer_in_fp8_takes_no_factors(dit, smoothed):
    model, groups = smoothed("SD3")
    modulation = dit.module(model, "joint_blocks.0.x_block.adaLN_modulation.1")
    fp8 = QuantizedTensor.from_float(modulation.weight.detach(), "TensorCoreFP8E4M3Layout")
    modulation.weight, modulation.quant_format = torch.nn.Parameter(fp8, requires_grad=False), "float8_e4m3fn"
    left = [group for group in groups if not group[0].startswith("joint_blocks.0.x_block")]
    assert sorted(map(sorted, folding.foldable_groups(model, dit.int8_weights(model)))) == left != groups
    with pytest.raises(ValueError, match=r"of 2 layers, joint_blocks\.0\.x_block\.attn\.qkv first, cannot be folded"):
        folding.fold(model, model.model.diffusion_model.state_dict())


# Whole models: quantized, saved folded and not, and loaded by ComfyUI's own loader and by this pack's.


def formats(dit, path):
    return set(dit.formats(path).values())


@pytest.mark.parametrize("protect", (0, 3))
def test_ideogram_4_folds_wholly(dit, small, ideogram, tmp_path, protect):
    quantized = dit.quantize(ideogram, protect, **small.calibration(ideogram))
    assert all(weight._params.smooth is not None for weight in dit.int8_weights(quantized).values())
    own, folded = (dit.save(quantized, tmp_path / f"{fold}.safetensors", fold) for fold in (False, True))
    assert formats(dit, own) == {"int8_smoothquant"} and formats(dit, folded) == {"int8_tensorwise"}
    again = dit.save(dit.load(own), tmp_path / "again.safetensors", True)
    dit.assert_same_tensors(load_file(again), load_file(folded))

    for model in (dit.stock(folded), dit.load(folded)):
        assert_same_models(model, dit.load(own), small.output)


def test_layers_with_16_bit_activations_keep_them(dit, small, ideogram, tmp_path, logged):
    """Where their input is divided for a neighbour, they multiply it back."""
    shared, alone = "layers.0.feed_forward.w1", "layers.1.attention.o"
    quantized, mine = dit.quantize(ideogram, **small.calibration(ideogram)), {shared, alone}
    for layer in mine:
        small.hold_int8(dit.module(quantized, layer), bits=16)
    own = dit.save(quantized, tmp_path / "own.safetensors", False)
    assert not logged("Other loaders refuse")
    folded = dit.save(quantized, tmp_path / "folded.safetensors", True)
    (warning,) = logged("Other loaders refuse")
    assert "2 of its layers need 16-bit activations" in warning and "protected_in" in warning
    assert formats(dit, own) == {"int8_smoothquant", "int8_act16"}
    assert formats(dit, folded) == {"int8_tensorwise", "int8_act16"}
    loaded = dit.int8_weights(dit.load(folded))
    assert {layer for layer, weight in loaded.items() if weight._params.activation_bits == 16} == mine
    assert loaded[shared]._params.smooth is not None and loaded[alone]._params.smooth is None
    assert_same_models(dit.load(folded), dit.load(own), small.output)


def in_fp8(dit):
    """Its modulation is float8 and could not be divided; what it becomes can."""
    return comfy.sd.load_diffusion_model(str(dit.FILE), model_options={"dtype": torch.float8_e4m3fn})


GLYPHS = {
    "plain": (lambda dit: dit.stock(), 0, {}),
    "protected": (lambda dit: dit.stock(), 3, {}),
    "raw FP8": (in_fp8, 0, {}),
    "rotated": (lambda dit: dit.stock(), 0, {"method": "smooth + rotate"}),
}


@pytest.mark.parametrize("source, protect, options", GLYPHS.values(), ids=GLYPHS)
def test_the_glyph_model_folds_where_its_modulation_feeds_one_layer(dit, tmp_path, source, protect, options):
    """What is rotated stays so. A LoRA is baked in before."""
    quantized = foldable(dit, source(dit), protect, **options)
    int8 = dit.int8_weights(quantized)
    smoothed = {layer for layer, w in int8.items() if w._params.smooth is not None}
    assert smoothed == {layer for layer in int8 if layer.endswith(("qkv", "fc1"))}
    lora = dit.lora([*dit.LINEARS, "joint_blocks.0.x_block.adaLN_modulation.1"])
    saved = dit.with_lora(quantized, lora) if protect else quantized
    own, folded = (dit.save(saved, tmp_path / f"{fold}.safetensors", fold) for fold in (False, True))
    assert formats(dit, folded) == {"int8_tensorwise"}
    if protect:
        assert dit.relative_error(dit.output(dit.load(own)), dit.output(quantized)) > 0.05
    else:
        groups = {layer: weight._params.rotation_group for layer, weight in dit.int8_weights(dit.load(folded)).items()}
        assert groups == {layer: weight._params.rotation_group for layer, weight in int8.items()}
    times = (0.95, 0.7, 0.4, 0.1)
    velocities = lambda model: torch.stack([dit.velocity(model, time) for time in times])  # noqa: E731
    assert_same_models(dit.stock(folded), dit.load(own), velocities)


def foldable(dit, model, protect=0, **options):
    return dit.quantize(model, protect, smooth_only_foldable=True, calibration=dit.recorded(), **options)


def test_what_cannot_be_folded_is_named_and_leaves_no_file(dit, tmp_path):
    quantized = dit.quantize(dit.stock(), calibration=dit.recorded())
    message = (
        "factors of 10 layers, joint_blocks.0.context_block.attn.proj first, cannot be folded.*smooth_only_foldable"
    )
    with pytest.raises(ValueError, match=message):
        dit.save(quantized, tmp_path / "folded.safetensors", fold=True)
    quantized = foldable(dit, dit.stock())
    modulation = dit.module(quantized, "joint_blocks.1.x_block.adaLN_modulation.1")
    modulation.weight = torch.nn.Parameter(torch.full_like(modulation.weight, 6e4).half(), requires_grad=False)
    with pytest.raises(ValueError, match=r"1\.x_block\.adaLN_modulation\.1\.weight leaves the range of torch\.float16"):
        dit.save(quantized, tmp_path / "folded.safetensors", fold=True)
    assert not list(tmp_path.iterdir())


def test_a_lora_on_a_folded_file_warns(dit, tmp_path, logged):
    """Its weights are in another basis than the LoRA's, which nobody could see in the image. What is made of it stays
    folded. Of a file with nothing to fold there is nothing to say."""
    rotated = dit.save(dit.quantize(dit.stock(), method="rotate"), tmp_path / "rotated.safetensors", fold=True)
    dit.sample(dit.with_lora(dit.load(rotated), dit.lora([dit.LAYER])))
    path = dit.save(foldable(dit, dit.stock()), tmp_path / "folded.safetensors", fold=True)
    with safe_open(path, framework="pt") as file:
        assert json.loads(file.metadata()["int8_dit_recipe"])["folded"] is True
    model = dit.load(path)
    dit.sample(model)
    assert not logged("LoRA or merge on a folded INT8 file")
    patched = dit.with_lora(model, dit.lora([dit.LAYER]))
    dit.sample(patched)
    assert len(logged("LoRA or merge on a folded INT8 file")) == 1
    dit.save(patched, tmp_path / "baked.safetensors", fold=False)
    assert len(logged("LoRA or merge on a folded INT8 file")) == 2
    again = dit.save(dit.quantize(model), tmp_path / "again.safetensors", fold=False)
    dit.sample(dit.with_lora(dit.load(again), dit.lora([dit.LAYER])))
    assert len(logged("LoRA or merge on a folded INT8 file")) == 3
