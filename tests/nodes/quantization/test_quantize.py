"""Quantize to INT8: what calibration sees, what is protected and smoothed, and what stays untouched."""

import gc
import math
import weakref
from functools import partial
from types import SimpleNamespace

import comfy.sd
import pytest
import torch
from comfy.model_management import InterruptProcessingException, module_size
from comfy.quant_ops import QuantizedTensor
from comfy_api.latest import _io
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_extras.nodes_model_advanced import ModelSamplingSD3

from glyphs.outliers import plant
from int8_dit.kernels import Protection
from int8_dit.nodes.loading.memory_choice import memory_choice
from int8_dit.nodes.quantization import recorder
from int8_dit.nodes.quantization.calibration import Calibration
from int8_dit.nodes.quantization.quantize import QuantizationSettings
from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant, _protection
from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant as Node
from support.file_formats import FORMATS, encoded


def relative_output_error(x, weight, held):
    """What an INT8 weight makes of inputs, written out here, against the float weight."""
    params = held._params
    exact = x.double() @ weight.double().t()
    x = x.double() / (1 if params.smooth is None else params.smooth.double())
    step = x.abs().amax(1, keepdim=True) / 127
    product = ((x / step).round() * step) @ (held._qdata.double() * params.scale.double()).t()
    return float((product - exact).norm() / exact.norm())


def test_without_calibration_nothing_is_smoothed_and_it_says_so(dit, model, logged):
    quantized = dit.quantize(model, rounding="calibrated")
    weights = dit.int8_weights(quantized)
    assert set(weights) == set(dit.LINEARS) and dit.recipe(quantized)["rounding"] == "nearest"
    assert not [layer for layer, weight in weights.items() if weight._params.smooth is not None]
    (warning,) = logged("without smoothing")
    assert "sampler, sigmas and latent_image" in warning


def test_without_calibration_the_weights_that_round_worst_are_protected(dit, model):
    def rounding_error(layer):
        weight = dit.module(model, layer).weight
        step = weight.abs().amax(1, keepdim=True) / 127
        return float(((weight / step).round() * step - weight).norm() / weight.norm())

    worst = sorted(dit.LINEARS, key=rounding_error, reverse=True)[:2]
    quantized = dit.quantize(model, protect=2)
    assert set(dit.LINEARS) - set(dit.int8_weights(quantized)) == set(worst)


def protected(dit, model):
    return set(dit.LINEARS) - set(dit.int8_weights(model))


def test_the_most_fragile_layers_are_protected(dit, model, calibration):
    """Those whose output suffers most by plain INT8, on the recorded rows. The report says what each loses."""
    plain = dit.int8_weights(dit.quantize(model, method="none", calibration=calibration))

    def error(layer, held):
        rows = calibration.statistics[layer].sample.rows
        return relative_output_error(rows, dit.module(model, layer).weight, held)

    fragility = {layer: error(layer, plain[layer]) for layer in dit.LINEARS}
    fragile = sorted(dit.LINEARS, key=fragility.get, reverse=True)[:3]
    quantized = dit.quantize(model, 3, calibration=calibration)
    assert dit.recipe(quantized)["protected"] == fragile
    assert protected(dit, quantized) == set(fragile)
    for layer in fragile:
        assert torch.equal(dit.module(quantized, layer).weight, dit.module(model, layer).weight)
    for layer, figures in dit.recipe(quantized)["layers"].items():
        assert figures["fragility"] == pytest.approx(fragility[layer], rel=2e-3)
    for layer, held in dit.int8_weights(quantized).items():
        assert dit.recipe(quantized)["layers"][layer]["error"] == pytest.approx(error(layer, held), rel=2e-3)


@pytest.mark.parametrize(
    "rule, count",
    (
        ({"protect": "share of all linears", "percent": 8.0}, 3),  # of 34
        ({"protect": "share of all linears", "percent": 0.0}, 0),
        ({"protect": "number of layers", "layers": 5}, 5),
        ({"protect": "error budget", "percent": 50.0}, 0),
    ),
)
def test_how_many_are_protected(dit, model, calibration, rule, count):
    quantized, *_ = dit.run_node(model, protect=rule, calibration=calibration)
    assert len(protected(dit, quantized)) == len(dit.recipe(quantized)["protected"]) == count


def test_an_unknown_rule_of_protection_is_named_with_its_choices(model):
    """ComfyUI drops such a value of a dynamic widget, and its own check with it."""
    widgets = {"method": "smooth", "alpha": 0.5, "search_alpha": False, "weight_scales": "absmax"}
    widgets |= {"smooth_only_foldable": False, "kernel": "fused int8", "protect": "all of them"}
    known = _io.get_finalized_class_inputs(Node.INPUT_TYPES(), widgets)[0]["required"]
    given = {name: value for name, value in widgets.items() if name in known}
    assert "protect" not in given
    choices = "share of all linears, number of layers, error budget"
    with pytest.raises(ValueError, match=f"protect must be one of {choices}"):
        Node.execute(model, **given)


def test_the_recipe_leaves_little_of_what_outliers_cost(dit, tmp_path):
    """Channels that are large, and change no result in floats."""
    model = dit.stock(dit.write(tmp_path / "outliers.safetensors", plant(dit.tensors())))
    expected, calibration = dit.output(model), dit.run_node(model, **dit.calibration(model))[3]
    plain, recipe = (
        dit.output(dit.quantize(model, protect, method=method, calibration=calibration))
        for protect, method in ((0, "none"), (3, "smooth"))
    )
    assert dit.relative_error(recipe, expected) < 0.2 * dit.relative_error(plain, expected)


def layers_of(dit, model, calibration, **settings):
    return dit.recipe(dit.quantize(model, calibration=calibration, **settings))["layers"]


@pytest.mark.parametrize("alpha", (0.5, 0.45))
def test_a_searched_alpha_is_never_worse(dit, model, calibration, alpha):
    given, searched = (layers_of(dit, model, calibration, alpha=alpha, search_alpha=search) for search in (False, True))
    assert all(searched[layer]["error"] <= given[layer]["error"] for layer in dit.LINEARS)
    assert any(searched[layer]["transform"] != given[layer]["transform"] for layer in dit.LINEARS)


METHODS = ("none", "smooth", "rotate", "smooth + rotate")


CASES = [(method, "absmax") for method in (*METHODS, "best per layer")] + [("smooth + rotate", "least error")]


@pytest.mark.parametrize("method, weight_scales", CASES)
def test_every_method_computes_nearly_the_same(dit, model, calibration, method, weight_scales):
    quantized = dit.quantize(model, method=method, weight_scales=weight_scales, calibration=calibration)
    transforms = {layer: figures["transform"] for layer, figures in dit.recipe(quantized)["layers"].items()}
    for layer, weight in dit.int8_weights(quantized).items():
        assert (weight._params.smooth is not None) == ("smooth" in transforms[layer])
        group = (256 if "fc2" in layer else 64) if "rotate" in transforms[layer] else None
        assert weight._params.rotation_group == group
    if method in METHODS:
        assert {*transforms.values()} == {method.replace("smooth", "smooth 0.5")}
    assert 0 < dit.relative_error(dit.output(quantized), dit.output(model)) < 0.08


def test_without_calibration_the_best_per_layer_is_rotation(dit, model, logged):
    """It has nothing to measure on, and rotation is what helps unseen. That alone needs no calibration."""
    rotated = dit.quantize(model, method="rotate")
    assert all(weight._params.rotation_group for weight in dit.int8_weights(rotated).values())
    assert not logged("without smoothing")
    dit.assert_same_tensors(dit.snapshot(dit.quantize(model, method="best per layer")), dit.snapshot(rotated))
    assert logged("without smoothing")


def test_a_layer_that_was_never_called_is_not_smoothed_and_not_protected(dit, model, calibration):
    statistics = {name: seen for name, seen in calibration.statistics.items() if name != dit.LAYER}
    quantized, _, table, _ = dit.run_node(
        model, protect=dit.protect_layers(20), calibration=Calibration(calibration.shapes, statistics)
    )
    (left,) = dit.int8_weights(quantized).items()
    assert left[0] == dit.LAYER and left[1]._params.smooth is None
    assert f"| {dit.LAYER} | never called | never called |" in table
    assert dit.recipe(quantized)["layers"][dit.LAYER]["error"] is None


def in_nvfp4(tensors, layers, scaled):
    """With and without ModelOpt's AWQ scales, by which its layers multiply their input. And what it stands for."""
    made, values = dict(tensors), dict(tensors)
    for seed, layer in enumerate(layers):
        weight = tensors[f"{layer}.weight"].float()
        spread = torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(seed)).mul(0.7 * scaled).exp()
        packed = QuantizedTensor.from_float((weight / spread).bfloat16(), "TensorCoreNVFP4Layout")
        made |= packed.state_dict(f"{layer}.weight")
        made[f"{layer}.comfy_quant"] = encoded({"format": "nvfp4"})
        values[f"{layer}.weight"] = packed.dequantize().float() * spread
        if scaled:
            made[f"{layer}.pre_quant_scale"] = spread
    return SimpleNamespace(tensors=made, values=values)


SOURCES = {name: FORMATS[name] for name in ("bf16", "fp16", "fp32", "FP8", "FP8 scaled", "native")}
SOURCES |= {f"NVFP4, scaled {on}": partial(in_nvfp4, scaled=on) for on in (False, True)}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("calibrated", (False, True))
def test_sources(dit, tmp_path, source, calibrated):
    """The INT8 weights stand for those of the source, whatever its format: half a step apart at most."""
    file = SOURCES[source]({name: tensor.float() for name, tensor in dit.tensors().items()}, dit.LINEARS)
    path = dit.write(tmp_path / "source.safetensors", file.tensors)
    model, loaded = dit.stock(path), dit.load(path)
    quantized = dit.quantize(model, 2, calibration=dit.recorded() if calibrated else None)
    assert len(protected(dit, quantized)) == 2
    for layer, weight in dit.int8_weights(quantized).items():
        step = weight._params.scale / (1 if weight._params.smooth is None else weight._params.smooth)
        values = file.values[f"{layer}.weight"]
        off = (weight.dequantize() - values).abs() - step / 2 * (1 + 1e-3)
        assert float(off.clamp(min=0).norm() / values.norm()) <= 2e-3, layer  # ComfyUI computes some in bf16
    exact = dit.output(dit.stock(dit.write(tmp_path / "values.safetensors", file.values)))
    for made in (quantized, loaded):
        assert not [name for name in dit.snapshot(made) if name.endswith("pre_quant_scale")]
        assert dit.relative_error(dit.output(made), exact) < 0.08


def test_the_input_model_is_untouched(dit, model):
    """And no memory is shared with it: a patch that ComfyUI writes into one would be in the other."""

    def addresses(patcher):
        return {tensor.data_ptr() for tensor in patcher.model.diffusion_model.state_dict().values()}

    with dit.untouched(model):
        quantized = dit.quantize(model, protect=2, **dit.calibration(model))
        assert not addresses(model) & addresses(quantized)
        dit.output(quantized)


def test_the_input_model_can_be_forgotten(dit):
    """Or a bf16 model would stay in memory as long as its INT8 copy is in use, which ComfyUI counts as smaller."""
    model = dit.stock()
    source, size = weakref.ref(model.model), model.model_size()
    quantized = dit.quantize(model, protect=2)
    assert quantized.model_size() == module_size(quantized.model) < size
    del model
    gc.collect()
    assert source() is None


@pytest.mark.parametrize("share", (0, 0.7), ids=("calibration", "quantization"))
def test_the_input_model_is_untouched_by_a_cancel(dit, model, interrupt_at, share):
    inputs = dit.calibration(model, steps=3)
    with dit.untouched(model), pytest.raises(InterruptProcessingException):
        interrupt_at(share)
        dit.quantize(model, **inputs)


@pytest.mark.parametrize("loaded", (False, True), ids=("fresh", "loaded"))
def test_a_lora_is_baked_in(dit, model, tmp_path, loaded):
    """It changes INT8 layers, protected ones and one that the rule leaves alone, each once."""
    modulation = "joint_blocks.0.x_block.adaLN_modulation.1"
    lora = dit.lora([*dit.LINEARS, modulation], scale=0.2)
    source = dit.stock(dit.write(tmp_path / "merged.safetensors", dit.with_delta(dit.tensors(), lora)))
    patched = dit.with_lora(model, lora)
    if loaded:
        dit.output(patched)  # now the LoRA sits in the weights of the MODEL
    merged, quantized = dit.quantize(source, 3), dit.quantize(patched, 3)
    dit.output(quantized)

    for layer, weight in dit.int8_weights(quantized).items():
        expected = dit.int8_weights(merged)[layer]
        torch.testing.assert_close(weight._params.scale, expected._params.scale, rtol=1e-5, atol=0)
        steps = (weight._qdata.int() - expected._qdata.int()).abs()
        # Two float32 orders of one sum: a value on a rounding boundary may land one step aside.
        assert steps.max() <= 1 and (steps > 0).float().mean() < 1e-3
    for layer in (modulation, *protected(dit, quantized)):
        torch.testing.assert_close(dit.module(quantized, layer).weight, dit.module(merged, layer).weight)


def test_a_lora_on_raw_fp8_that_stays_in_floats_is_not_rounded_away(dit):
    """FP8 of `weight_dtype` has steps of 6 % and more, and most of a small LoRA is less than half of one."""
    layer = "joint_blocks.0.x_block.adaLN_modulation.1"
    fp8 = comfy.sd.load_diffusion_model(str(dit.FILE), model_options={"dtype": torch.float8_e4m3fn})
    before, lora = dit.module(fp8, layer).weight.float(), dit.lora([layer], 0.02)
    after = dit.module(dit.quantize(dit.with_lora(fp8, lora)), layer).weight
    assert dit.relative_error(after - before, dit.delta(lora, layer)) < 1e-3


def test_what_is_attached_for_sampling_survives(dit, model):
    calls = []

    def wrapper(apply_model, arguments):
        calls.append(arguments["timestep"])
        return apply_model(arguments["input"], arguments["timestep"], **arguments["c"])

    (shifted,) = ModelSamplingSD3().patch(model, shift=7.0)
    shifted.set_model_unet_function_wrapper(wrapper)
    quantized = dit.quantize(shifted)
    assert quantized.get_model_object("model_sampling").shift == 7.0
    dit.sample(quantized, steps=2)
    assert len(calls) == 2


def test_an_int8_model_is_quantized_again(dit, tmp_path):
    """From a native file to a smoothed one: the new weights stand for the ones that the old INT8 weights stood for."""
    model = dit.load(dit.write(tmp_path / "native.safetensors", dit.native_int8()))
    inputs = dit.calibration(model)
    with dit.untouched(model):
        again = dit.quantize(model, protect=2, **inputs)
    old, new = dit.int8_weights(model), dit.int8_weights(again)
    assert len(new) == len(dit.LINEARS) - 2
    for layer in dit.LINEARS:
        if layer in new:
            step = new[layer]._params.scale / new[layer]._params.smooth
            assert ((new[layer].dequantize() - old[layer].dequantize()).abs() <= step / 2 * (1 + 1e-4)).all()
        else:
            assert torch.equal(dit.module(again, layer).weight, old[layer].dequantize())


def test_what_a_load_decided_of_memory_is_not_said_of_other_weights(dit, tmp_path):
    model = dit.load(dit.write_as(tmp_path, "Q4_0"), memory="auto")
    assert memory_choice(model).why
    assert not memory_choice(dit.quantize(model)).why


def test_auto_without_gpu_keeps_int8_weights_and_computes_in_bf16(dit, model, caplog, logged, tmp_path):
    """The weights can still be saved as INT8; unlike the loader's they are not dequantized once."""
    quantized = dit.quantize(model, kernel="auto")
    weights = dit.int8_weights(quantized)
    assert len(weights) == len(dit.LINEARS)
    x = dit.rows(dit.module(quantized, dit.LAYER), 4)
    expected = x @ weights[dit.LAYER].dequantize().t() + dit.module(quantized, dit.LAYER).bias
    torch.testing.assert_close(dit.module(quantized, dit.LAYER)(x), expected)

    dit.sample(quantized)
    assert len(logged("INT8 DiT runs in")) == 1
    assert dit.save(quantized, tmp_path / "x.safetensors")
    caplog.clear()
    dit.sample(dit.quantize(quantized, kernel="fused int8"))
    assert not logged("INT8 DiT runs in")


def packed_in_an_unknown_way(model, dit):
    packed = torch.zeros(dit.module(model, dit.LAYER).weight.shape, dtype=torch.uint8)
    dit.module(model, dit.LAYER).weight = torch.nn.Parameter(packed, requires_grad=False)


@pytest.mark.parametrize(
    "change, message",
    (
        (
            lambda model, _: setattr(model, "model", SimpleNamespace(diffusion_model=torch.nn.Module())),
            "no linear layers in repeated blocks",
        ),
        (
            lambda model, _: set_torch_compile_wrapper(model, backend="eager"),
            r"torch.compile.*after Quantize to INT8",
        ),
        (
            lambda model, dit: model.add_object_patch(f"diffusion_model.{dit.LAYER}", torch.nn.Linear(192, 768)),
            "already replaced",
        ),
        (packed_in_an_unknown_way, r"layer {layer} cannot be quantized: .*torch.uint8.*GGUF"),
    ),
)
def test_a_model_that_is_refused(dit, model, monkeypatch, change, message):
    changed, inputs = model.clone(), dit.calibration(model)
    change(changed, dit)
    monkeypatch.setattr(recorder, "sample", lambda *_: pytest.fail("the refusal comes before the work"))
    with pytest.raises(ValueError, match=message.replace("{layer}", dit.LAYER)):
        dit.quantize(changed, **inputs)


@pytest.mark.parametrize(
    "connected, inputs, message",
    (
        (["positive"], {}, "calibration also needs sampler and sigmas and latent_image: connect"),
        (["positive", "sigmas", "latent_image"], {}, "calibration also needs sampler: connect"),
        ([], {"calibration": True}, "a calibration is connected, and so are inputs of a calibration run"),
        ([], {"sigmas": torch.tensor([1.0])}, "sigmas holds no step"),
        ((), {"alpha": -0.1}, "alpha must be between 0 and 1, got -0.1"),
        ((), {"alpha": math.nan}, "alpha must be between 0 and 1, got nan"),
    ),
)
def test_inputs_that_are_refused(dit, model, calibration, connected, inputs, message):
    """connected: which inputs of a calibration run are; all where it is empty."""
    given = dit.calibration(model)
    given = {name: given[name] for name in connected or given} | inputs
    if "calibration" in inputs:
        given["calibration"] = calibration
    with pytest.raises(ValueError, match=message):
        dit.quantize(model, **given)


def test_a_protection_that_leaves_nothing_is_refused_before_the_work(dit, model, calibration, monkeypatch):
    monkeypatch.setattr("int8_dit.nodes.quantization.quantize._quantize_layers", None)
    with pytest.raises(ValueError, match="protecting 21 layers leaves none of the model's 21 quantizable layers"):
        dit.quantize(model, 21, calibration=calibration, protected_in="bf16")


def test_the_defaults_are_the_recipe_with_the_best_method_per_layer():
    """Alpha from 0.5 on, 17 of Ideogram 4's 211 linears protected (arXiv 2606.12280); settings by themselves smooth."""
    schema = QuantizeToINT8SmoothQuant.define_schema()
    widgets = {widget.id: widget for widget in schema.inputs}
    defaults = {name: widgets[name].default for name in ("method", "alpha", "search_alpha", "weight_scales")}
    assert defaults == {"method": "best per layer", "alpha": 0.5, "search_alpha": True, "weight_scales": "absmax"}
    assert widgets["smooth_only_foldable"].default is False and widgets["kernel"].default == "auto"
    first = widgets["protect"].options[0]
    protection = _protection({"protect": first.key, "percent": first.inputs[0].default})
    assert QuantizationSettings() == QuantizationSettings("smooth", 0.5, False, protection, False, False)
    layers = {f"{index:03}": float(index) for index in range(171)}
    assert len(protection.choose(layers, layers, 211)) == 17
    assert protection == Protection("share", 0.08)


def test_a_bypass_lora_is_refused_and_not_lost(dit, model, tmp_path, interrupt_at):
    """It is in no weight: it would be gone from the quantized model and from a file, and nobody could see it. A
    sampling before that would be for nothing."""

    def with_bypass(model):
        return comfy.sd.load_bypass_lora_for_models(model, None, dit.lora(dit.LINEARS), 1.0, 0.0)[0]

    message = r"not in its weights .bypass_lora. and would be lost. Load a bypass LoRA with"
    with pytest.raises(ValueError, match="bypass_lora"):
        dit.save(with_bypass(dit.quantize(model)), tmp_path / "x.safetensors")
    assert not list(tmp_path.iterdir())
    interrupt_at(0)  # pressed after the first step, it must not be reached
    with pytest.raises(ValueError, match=message):
        dit.quantize(with_bypass(model), **dit.calibration(model))
