"""Quantize to INT8 with weights of 4 bits: ComfyUI's W4A8, calibrated, that every ComfyUI from 0.31 on loads."""

import pytest
import torch
from comfy.quant_ops import QUANT_ALGOS

from int8_dit.kernels import Protection
from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model

CODES = "INT8 with 4-bit weights"
pytestmark = pytest.mark.usefixtures("all_may_stay_stored")


@pytest.fixture
def quantize(dit):
    """Quantize the glyph model in 4 bits, by settings, rounded to nearest; the MODEL and its report."""

    def quantize(calibration=None, model=None, **settings):
        settings = {"weight_bits": 4, "protection": Protection("number", 0), **settings}
        return quantize_model(model or dit.stock(), QuantizationSettings(**settings), "fused int8", calibration)[:2]

    return quantize


@pytest.fixture
def calibrated(dit, quantize):
    """The same, rounded by what was recorded."""
    return quantize(dit.recorded(), rounding="calibrated")


@pytest.fixture
def save(dit, tmp_path):
    return lambda model: dit.save(model, tmp_path / "four_bits.safetensors")


def test_all_layers_get_codes_and_compute_with_them(dit, quantize):
    model, report = quantize(dit.recorded())
    assert set(dit.coded(model)) == set(dit.LINEARS) and {layer.held_in for layer in report.layers} == {CODES}
    error = dit.relative_error(dit.output(model), dit.output(dit.stock()))
    assert dit.int8_noise() < error < 0.25
    held = sum(piece.nbytes for weight in dit.coded(model).values() for piece in weight.state_dict("weight").values())
    assert held < 0.60 * sum(weight.numel() for weight in dit.coded(model).values())  # in rows this short


def test_calibrated_rounding_loses_less_and_the_report_says_so(dit, quantize, calibrated):
    expected, (model, report) = dit.output(dit.stock()), calibrated
    nearest, _ = quantize(dit.recorded())
    assert dit.relative_error(dit.output(model), expected) < 0.85 * dit.relative_error(dit.output(nearest), expected)
    assert "4-bit weights" in report.title and "nearest 4 bits" in report.summary
    better = [layer for layer in report.layers if layer.nearest_error is not None]
    assert len(better) > len(report.layers) / 2 and all(layer.error < layer.nearest_error for layer in better)
    assert report.recipe()["weight_bits"] == 4 and CODES in report.markdown()


def test_the_most_fragile_get_8_bits_that_are_native(dit, quantize, save):
    model, report = quantize(dit.recorded(), protection=Protection("number", 3))
    _, plain = quantize(dit.recorded())
    worst = sorted(plain.layers, key=lambda layer: -layer.error)[:3]
    assert set(report.protected) == {layer.name for layer in worst}
    assert set(dit.int8_weights(model)) == set(report.protected)
    held = dit.formats(save(model))
    assert {held[name] for name in report.protected} == {"int8_tensorwise"}
    assert set(held) == set(dit.LINEARS) and list(held.values()).count("asym_w4a8_int8") == len(dit.LINEARS) - 3


def test_the_report_says_4_bits_where_all_layers_are_protected(dit, quantize):
    _, report = quantize(dit.recorded(), protection=Protection("number", len(dit.LINEARS)))
    assert {layer.held_in for layer in report.layers} == {"INT8"}
    assert report.title == "INT8 quantization (rotate, 4-bit weights)" and "(nearest 4 bits: " in report.summary
    assert f"\n0 of 34 linears are {CODES}. " in report.markdown() and report.chart()["plain"] == "nearest 4 bits"


@pytest.mark.parametrize("number", (0, 2))
def test_in_bf16_if_it_is_asked_for(dit, quantize, number):
    model, _ = quantize(dit.recorded(), protection=Protection("number", number), protected_in="bf16")
    assert len(dit.coded(model)) == len(dit.LINEARS) - number and not dit.int8_weights(model)


def large_in_codes(monkeypatch):
    """Only large layers get codes."""
    monkeypatch.setattr("int8_dit.nodes.linears.stored_weights.SMALLEST_STORED", 192 * 768 // 2)


def test_what_cannot_be_rotated_or_is_small_has_8_bits(dit, quantize, monkeypatch):
    large_in_codes(monkeypatch)
    model, report = quantize(dit.recorded())
    large = {name for name, weight in dit.tensors().items() if tuple(weight.shape) in ((192, 768), (768, 192))}
    assert {f"{name}.weight" for name in dit.coded(model)} == large & {f"{name}.weight" for name in dit.LINEARS}
    assert not report.protected and {layer.held_in for layer in report.layers} == {CODES, "INT8"}
    assert {weight._params.rotation_group for weight in dit.int8_weights(model).values()} == {64}


def test_an_error_budget_holds_for_layers_without_codes_too(dit, quantize, monkeypatch):
    """Which lose least: a number of layers to protect does not reach them."""
    large_in_codes(monkeypatch)
    calibration = dit.recorded()
    _, report = quantize(calibration, protection=Protection("number", 17))
    in_codes = {layer.name for layer in report.layers if layer.held_in == CODES or layer.protected}
    assert set(report.protected) == in_codes < set(dit.LINEARS)
    budget = min(layer.error for layer in report.layers if not layer.protected) * 1.2
    model, report = quantize(calibration, protection=Protection("error", budget))
    assert all(layer.error_as_held <= budget for layer in report.layers)
    in_floats = {layer.name for layer in report.layers if layer.held_in == "bf16"}
    assert in_floats - in_codes and in_floats == set(dit.LINEARS) - set(dit.int8_weights(model))


@pytest.mark.parametrize("memory", ("INT8", "as stored"))
def test_saved_and_loaded_it_draws_the_same(dit, quantize, save, memory):
    model, _ = quantize(dit.recorded(), protection=Protection("number", 2))
    expected = dit.output(model)
    assert torch.equal(dit.output(dit.load(save(model), memory=memory)), expected)


def test_stock_comfyui_loads_the_file(dit, quantize, save):
    if "asym_w4a8_int8" not in QUANT_ALGOS:
        pytest.skip("this ComfyUI does not know W4A8")
    model, _ = quantize(dit.recorded(), protection=Protection("number", 2))
    # ComfyUI's eager kernels multiply what was rounded to bf16 in between.
    assert dit.relative_error(dit.output(dit.stock(save(model))), dit.output(model)) < 3 * dit.int8_noise()


def test_without_a_calibration_it_is_rounded_to_nearest(dit, quantize):
    model, report = quantize()
    assert set(dit.coded(model)) == set(dit.LINEARS) and report.calibration is None
    assert all(layer.nearest_error is None for layer in report.layers)
