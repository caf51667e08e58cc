"""Draw anew what shows the nodes themselves: the pictures of their help pages, README.md's picture of its three steps.

    COMFYUI_PATH=~/ComfyUI python tests/describe_nodes.py

Run it after a node's name, inputs, outputs or tooltips have changed, with a Python that has ComfyUI's requirements,
Playwright and Pillow. Pictures need Chromium.
"""

from __future__ import annotations

import io
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from support.browser import NoBrowser, chromium
from support.environment import given, run_script, say
from support.frontend import open_frontend
from support.node_texts import own_nodes
from support.server import PROJECT, ServerError, serve
from support.small_png import save_small_png

if TYPE_CHECKING:
    from playwright.sync_api import Page

PICTURES = PROJECT / "web" / "docs" / "pictures"
SHOWN_FILES = {"diffusion_models": "ideogram4_fp8_scaled.safetensors", "int8_calibrations": "calibration.safetensors"}
SCALE = 1.5
MARGIN = 12

# In a graph of its own: the frontend keeps the values of widgets by graph, node and name.
PLACE_NODE = """async ([type, scale]) => {
    await app.loadGraphData({ id: crypto.randomUUID(), nodes: [], links: [], version: 0.4 });
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


GRAPH_SCALE = 1.6
# What README.md's steps show. Groups: left, top, width, height. Nodes: type, title, left, top, width, file; without a
# width they are collapsed.
STEPS = {
    "What you generate with": (0, 0, 256, 400),
    "1  Quantize": (270, 0, 284, 590),
    "2  Save": (568, 0, 270, 164),
    "3  Load it from then on": (568, 178, 270, 280),
}
NODES = {
    "model": ("UNETLoader", "Load Diffusion Model", 10, 70, 236, "my_model.safetensors"),
    "positive": ("CLIPTextEncode", "Prompt", 24, 210, 0, None),
    "sampler": ("KSamplerSelect", "Sampler", 24, 260, 0, None),
    "sigmas": ("BasicScheduler", "Scheduler", 24, 310, 0, None),
    "latent_image": ("EmptyLatentImage", "Empty Latent Image", 24, 360, 0, None),
    "quantize": ("QuantizeToINT8SmoothQuant", "Quantize to INT8", 280, 70, 264, None),
    "save": ("SaveINT8DiT", "Save INT8 DiT", 578, 70, 250, None),
    "load": ("LoadINT8DiT", "Load INT8 DiT", 578, 248, 250, "INT8_00001_.safetensors"),
}
PLACE_STEPS = """async ([groups, nodes, scale]) => {
    app.graph.clear();
    app.canvas.background_image = null;
    app.canvas.render_info = false;
    for (const [title, bounds] of Object.entries(groups)) {
        const group = new LiteGraph.LGraphGroup(title);
        group.font_size = 15;
        group.pos = bounds.slice(0, 2);
        group.size = bounds.slice(2);
        app.graph.add(group);
    }
    const made = {};
    for (const [name, [type, title, x, y, width, file]] of Object.entries(nodes)) {
        const node = (made[name] = LiteGraph.createNode(type));
        node.title = title;
        app.graph.add(node);
        node.badges = [];
        node.pos = [x, y];
        if (width) node.setSize([width, node.computeSize()[1]]);
        else node.collapse();
        if (file) node.widgets[0].value = file;
    }
    const into = (name) => made.quantize.inputs.findIndex((input) => input.name.split(".").at(-1).startsWith(name));
    for (const name of ["model", "positive", "sampler", "sigmas", "latent_image"]) {
        made[name].connect(0, made.quantize, into(name));
    }
    made.quantize.connect(0, made.save, 0);
    Object.assign(app.canvas.ds, { scale, offset: [200 / scale, 100 / scale] });
    app.canvas.setDirty(true, true);
    await new Promise((done) => setTimeout(done, 1000));
    const canvas = app.canvas.canvas.getBoundingClientRect();
    const corner = (axis) => Math.max(...Object.values(groups).map((box) => box[axis] + box[axis + 2]));
    return [canvas.x + 200, canvas.y + 100, corner(0) * scale, corner(1) * scale];
}"""


def draw(page: Page, place: tuple[float, ...], path: Path) -> None:
    """Keep a part of the page (x, y, width, height) and a margin around it."""
    x, y, width, height = place
    clip = {"x": x - MARGIN, "y": y - MARGIN, "width": width + 2 * MARGIN, "height": height + 2 * MARGIN}
    seen = Image.open(io.BytesIO(page.screenshot(clip=clip)))
    save_small_png(seen, path)
    say(f"{path.name}: {seen.width} x {seen.height}, {path.stat().st_size / 1000:.1f} kB")


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="int8-dit-nodes-") as folder, serve(given(), Path(folder)) as server:
        for kind, name in SHOWN_FILES.items():
            (server.base / "models" / kind).mkdir(parents=True, exist_ok=True)
            (server.base / "models" / kind / name).touch()
        (server.base / "models" / "diffusion_models" / "glyph_dit.safetensors").unlink()
        nodes = own_nodes(json.loads(server.get("/object_info")))
        PICTURES.mkdir(exist_ok=True)
        with chromium() as browser, open_frontend(browser, server.url) as page:
            for node in nodes:
                draw(page, page.evaluate(PLACE_NODE, [node, SCALE]), PICTURES / f"{node}.png")
        for *_, file in NODES.values():
            if file:
                (server.base / "models" / "diffusion_models" / file).touch()
        with (
            chromium() as browser,
            open_frontend(browser, server.url, viewport={"width": 1900, "height": 1200}) as page,
        ):
            draw(page, page.evaluate(PLACE_STEPS, [STEPS, NODES, GRAPH_SCALE]), PICTURES.parent / "graph.png")


if __name__ == "__main__":
    run_script(main, ServerError, NoBrowser)
