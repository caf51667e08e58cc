"""Calibrated rounding in the node: other weights of the same format, less error on inputs that were held out.

How a group of layers is rounded: tests/kernels/quantization/test_weight_rounding.py.
"""

import pytest
import torch

from int8_dit.nodes.quantize_to_int8 import QuantizeToINT8SmoothQuant

ACT16 = "INT8 with 16-bit activations"


@pytest.fixture(scope="module")
def outputs(dit):
    """What the node returns for each way to round."""
    model = dit.stock()
    settings = {"protect": dit.protect_layers(4), "protected_in": ACT16}
    settings["calibration"] = dit.run_node(model, **dit.calibration(model, "INT8DIT", steps=4))[3]
    return {way: dit.node_output(model, rounding=way, **settings) for way in ("nearest", "calibrated")}


def test_only_the_rounding_of_weights_differs_and_the_report_says_so(dit, outputs):
    quantized = {way: output.result[0] for way, output in outputs.items()}
    nearest, calibrated = (dit.int8_weights(model) for model in quantized.values())
    before, after = map(dit.recipe, quantized.values())
    assert (before["rounding"], after["rounding"]) == ("nearest", "calibrated")
    assert before["protected"] == after["protected"]
    taken = {layer for layer, figures in after["layers"].items() if "nearest_error" in figures}
    assert len(taken) > len(dit.LINEARS) / 2
    for layer in dit.LINEARS:
        assert torch.equal(nearest[layer]._params.scale, calibrated[layer]._params.scale)
        assert torch.equal(nearest[layer]._qdata, calibrated[layer]._qdata) == (layer not in taken)
        old, new = before["layers"][layer], after["layers"][layer]
        assert (new["transform"], new["fragility"]) == (old["transform"], old["fragility"])
        assert new.get("nearest_error", new["error"]) == old["error"] >= new["error"]
    table = outputs["calibrated"].result[2]
    assert f"Calibrated rounding in {len(taken)} of 21 layers, mean error " in table
    assert table.count(", calibrated rounding |") == len(taken)
    (shown,) = outputs["calibrated"].ui["int8_quantization_report"]
    assert "there on held-out inputs (rounded to nearest: " in shown["summary"]
    assert "alibrated rounding" not in outputs["nearest"].result[2]


def test_widgets_are_behind_the_older_ones_and_may_be_missing():
    """Workflows that were saved without them keep the values of the others."""
    last = QuantizeToINT8SmoothQuant.define_schema().inputs[-4:]
    assert [widget.id for widget in last] == ["protected_in", "rounding", "attention", "weights"]
    assert all(widget.optional for widget in last)
    rounding = last[1]
    assert (rounding.options, rounding.default, rounding.advanced) == (["calibrated", "nearest"], "calibrated", True)
    assert (last[0].options, last[0].default) == ([ACT16, "bf16"], ACT16)
