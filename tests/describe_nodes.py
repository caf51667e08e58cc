"""Write anew what is made of the nodes themselves: the pictures of their help pages, and locales/en/nodeDefs.json.

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

from PIL import Image

from support.browser import NoBrowser, chromium
from support.environment import Environment, PrepareError, run_script, say
from support.frontend import open_frontend
from support.node_texts import own_nodes, write_english
from support.server import PROJECT, ServerError, serve

PICTURES = PROJECT / "web" / "docs" / "pictures"
SHOWN_FILES = {"diffusion_models": "ideogram4_fp8_scaled.safetensors", "int8_calibrations": "calibration.safetensors"}
SCALE = 1.5
MARGIN = 12
COLORS = 48

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
                x, y, width, height = page.evaluate(PLACE_NODE, [node, SCALE])
                clip = {"x": x - MARGIN, "y": y - MARGIN, "width": width + 2 * MARGIN, "height": height + 2 * MARGIN}
                seen = Image.open(io.BytesIO(page.screenshot(clip=clip))).convert("RGB")
                path = PICTURES / f"{node}.png"
                seen.quantize(COLORS, dither=Image.Dither.NONE).save(path, optimize=True)
                say(f"{path.name}: {seen.width} x {seen.height}, {path.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    run_script(main, ServerError, NoBrowser)
