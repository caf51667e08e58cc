"""The quantization report: its line, its table, its recipe, and what its pictures show."""

import json

import pytest


@pytest.mark.parametrize(
    "name, blocks, number, kind",
    (
        ("layers.3.attention.qkv", "layers", 3, "attention.qkv"),
        ("double_blocks.12.img_mlp.0", "double_blocks", 12, "img_mlp.0"),
        ("net.blocks.0.x_block.mlp.fc1", "net.blocks", 0, "x_block.mlp.fc1"),
        ("llm_cond_proj", "", None, "llm_cond_proj"),
        ("input_blocks.7.1.transformer_blocks.9.ff.net.0.proj", "input_blocks", 7, "transformer_blocks.ff.net.0.proj"),
        ("middle_block.1.transformer_blocks.0.attn1.to_q", "middle_block", 1, "transformer_blocks.attn1.to_q"),
        ("blocks.block3.blocks.1.block.attn.to_out.0", "blocks.block", 3, "blocks.block.attn.to_out.0"),
    ),
)
def test_the_block_and_kind_of_a_layer(report_of, name, blocks, number, kind):
    (panel,) = report_of({name: (0.01, 0.01)}).chart()["panels"]
    assert (panel["blocks"], panel["marks"][0]["block"], panel["kind"]) == (blocks, number, kind)


ERRORS = {
    "layers.0.w1": (0.012, 0.011),
    "layers.0.w2": (0.2, 0.03),
    "layers.1.w1": (0.012, 0.0100004),
    "layers.1.w2": (0.05, 0.005),
    "proj": (None, None),
}


def test_the_table_has_the_most_fragile_first(report_of):
    table = report_of(ERRORS, ("layers.0.w2",), {"calls": 3, "rows": 12}).markdown()
    assert table.startswith("## INT8 quantization (smooth)\n\n4 of 211 linears are plain INT8. ")
    assert "relative to the layer's output" in table
    assert table.splitlines()[8:] == [
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
    assert lines[2].endswith("2 of 211 linears protected: 1 in INT8 with 16-bit activations, 1 in bf16.")
    assert lines[8] == "| layers.0.w2 | 20.00 % | 3.00 % | protected in INT8 with 16-bit activations, smooth 0.5 |"
    layers = report.recipe()["layers"]
    assert {name: layer["held_in"] for name, layer in layers.items() if "held_in" in layer} == dict(protected)


def test_the_line_above_all(report_of):
    """A layer in bf16 loses nothing, and one that was never called counts for nothing."""
    errors = {"b.0.x": (0.04, 0.02), "b.1.x": (0.08, 0.06), "b.2.x": (None, None)}
    report = report_of(errors, ("b.1.x",), {"calls": 3, "rows": 12}, size=10_620_000_000, size_before=18_600_000_000)
    assert report.title == "INT8 quantization (smooth)"
    assert report.summary == (
        "Mean error 1.00 % of the output (plain INT8: 6.00 %). 1 of 211 linears protected: 1 in bf16. "
        "10.6 GB (was 18.6 GB)."
    )
    assert report.headline == "1.0 % of the output changes; 18.6 GB become 10.6 GB"
    small = report_of(errors, (), {"calls": 3, "rows": 12}, size=953_000_000, size_before=1_600_000_000)
    assert small.headline.endswith("; 1.6 GB become 1.0 GB")


def test_the_line_of_an_uncalibrated_quantization(report_of):
    report = report_of({"b.0.x": (0.04, 0.02)})
    assert report.title == "INT8 quantization (uncalibrated)"
    assert report.summary == "Mean error 2.00 % of the weight (plain INT8: 4.00 %). 0 of 211 linears protected."
    assert report_of({"b.0.x": (None, None)}).summary == "0 of 211 linears protected."


def test_the_chart_has_a_panel_per_kind_of_layer_and_block(report_of):
    """Kinds of the same blocks side by side, in the order of the model."""
    names = ("double.0.qkv", "single.0.qkv", "proj", "double.0.mlp", "double.1.qkv", "single.3.qkv")
    panels = report_of(dict.fromkeys(names, (0.1, 0.01))).chart()["panels"]
    assert [(panel["blocks"], panel["kind"], [mark["block"] for mark in panel["marks"]]) for panel in panels] == [
        ("double", "qkv", [0, 1]),
        ("double", "mlp", [0]),
        ("single", "qkv", [0, 3]),
        ("", "proj", [None]),
    ]


def test_a_mark_is_a_layer_before_and_after(report_of):
    report = report_of(ERRORS, (("layers.0.w2", "INT8 with 16-bit activations"), ("layers.1.w2", "bf16")))
    w1, w2, proj = panels = report.chart()["panels"]
    assert [(mark["before"], mark["after"], mark["held_in"]) for panel in panels for mark in panel["marks"]] == [
        (0.012, 0.011, "INT8"),
        (0.012, 0.01, "INT8"),
        (0.2, 0.03, "INT8 with 16-bit activations"),
        (0.05, 0.0, "bf16"),
        (None, None, "INT8"),
    ]
    assert (w1["before"], w2["after"]) == (pytest.approx(0.012), pytest.approx(0.015))
    assert (proj["before"], proj["after"]) == (None, None)


@pytest.mark.parametrize("errors", (ERRORS, {"a": (0.0, 0.0)}, {"a": (None, None)}, {"a": (0.0101, 0.01)}))
def test_the_scale_holds_all_errors(report_of, errors):
    scale = report_of(errors).chart()
    assert all(
        scale["low"] < max(error, 1e-4) < scale["high"]
        for pair in errors.values()
        for error in pair
        if error is not None
    )
    assert len(scale["ticks"]) <= 4 and all(scale["low"] <= tick <= scale["high"] for tick in scale["ticks"])


def test_the_node_shows_the_chart(dit):
    """In values that JSON has, and with the sizes of the two models."""
    model = dit.stock()
    output = dit.node_output(model, protect=dit.protect_layers(2))
    (shown,) = json.loads(json.dumps(output.ui["int8_quantization_report"]))
    assert shown["title"] == "INT8 quantization (uncalibrated)"
    assert "2 of 34 linears protected: 2 in bf16" in shown["summary"]
    before = f"(was {model.model_size() / 1e6:.1f} MB)."
    assert shown["summary"].endswith(before) and output.result[0].model_size() < model.model_size()
    layers = [mark["layer"] for panel in shown["panels"] for mark in panel["marks"]]
    assert sorted(layers) == sorted(dit.LINEARS)
    assert output.result[2].startswith("## INT8 quantization (uncalibrated)")
