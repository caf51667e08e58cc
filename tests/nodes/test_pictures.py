"""The pictures that nodes draw: everything is on the sheet, nothing covers a text, and marks are where figures are."""

import subprocess
import sys

import pytest


@pytest.fixture
def texts_of(pack, monkeypatch):
    """The texts that a figure shows, each with the box of its letters in pixels."""
    from matplotlib.text import Text

    drawn = []
    draw = Text.draw

    def recorded(text, renderer, *args, **kwargs):
        if text.get_visible() and text.get_text():
            drawn.append((text.get_text(), text.get_window_extent(renderer)))
        return draw(text, renderer, *args, **kwargs)

    def texts_of(figure):
        drawn.clear()
        figure.canvas.draw()
        return list(drawn)

    monkeypatch.setattr(Text, "draw", recorded)
    return texts_of


def assert_legible(figure, texts):
    """All texts lie on the sheet, none covers another, and none is smaller than 8 pixels where it is shown 450 wide."""
    sheet = figure.bbox
    for text, box in texts:
        assert sheet.x0 <= box.x0 and box.x1 <= sheet.x1 and sheet.y0 <= box.y0 and box.y1 <= sheet.y1, text
        assert box.height * 450 / sheet.width >= 8, text
    boxes = [(text, box.padded(-1)) for text, box in texts]
    for index, (text, box) in enumerate(boxes):
        assert not [other for other, covered in boxes[index + 1 :] if box.overlaps(covered)], text


# The quantization report.

IDEOGRAM4 = (
    "attention.qkv",
    "attention.o",
    "feed_forward.w1",
    "feed_forward.w2",
    "feed_forward.w3",
    "adaln_modulation",
)
LONG = "a_module_with_quite_a_name.in_another_one_with_a_longer_name.that_holds_a_third.query_key_value_projection"
MODELS = {
    "34 blocks": {f"layers.{block}.{kind}": block for block in range(34) for kind in IDEOGRAM4} | {"llm_cond_proj": 3},
    "4 blocks": {f"joint_blocks.{block}.{kind}": block for block in range(4) for kind in IDEOGRAM4},
    "1 block": {"b.0.k": 0},
    "300 blocks": {f"blocks.{block}.k": block for block in range(300)},
    "from block 98 on": {f"blocks.{block}.k": block for block in range(98, 104)},
    "two kinds of blocks": {f"{name}.{b}.mlp": b for name, n in (("double", 19), ("single", 38)) for b in range(n)},
    "long names": {f"{LONG}_of_blocks.{block}.{LONG}": block for block in range(12)} | {LONG: 1},
}


@pytest.fixture
def quantization(pack):
    """A report on layers by name and number, with all ways to hold a layer in it, and its picture."""
    from int8_dit.kernels import TransformPlan
    from int8_dit.nodes.pictures.quantization_plot import draw
    from int8_dit.nodes.quantization.chart import chart_of
    from int8_dit.nodes.quantization.report import LayerReport, QuantizationReport

    def make(errors, held=None, calibration=None):
        held = held or {}
        layers = tuple(
            LayerReport(name, TransformPlan(), *pair, held.get(name, "INT8"), protected=name in held)
            for name, pair in errors.items()
        )
        size = 10_600_000_000
        return draw(
            chart_of(QuantizationReport({"method": "smooth"}, 300, calibration, layers, tuple(held), size, size))
        )

    return make


@pytest.mark.parametrize("model", MODELS)
def test_the_report_is_legible(quantization, texts_of, model):
    names = list(MODELS[model])
    errors = {
        name: (0.003 * 1.07 ** (number % 50), 0.001 * 1.05 ** (number % 50)) for name, number in MODELS[model].items()
    }
    errors |= dict.fromkeys(names[5:6], (None, None))
    held = dict.fromkeys(names[:40:3], "INT8 with 16-bit activations") | dict.fromkeys(names[1:40:3], "bf16")
    figure = quantization(errors, held)
    texts = texts_of(figure)
    assert_legible(figure, texts)
    said = [text for text, _ in texts]
    assert "INT8 quantization (uncalibrated)" in said
    ends = {str(number) for number in (min(MODELS[model].values()), max(MODELS[model].values()))}
    assert ends & set(said)


@pytest.mark.parametrize("errors", ({"a": (0.0, 0.0)}, {"a": (None, None)}, {"b.0.c": (9.0, 1e-9)}))
def test_odd_reports_can_be_drawn(quantization, texts_of, errors):
    figure = quantization(errors)
    assert_legible(figure, texts_of(figure))


def places(figure, name):
    """Where the marks of that name stand: block, error."""
    from int8_dit.nodes.pictures.quantization_plot import _MARKS

    wanted = _MARKS[name]
    return [
        (float(x), float(y))
        for axes in figure.axes
        for line in axes.lines
        if (line.get_marker(), line.get_color()) == (wanted["marker"], wanted["color"])
        for x, y in zip(line.get_xdata(), line.get_ydata(), strict=True)
    ]


def test_the_marks_are_where_their_figures_are(quantization):
    errors = {"b.0.k": (0.1, 0.02), "b.1.k": (0.2, 0.01), "b.2.k": (0.3, 0.03), "b.5.k": (None, None)}
    figure = quantization(errors, {"b.1.k": "INT8 with 16-bit activations", "b.2.k": "bf16"}, {"calls": 1, "rows": 1})
    (panel,) = figure.axes
    assert places(figure, "plain INT8") == [(0, 0.1), (1, 0.2), (2, 0.3)]
    assert places(figure, "as quantized") == [(0, 0.02)]
    assert places(figure, "16-bit activations") == [(1, 0.01)]
    # At the foot, below all errors.
    ((bf16, foot),) = places(figure, "kept in bf16")
    assert bf16 == 2 and panel.get_ylim()[0] < foot < 0.01
    assert places(figure, "never called") == [(5, foot)]


def test_the_image_is_what_comfyui_takes(pack, quantization):
    import torch

    from int8_dit.nodes.pictures.drawing import as_comfyui_image

    image = as_comfyui_image(quantization({"b.0.k": (0.1, 0.02)}))
    assert image.dtype == torch.float32 and image.ndim == 4 and image.shape[0] == 1 and image.shape[3] == 3
    assert image.min() >= 0 and image.max() == 1 and image[0, 0].eq(1).all()  # white around
    assert image.lt(0.5).any()


# The benchmark.


@pytest.fixture
def benchmark(pack):
    """The picture of results given as shape: {method: rounds}, of the shapes' names."""
    from int8_dit.kernels.benchmark import LinearShape, ShapeResult
    from int8_dit.nodes.pictures.benchmark_plot import draw

    def make(results, headline="On this card INT8 is 2.00 × bf16", environment="A card, a driver"):
        shapes = [
            ShapeResult(LinearShape(name, 13824, 53248), 80661, rounds=rounds) for name, rounds in results.items()
        ]
        return draw(shapes, headline, environment)

    return make


def methods():
    from int8_dit.kernels.benchmark.methods import BENCHMARK_METHODS

    return [method.name for method in BENCHMARK_METHODS]


MACHINE = (
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, driver 580.159.04, torch 2.11.0+cu130, triton 3.6.0, "
    "comfy-kitchen 0.2.40"
)


HEADLINE = "On this card INT8 is only 0.89 × bf16; your image takes 1.12 of the time"


@pytest.mark.parametrize("shapes, of_methods", ((1, 2), (2, 9), (5, 6), (8, 14), (8, 15)))
def test_the_benchmark_is_legible(benchmark, texts_of, shapes, of_methods):
    names = ["Flux, Qwen-Image attention out, which is long", "qkv", "ffn up", "video", "o", "w1", "w2", "w3"]
    rounds = {name: [0.4 + 0.2 * n, 0.5 + 0.2 * n, 0.6 + 0.2 * n] for n, name in enumerate(methods()[:of_methods])}
    slow = {name: [1000 * time for time in times] for name, times in rounds.items() if name != "bf16"}
    results = dict.fromkeys(names[:shapes], rounds)
    figure = benchmark(results | {name: slow for name in names[3:5] if name in results}, HEADLINE, MACHINE)
    assert_legible(figure, texts_of(figure))


def bars(figure):
    """How long the bars of each panel are, by method."""
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return [
        {names[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in a.patches} for a in figure.axes
    ]


def test_bars_are_medians_relative_to_bf16_with_their_rounds(benchmark):
    figure = benchmark({"qkv": {"fused int8": [0.9, 1.0, 1.4], "bf16": [2.0, 2.0, 2.0], "new one": [8.0]}})
    (lengths,) = bars(figure)
    # The fastest on top; one is too long for the scale.
    assert list(lengths) == ["fused int8", "bf16", "new one"]
    assert lengths == pytest.approx({"fused int8": 0.5, "bf16": 1.0, "new one": 3.0})
    ours, *others = (bar.get_facecolor() for bar in figure.axes[0].patches)
    assert others[0] == others[1] != ours
    (spread,) = (line.get_xdata() for line in figure.axes[0].lines if list(line.get_ydata()) == [0, 0])
    assert list(spread) == pytest.approx([0.45, 0.7])


def test_without_bf16_the_slowest_method_is_the_measure(benchmark, texts_of):
    figure = benchmark({"qkv": {"fused int8": [1.0], "fake-quant": [4.0]}, "o": {"bf16": [1.0], "fused int8": [1.0]}})
    first, second = bars(figure)
    assert first == pytest.approx({"fake-quant": 1.0, "fused int8": 0.25})
    assert second == pytest.approx({"bf16": 1.0, "fused int8": 1.0})
    assert [text for text, _ in texts_of(figure) if text.startswith("1 = ")] == ["1 = fake-quant"]


@pytest.mark.parametrize("results", ({}, {"qkv": {}}))
def test_a_benchmark_of_nothing_can_be_drawn(benchmark, texts_of, results):
    figure = benchmark(results)
    assert_legible(figure, texts_of(figure))


@pytest.fixture
def attention(pack):
    """Results of attention calls with these times of each method."""
    from int8_dit.kernels.benchmark import AttentionCall, AttentionResult, AttentionShape

    def make(*times):
        call = AttentionCall("cross attention", 40, AttentionShape(32760, 32512, 128, True), 8, 2)
        return [AttentionResult(call, rounds={name: [ms, ms, 1.1 * ms] for name, ms in each.items()}) for each in times]

    return make


@pytest.mark.parametrize("calls", (1, 2, 4))
def test_the_attention_is_legible(attention, texts_of, calls):
    from int8_dit.kernels.benchmark import ATTENTION_METHODS
    from int8_dit.nodes.pictures.benchmark_plot import ATTENTION, draw

    times = {method.name: 1.0 + number for number, method in enumerate(ATTENTION_METHODS)}
    figure = draw(attention(*[times] * calls), "", MACHINE, ATTENTION)
    assert_legible(figure, texts_of(figure))
    assert bars(figure)[0]["flash"] == pytest.approx(1.0 / times["ComfyUI's choice"])
    assert ATTENTION.ours == {"Triton", "INT8 of this pack"}


def test_attention_stands_below_the_linears(attention):
    from int8_dit.nodes.pictures.benchmark_plot import plot

    alone, both = plot([], "fast", ""), plot([], "fast", "", attention({"flash": 1.0}))
    assert both.shape[1] > alone.shape[1] and both.shape[2] == alone.shape[2]
    assert (both[:, : alone.shape[1]] == alone).all() and both[:, alone.shape[1] :].min() < 0.5


# The package that draws.


@pytest.mark.slow
def test_matplotlib_is_imported_only_to_draw(comfyui):
    """And never pyplot, whose state is one for the whole process."""
    script = f"""
import sys
from pathlib import Path
sys.path.insert(0, "tests")
from support.pack import import_comfyui, import_pack
import_comfyui(Path({str(comfyui)!r}), cpu=True)
import_pack()
assert "matplotlib" not in sys.modules
from int8_dit.nodes.pictures.benchmark_plot import plot
plot([], "nothing", "")
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_a_missing_matplotlib_is_said_before_the_work(dit, monkeypatch):
    import importlib.util

    from int8_dit.nodes import quantize_to_int8

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name, *a))
    monkeypatch.setattr(quantize_to_int8, "quantize_model", lambda *_: pytest.fail("the work began"))
    with pytest.raises(ImportError, match="pip install matplotlib"):
        dit.quantize(dit.stock())
