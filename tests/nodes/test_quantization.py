"""Quantize to INT8 (SmoothQuant): what calibration sees, what is protected and smoothed, and what stays untouched."""

import gc
import math
import weakref
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def model(dit):
    """A bf16 MODEL of ComfyUI's own loader."""
    return dit.stock()


def sample_as_the_user_would(model, inputs, negative=None, cfg=1.0):
    """The graph RandomNoise + BasicGuider or CFGGuider + SamplerCustomAdvanced, on the calibration inputs."""
    from comfy_extras import nodes_custom_sampler as sampling

    if negative is None:
        (guider,) = sampling.BasicGuider.execute(model, inputs["positive"]).result
    else:
        (guider,) = sampling.CFGGuider.execute(model, inputs["positive"], negative, cfg).result
    (noise,) = sampling.RandomNoise.execute(inputs["seed"]).result
    sampling.SamplerCustomAdvanced.execute(noise, guider, inputs["sampler"], inputs["sigmas"], inputs["latent_image"])


def record(dit, model, inputs, **guidance):
    """What every quantizable linear gets in one such sampling: absmax per channel of each call, by layer."""
    seen = {layer: [] for layer in dit.LINEARS}
    handles = [
        dit.module(model, layer).register_forward_pre_hook(lambda _, args, calls=calls: calls.append(args[0].clone()))
        for layer, calls in seen.items()
    ]
    sample_as_the_user_would(model, inputs, **guidance)
    for handle in handles:
        handle.remove()
    return {layer: torch.stack([x.abs().flatten(0, -2).amax(0) for x in calls]) for layer, calls in seen.items()}


def spikiness(calls):
    """max / median over the channels, averaged over the calls. calls: [calls, channels]"""
    return float((calls.amax(1) / calls.median(1).values).mean())


@pytest.mark.parametrize("guided", (False, True), ids=("no negative", "CFG"))
def test_statistics_are_those_of_the_users_own_sampling(dit, model, guided):
    from int8_dit.nodes.calibration import calibrate

    inputs = dit.calibration(model)
    guidance = {"negative": dit.calibration(model, text="XXXX")["positive"], "cfg": 3.0} if guided else {}
    expected = record(dit, model, inputs, **guidance)
    arguments = {"negative": None, "cfg": 1.0} | inputs | guidance
    arguments["latent"] = arguments.pop("latent_image")
    statistics = calibrate(model, **arguments)

    assert statistics.keys() == expected.keys()
    for layer, calls in expected.items():
        assert statistics[layer].calls == len(calls)
        assert torch.equal(statistics[layer].absmax, calls.amax(0))
        assert statistics[layer].spikiness == pytest.approx(spikiness(calls), rel=1e-5)  # float32 sums


def test_the_spikiest_layers_are_protected(dit, model):
    inputs = dit.calibration(model)
    recorded = record(dit, model, inputs)
    spikiest = sorted(dit.LINEARS, key=lambda layer: spikiness(recorded[layer]), reverse=True)[:3]

    quantized = dit.quantize(model, protect_layers=3, **inputs)
    assert set(dit.LINEARS) - set(dit.int8_weights(quantized)) == set(spikiest)
    for layer in spikiest:
        assert torch.equal(dit.module(quantized, layer).weight, dit.module(model, layer).weight)


@pytest.mark.parametrize("alpha", (0.0, 0.5, 1.0))
def test_smoothing_factors(dit, model, alpha):
    """s = max|X|^alpha / max|W|^(1 - alpha), and the dequantized weight is the original one."""
    inputs = dit.calibration(model)
    recorded = record(dit, model, inputs)
    for layer, weight in dit.int8_weights(dit.quantize(model, alpha, **inputs)).items():
        original = dit.module(model, layer).weight
        smooth = recorded[layer].amax(0) ** alpha / original.abs().amax(0) ** (1 - alpha)
        torch.testing.assert_close(weight._params.smooth, smooth, rtol=1e-5, atol=0)
        # Half an int8 step of the smoothed weight, and a little for float32 arithmetic.
        bound = (original * smooth).abs().amax(1, keepdim=True) / 127 / 2 / smooth
        assert ((weight.dequantize() - original).abs() <= bound * (1 + 1e-4)).all()


def test_quantized_model_computes_nearly_the_same(dit, model):
    quantized = dit.quantize(model, protect_layers=2, **dit.calibration(model))
    # INT8 noise of 19 linears is a few percent; a layer without its smoothing would be over 50 %.
    assert 0 < dit.relative_error(dit.output(quantized), dit.output(model)) < 0.08


def test_without_calibration_nothing_is_smoothed_and_it_says_so(dit, model, caplog):
    weights = dit.int8_weights(dit.quantize(model))
    assert set(weights) == set(dit.LINEARS)
    assert not [layer for layer, weight in weights.items() if weight._params.smooth is not None]
    (warning,) = [r.getMessage() for r in caplog.records if "without smoothing" in r.getMessage()]
    assert "sampler, sigmas, latent_image" in warning


def test_without_calibration_the_weights_that_round_worst_are_protected(dit, model):
    def rounding_error(layer):
        weight = dit.module(model, layer).weight
        step = weight.abs().amax(1, keepdim=True) / 127
        return float(((weight / step).round() * step - weight).norm() / weight.norm())

    worst = sorted(dit.LINEARS, key=rounding_error, reverse=True)[:2]
    quantized = dit.quantize(model, protect_layers=2)
    assert set(dit.LINEARS) - set(dit.int8_weights(quantized)) == set(worst)


@pytest.mark.parametrize(
    "connected, missing",
    (
        (["positive"], "sampler and sigmas and latent_image"),
        (["sampler"], "sigmas and latent_image"),
        (["positive", "sigmas", "latent_image"], "sampler"),
        (["positive", "sampler", "sigmas"], "latent_image"),
    ),
)
def test_partly_connected_calibration(dit, model, connected, missing):
    inputs = dit.calibration(model)
    with pytest.raises(ValueError, match=f"calibration also needs {missing}: connect"):
        dit.quantize(model, **{name: inputs[name] for name in connected})


def test_sigmas_without_a_step(dit, model):
    with pytest.raises(ValueError, match="sigmas holds no step"):
        dit.quantize(model, **dit.calibration(model) | {"sigmas": torch.tensor([1.0])})


@pytest.mark.parametrize("alpha", (-0.1, 1.5, math.nan))
def test_alpha_outside_its_range(dit, model, alpha):
    with pytest.raises(ValueError, match=f"alpha must be between 0 and 1, got {alpha}"):
        dit.quantize(model, alpha)


@pytest.mark.parametrize("protect_layers", (21, 22))
def test_nothing_left_to_quantize(dit, model, protect_layers):
    with pytest.raises(ValueError, match=f"protect_layers is {protect_layers}.* 21 quantizable layers"):
        dit.quantize(model, protect_layers=protect_layers)


@pytest.mark.parametrize("calibrated", (False, True))
def test_the_input_model_is_untouched(dit, model, calibrated):
    inputs = dit.calibration(model) if calibrated else {}
    with dit.untouched(model):
        quantized = dit.quantize(model, protect_layers=2, **inputs)
        dit.output(quantized)


def test_the_input_model_is_untouched_by_an_error_in_calibration(dit, model):
    def fail(apply_model, arguments):
        raise ArithmeticError("out of luck")

    inputs = dit.calibration(model)
    failing = model.clone()
    failing.set_model_unet_function_wrapper(fail)
    with dit.untouched(model), pytest.raises(ArithmeticError, match="out of luck"):
        dit.quantize(failing, **inputs)


@pytest.mark.parametrize("steps", (3, 21), ids=("calibration", "quantization"))
def test_the_input_model_is_untouched_by_a_cancel(dit, model, interrupt_in_job, steps):
    from comfy.model_management import InterruptProcessingException

    inputs = dit.calibration(model, steps=3)
    with dit.untouched(model), pytest.raises(InterruptProcessingException):
        interrupt_in_job(steps)
        dit.quantize(model, **inputs)


def test_no_memory_is_shared_with_the_input_model(dit, model):
    """Or a patch that ComfyUI writes into one would be in the other."""

    def addresses(patcher):
        return {tensor.data_ptr() for tensor in patcher.model.diffusion_model.state_dict().values()}

    assert not addresses(model) & addresses(dit.quantize(model, protect_layers=2))


def test_the_input_model_can_be_forgotten(dit):
    """Or a bf16 model would stay in memory as long as its INT8 copy is in use."""
    model = dit.stock()
    source = weakref.ref(model.model)
    quantized = dit.quantize(model, protect_layers=2)
    del model
    gc.collect()
    assert source() is None
    assert quantized.model is not None


def test_comfyui_counts_on_the_smaller_size(dit, model):
    from comfy.model_management import module_size

    quantized = dit.quantize(model)
    assert quantized.model_size() == module_size(quantized.model) < model.model_size()


def test_same_inputs_and_seed_give_identical_weights(dit, model):
    first, again, other = (
        dit.snapshot(dit.quantize(model, protect_layers=2, **dit.calibration(model, seed=seed))) for seed in (5, 5, 6)
    )
    dit.assert_same_tensors(again, first)
    assert not torch.equal(other[f"{dit.LAYER}.weight"], first[f"{dit.LAYER}.weight"])


@pytest.mark.parametrize("loaded", (False, True), ids=("fresh", "loaded"))
def test_a_lora_is_baked_in(dit, model, tmp_path, loaded):
    """It changes INT8 layers, a protected one and one that the rule leaves alone."""
    modulation = "joint_blocks.0.x_block.adaLN_modulation.1"
    lora = dit.lora([*dit.LINEARS, modulation], scale=0.2)
    merged = dit.quantize(dit.stock(dit.write(tmp_path / "merged.safetensors", dit.with_delta(dit.tensors(), lora))))
    patched = dit.with_lora(model, lora)
    if loaded:
        dit.output(patched)  # now the LoRA sits in the weights of the MODEL
    quantized = dit.quantize(patched)

    for layer, weight in dit.int8_weights(quantized).items():
        expected = dit.int8_weights(merged)[layer]
        torch.testing.assert_close(weight._params.scale, expected._params.scale, rtol=1e-5, atol=0)
        steps = (weight._qdata.int() - expected._qdata.int()).abs()
        # Two float32 orders of one sum: a value on a rounding boundary may land one step aside.
        assert steps.max() <= 1 and (steps > 0).float().mean() < 1e-3
    torch.testing.assert_close(dit.module(quantized, modulation).weight, dit.module(merged, modulation).weight)


def test_a_lora_is_baked_into_protected_layers(dit, model):
    quantized = dit.quantize(dit.with_lora(model, dit.lora(dit.LINEARS)), protect_layers=20)
    merged = dit.with_delta(dit.tensors(), dit.lora(dit.LINEARS))
    for layer in set(dit.LINEARS) - set(dit.int8_weights(quantized)):
        torch.testing.assert_close(dit.module(quantized, layer).weight, merged[f"{layer}.weight"], rtol=1e-5, atol=1e-6)


def test_a_lora_is_not_applied_twice(dit, model):
    quantized = dit.quantize(dit.with_lora(model, dit.lora(dit.LINEARS)))
    before = dit.snapshot(quantized)
    dit.output(quantized)
    dit.assert_same_tensors(dit.snapshot(quantized), before)


def test_what_is_attached_for_sampling_survives(dit, model):
    from comfy_extras.nodes_model_advanced import ModelSamplingSD3

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


@pytest.mark.parametrize("protect_layers", (0, 2))
def test_a_nan_weight_names_its_layer(dit, tmp_path, protect_layers):
    weights = dit.tensors()
    weights[f"{dit.LAYER}.weight"][3, 5] = math.nan
    broken = dit.stock(dit.write(tmp_path / "nan.safetensors", weights))
    with pytest.raises(ValueError, match=rf"{dit.LAYER}.*NaN or Inf in output channel 3"):
        dit.quantize(broken, protect_layers=protect_layers)


def test_a_nan_activation_names_the_first_layer_that_gets_it(dit, tmp_path):
    weights = dit.tensors()
    weights["joint_blocks.1.x_block.attn.proj.bias"][0] = math.nan
    broken = dit.stock(dit.write(tmp_path / "nan.safetensors", weights))
    with pytest.raises(ValueError, match=r"layer joint_blocks\.1\.x_block\.mlp\.fc1 held a NaN or Inf"):
        dit.quantize(broken, **dit.calibration(broken))


def test_a_compiled_model_is_refused(dit, model):
    from comfy_api.torch_helpers import set_torch_compile_wrapper

    compiled = model.clone()
    set_torch_compile_wrapper(compiled, backend="eager")
    with pytest.raises(ValueError, match="torch.compile.*after Quantize to INT8"):
        dit.quantize(compiled)


def test_replaced_layers_are_refused(dit, model):
    replaced = model.clone()
    replaced.add_object_patch(f"diffusion_model.{dit.LAYER}", torch.nn.Linear(192, 768))
    with pytest.raises(ValueError, match="already replaced"):
        dit.quantize(replaced)


def test_an_int8_model_is_quantized_again(dit, tmp_path):
    """From a native file to a smoothed one: the new weights stand for the ones that the old INT8 weights stood for."""
    model = dit.load(dit.write(tmp_path / "native.safetensors", dit.native_int8()))
    inputs = dit.calibration(model)
    with dit.untouched(model):
        again = dit.quantize(model, protect_layers=2, **inputs)
    old, new = dit.int8_weights(model), dit.int8_weights(again)
    assert len(new) == len(dit.LINEARS) - 2
    for layer in dit.LINEARS:
        if layer in new:
            step = new[layer]._params.scale / new[layer]._params.smooth
            assert ((new[layer].dequantize() - old[layer].dequantize()).abs() <= step / 2 * (1 + 1e-4)).all()
        else:
            assert torch.equal(dit.module(again, layer).weight, old[layer].dequantize())


def test_auto_without_gpu_keeps_int8_weights_and_computes_in_bf16(dit, model, caplog):
    """The weights can still be saved as INT8; unlike the loader's they are not dequantized once."""
    quantized = dit.quantize(model, kernel="auto")
    weights = dit.int8_weights(quantized)
    assert len(weights) == len(dit.LINEARS)
    x = torch.randn(4, 192, generator=torch.Generator().manual_seed(0))
    expected = x @ weights[dit.LAYER].dequantize().t() + dit.module(quantized, dit.LAYER).bias
    torch.testing.assert_close(dit.module(quantized, dit.LAYER)(x), expected)

    dit.sample(quantized)
    assert len([r for r in caplog.records if "runs in bf16" in r.getMessage()]) == 1


def test_quantizing_again_with_another_kernel_does_not_warn(dit, model, caplog):
    dit.sample(dit.quantize(dit.quantize(model, kernel="auto"), kernel="fused int8"))
    assert not [r for r in caplog.records if "runs in bf16" in r.getMessage()]


def test_a_second_copy_for_another_gpu(dit, model):
    """ComfyUI rebuilds a MODEL through its `cached_patcher_init`; there is no file to load it from."""
    quantized = dit.quantize(model, protect_layers=2, **dit.calibration(model))
    twin = quantized.deepclone_multigpu()
    assert twin.model is not quantized.model
    dit.assert_same_tensors(dit.snapshot(twin), dit.snapshot(quantized))
    assert torch.equal(dit.output(twin), dit.output(quantized))


def test_a_model_without_linears_in_blocks(dit, model):
    empty = model.clone()
    empty.model = SimpleNamespace(diffusion_model=torch.nn.Module())
    with pytest.raises(ValueError, match="no linear layers in repeated blocks"):
        dit.quantize(empty)
