"""Calibrated rounding in the node: other weights of the same format, less error on inputs that were held out."""

import json
import statistics

import pytest
import torch

ACT16 = "INT8 with 16-bit activations"


@pytest.fixture(scope="module", autouse=True)
def no_interpreter():
    """Before the fixtures of this module, which quantize."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("TRITON_INTERPRET", raising=False)
        yield


@pytest.fixture(scope="module")
def model(dit):
    return dit.stock()


@pytest.fixture(scope="module")
def calibration(dit, model):
    return dit.run_node(model, **dit.calibration(model, "INT8DIT", steps=4))[3]


@pytest.fixture(scope="module")
def settings(dit, calibration):
    return {"calibration": calibration, "protect": dit.protect_layers(4), "protected_in": ACT16}


@pytest.fixture(scope="module")
def outputs(dit, model, settings):
    """What the node returns for each way to round."""
    return {way: dit.node_output(model, rounding=way, **settings) for way in ("nearest", "calibrated")}


@pytest.fixture(scope="module")
def quantized(outputs):
    return {way: output.result[0] for way, output in outputs.items()}


def relative_output_errors(dit, model, quantized, seen):
    """The relative error of each layer's output on the rows of another calibration."""
    from int8_dit.kernels import ChannelTransform
    from int8_dit.kernels.numerics.output_error import OutputError

    errors = {}
    for layer, weight in dit.int8_weights(quantized).items():
        held = weight._params
        transform = ChannelTransform(held.smooth, held.rotation_group)
        error = OutputError(seen.statistics[layer].sample.rows, dit.module(model, layer).weight)
        errors[layer] = error.of(weight._qdata, held.scale.flatten(), transform, held.activation_bits)
    return errors


def test_only_the_rounding_of_weights_differs(dit, quantized):
    """Scales, transforms and protected layers do not; and no layer is said to lose more."""
    nearest, calibrated = (dit.int8_weights(quantized[way]) for way in ("nearest", "calibrated"))
    before, after = (dit.recipe(quantized[way]) for way in ("nearest", "calibrated"))
    assert (before["rounding"], after["rounding"]) == ("nearest", "calibrated")
    assert before["protected"] == after["protected"]
    taken = {layer for layer, figures in after["layers"].items() if "nearest_error" in figures}
    assert len(taken) > len(dit.LINEARS) / 2
    for layer in dit.LINEARS:
        assert torch.equal(nearest[layer]._params.scale, calibrated[layer]._params.scale)
        assert torch.equal(nearest[layer]._qdata, calibrated[layer]._qdata) == (layer not in taken)
        old, new = before["layers"][layer], after["layers"][layer]
        assert (new["transform"], new["fragility"]) == (old["transform"], old["fragility"])
        if layer in taken:
            assert new["error"] < new["nearest_error"] == old["error"]
        else:
            assert new["error"] == old["error"]


def test_less_is_lost_on_another_prompt(dit, model, quantized):
    other = dit.run_node(model, **dit.calibration(model, "QUARK", steps=4, seed=7))[3]
    nearest, calibrated = (
        relative_output_errors(dit, model, quantized[way], other) for way in ("nearest", "calibrated")
    )
    assert statistics.fmean(calibrated[layer] / nearest[layer] for layer in dit.LINEARS) < 0.97


def test_the_report_says_how_many_and_what_they_gained(dit, outputs, quantized):
    taken = sum("nearest_error" in layer for layer in dit.recipe(quantized["calibrated"])["layers"].values())
    table = outputs["calibrated"].result[2]
    assert f"Calibrated rounding in {taken} of 21 layers, mean error " in table
    assert table.count(", calibrated rounding |") == taken
    (shown,) = outputs["calibrated"].ui["int8_quantization_report"]
    assert "there on held-out inputs (rounded to nearest: " in shown["summary"]
    assert "alibrated rounding" not in outputs["nearest"].result[2]


def test_it_is_saved_and_loaded(dit, quantized, tmp_path):
    from safetensors import safe_open

    from int8_dit.nodes.saving.save import save_int8_model

    path = tmp_path / "saved.safetensors"
    save_int8_model(quantized["calibrated"], str(path), {})
    loaded = dit.load(path)
    dit.assert_same_tensors(dit.snapshot(loaded), dit.snapshot(quantized["calibrated"]))
    assert torch.equal(dit.output(loaded), dit.output(quantized["calibrated"]))
    with safe_open(path, "pt") as file:
        kept = json.loads(file.metadata()["int8_dit_recipe"])
    assert kept["rounding"] == "calibrated"
    assert kept["layers"] == dit.recipe(quantized["calibrated"])["layers"]


def test_with_other_settings(dit, model, calibration):
    """Rotation, scales of the least error, layers held in bf16."""
    calibrated, _, table, _ = dit.run_node(
        model,
        rounding="calibrated",
        calibration=calibration,
        method="smooth + rotate",
        weight_scales="least error",
        protect=dit.protect_layers(2),
    )
    assert 0 < dit.relative_error(dit.output(calibrated), dit.output(model)) < 0.08
    assert not [line for line in table.splitlines() if "bf16" in line and "calibrated rounding |" in line]
    assert "Calibrated rounding in " in table


def test_without_calibration_it_is_nearest(dit, model):
    nearest, asked = (dit.run_node(model, rounding=way)[0] for way in ("nearest", "calibrated"))
    dit.assert_same_tensors(dit.snapshot(asked), dit.snapshot(nearest))
    assert dit.recipe(asked)["rounding"] == "nearest"


def test_widgets_are_behind_the_older_ones_and_may_be_missing(pack):
    """Workflows that were saved without them keep the values of the others."""
    from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant

    last = QuantizeToINT8SmoothQuant.define_schema().inputs[-4:]
    assert [widget.id for widget in last] == ["protected_in", "rounding", "attention", "weights"]
    assert all(widget.optional for widget in last)
    rounding = last[1]
    assert (rounding.options, rounding.default, rounding.advanced) == (["calibrated", "nearest"], "calibrated", True)
    assert (last[0].options, last[0].default) == ([ACT16, "bf16"], ACT16)
