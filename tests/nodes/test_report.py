"""The quantization report: layers by kind and block, the table, the picture."""

import math

import pytest
import torch


@pytest.fixture
def report_of(pack):
    """A report on layers given as name: (fragility, error)."""
    from int8_dit.kernels import TransformPlan
    from int8_dit.nodes.quantization.report import LayerReport, QuantizationReport

    def make(errors, protected=(), calibration=None):
        protected = [name if isinstance(name, tuple) else (name, "bf16") for name in protected]
        layers = tuple(
            LayerReport(name, TransformPlan(0.5), fragility, error, dict(protected).get(name, "INT8"))
            for name, (fragility, error) in errors.items()
        )
        return QuantizationReport({"method": "smooth"}, 211, calibration, layers, tuple(dict(protected)))

    return make


@pytest.mark.parametrize(
    "name, block, kind",
    (
        ("layers.3.attention.qkv", "layers.3", "attention.qkv"),
        ("double_blocks.12.img_mlp.0", "double_blocks.12", "img_mlp.0"),
        ("joint_blocks.0.x_block.mlp.fc1", "joint_blocks.0", "x_block.mlp.fc1"),
        ("llm_cond_proj", "llm_cond_proj", "llm_cond_proj"),
    ),
)
def test_the_block_and_kind_of_a_layer(report_of, name, block, kind):
    (layer,) = report_of({name: (0.01, 0.01)}).layers
    assert (layer.block, layer.kind) == (block, kind)


ERRORS = {
    "layers.0.w1": (0.012, 0.011),
    "layers.0.w2": (0.2, 0.03),
    "layers.1.w1": (0.012, 0.0100004),
    "layers.1.w2": (0.05, 0.005),
    "proj": (None, None),
}


def test_the_table_has_the_most_fragile_first(report_of):
    table = report_of(ERRORS, ("layers.0.w2",), {"calls": 3, "rows": 12}).markdown()
    assert table.startswith("4 of 211 linears are plain INT8, 1 fragile ones are protected: 1 in bf16.")
    assert "relative to the layer's output" in table
    assert table.splitlines()[6:] == [
        "| layers.0.w2 | 20.00 % |  | protected in bf16 |",
        "| layers.1.w2 | 5.00 % | 0.50 % | smooth 0.5 |",
        "| layers.0.w1 | 1.20 % | 1.10 % | smooth 0.5 |",
        "| layers.1.w1 | 1.20 % | 1.00 % | smooth 0.5 |",
        "| proj | never called | never called | smooth 0.5 |",
    ]


def test_the_table_of_layers_with_16_bits(report_of):
    """The error is what is left, unlike that of a layer in bf16, which is not known."""
    protected = (("layers.0.w2", "INT8 with 16-bit activations"), ("layers.1.w2", "bf16"))
    report = report_of(ERRORS, protected, {"calls": 3, "rows": 12})
    lines = report.markdown().splitlines()
    assert lines[0].endswith("2 fragile ones are protected: 1 in INT8 with 16-bit activations, 1 in bf16.")
    assert lines[6] == "| layers.0.w2 | 20.00 % | 3.00 % | protected in INT8 with 16-bit activations, smooth 0.5 |"
    layers = report.recipe()["layers"]
    assert {name: layer["held_in"] for name, layer in layers.items() if "held_in" in layer} == dict(protected)


def test_the_recipe(report_of):
    recipe = report_of(ERRORS, ("layers.0.w2",)).recipe()
    assert (recipe["method"], recipe["linears"], recipe["quantized"]) == ("smooth", 211, 4)
    assert (recipe["protected"], recipe["error_of"], recipe["calibration"]) == (["layers.0.w2"], "weight", None)
    assert recipe["layers"]["layers.1.w1"] == {"transform": "smooth 0.5", "fragility": 0.012, "error": 0.01}
    assert recipe["layers"]["proj"]["error"] is None


def pixels(image, color):
    """Where a colour is, as rows of y, x."""
    wanted = torch.tensor([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return (image[0] - wanted).abs().amax(-1).lt(1e-3).nonzero()


def test_the_picture(report_of):
    from int8_dit.nodes.pictures import quantization_plot

    image = quantization_plot.plot(report_of(ERRORS, ("layers.0.w2",)))
    assert image.ndim == 4 and image.shape[-1] == 3 and image.min() >= 0 and image.max() <= 1
    chart = image[:, quantization_plot._HEADER :]
    blue, red = pixels(chart, quantization_plot._INT8), pixels(chart, quantization_plot._PROTECTED)
    # Blocks are columns from left to right: the protected layer is in the first, another of its kind in the second.
    second = blue[blue[:, 1] > red[:, 1].max() + 20]
    assert len(red) and len(second) and len(blue) > len(second)
    # In its row the larger error is higher up.
    same_row = second[(second[:, 0] - red[:, 0].float().mean()).abs() < quantization_plot._ROW]
    assert red[:, 0].max() < same_row[:, 0].max()


def test_the_marks_are_where_their_figures_are(report_of):
    """Fragility in grey, and as a red square where it was protected; the error as quantized in blue, a decade below."""
    from int8_dit.nodes.pictures import quantization_plot

    image = quantization_plot.plot(report_of({"b.0.k": (0.1, 0.02), "b.1.k": (0.1, 0.01)}, ("b.0.k",)))
    chart = image[:, quantization_plot._HEADER :]
    red, grey, blue = (
        pixels(chart, color)[:, 0].float()
        for color in (quantization_plot._PROTECTED, quantization_plot._PLAIN, quantization_plot._INT8)
    )
    assert float(red.mean()) == pytest.approx(float(grey.min()) + quantization_plot._RADIUS, abs=1)
    decade = quantization_plot._ROW / math.log10(10 * 1.3**2)
    assert float(blue.mean() - red.mean()) == pytest.approx(decade, abs=1)


def test_the_mark_of_what_16_bits_leave(report_of):
    """A red circle, a decade below the red square of the same layer in bf16."""
    from int8_dit.nodes.pictures import quantization_plot

    def lowest_red(held_in):
        errors = {"b.0.k": (0.1, 0.01), "b.1.k": (0.1, 0.01)}
        image = quantization_plot.plot(report_of(errors, (("b.0.k", held_in),)))
        return pixels(image[:, quantization_plot._HEADER :], quantization_plot._PROTECTED)[:, 0].max()

    decade = quantization_plot._ROW / math.log10(10 * 1.3**2)
    below = lowest_red("INT8 with 16-bit activations") - lowest_red("bf16")
    assert float(below) == pytest.approx(decade, abs=2)


@pytest.mark.parametrize(
    "errors", ({"a": (0.0, 0.0)}, {"a": (None, None)}, {f"b.{i}.c": (9.0, 1e-9) for i in range(90)})
)
def test_odd_reports_can_be_drawn(report_of, errors):
    from int8_dit.nodes.pictures.quantization_plot import plot

    assert plot(report_of(errors)).shape[2] == 1100
