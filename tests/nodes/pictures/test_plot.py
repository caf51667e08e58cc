"""The pictures that nodes draw: everything is on the sheet, nothing covers a text, and rows are where figures are."""

import importlib.util
import subprocess
import sys

import pytest
from matplotlib.text import Text

from int8_dit.kernels.benchmark.attention_rows import ATTENTION_METHODS, AttentionResult, AttentionShape, AttentionSizes
from int8_dit.kernels.benchmark.methods import BENCHMARK_METHODS
from int8_dit.kernels.benchmark.shape_results import LinearShape, ShapeResult
from int8_dit.nodes.pictures.plot import (
    INT8,
    MUTED,
    PLAIN,
    PROTECTED,
    as_comfyui_image,
    draw_chart,
    draw_times,
    plot_times,
)

MACHINE = (
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition, driver 580.159.04, torch 2.11.0+cu130, triton 3.6.0, "
    "comfy-kitchen 0.2.40"
)
HEADLINE = "On this card INT8 is only 0.89 × bf16; your image takes 1.12 of the time"


def texts_of(figure, monkeypatch):
    """The texts that a figure shows. All lie on the sheet, none covers another, and none is smaller than 8 pixels where
    the sheet is shown 450 wide."""
    drawn, draw = [], Text.draw

    def recorded(text, renderer, *args, **kwargs):
        if text.get_visible() and text.get_text():
            drawn.append((text.get_text(), text.get_window_extent(renderer)))
        return draw(text, renderer, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Text, "draw", recorded)
        image = as_comfyui_image(figure)
    assert image.shape[0] == 1 and image.shape[3] == 3 and image.min() >= 0
    assert image[0, 0].eq(1).all() and image.lt(0.5).any()  # dark on white
    sheet = figure.bbox
    for index, (text, box) in enumerate(drawn):
        assert sheet.x0 <= box.x0 and box.x1 <= sheet.x1 and sheet.y0 <= box.y0 and box.y1 <= sheet.y1, text
        assert box.height * 450 / sheet.width >= 8, text
        inside = box.padded(-1)
        assert not [other for other, covered in drawn[index + 1 :] if inside.overlaps(covered.padded(-1))], text
    return [text for text, _ in drawn]


# The quantization report.

IDEOGRAM4 = ("attention.qkv", "attention.o", "adaln_modulation", *(f"feed_forward.w{n}" for n in (1, 2, 3)))
LONG = "a_module_with_quite_a_name.in_another_one_with_a_longer_name.that_holds_a_third.query_key_value_projection"
MODELS = {
    "34 blocks": {f"layers.{block}.{kind}": block for block in range(34) for kind in IDEOGRAM4} | {"llm_cond_proj": 3},
    "300 blocks": {f"blocks.{block}.k": block for block in range(300)},
    "from block 98 on": {f"blocks.{block}.k": block for block in range(98, 104)},
    "two kinds of blocks": {f"{name}.{b}.mlp": b for name, n in (("double", 19), ("single", 38)) for b in range(n)},
    "long names": {f"{LONG}_of_blocks.{block}.{LONG}": block for block in range(12)} | {LONG: 1},
}


def picture(report):
    return draw_chart(report.chart())


@pytest.mark.parametrize("model", MODELS)
def test_the_report_is_legible(report_of, monkeypatch, model):
    names = list(MODELS[model])
    errors = {name: (0.003 * 1.07 ** (n % 50), 0.001 * 1.05 ** (n % 50)) for name, n in MODELS[model].items()}
    errors |= dict.fromkeys(names[5:6], (None, None))
    held = dict.fromkeys(names[:40:3], "INT8 with 16-bit activations") | dict.fromkeys(names[1:40:3], "bf16")
    texts = texts_of(picture(report_of(errors, held.items(), size=10**10, size_before=10**10)), monkeypatch)
    assert {"INT8 quantization (uncalibrated)", "plain INT8", "16-bit activations", "kept in bf16"} <= set(texts)
    assert str(min(MODELS[model].values())) in texts


@pytest.mark.parametrize("errors", ({"a": (0.0, 0.0)}, {"a": (None, None)}, {"b.0.c": (9.0, 1e-9)}))
def test_odd_reports_can_be_drawn(report_of, monkeypatch, errors):
    texts_of(picture(report_of(errors)), monkeypatch)


def test_a_report_of_many_kinds_is_drawn_as_far_as_it_fits(report_of):
    figure = picture(report_of({f"{kind}_{n}": (0.1, 0.01) for n in range(400) for kind in "abc"}))
    assert 100 < len(figure.axes) < 1200 and figure.bbox.height < 1 << 16
    assert figure.axes[3].get_title(loc="left").startswith("a_1 ")
    assert f"{1200 - len(figure.axes)} more panels do not fit here" in figure.texts[1].get_text().replace("\n", " ")


def test_the_marks_are_where_their_figures_are(report_of):
    errors = {"b.0.k": (0.1, 0.02), "b.1.k": (0.2, 0.01), "b.2.k": (0.3, 0.03), "b.5.k": (None, None)}
    errors["b.1.j"] = (0.1, 0.1)
    figure = picture(report_of(errors, (("b.1.k", "INT8 with 16-bit activations"), "b.2.k"), {"calls": 1, "rows": 1}))
    panel, other = figure.axes
    assert other.get_xlim() == panel.get_xlim() == (-0.5, 5.5)  # block below block
    foot = panel.get_ylim()[0]
    assert foot < 0.01
    marks = {
        (line.get_color(), line.get_marker(), float(line.get_xdata()[0]), float(line.get_ydata()[0]))
        for line in panel.lines
    }
    assert marks == {
        *((PLAIN, "o", block, error) for block, error in enumerate((0.1, 0.2, 0.3))),
        (INT8, "o", 0, 0.02),
        (PROTECTED, "D", 1, 0.01),
        (PROTECTED, "s", 2, foot),
        (MUTED, "x", 5, foot),
    }


# The benchmark.


def shapes(results):
    """The results of linears given as shape: {method: rounds}."""
    return [ShapeResult(LinearShape(name, 13824, 53248), 80661, rounds=rounds) for name, rounds in results.items()]


def calls(count):
    """Results of attention calls, each method slower than the one before."""
    call = AttentionSizes("cross attention", 40, AttentionShape(32760, 32512, 128, True), 8, 2)
    rounds = {method.name: [n, n, 1.1 * n] for n, method in enumerate(ATTENTION_METHODS, 1)}
    return [AttentionResult(call, rounds=rounds)] * count


@pytest.mark.parametrize("count, of_methods", ((1, 2), (2, 9), (8, 15)))
def test_the_benchmark_is_legible(monkeypatch, count, of_methods):
    names = ["Flux, Qwen-Image attention out, which is long", "qkv", "ffn up", "video", "o", "w1", "w2", "w3"][:count]
    rounds = {method.name: [0.4 + 0.2 * n, 0.6 + 0.2 * n] for n, method in enumerate(BENCHMARK_METHODS[:of_methods])}
    slow = {name: [1000 * time for time in times] for name, times in rounds.items() if name != "bf16"}
    results = dict.fromkeys(names, rounds) | dict.fromkeys(names[3:5], slow)
    texts_of(draw_times(shapes(results), HEADLINE, "Times", MACHINE), monkeypatch)


@pytest.mark.parametrize("count", (1, 4))
def test_the_attention_is_legible(monkeypatch, count):
    texts_of(draw_times(calls(count), "", "Times", MACHINE, "ComfyUI's choice"), monkeypatch)


def bars(figure):
    """How long the bars of each panel are, by method."""
    names = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return [
        {names[round(bar.get_y() + bar.get_height() / 2)]: bar.get_width() for bar in a.patches} for a in figure.axes
    ]


def test_bars_are_medians_relative_to_bf16_with_their_rounds():
    rounds = {"fused int8": [0.9, 1.0, 1.4], "bf16": [2.0, 2.0, 2.0], "new one": [8.0]}
    figure = draw_times(shapes({"qkv": rounds}), "", "Times", "")
    (panel,) = figure.axes
    assert bars(figure)[0] == pytest.approx({"fused int8": 0.5, "bf16": 1.0, "new one": 4.0})
    assert panel.get_xlim() == (0, 3)  # one is too long for the scale, and ends in an arrow
    assert [line.get_xydata().tolist() for line in panel.lines] == [[[3, 2]]]
    assert [label.get_text() for label in panel.get_yticklabels()] == ["fused int8", "bf16", "new one"]
    ours, *others = (bar.get_facecolor() for bar in panel.patches)
    assert others[0] == others[1] != ours
    (spread,) = panel.collections[0].get_segments()
    assert spread[:, 0].tolist() == pytest.approx([0.45, 0.7]) and spread[:, 1].tolist() == [0, 0]


def test_without_bf16_the_slowest_method_is_the_measure():
    results = {"qkv": {"fused int8": [1.0], "fake-quant": [4.0]}, "o": {"bf16": [1.0], "fused int8": [1.0]}}
    figure = draw_times(shapes(results), "", "Times", "")
    first, second = bars(figure)
    assert first == pytest.approx({"fake-quant": 1.0, "fused int8": 0.25})
    assert second == pytest.approx({"bf16": 1.0, "fused int8": 1.0})
    assert [panel.get_xlabel() for panel in figure.axes] == ["1 = fake-quant", "1 = bf16"]


def test_attention_stands_below_the_linears_of_a_benchmark_that_may_have_none():
    alone, both = plot_times(shapes({"qkv": {}}), "fast", ""), plot_times([], "fast", "", calls(1))
    assert both.shape[1] > alone.shape[1] and both.shape[2] == alone.shape[2]
    assert (both[:, : alone.shape[1]] == alone).all() and both[:, alone.shape[1] :].min() < 0.5


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
from int8_dit.nodes.pictures.plot import plot_times
plot_times([], "nothing", "")
assert "matplotlib" in sys.modules and "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=300)


def test_a_missing_matplotlib_is_said_before_the_work(dit, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "matplotlib" else found(name, *a))
    monkeypatch.setattr("int8_dit.nodes.quantize_to_int8.quantize_model", lambda *_: pytest.fail("the work began"))
    with pytest.raises(ImportError, match="pip install matplotlib"):
        dit.quantize(dit.stock())
