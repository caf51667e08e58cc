"""Graphs that run, and what makes them fail: for tests of what a node then says, and for pictures of it."""

from __future__ import annotations

from . import workflows

BROKEN = "broken.safetensors"
LOADER, QUANTIZE = ("LoadINT8DiT", {"model_name": workflows.GLYPH_MODEL}), ("QuantizeToINT8SmoothQuant", {})
SHOWN_LOADER = ({"node": LOADER, "shown": ("PreviewAny", {})}, [("node", 1, "shown", "source")])
SHOWN_QUANTIZE = (
    {"file": ("UNETLoader", {"unet_name": workflows.GLYPH_MODEL}), "node": QUANTIZE, "shown": ("PreviewAny", {})},
    [("file", 0, "node", "model"), ("node", 2, "shown", "source")],
)
PROMPT = """() => {
    const text = LiteGraph.createNode("DemoLettersINT8DiT");
    app.graph.add(text);
    text.pos = [100, 300];
    text.connect(0, app.graph.nodes.find(({ title }) => title === "node"), "positive.positive_0");
}"""
SET = """values => {
    const { widgets } = app.graph.nodes.find(({ title }) => title === "node");
    for (const [name, value] of Object.entries(values)) widgets.find((widget) => widget.name === name).value = value;
}"""
# By what fails: a graph that runs, what breaks it, and what the node then says.
FAILING = {
    "missing file": (
        *SHOWN_LOADER,
        (SET, {"model_name": "gone.safetensors"}),
        "There is no file gone.safetensors for model_name: choose another, or put it into its folder and press R",
    ),
    "wrong file": (*SHOWN_LOADER, (SET, {"model_name": BROKEN}), "broken.safetensors is damaged or incomplete"),
    "missing calibration input": (
        *SHOWN_QUANTIZE,
        (PROMPT, None),
        "Calibration also needs sampler and sigmas and latent_image: connect them, or disconnect",
    ),
    "refused kernel": (*SHOWN_LOADER, (SET, {"attention": "INT8 (comfy-kitchen)"}), "INT8 (comfy-kitchen)"),
}
