"""Words of the pack can be read in the frontend's dark and light palette."""

import pytest

from support.frontend import WARNING, add_nodes, set_setting

LEAST = 4.5  # WCAG 2.2, 1.4.3: of text to what is behind it
SHOW = """() => {
    const [loader, benchmark] = app.graph.nodes;
    const mark = { layer: "b.0.k", block: 0, before: 0.1, after: 0.01, held_in: "INT8", protected: false };
    const panel = { kind: "k", blocks: "b", before: 0.1, after: 0.01, marks: [mark] };
    const report = { title: "report", summary: "s", panels: [panel], low: 0.005, high: 0.2, ticks: [0.02] };
    const badges = ["good", "note", "warn"].map((severity) => ({ severity, text: "a badge", detail: "its detail" }));
    loader.onExecuted({ int8_dit_badges: badges });
    const table = { title: "title", columns: ["one", "other"], rows: [["1", "2"]], notes: ["a note"], summary: ["s"] };
    const download = { filename: "f", subfolder: "", type: "" };
    benchmark.onExecuted({ int8_benchmark: [{ ...table, download }], int8_quantization_report: [report] });
    sessionStorage.clear();
    const detail = { reason: "bf16", summary: "summary", detail: "detail", node: String(loader.id) };
    app.api.dispatchEvent(new CustomEvent("int8_dit.warning", { detail }));
    const failing = app.graph.nodes.find(({ type }) => type === "SaveINT8DiT");
    const failure = { node_id: String(failing.id), node_type: failing.type, exception_message: "what failed" };
    app.api.dispatchEvent(new CustomEvent("execution_error", { detail: failure }));
}"""
CONTRASTS = """() => {
    const rgba = (color) => {
        const numbers = color.match(/[\\d.]+/g).map(Number);
        const scale = color.startsWith("color(") ? 255 : 1;
        return [...numbers.slice(0, 3).map((number) => number * scale), numbers[3] ?? 1];
    };
    const over = (front, back) => [0, 1, 2].map((at) => front[at] * front[3] + back[at] * (1 - front[3]));
    const behind = (part) => {
        if (!part) return [255, 255, 255];
        const color = rgba(getComputedStyle(part).backgroundColor);
        return color[3] === 1 ? color : over(color, behind(part.parentElement));
    };
    const luminance = (color) => {
        const [r, g, b] = color.map((value) => value / 255)
            .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const hasWords = (part) => [...part.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
    const ours = [...document.querySelectorAll(".int8-result *, .int8-details :not(title), .int8-warning *")];
    return ours.filter(hasWords).map((part) => {
        const back = behind(part);
        const ink = getComputedStyle(part)[part instanceof SVGElement ? "fill" : "color"];
        const both = [luminance(back), luminance(over(rgba(ink), back))];
        return [part.textContent, (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05)];
    });
}"""


@pytest.fixture(params=("dark", "light"))
def palette(page, request):
    set_setting(page, "Comfy.ColorPalette", request.param)
    return request.param


def test_words_stand_out(page, palette):
    add_nodes(
        page, {"load": ("LoadINT8DiT", {}), "benchmark": ("INT8KernelBenchmark", {}), "save": ("SaveINT8DiT", {})}, []
    )
    page.evaluate(SHOW)
    page.wait_for_selector(WARNING)
    page.evaluate("[...document.querySelectorAll('.int8-more')].at(-1).click()")
    page.wait_for_selector(".int8-details")
    contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 20 and {"What failed", "plain INT8", "2 %"} <= {text for text, _ in contrasts}
    assert not {text: ratio for text, ratio in contrasts if ratio < LEAST}
