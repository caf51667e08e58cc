"""What the nodes of the templates put out, from runs of the same nodes on the small test model, and shown on a page.

The templates name models of gigabytes. How much room a result takes on a node does not hang on the model's size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import workflows
from .server import ComfyServer
from .workflows import Prompt, link

if TYPE_CHECKING:
    from playwright.sync_api import Page

_TOKENS = 16
_SHOW = """(results) => {
    for (const node of app.graph.nodes) {
        const output = results[node.type];
        if (!output) continue;
        const detail = { node: String(node.id), display_node: String(node.id), output, prompt_id: "" };
        app.api.dispatchEvent(new CustomEvent("executed", { detail }));
    }
}"""


def node_results(server: ComfyServer) -> dict[str, dict]:
    """The ui results by the node's type."""
    prompt = Prompt()
    original = workflows.stock_model(prompt)
    model = workflows.calibrated_model(prompt, original, text="INT8", steps=4)
    workflows.save_model(prompt, model)
    workflows.save_calibration(prompt, link(model[0], 3))
    loaded = workflows.int8_model(prompt, workflows.GLYPH_MODEL)
    prompt.add("PreviewAny", source=link(loaded[0], 1))
    applied = prompt.add("ApplyFusedINT8Kernel", model=loaded, kernel="fused int8")
    prompt.add("PreviewAny", source=link(applied, 1))
    images = [workflows.glyph_images(prompt, drawn, text="A", steps=4) for drawn in (original, loaded)]
    reference, image = (prompt[shown]["inputs"]["images"] for shown in images)
    prompt.add("CompareImagesINT8DiT", reference=reference, image=image)
    workflows.kernel_benchmark(prompt, tokens=_TOKENS, model=loaded)
    results = {prompt[number]["class_type"]: output for number, output in server.queue(prompt).items()}
    return results | {"SaveImage": results["PreviewImage"]}


def show_results(page: Page, results: dict[str, dict]) -> None:
    """Tell the page that each of its nodes has run."""
    page.evaluate(_SHOW, results)
