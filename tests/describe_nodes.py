"""Write anew what is made of the nodes themselves: the pictures of their help pages, locales/en/nodeDefs.json, and
README.md's picture of a graph.

    COMFYUI_PATH=~/ComfyUI python tests/describe_nodes.py

Run it after a node's name, inputs, outputs or tooltips have changed, with a Python that has ComfyUI's requirements,
Playwright and Pillow. Pictures need Chromium.
"""

from __future__ import annotations

import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from support.browser import NoBrowser, chromium
from support.environment import Environment, PrepareError, run_script, say
from support.frontend import load, open_frontend
from support.node_texts import own_nodes, write_english
from support.server import PROJECT, ServerError, serve
from support.small_png import save_small_png
from support.workflows_saved import TEMPLATES, read, stand_ins

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURES = PROJECT / "web" / "docs" / "pictures"
SHOWN_FILES = {"diffusion_models": "ideogram4_fp8_scaled.safetensors", "int8_calibrations": "calibration.safetensors"}
SCALE = 1.5
MARGIN = 12

PLACE_NODE = """async ([type, scale]) => {
    app.graph.clear();
    app.canvas.background_image = null;
    app.canvas.render_info = false;
    const node = LiteGraph.createNode(type);
    app.graph.add(node);
    node.badges = [];
    node.setSize([Math.max(node.size[0], 370), node.size[1]]);
    node.pos = [400 / scale, 200 / scale];
    Object.assign(app.canvas.ds, { scale, offset: [0, 0] });
    app.canvas.setDirty(true, true);
    await new Promise((done) => setTimeout(done, 500));
    const canvas = app.canvas.canvas.getBoundingClientRect();
    const title = LiteGraph.NODE_TITLE_HEIGHT;
    return [canvas.x + node.pos[0] * scale, canvas.y + (node.pos[1] - title) * scale,
        node.size[0] * scale, (node.size[1] + title) * scale];
}"""


GRAPH = "Ideogram 4 INT8"
GRAPH_SCALE = 0.62
SHOW_GROUPS = """async (scale) => {
    app.canvas.background_image = null;
    app.canvas.render_info = false;
    const boxes = app.graph.groups.map((group) => group._bounding);
    const [left, top] = [0, 1].map((axis) => Math.min(...boxes.map((box) => box[axis])));
    const [right, bottom] = [0, 1].map((axis) => Math.max(...boxes.map((box) => box[axis] + box[axis + 2])));
    Object.assign(app.canvas.ds, { scale, offset: [130 / scale - left, 130 / scale - top] });
    app.canvas.setDirty(true, true);
    await new Promise((done) => setTimeout(done, 1000));
    const canvas = app.canvas.canvas.getBoundingClientRect();
    return [canvas.x + 130, canvas.y + 130, (right - left) * scale, (bottom - top) * scale];
}"""


def draw(page: Page, place: tuple[float, ...], path: Path) -> None:
    """Keep a part of the page (x, y, width, height) and a margin around it."""
    x, y, width, height = place
    clip = {"x": x - MARGIN, "y": y - MARGIN, "width": width + 2 * MARGIN, "height": height + 2 * MARGIN}
    seen = Image.open(io.BytesIO(page.screenshot(clip=clip)))
    save_small_png(seen, path)
    say(f"{path.name}: {seen.width} x {seen.height}, {path.stat().st_size / 1000:.1f} kB")


def main() -> None:
    if not os.environ.get("COMFYUI_PATH"):
        raise PrepareError("COMFYUI_PATH is not set: name a ComfyUI")
    environment = Environment(python=Path(sys.executable), comfyui=Path(os.environ["COMFYUI_PATH"]).resolve())
    with tempfile.TemporaryDirectory(prefix="int8-dit-nodes-") as folder, serve(environment, Path(folder)) as server:
        for kind, name in SHOWN_FILES.items():
            (server.base / "models" / kind).mkdir(parents=True, exist_ok=True)
            (server.base / "models" / kind / name).touch()
        (server.base / "models" / "diffusion_models" / "glyph_dit.safetensors").unlink()
        nodes = own_nodes(json.loads(server.get("/object_info")))
        write_english(nodes)
        PICTURES.mkdir(exist_ok=True)
        with chromium() as browser, open_frontend(browser, server.url) as page:
            for node in nodes:
                draw(page, page.evaluate(PLACE_NODE, [node, SCALE]), PICTURES / f"{node}.png")
        (path,) = (path for path in TEMPLATES if path.stem == GRAPH)
        with (
            stand_ins(server, [read(path)]),
            chromium() as browser,
            open_frontend(browser, server.url, viewport={"width": 1900, "height": 900}) as page,
        ):
            load(page, read(path))
            draw(page, page.evaluate(SHOW_GROUPS, GRAPH_SCALE), PICTURES.parent / "graph.png")


if __name__ == "__main__":
    run_script(main, ServerError, NoBrowser)
