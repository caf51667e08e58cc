"""The quantization report inside its node, in the real frontend."""

from support import workflows
from support.frontend import add_nodes, open_details, run, settle

LAYERS = 21  # of the glyph model that are quantized
# What is read off the page, in pixels of the window.
SHOWN = """() => {
    const section = document.querySelector(".int8-report");
    const box = section.closest("dialog");
    const all = (selector) => [...section.querySelectorAll(selector)];
    const rectangle = ({ left, right, top, bottom }) => ({ left, right, top, bottom });
    return {
        title: section.querySelector("h4").textContent,
        summary: section.querySelector("p").textContent,
        legend: all(".legend > span").map((entry) => entry.textContent),
        kinds: all(".kind").map((kind) => [...kind.children].map((part) => part.textContent)),
        marks: all(".mark title").map((title) => title.textContent),
        texts: all("text, h4, .kind > span, .legend > span").map(
            (text) => [text.textContent, rectangle(text.getBoundingClientRect())]),
        section: rectangle(section.getBoundingClientRect()),
        overflow: box.scrollWidth - box.clientWidth,
    };
}"""


def legible(page):
    """What is shown. All texts lie in the section, and none covers another."""
    shown = page.evaluate(SHOWN)
    inside = shown["section"]
    for index, (text, box) in enumerate(shown["texts"]):
        assert inside["left"] - 1 <= box["left"] and box["right"] <= inside["right"] + 1, text
        for other, covered in shown["texts"][index + 1 :]:
            beside = box["right"] <= covered["left"] + 1 or covered["right"] <= box["left"] + 1
            assert beside or box["bottom"] <= covered["top"] + 2 or covered["bottom"] <= box["top"] + 2, (text, other)
    assert shown["overflow"] <= 0
    return shown


def test_the_node_says_what_it_does_and_then_what_it_did(page, server, renderer, tmp_path):
    """In ComfyUI's own line of text, until there is a result; all of that behind a click."""
    nodes = {
        "file": ("UNETLoader", {"unet_name": workflows.GLYPH_MODEL}),
        "node": ("QuantizeToINT8SmoothQuant", {"kernel": "fused int8", "alpha": 0.25 + (renderer == "Vue") / 4}),
        "text": ("PreviewAny", {}),  # another alpha is not what the cache has
    }
    add_nodes(page, nodes, [("file", 0, "node", "model"), ("node", 2, "text", "source")])
    page.evaluate(
        """() => {
            window.said = [];
            app.api.addEventListener("progress_text", ({ detail }) => said.push([`${detail.nodeId}`, detail.text]));
        }"""
    )
    outputs = run(page, server)
    (report,) = [one for output in outputs.values() for one in output.get("int8_quantization_report", ())]
    page.wait_for_selector(".int8-result .int8-headline")
    node, widgets = page.evaluate(
        """() => {
            const { id, widgets } = app.graph.nodes.find(({ title }) => title === "node");
            return [`${id}`, widgets.map(({ name }) => name)];
        }"""
    )
    said = page.evaluate("said")
    assert {place for place, _ in said} == {node} and said[0][1].startswith("quantizing layer 1 of 21")
    assert "$$node-text-preview" not in widgets

    assert page.locator(".int8-result .int8-headline").text_content() == report["headline"]
    assert page.locator(".int8-report").count() == 0
    settle(page)  # the node is measured in the frames after the result
    open_details(page)
    page.screenshot(path=tmp_path / "report.png")
    shown = legible(page)
    assert (shown["title"], shown["summary"]) == (report["title"], report["summary"])
    assert [kind for kind, _ in shown["kinds"]] == [panel["kind"] for panel in report["panels"]]
    marks = [mark["layer"] for panel in report["panels"] for mark in panel["marks"]]
    assert len(marks) == LAYERS and [text.partition(":")[0] for text in shown["marks"]] == marks
    assert shown["legend"] == ["plain INT8", "as quantized", "kept in bf16"]


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


def panel(kind, numbers, blocks="layers"):
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


def test_any_report_is_legible(page, tmp_path):
    summary = (
        "Mean error 1.06 % of the output (plain INT8: 2.88 %). 17 of 212 linears protected. 10.6 GB (was 18.6 GB)."
    )
    scale = {"low": 0.003, "high": 0.4, "ticks": [0.005, 0.02, 0.1]}
    for case, panels in PANELS.items():
        page.evaluate(DRAW, {"title": "INT8 quantization", "summary": summary, "panels": panels, **scale})
        page.screenshot(path=tmp_path / f"{case}.png")
        shown = legible(page)
        assert len(shown["marks"]) == sum(len(panel["marks"]) for panel in panels)
        if case == "34 blocks":
            assert shown["legend"][2:] == ["16-bit activations", "kept in bf16", "never called"]
            assert shown["marks"][3:6] == [
                "layers.3.feed_forward.w0: 2.30 % → 0.00 %, bf16",
                "layers.4.feed_forward.w0: 2.40 % → 0.40 %, INT8 with 16-bit activations",
                "layers.5.feed_forward.w0: never called",
            ]
