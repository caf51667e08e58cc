"""The quantization report inside its node, in the real frontend: both renderers, both themes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import workflows
from support.frontend import open_details, open_frontend, settle
from support.server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

LAYERS = 21  # of the glyph model that are quantized
RENDERERS = {"classic": False, "Vue": True}
THEMES = ("dark", "light")


@pytest.fixture(scope="module")
def page(browser: Browser, server: ComfyServer) -> Iterator[Page]:
    """The frontend, loaded and idle."""
    with open_frontend(browser, server.url, viewport={"width": 1000, "height": 1200}) as page:
        yield page
        for name, value in {"Comfy.VueNodes.Enabled": False, "Comfy.ColorPalette": "dark"}.items():  # the server's
            page.evaluate("([name, value]) => app.ui.settings.setSettingValueAsync(name, value)", [name, value])


@pytest.fixture(autouse=True)
def no_dialog_is_left(page: Page) -> Iterator[None]:
    yield
    page.evaluate("document.querySelectorAll('dialog.int8-details').forEach((dialog) => dialog.remove())")


ADD_NODES = """model => {
    app.graph.clear();
    const [loader, node, text] = ["UNETLoader", "QuantizeToINT8SmoothQuant", "PreviewAny"].map(
        (type) => LiteGraph.createNode(type));
    for (const added of [loader, node, text]) app.graph.add(added);
    [loader.pos, node.pos, text.pos] = [[10, 60], [300, 60], [10, 300]];
    loader.widgets.find(({ name }) => name === "unet_name").value = model;
    node.widgets.find(({ name }) => name === "kernel").value = "fused int8";
    loader.connect(0, node, "model");
    node.connect(2, text, 0);
    Object.assign(app.canvas.ds, { scale: 1, offset: [0, 0] });
}"""


def run(page: Page, server: ComfyServer) -> dict:
    """Run what is on the canvas, and return the report's ui result."""
    with page.expect_response(lambda r: r.url.endswith("/prompt") and r.request.method == "POST") as posted:
        page.evaluate("app.queuePrompt(0)")
    outputs = server.wait(posted.value.json()["prompt_id"])
    (report,) = [output["int8_quantization_report"] for output in outputs.values() if "text" not in output]
    return report[0]


# What is read off the page, in pixels of the window.
SHOWN = """() => {
    const section = document.querySelector(".int8-report");
    const box = section.closest("dialog");
    const all = (selector) => [...section.querySelectorAll(selector)];
    const rectangle = ({ left, right, top, bottom }) => ({ left, right, top, bottom });
    const color = (selector, of) => getComputedStyle(section.querySelector(selector))[of];
    return {
        title: section.querySelector("h4").textContent,
        summary: section.querySelector("p").textContent,
        headline: document.querySelector(".int8-result .int8-headline")?.textContent,
        legend: all(".legend > span").map((entry) => entry.textContent),
        kinds: all(".kind").map((kind) => [...kind.children].map((part) => part.textContent)),
        marks: all(".mark title").map((title) => title.textContent),
        texts: all("text, h4, .kind > span, .legend > span").map(
            (text) => [text.textContent, rectangle(text.getBoundingClientRect())]),
        section: rectangle(section.getBoundingClientRect()),
        ink: color(".number", "fill"),
        paper: getComputedStyle(box).backgroundColor,
        overflow: box.scrollWidth - box.clientWidth,
    };
}"""


def luminance(color: str) -> float:
    """Of a colour as the browser writes it, rgb(r, g, b), by WCAG."""
    channels = [int(number) / 255 for number in re.findall(r"\d+", color)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(first: str, second: str) -> float:
    lighter, darker = sorted((luminance(first), luminance(second)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def assert_legible(shown: dict) -> None:
    """All texts lie in the section, and none covers another."""
    inside = shown["section"]
    for index, (text, box) in enumerate(shown["texts"]):
        assert inside["left"] - 1 <= box["left"] and box["right"] <= inside["right"] + 1, text
        for other, covered in shown["texts"][index + 1 :]:
            beside = box["right"] <= covered["left"] + 1 or covered["right"] <= box["left"] + 1
            assert beside or box["bottom"] <= covered["top"] + 2 or covered["bottom"] <= box["top"] + 2, (text, other)


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.parametrize("renderer", RENDERERS)
def test_the_report_is_drawn_in_its_node(
    page: Page, server: ComfyServer, tmp_path: Path, renderer: str, theme: str
) -> None:
    settings = {"Comfy.VueNodes.Enabled": RENDERERS[renderer], "Comfy.ColorPalette": theme}
    for name, value in settings.items():
        page.evaluate("([name, value]) => app.ui.settings.setSettingValueAsync(name, value)", [name, value])
    page.evaluate(ADD_NODES, workflows.GLYPH_MODEL)
    report = run(page, server)
    page.wait_for_selector(".int8-result .int8-headline")
    assert page.locator(".int8-report").count() == 0  # behind a click
    settle(page)  # the node is measured in the frames after the result
    open_details(page)
    page.screenshot(path=tmp_path / "report.png")

    shown = page.evaluate(SHOWN)
    assert shown["headline"] == report["headline"]
    assert (shown["title"], shown["summary"]) == (report["title"], report["summary"])
    assert shown["title"] == "INT8 quantization (uncalibrated)"
    assert [kind for kind, _ in shown["kinds"]] == [panel["kind"] for panel in report["panels"]]
    marks = [mark for panel in report["panels"] for mark in panel["marks"]]
    assert len(marks) == LAYERS
    assert [text.partition(":")[0] for text in shown["marks"]] == [mark["layer"] for mark in marks]
    assert shown["legend"] == ["plain INT8", "as quantized", "kept in bf16"]
    assert_legible(shown)
    assert shown["overflow"] <= 0
    assert contrast(shown["ink"], shown["paper"]) > 4.5


def test_the_node_says_what_it_does(page: Page, server: ComfyServer) -> None:
    """In ComfyUI's own line of text, until there is a result."""
    page.evaluate(ADD_NODES, workflows.GLYPH_MODEL)
    page.evaluate(  # not what the cache has
        """() => {
            const node = app.graph.nodes.find(({ type }) => type === "QuantizeToINT8SmoothQuant");
            node.widgets.find(({ name }) => name === "alpha").value = 0.25;
            window.said = [];
            window.nodeId = `${node.id}`;
            app.api.addEventListener("progress_text", ({ detail }) => said.push([`${detail.nodeId}`, detail.text]));
        }"""
    )
    run(page, server)
    page.wait_for_selector(".int8-result")
    said = page.evaluate("said")
    assert {node for node, _ in said} == {page.evaluate("nodeId")}
    assert said[0][1].startswith("quantizing layer 1 of 21")
    assert "$$node-text-preview" not in page.evaluate(
        "app.graph.nodes.find(({ id }) => `${id}` === nodeId).widgets.map(({ name }) => name)"
    )


LONG = "a_module_with_quite_a_name.in_another_one_with_a_longer_name.that_holds_a_third.query_key_value_projection"
DRAW = """async report => {
    const { quantizationSection } = await import("/extensions/int8_dit/quantization_report.js");
    const box = document.createElement("dialog");
    box.className = "int8-details";
    box.open = true;
    Object.assign(box.style, { position: "fixed", zIndex: 10000, top: 0, left: 0, width: "430px" });
    document.querySelectorAll(".int8-details").forEach((earlier) => earlier.remove());
    box.append(quantizationSection(report));
    document.body.append(box);
}"""


def panel(kind: str, numbers: range | tuple[None], blocks: str = "layers") -> dict:
    """A panel of a report with every kind of mark in it."""
    ways = ("INT8", "INT8", "INT8", "bf16", "INT8 with 16-bit activations", "never called")
    marks = []
    for index, number in enumerate(numbers):
        way = ways[index % len(ways)]
        errors = {"before": 0.02 + 0.001 * index, "after": 0.0 if way == "bf16" else 0.004, "held_in": way}
        never = {"before": None, "after": None, "held_in": "INT8"}
        marks.append({"layer": f"{blocks}.{number}.{kind}", "block": number} | (errors if way in ways[:5] else never))
    return {"kind": kind, "blocks": blocks, "before": 0.03, "after": 0.004, "marks": marks}


PANELS = {
    "34 blocks": [*(panel(f"feed_forward.w{n}", range(34)) for n in range(6)), panel("llm_cond_proj", (None,), "")],
    "300 blocks": [panel("k", range(300))],
    "late blocks": [panel("k", range(98, 104))],
    "long names": [panel(LONG, range(4), LONG), panel(LONG, (None,), "")],
}


@pytest.mark.parametrize("case", PANELS)
def test_any_report_is_legible(page: Page, tmp_path: Path, case: str) -> None:
    summary = (
        "Mean error 1.06 % of the output (plain INT8: 2.88 %). 17 of 212 linears protected. 10.6 GB (was 18.6 GB)."
    )
    scale = {"low": 0.003, "high": 0.4, "ticks": [0.005, 0.02, 0.1]}
    page.evaluate(DRAW, {"title": "INT8 quantization", "summary": summary, "panels": PANELS[case], **scale})
    page.screenshot(path=tmp_path / "report.png")
    shown = page.evaluate(SHOWN)
    assert_legible(shown)
    assert shown["overflow"] <= 0
    assert len(shown["marks"]) == sum(len(panel["marks"]) for panel in PANELS[case])
    if case == "34 blocks":
        assert shown["legend"] == ["plain INT8", "as quantized", "16-bit activations", "kept in bf16", "never called"]
        assert shown["marks"][3:6] == [
            "layers.3.feed_forward.w0: 2.30 % → 0.00 %, bf16",
            "layers.4.feed_forward.w0: 2.40 % → 0.40 %, INT8 with 16-bit activations",
            "layers.5.feed_forward.w0: never called",
        ]
