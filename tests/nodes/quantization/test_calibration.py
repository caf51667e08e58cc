"""Calibration: what the recorder sees of real sampling, that nothing of it stays, and calibrations kept and merged."""

import gc
import json
import math
import os
import re

import comfy.model_management
import comfy.ops
import folder_paths
import pytest
import torch
from comfy.patcher_extension import CallbacksMP
from comfy_api.torch_helpers import set_torch_compile_wrapper
from comfy_execution.utils import CurrentNodeContext
from comfy_extras import nodes_custom_sampler as sampling
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from int8_dit.kernels import ActivationStatistics
from int8_dit.nodes.calibrations import FOLDER, LoadINT8Calibration, MergeINT8Calibrations, SaveINT8Calibration
from int8_dit.nodes.comfyui.quantized import NATIVE_LAYOUT, has_layout
from int8_dit.nodes.linears.layer_selection import quantizable_linears
from int8_dit.nodes.quantization import calibration as files
from int8_dit.nodes.quantization import recorder
from int8_dit.nodes.quantization.calibration import Calibration, merge_calibrations
from support.comfyui_today import today


def prompts_of(inputs):
    return list(inputs["positive"].values())


def sample_as_the_user_would(model, inputs, negative=None, cfg=1.0):
    """The graph RandomNoise + BasicGuider or CFGGuider + SamplerCustomAdvanced, on the calibration inputs."""
    for index, positive in enumerate(prompts_of(inputs)):
        if negative is None:
            (guider,) = sampling.BasicGuider.execute(model, positive).result
        else:
            (guider,) = sampling.CFGGuider.execute(model, positive, negative, cfg).result
        (noise,) = sampling.RandomNoise.execute((inputs["seed"] + index) % (1 << 64)).result
        sampling.SamplerCustomAdvanced.execute(
            noise, guider, inputs["sampler"], inputs["sigmas"], inputs["latent_image"]
        )


def record(dit, model, sample):
    """What every quantizable linear gets while `sample()` runs: its inputs [calls, tokens, channels], by layer."""
    seen = {layer: [] for layer in dit.LINEARS}
    handles = [
        dit.module(model, layer).register_forward_pre_hook(
            lambda _, args, calls=calls: calls.append(args[0].flatten(0, -2).clone())
        )
        for layer, calls in seen.items()
    ]
    sample()
    for handle in handles:
        handle.remove()
    return seen


def assert_statistics(calibration, recorded):
    """Absmax, spikiness and sampled rows are those of the recorded inputs."""
    assert calibration.statistics.keys() == recorded.keys()
    for layer, calls in recorded.items():
        seen = calibration.statistics[layer]
        magnitudes = torch.stack([x.abs().amax(0) for x in calls])
        assert seen.calls == len(calls)
        assert torch.equal(seen.absmax, magnitudes.amax(0))
        spikiness = float((magnitudes.amax(1) / magnitudes.median(1).values).mean())
        assert seen.spikiness == pytest.approx(spikiness, rel=1e-5)  # float32 sums
        known = {tuple(row) for x in calls for row in x.tolist()}
        assert {tuple(row) for row in seen.sample.rows.tolist()} <= known
        assert len(seen.sample.parts) == min(16, len(calls))


def calibration_of(dit, model, inputs):
    """The calibration that the quantize node runs itself."""
    return dit.run_node(model, **inputs)[3]


@pytest.mark.parametrize("guided", (False, True), ids=("no negative", "CFG"))
def test_the_nodes_own_run_is_the_users_sampling(dit, model, guided):
    """Of two prompts, one after the other, from the largest seed on."""
    inputs = dit.calibration(model, seed=(1 << 64) - 1)
    guidance = {"negative": prompts_of(dit.calibration(model, text="XXXX"))[0], "cfg": 3.0} if guided else {}
    inputs["positive"]["positive_1"] = prompts_of(dit.calibration(model, text="DIT3"))[0]
    recorded = record(dit, model, lambda: sample_as_the_user_would(model, inputs, **guidance))
    assert all(len(calls) == 4 for calls in recorded.values())  # two steps each
    assert_statistics(calibration_of(dit, model, inputs | guidance), recorded)


def test_without_a_prompt_the_model_runs_unconditionally(dit, small, ideogram):
    inputs = small.calibration(ideogram)
    del inputs["positive"]
    calibration = calibration_of(dit, ideogram, inputs)
    text, image = "llm_cond_proj", "layers.0.attention.qkv"
    assert text in calibration.shapes and text not in calibration.statistics  # never called without text
    assert calibration.statistics[image].calls == 2


def test_a_model_that_needs_a_prompt_says_so(dit, model):
    inputs = dit.calibration(model)
    with pytest.raises(ValueError, match=r"does not run without a prompt \(KeyError.*: connect positive"):
        dit.quantize(model, **inputs | {"positive": {}})


def test_the_recorder_sees_what_any_sampler_does_and_changes_no_result(dit, model):
    """Also of a MODEL that a node cloned from the armed one."""
    inputs = dit.calibration(model)
    for clone in (lambda armed: armed, lambda armed: dit.with_lora(armed, dit.lora(dit.LINEARS))):
        recording = recorder.Recording()
        armed = clone(recorder.armed(model, recording))
        recorded = record(dit, model, lambda armed=armed: sample_as_the_user_would(armed, inputs))
        assert_statistics(recording.calibration(), recorded)
        expected = dit.sample(clone(model), "INT8", steps=2)
        assert torch.equal(dit.sample(armed, "INT8", steps=2), expected)


def test_a_model_that_goes_away_while_it_is_observed_leaves_nothing(dit, model):
    """Its modules live on in other clones, and its address may become that of another one."""
    recording = recorder.Recording()
    armed = recorder.armed(model, recording)
    (begin,) = armed.get_callbacks(CallbacksMP.ON_PRE_RUN, recorder.RECORDER_KEY)
    (end,) = armed.get_callbacks(CallbacksMP.ON_CLEANUP, recorder.RECORDER_KEY)
    clone = armed.clone()
    begin(clone)
    assert dit.module(model, dit.LAYER)._forward_pre_hooks
    del clone
    gc.collect()
    assert not dit.module(model, dit.LAYER)._forward_pre_hooks
    for _ in range(100):
        end(armed.clone())  # one of them at the same address
    begin(armed)
    assert len(dit.module(model, dit.LAYER)._forward_pre_hooks) == 1
    end(armed)
    assert not dit.module(model, dit.LAYER)._forward_pre_hooks


def test_two_models_of_one_guider_have_statistics_of_their_own(small, ideogram):
    """DualModelGuider, as Ideogram 4 is sampled: text reaches the one, none the other."""
    inputs = small.calibration(ideogram)
    models = ideogram, small.ideogram4_again(ideogram)
    recordings = recorder.Recording(), recorder.Recording()
    armed = [recorder.armed(*pair) for pair in zip(models, recordings, strict=True)]
    (guider,) = sampling.DualModelGuider.execute(armed[0], prompts_of(inputs)[0], 4.0, armed[1], None).result
    (noise,) = sampling.RandomNoise.execute(0).result
    sampling.SamplerCustomAdvanced.execute(noise, guider, inputs["sampler"], inputs["sigmas"], inputs["latent_image"])

    positive, negative = (recording.calibration() for recording in recordings)
    assert "llm_cond_proj" in positive.statistics and "llm_cond_proj" not in negative.statistics
    layer = "layers.1.feed_forward.w2"
    assert positive.statistics[layer].calls == negative.statistics[layer].calls == 2
    assert not torch.equal(positive.statistics[layer].absmax, negative.statistics[layer].absmax)
    assert not [module for model in models for module in model.model.modules() if module._forward_pre_hooks]


def test_samplings_are_told_apart_by_the_node_that_samples(dit, model):
    """Collect Calibration takes those that come before it, whatever else has run by then."""
    recording = recorder.Recording()
    armed = recorder.armed(model, recording)
    for node, steps in (("1", 1), ("2", 2), ("2", 3)):
        with CurrentNodeContext("prompt", node):
            dit.sample(armed, steps=steps)
    calls = {nodes: recording.calibration(set(nodes)).statistics[dit.LAYER].calls for nodes in ("1", "2", "12")}
    assert calls == {"1": 1, "2": 5, "12": 6}
    with pytest.raises(ValueError, match="no sampling was recorded: connect the MODEL output of Record Calibration"):
        recording.calibration({"3"})


def test_a_sampler_that_expands_counts_as_itself(dit, model):
    recording = recorder.Recording()
    with CurrentNodeContext("a", "7.0.0.3"):
        dit.sample(recorder.armed(model, recording))
    for node in ("7", "7.0.0.3"):  # seen from outside, and by a Collect Calibration it expands into
        assert recording.calibration({node}).statistics
    with pytest.raises(ValueError, match="no sampling was recorded"):
        recording.calibration({"7.0.0.1", "70"})


def test_a_negative_counts_whatever_the_cfg(dit, model):
    """ComfyUI leaves the negative out at a CFG of 1, the widget's default."""
    inputs = dit.calibration(model, steps=1)
    with_negative = inputs | {"negative": prompts_of(dit.calibration(model, text="XXXX"))[0]}
    alone, both = (calibration_of(dit, model, given).statistics[dit.LAYER] for given in (inputs, with_negative))
    assert (both.absmax > alone.absmax * 1.01).any()
    assert (both.absmax >= alone.absmax * 0.999).all()  # two in a batch round otherwise


def test_mask_and_batch_index_of_the_latent_are_used(dit, model):
    inputs = dit.calibration(model)
    latent = inputs["latent_image"]
    whole = calibration_of(dit, model, inputs).statistics[dit.LAYER].absmax
    masked = latent | {"noise_mask": torch.zeros(1, 1, *latent["samples"].shape[-2:])}
    indexed = latent | {"batch_index": list(range(7, 7 + len(latent["samples"])))}
    for changed in (masked, indexed):
        assert not torch.equal(
            calibration_of(dit, model, inputs | {"latent_image": changed}).statistics[dit.LAYER].absmax, whole
        )


def test_an_error_while_recording_leaves_no_observer(dit, model):
    def fail(apply_model, arguments):
        raise ArithmeticError("out of luck")

    armed = recorder.armed(model, recorder.Recording())
    armed.set_model_unet_function_wrapper(fail)
    with dit.untouched(model), pytest.raises(ArithmeticError, match="out of luck"):
        dit.sample(armed)


def test_a_cancel_within_a_linear_leaves_no_observer(dit, tmp_path):
    """ComfyUI's exception of it is no Exception, and PyTorch calls no hook behind it."""
    model = dit.stock(dit.write(tmp_path / "native.safetensors", dit.native_int8()))
    layer, press = dit.module(model, dit.LAYER), lambda *_: comfy.model_management.interrupt_current_processing()
    with dit.untouched(model):
        pressed = layer.register_forward_pre_hook(press)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            dit.sample(recorder.armed(model, recorder.Recording()))
        pressed.remove()
    assert has_layout(layer.weight, NATIVE_LAYOUT) and recorder._block.get() is None


@pytest.mark.parametrize("holds", ("floats", "INT8"))
def test_linears_that_comfyui_calls_past_their_forward_are_seen(dit, small, monkeypatch, holds):
    """It does so with those in ComfyUI's own INT8, and in fp16 with `--fast fp16_accumulation`."""
    with today("linear_input_act"):
        monkeypatch.setattr(comfy.ops, "_fp16_linear_wanted", lambda x: True)
        model = small.wan()
        if holds == "INT8":
            model = small.in_comfyuis_int8(model)
        seen = small.recorded(model).statistics
        modules = [module for module in model.model.modules() if hasattr(module, "in_features")]
        monkeypatch.undo()
    assert seen.keys() == quantizable_linears(model).keys()
    assert not any("comfy_force_forward" in vars(module) for module in modules)


@pytest.mark.parametrize("node", ("ComfyUI's", "of one block"))
def test_a_compiled_model_cannot_be_recorded(dit, model, node):
    armed = recorder.armed(model, recorder.Recording())
    if node == "of one block":
        path = "diffusion_model.joint_blocks.0"
        armed.add_object_patch(path, torch.compile(armed.get_model_object(path), backend="eager"))
    else:
        set_torch_compile_wrapper(armed, backend="eager")
    with pytest.raises(ValueError, match=r"torch.compile cannot be recorded; take that node out"):
        dit.sample(armed)


def test_a_nan_names_the_first_layer_that_gets_it(dit, tmp_path, interrupt_at):
    """The attention in the second block puts it out. In a recording, and in the node's own run, which it ends."""
    weights = dit.tensors()
    weights["joint_blocks.1.x_block.attn.proj.bias"][0] = math.nan
    model = dit.stock(dit.write(tmp_path / "nan.safetensors", weights))
    message = r"layer joint_blocks\.1\.x_block\.mlp\.fc1 held a NaN or Inf"
    recording = recorder.Recording()
    dit.sample(recorder.armed(model, recording), steps=2)
    with pytest.raises(ValueError, match=message):
        recording.calibration()
    interrupt_at(0)  # pressed after the first step, it must not be reached
    with pytest.raises(ValueError, match=message):
        dit.run_node(model, **dit.calibration(model, steps=50))


def test_quantizing_the_armed_model_records_no_more(dit, model):
    recording = recorder.Recording()
    quantized = dit.quantize(recorder.armed(model, recording))
    dit.sample(quantized)
    with pytest.raises(ValueError, match="no sampling was recorded"):
        recording.calibration()


# Kept in files.


def save(calibration, path):
    files.save_calibration(calibration, str(path), {})
    return str(path)


def assert_same(a, b):
    assert a.shapes == b.shapes and list(a.shapes) == list(b.shapes)
    assert a.statistics.keys() == b.statistics.keys()
    for name, seen in a.statistics.items():
        other = b.statistics[name]
        assert seen.calls == other.calls and seen.spikiness == pytest.approx(other.spikiness, rel=1e-6)
        assert torch.equal(seen.absmax, other.absmax)
        assert [part.tolist() for part in seen.sample.parts] == [part.tolist() for part in other.sample.parts]
    assert a.attention and attention_of(a) == attention_of(b)


def attention_of(calibration):
    return {block: (error.calls, error.sums) for block, error in calibration.attention.items()}


def test_a_calibration_comes_back_from_its_file(dit, model, calibration, tmp_path):
    loaded = files.load_calibration(save(calibration, tmp_path / "c.safetensors"))
    assert_same(loaded, calibration)
    dit.assert_same_tensors(
        dit.snapshot(dit.quantize(model, 2, calibration=loaded)),
        dit.snapshot(dit.quantize(model, 2, **dit.calibration(model))),
    )


def test_the_nodes_save_load_and_find_calibrations(dit, calibration, tmp_path, monkeypatch):
    assert [folder_paths.models_dir, folder_paths.get_output_directory()] == [
        os.path.dirname(place) for place in folder_paths.get_folder_paths(FOLDER)
    ]
    monkeypatch.setitem(folder_paths.folder_names_and_paths, FOLDER, ([str(tmp_path)], {".safetensors"}))
    monkeypatch.setattr(folder_paths, "filename_list_cache", {})
    save(calibration, tmp_path / "mine.safetensors")
    (loaded,) = LoadINT8Calibration.execute("mine.safetensors").result
    assert_same(loaded, calibration)
    (merged,) = MergeINT8Calibrations.execute({"calibration_0": loaded, "calibration_1": loaded}).result
    assert merged.statistics[dit.LAYER].calls == 2 * loaded.statistics[dit.LAYER].calls
    for block, error in merged.attention.items():
        assert error.calls == 2 * loaded.attention[block].calls
        assert error.error == pytest.approx(loaded.attention[block].error)


def test_another_calibration_of_that_name_is_loaded_anew(tmp_path, monkeypatch):
    monkeypatch.setitem(folder_paths.folder_names_and_paths, FOLDER, ([str(tmp_path)], {".safetensors"}))
    said = set()
    for content, changed in (("one", 1), ("others", 1), ("others", 2), ("others", 2)):
        (tmp_path / "mine.safetensors").write_text(content)
        os.utime(tmp_path / "mine.safetensors", (changed, changed))
        said.add(LoadINT8Calibration.fingerprint_inputs("mine.safetensors"))
    assert len(said) == 3
    assert LoadINT8Calibration.fingerprint_inputs(None) == ""  # as ComfyUI asks where another node gives the name


def test_a_quantization_without_calibration_has_none_to_keep(dit, model):
    nothing = dit.run_node(model)[3]
    with pytest.raises(ValueError, match="there is no calibration: Quantize to INT8 had no calibration inputs"):
        SaveINT8Calibration.execute(nothing, "int8_calibrations/none")
    with pytest.raises(ValueError, match="there is no calibration"):
        MergeINT8Calibrations.execute({"calibration_0": nothing, "calibration_1": nothing})


LAYER = "joint_blocks.1.x_block.mlp.fc1"  # [768, 192]
ABSMAX, ROWS = f"{LAYER}.absmax", f"{LAYER}.rows"


def said(**entries):
    """Metadata that say this of the layer."""
    return lambda layers, _: layers[LAYER].update(entries)


def held(key, change):
    """A tensor, changed."""
    return lambda _, tensors: tensors.update({key: change(tensors[key])})


def never_called(layers, tensors):
    tensors.clear()
    for layer in layers.values():
        layer.update(calls=0)


DAMAGES = (
    (lambda layers, _: layers[LAYER].pop("shape"), "'shape'"),
    *((lambda layers, _, layer=layer: layers.update({LAYER: layer}), "") for layer in (None, [], 7, {})),
    *((said(shape=shape), "") for shape in ("ab", None, [768], [768, 192, 1], [10**400, 192], [768, math.nan])),
    *((said(shape=shape), "two whole numbers") for shape in ([768.0, 192], [768, 0], [-768, 192], [1 << 62, 192])),
    *((said(calls=calls), f"whole number .*{calls}") for calls in (-5, True, 1.5, None)),
    (said(calls=0), "it has statistics, and calls is 0"),
    *((said(sampled=sampled), "") for sampled in (None, "16", [1.5], [10**400])),
    (said(sampled=[3]), "split"),
    *((said(spikiness=spikiness), "") for spikiness in (math.nan, math.inf, -1.0, None, [], "x")),
    (lambda _, tensors: tensors.pop(ROWS), "rows"),
    (held(ABSMAX, lambda _: torch.ones(3)), r"absmax must be float32 \[192\], not .*\[3\]"),
    *((held(ABSMAX, lambda t, d=dtype: t.to(d)), "absmax must be float32") for dtype in (torch.int32, torch.half)),
    *((held(ABSMAX, lambda t, v=v: t.fill_(v)), "") for v in (math.nan, math.inf, -1.0, 1e13, 1e30)),
    (held(ROWS, lambda _: torch.ones(16, 5)), r"rows must be floating point \[rows, 192\]"),
    (held(ROWS, lambda t: t.flatten()), "rows must be"),
    (held(ROWS, lambda t: t.to(torch.int16)), "rows must be"),
    *((held(ROWS, lambda t, v=v: t.index_fill(0, torch.tensor([1]), v)), "") for v in (math.nan, -math.inf, 1e30)),
)


SAID, COMPARED = "int8_dit_calibration", "int8_dit_calibrated_attention"
LONG_TEXTS = ("[" * 100_000, '{"a":' * 50_000, "9" * 5000, '"' + "x" * 999_999)
BLOCK = "joint_blocks.1"
NO_SUMS = ([2, 1.0], [2, "a", 1.0], [2, -1.0, 1.0], [True, 1.0, 1.0], 3, [0, 1.0, 1.0], None)


def damaged(path, damage):
    """A calibration's file that this happened to: to what its metadata say of layers and to its tensors, or to its
    metadata."""
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors, layers = load_file(path), json.loads(metadata[SAID])
    if not isinstance(damage, dict):
        damage(layers, tensors)
        damage = {SAID: json.dumps(layers)}
    save_file(tensors, path, metadata | damage)


@pytest.mark.parametrize(
    "damage, message",
    (
        *((damage, f"at layer {re.escape(LAYER)} .*{message}") for damage, message in DAMAGES),
        (
            lambda _, tensors: tensors.update({"other.rows": torch.ones(1, 3)}),
            r"read \(other\.rows belongs to no layer",
        ),
        *(({SAID: text}, "") for text in ("", "null", "[]", *LONG_TEXTS)),
        *(({COMPARED: json.dumps({BLOCK: sums})}, f"cannot be read at layer {BLOCK}") for sums in NO_SUMS),
        (never_called, "no layer was called"),
    ),
)
def test_a_damaged_calibration_names_file_and_layer(calibration, tmp_path, damage, message):
    path = save(calibration, tmp_path / "broken.safetensors")
    damaged(path, damage)
    with pytest.raises(ValueError, match=rf"^broken\.safetensors: .*{message}") as error:
        files.load_calibration(path)
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("value", (1e12, 1e-30, 0.0))
def test_a_model_can_be_quantized_with_the_largest_and_smallest_values_that_load(dit, model, calibration, value):
    statistics = {
        name: ActivationStatistics.restored(
            1, 1.0, torch.full_like(seen.absmax, value), [seen.sample.rows[:4] * 0 + value]
        )
        for name, seen in calibration.statistics.items()
    }
    extreme = Calibration(calibration.shapes, statistics)
    output = dit.node_output(model, method="best per layer", rounding="calibrated", calibration=extreme)
    quantized, picture, *_ = output.result
    weights = dit.int8_weights(quantized).values()
    assert all(bool(torch.isfinite(weight.dequantize()).all()) for weight in weights)
    assert bool(torch.isfinite(picture).all()) and bool(torch.isfinite(dit.output(quantized)).all())


def test_a_file_that_is_no_whole_calibration(dit, calibration, tmp_path):
    path = tmp_path / "c.safetensors"
    save(calibration, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"^c\.safetensors is damaged or incomplete"):
        files.load_calibration(str(path))
    with pytest.raises(ValueError, match=r"^glyph_dit\.safetensors is not a calibration"):
        files.load_calibration(str(dit.FILE))


# Merged, and refused where they do not belong.


def test_merged_calibrations_are_as_recorded_together(dit, model):
    inputs = [dit.calibration(model), dit.calibration(model, text="DIT3") | {"seed": 1}]
    both = inputs[0] | {"positive": {f"positive_{i}": prompts_of(one)[0] for i, one in enumerate(inputs)}}
    merged = merge_calibrations([calibration_of(dit, model, one) for one in inputs])
    together = calibration_of(dit, model, both)
    assert merged.shapes == together.shapes and merged.statistics.keys() == together.statistics.keys()
    for name, seen in merged.statistics.items():
        other = together.statistics[name]
        assert seen.calls == other.calls and seen.spikiness == pytest.approx(other.spikiness, rel=1e-6)
        assert torch.equal(seen.absmax, other.absmax)
        assert seen.sample.rows.shape == other.sample.rows.shape  # which rows of a call are drawn is another matter


def with_shapes(calibration, change):
    shapes = dict(calibration.shapes)
    change(shapes)
    return Calibration(shapes, calibration.statistics)


def test_a_calibration_of_another_model_is_refused_with_the_first_layer_that_differs(dit, model, calibration):
    layers = sorted((dit.LINEARS[9], dit.LINEARS[4]), key=list(calibration.shapes).index)
    other = with_shapes(calibration, lambda shapes: shapes.update(dict.fromkeys(layers, (3, 5))))
    own = list(calibration.shapes[layers[0]])
    message = f"layer {layers[0]} is [3, 5] in the calibration and {own} in the MODEL"
    with pytest.raises(ValueError, match=re.escape(message)):
        dit.run_node(model, calibration=other)
    message = f"layer {layers[0]} is {own} in the first and [3, 5] in number 2"
    with pytest.raises(ValueError, match=re.escape(message)):
        merge_calibrations([calibration, other])
    fewer = with_shapes(calibration, lambda shapes: shapes.pop(dit.LAYER))
    with pytest.raises(ValueError, match=f"layer {dit.LAYER} is missing in the calibration"):
        dit.run_node(model, calibration=fewer)
