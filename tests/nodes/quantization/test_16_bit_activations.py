"""Layers whose input is rounded to 16 bits: chosen and computed. In files: test_file_formats.py."""

import pytest
import torch

ACT16, BF16 = "INT8 with 16-bit activations", "bf16"


@pytest.fixture
def quantized(dit, model, calibration):
    """A MODEL with every layer smoothed, three of them with 16-bit activations."""
    return dit.quantize(model, 3, calibration=calibration, protected_in=ACT16)


def of_16_bits(dit, model):
    return {layer for layer, weight in dit.int8_weights(model).items() if weight._params.activation_bits == 16}


def test_the_fragile_layers_get_them(dit, model, calibration, quantized):
    in_bf16 = dit.quantize(model, 3, calibration=calibration)
    assert of_16_bits(dit, quantized) == set(dit.LINEARS) - set(dit.int8_weights(in_bf16))
    assert set(dit.int8_weights(quantized)) == set(dit.LINEARS)
    assert dit.recipe(quantized)["protected"] == dit.recipe(in_bf16)["protected"]
    expected = dit.output(model)
    assert 0 < dit.relative_error(dit.output(quantized), expected) < 0.08


def test_what_they_lose_is_the_rounding_of_the_weight(dit, model, calibration, quantized):
    """It is in the report, and less than with 8 bits."""
    with_8 = dit.recipe(dit.quantize(model, calibration=calibration))["layers"]
    for layer in of_16_bits(dit, quantized):
        rows = calibration.statistics[layer].sample.rows.double()
        exact = rows @ dit.module(model, layer).weight.double().t()
        held = rows @ dit.module(quantized, layer).weight.dequantize().double().t()
        reported = dit.recipe(quantized)["layers"][layer]
        assert reported["held_in"] == ACT16
        assert reported["error"] == pytest.approx(float((held - exact).norm() / exact.norm()), rel=0.02)
        assert reported["error"] < with_8[layer]["error"]


def test_a_layer_computes_with_them(dit, quantized):
    """An outlier in each token costs a layer with 8 bits a lot, and one with 16 nothing that can be seen."""
    layers = {16: of_16_bits(dit, quantized)}
    layers[8] = set(dit.LINEARS) - layers[16]
    errors = {8: [], 16: []}
    for bits, names in layers.items():
        for layer in names:
            module = dit.module(quantized, layer)
            x = dit.rows(module, 8)
            x[:, 5] *= 1000
            expected = torch.nn.functional.linear(x, module.weight.dequantize(), module.bias)
            # The outlier's own part is exact either way.
            part = torch.nn.functional.linear(x[:, 5:6], module.weight.dequantize()[:, 5:6])
            errors[bits].append(float((module(x) - expected).norm() / (expected - part).norm()))
    assert max(errors[16]) < 0.05 < 0.2 < min(errors[8])


def test_an_error_budget_chooses_layer_by_layer(dit, model, calibration):
    """8 bits where they keep to it, then 16, then bf16."""
    with_8 = dit.recipe(dit.quantize(model, calibration=calibration))["layers"]
    six = dit.recipe(dit.quantize(model, 6, calibration=calibration, protected_in=ACT16))["layers"]
    with_16 = {layer: figures["error"] for layer, figures in six.items() if "held_in" in figures}
    budget = min(figures["error"] for figures in with_8.values()) + 1e-6
    rule = {"protect": "error budget", "percent": 100 * budget}
    chosen, *_ = dit.run_node(model, protect=rule, calibration=calibration, protected_in=ACT16)
    in_bf16 = set(dit.LINEARS) - set(dit.int8_weights(chosen))
    over = {layer for layer, figures in with_8.items() if figures["error"] > budget}
    assert of_16_bits(dit, chosen) | in_bf16 == over >= set(with_16)
    assert of_16_bits(dit, chosen) and in_bf16
    assert in_bf16 & set(with_16) == {layer for layer, error in with_16.items() if error > budget}
    held = [figures for figures in dit.recipe(chosen)["layers"].values() if figures.get("held_in") != BF16]
    assert max(figures["error"] for figures in held) <= budget


def test_without_calibration_protected_layers_are_in_bf16(dit, model):
    """They are those whose weights round worst, which 16 bits of the activations do not change."""
    quantized = dit.quantize(model, 2, protected_in=ACT16)
    assert not of_16_bits(dit, quantized)
    assert len(dit.int8_weights(quantized)) == len(dit.LINEARS) - 2
    assert dit.recipe(quantized)["protected_in"] == BF16
