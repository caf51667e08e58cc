"""Calibrated rounding in the node: other weights of the same format, less error on inputs that were held out."""

import pytest
import torch

from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant

ACT16 = "INT8 with 16-bit activations"


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


def test_the_report_says_how_many_and_what_they_gained(dit, outputs, quantized):
    taken = sum("nearest_error" in layer for layer in dit.recipe(quantized["calibrated"])["layers"].values())
    table = outputs["calibrated"].result[2]
    assert f"Calibrated rounding in {taken} of 21 layers, mean error " in table
    assert table.count(", calibrated rounding |") == taken
    (shown,) = outputs["calibrated"].ui["int8_quantization_report"]
    assert "there on held-out inputs (rounded to nearest: " in shown["summary"]
    assert "alibrated rounding" not in outputs["nearest"].result[2]


def test_without_calibration_it_is_nearest(dit, model):
    nearest, asked = (dit.run_node(model, rounding=way)[0] for way in ("nearest", "calibrated"))
    dit.assert_same_tensors(dit.snapshot(asked), dit.snapshot(nearest))
    assert dit.recipe(asked)["rounding"] == "nearest"


def test_widgets_are_behind_the_older_ones_and_may_be_missing():
    """Workflows that were saved without them keep the values of the others."""
    last = QuantizeToINT8SmoothQuant.define_schema().inputs[-4:]
    assert [widget.id for widget in last] == ["protected_in", "rounding", "attention", "weights"]
    assert all(widget.optional for widget in last)
    rounding = last[1]
    assert (rounding.options, rounding.default, rounding.advanced) == (["calibrated", "nearest"], "calibrated", True)
    assert (last[0].options, last[0].default) == ([ACT16, "bf16"], ACT16)
