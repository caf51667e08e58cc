"""Every file format and every architecture: what is loaded computes what the file stands for, and is saved whole.

How a layer is read depends on its format, and what its MODEL is on its architecture: not every pair is tried. The
architectures are small ones of ComfyUI's own classes, the files are made by other code than this pack's.
"""

from functools import cache
from types import SimpleNamespace

import pytest
import torch

from int8_dit.nodes.linears.layer_selection import quantizable_linears
from support.architectures import ARCHITECTURES
from support.covering import covering
from support.file_formats import FORMATS

FLOAT = ["bf16", "fp16", "fp32", "checkpoint, bf16"]
NEEDS = "needs the node pack ComfyUI-INT8-DiT"
OWN = {name: f"int8_smoothquant.*{NEEDS}" for name in FORMATS if name.startswith("smoothed")}
OWN |= {name: f"int8_act16.*{NEEDS}" for name in FORMATS if name.startswith("16-bit")}
NATIVE = [name for name in FORMATS if name.startswith("native")]
DIFFUSERS = [name for name, architecture in ARCHITECTURES.items() if architecture.diffusers]

# INT8's noise in one linear with normal input is 1 to 2 %.
LAYER_ERROR = 0.03
# A whole model's error in units of what rounding its weights to INT8 does; its activations are rounded too. Layers have
# the bound above: many a one hardly reaches the output of a model with random weights.
OUTPUT_NOISES = 4


@pytest.fixture(scope="module")
def original(small, dit):
    """A small model by its architecture's name: its float tensors, which linears become INT8, what that costs."""

    def computed(architecture, tensors):
        model = small.stock_of(architecture, tensors)
        return model, small.output_of(architecture, model)

    @cache
    def make(name):
        architecture = ARCHITECTURES[name]
        tensors = small.tensors_of(architecture)
        model, output = computed(architecture, tensors)
        layers = list(quantizable_linears(model))
        assert layers
        rounded = dict(tensors)
        for layer in layers:
            weight = tensors[f"{layer}.weight"]
            step = weight.abs().amax(dim=1, keepdim=True) / 127
            rounded[f"{layer}.weight"] = (weight / step).round() * step
        noise = dit.relative_error(computed(architecture, rounded)[1], output)
        return SimpleNamespace(architecture=architecture, tensors=tensors, layers=layers, noise=noise)

    return make


def layer_error(dit, model, file, layer):
    """The error of a linear of a MODEL on normal input, against the weights that the file stands for."""
    weight, bias = file.values[f"{layer}.weight"], file.values.get(f"{layer}.bias")
    x = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0))
    return dit.relative_error(dit.module(model, layer)(x), torch.nn.functional.linear(x, weight, bias))


@pytest.mark.parametrize("name, format_name", covering(ARCHITECTURES, FORMATS, slow_rounds=2))
def test_a_file_of_an_architecture(small, dit, original, tmp_path, name, format_name):
    it = original(name)
    file = FORMATS[format_name](it.tensors, it.layers)
    path, saved = (tmp_path / f"{which}.safetensors" for which in ("file", "saved"))
    dit.write(path, file.tensors, file.metadata)
    allowed = OUTPUT_NOISES * it.noise

    # Loaded, it computes what the file stands for.
    with small.known_to_comfyui(it.architecture):
        model = dit.load(path)
    assert set(dit.int8_weights(model)) == set(it.layers)
    assert max(layer_error(dit, model, file, layer) for layer in it.layers) < LAYER_ERROR
    output = small.output_of(it.architecture, model)
    expected = small.output_of(it.architecture, small.stock_of(it.architecture, file.values))
    assert dit.relative_error(output, expected) < allowed

    # Saved, it comes back. (Where tensors lie in memory changes the order of float32 sums.)
    with small.known_to_comfyui(it.architecture):
        dit.save(model, saved)
        again = dit.load(saved)
        dit.assert_same_tensors(dit.snapshot(again), dit.snapshot(model))
        assert dit.relative_error(small.output_of(it.architecture, again), output) < allowed

        # Other loaders read it, unless they would get it wrong.
        if format_name in OWN:
            with pytest.raises(Exception, match=OWN[format_name]):
                dit.stock(saved)
        else:
            assert dit.relative_error(small.output_of(it.architecture, dit.stock(saved)), output) < allowed


NAMED = covering(DIFFUSERS, FLOAT, slow_rounds=1)
NAMED += covering(DIFFUSERS, [name for name in FORMATS if name not in FLOAT], slow_rounds=2)


@pytest.mark.parametrize("name, format_name", NAMED)
def test_a_file_with_diffusers_names(small, dit, original, tmp_path, name, format_name):
    """Named, fused and swapped as Diffusers does: read right, or refused where it is quantized."""
    it = original(name)
    file = FORMATS[format_name](*small.named_by_diffusers(it.architecture, it.tensors, it.layers))
    path = dit.write(tmp_path / "named so.safetensors", file.tensors, file.metadata)
    with small.known_to_comfyui(it.architecture):
        try:
            model = dit.load(path)
        except ValueError as error:
            assert "named so.safetensors" in str(error) and format_name not in (*FLOAT, *NATIVE)
            return
        expected = small.output_of(it.architecture, small.stock_of(it.architecture, file.values))
    assert set(dit.int8_weights(model)) == set(it.layers)
    assert dit.relative_error(small.output_of(it.architecture, model), expected) < OUTPUT_NOISES * it.noise
