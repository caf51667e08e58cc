"""A LoRA on a MODEL with INT8 or stored weights: right in every mode, still INT8, and gone without a trace."""

import pytest
import torch

# INT8 noise of 21 linears is a few percent of the output; a LoRA in the smoothed basis or not applied is over 50 %.
NOISE = 0.1


@pytest.fixture
def expected(dit, lora):
    """What the bf16 MODEL with the LoRA computes."""
    patched = dit.output(dit.with_lora(dit.stock(), lora))
    assert dit.relative_error(patched, dit.output(dit.stock())) > 5 * NOISE
    return patched


ACT16 = {"protected_in": "INT8 with 16-bit activations"}
MODELS = {
    "smoothed": lambda dit, path: dit.quantize(dit.stock(), calibration=dit.recorded()),
    "three with 16-bit activations": lambda dit, path: dit.quantize(
        dit.stock(), 3, calibration=dit.recorded(), **ACT16
    ),
    "rotated": lambda dit, path: dit.load(dit.write(path, dit.native_int8(rotation_group=64))),
    "in the bf16 fallback": lambda dit, path: dit.quantize(dit.stock(), kernel="auto"),  # dequantized as it is used
    "ComfyUI's INT8 on the kernel": lambda dit, path: dit.apply(dit.stock(dit.write(path, dit.native_int8()))),
    **{
        f"{kind} as stored": lambda dit, path, kind=kind: dit.load(dit.write_as(path.parent, kind), memory="as stored")
        for kind in ("Q8_0", "W6A8")
    },
}


def held(dit, model):
    """How each layer holds its weight: in a layout, with activations of so many bits, divided by which factors."""
    weights = {layer: dit.module(model, layer).weight for layer in dit.LINEARS}
    parts = ("activation_bits", "factors")
    return {name: (w._layout_cls, *(getattr(w._params, part, None) for part in parts)) for name, w in weights.items()}


@pytest.mark.usefixtures("all_may_stay_stored")
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_loaded_and_partially_loaded(dit, lora, expected, tmp_path, make):
    model = make(dit, tmp_path / "model.safetensors")
    plain, before, tensors = dit.output(model), held(dit, model), dit.snapshot(model)
    patched = dit.with_lora(model, lora)
    assert dit.relative_error(dit.output(patched), expected) < NOISE
    assert held(dit, patched) == before
    patched.partially_unload(patched.offload_device, 1 << 30)
    assert dit.relative_error(dit.forward(patched), expected) < NOISE
    patched.detach()
    dit.stream(patched)
    assert dit.module(patched, dit.LAYER).weight_function  # ComfyUI's LowVramPatch
    assert dit.relative_error(dit.forward(patched), expected) < NOISE
    assert held(dit, patched) == before
    patched.detach()
    dit.stream(model)
    assert torch.equal(dit.forward(model), plain)
    model.detach()
    dit.assert_same_tensors(dit.snapshot(model), tensors)


def test_patched_weights_are_the_merged_ones_within_a_step(dit, smoothed, lora):
    patched = dit.with_lora(smoothed, lora)
    originals = {layer: weight.dequantize() for layer, weight in dit.int8_weights(smoothed).items()}
    smooth = {layer: weight._params.smooth.clone() for layer, weight in dit.int8_weights(smoothed).items()}
    dit.output(patched)
    for layer, weight in dit.int8_weights(patched).items():
        assert torch.equal(weight._params.smooth, smooth[layer])
        # ComfyUI rounds patched weights stochastically, up to a whole step.
        step = weight._params.scale / smooth[layer]
        assert ((weight.dequantize() - originals[layer] - dit.delta(lora, layer)).abs() <= step * (1 + 1e-4)).all()


def test_partially_loaded_on_a_layer_in_floats(dit):
    """A LoRA may change layers that are never INT8, too."""
    layer = "t_embedder.mlp.0"
    lora = dit.lora([layer], 2.0)
    expected = dit.output(dit.with_lora(dit.stock(), lora))
    assert dit.relative_error(expected, dit.output(dit.stock())) > 2 * NOISE
    patched = dit.with_lora(dit.load(), lora)
    dit.stream(patched)
    assert dit.module(patched, layer).weight_function
    assert dit.relative_error(dit.forward(patched), expected) < NOISE


def test_partially_loaded_a_lora_costs_no_second_rounding(dit, smoothed, lora):
    """It is added to the output, as strong as the user wants it; the weight stays as it is stored."""
    patched, expected = (dit.with_lora(model, lora, 0.75) for model in (smoothed, dit.stock()))
    expected = dit.output(expected)
    dit.stream(patched)
    streamed = dit.forward(patched)
    layer = dit.module(patched, dit.LAYER)
    x = dit.rows(layer, 2, 5)
    with torch.inference_mode():
        with_it = layer(x)
        layer.weight_function, functions = [], layer.weight_function
        without = layer(x)
        layer.weight_function = functions
    torch.testing.assert_close(with_it, without + 0.75 * x @ dit.delta(lora, dit.LAYER).t(), rtol=1e-4, atol=1e-4)
    dit.output(patched)
    assert dit.relative_error(streamed, expected) < NOISE


def test_partially_loaded_with_another_kind_of_patch(dit, smoothed, lora):
    """A merged difference becomes part of an INT8 weight."""
    patches = {f"diffusion_model.{layer}.weight": (dit.delta(lora, layer),) for layer in dit.LINEARS}
    expected = dit.stock()
    expected.add_patches(patches)
    patched = smoothed.clone()
    patched.add_patches(patches)
    dit.stream(patched)
    assert dit.relative_error(dit.forward(patched), dit.output(expected)) < NOISE


@pytest.mark.parametrize("quantized_here", (False, True))
def test_loaded_again_with_less_room(dit, smoothed, lora, expected, tmp_path, quantized_here):
    """Models that take turns on a small card: weights that are patched and stay there are not patched again."""
    model = smoothed if quantized_here else dit.load(dit.write(tmp_path / "native.safetensors", dit.native_int8()))
    patched = dit.with_lora(model, lora)
    device, size = patched.load_device, patched.model_size()
    patched.partially_load(device, 2 * size)
    for unloaded, room in ((0.5, 0.0), (0.0, 0.1), (0.3, 0.0)):
        patched.partially_unload(patched.offload_device, unloaded * size)
        patched.partially_load(device, room * size)
        assert dit.relative_error(dit.forward(patched), expected) < NOISE


def test_computing_on_after_being_unloaded(dit, smoothed, lora, expected):
    """What DualModelGuider does to its first model where the second takes all room."""
    patched = dit.with_lora(smoothed, lora)
    dit.output(patched)
    patched.detach()
    patched.pre_run()
    patched.prepare_state(torch.ones(1), {})
    assert dit.module(patched, dit.LAYER).weight_function  # ComfyUI's LowVramPatch
    assert dit.relative_error(dit.forward(patched), expected) < NOISE
