"""Layers whose input is rounded to 16 bits: which are chosen. In files: test_file_formats.py."""

import pytest

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
