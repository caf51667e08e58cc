"""Draw the thumbnails of the templates anew: a headline above the template as it opens, after a run where one needs no
model.

    COMFYUI_PATH=~/ComfyUI python tests/draw_thumbnails.py

Run it after a template has changed, with a Python that has ComfyUI's requirements, Playwright and Pillow.
"""

from __future__ import annotations

import base64
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from PIL import Image

from support import workflows_saved
from support.browser import NoBrowser, chromium
from support.environment import given, run_script, say
from support.frontend import load, open_frontend, run, settle
from support.server import ServerError, serve
from support.workflows_saved import TEMPLATES, read

if TYPE_CHECKING:
    from playwright.sync_api import Page

SIDE = 512
# What each is for, in words that can be read at half the size; whether it runs with nothing downloaded.
HEADLINES = {
    "Try INT8 without a download": ("First INT8 image: now", "no download, any machine", True),
    "INT8 kernel benchmark": ("What to load here?", "and is INT8 faster: one click", False),
    "INT8 on a card with 8 GB": ("INT8 on 8 GB", "GGUF, as stored or INT8", False),
    "INT8 model with a LoRA": ("INT8 + LoRA", "Z-Image Turbo", False),
    "INT8 and EasyCache": ("INT8 and EasyCache", "the same seed, fewer steps", False),
    "Compare bf16 and INT8": ("bf16 or INT8?", "same seed, side by side", False),
    "Quantize your own model to INT8": ("Make INT8 files", "with three prompts of yours", False),
    "Quantize around your KSampler": ("Quantize any graph", "record your own KSampler", False),
    "Ideogram 4 INT8": ("Ideogram 4 in INT8", "ComfyUI's files, fused kernel", False),
    "Ideogram 4 calibrate and quantize": ("Ideogram 4: own INT8", "calibrate, quantize, save", False),
}
CARD = """<body style="margin:0;width:512px;height:512px;overflow:hidden;
    background:linear-gradient(160deg,#1d3a66,#0d1017 60%);font-family:Inter,'DejaVu Sans',sans-serif;color:#fff">
<div style="padding:30px 30px 0;font-size:52px;font-weight:800;line-height:1.08;letter-spacing:-1px">{headline}</div>
<div style="padding:12px 30px 0;font-size:27px;color:#9cc4ff">{line}</div>
<img src="data:image/png;base64,{picture}" style="position:absolute;left:30px;bottom:30px;width:452px;height:{height}px;
    object-fit:cover;object-position:{place};border-radius:12px;border:2px solid #3f6fb5">
</body>"""
# The graph without its note, and without what the frontend lays over it.
SHOW_GRAPH = """async () => {
    app.canvas.background_image = null;
    app.canvas.render_info = false;
    const nodes = app.graph.nodes.filter((node) => node.type !== "MarkdownNote");
    const low = [0, 1].map((i) => Math.min(...nodes.map(({ pos }) => pos[i] - (i ? 50 : 20))));
    const high = [0, 1].map((i) => Math.max(...nodes.map(({ pos, size }) => pos[i] + size[i] + 20)));
    Object.assign(app.canvas.ds, { scale: 1, offset: [60 - low[0], 100 - low[1]] });
    for (const node of app.graph.nodes.filter((node) => node.type === "MarkdownNote")) app.graph.remove(node);
    app.canvas.setDirty(true, true);
    const canvas = app.canvas.canvas.getBoundingClientRect();
    return [canvas.x + 60, canvas.y + 100, high[0] - low[0], high[1] - low[1]];
}"""


def card(page: Page, picture: bytes, headline: str, line: str) -> Image.Image:
    """The thumbnail, drawn by the browser: it has the fonts."""
    height = 290 if len(headline) > 17 else 345
    page.set_viewport_size({"width": SIDE, "height": SIDE})
    html = CARD.format(
        headline=headline, line=line, height=height, place="left top", picture=base64.b64encode(picture).decode()
    )
    page.set_content(html)
    return Image.open(io.BytesIO(page.screenshot())).convert("RGB")


def main() -> None:
    with (
        tempfile.TemporaryDirectory(prefix="int8-dit-thumbnails-") as folder,
        serve(given(), Path(folder)) as server,
        workflows_saved.stand_ins(server, map(read, TEMPLATES)),
        chromium() as browser,
        open_frontend(browser, server.url, viewport={"width": 2200, "height": 1300}) as page,
    ):
        for path in TEMPLATES:
            headline, line, runs = HEADLINES[path.stem]
            workflow = read(path)
            del workflow["extra"]["linearMode"]  # it opens as an app, whose picture says nothing
            load(page, workflow)
            settle(page)
            if runs:
                run(page, server)
                page.wait_for_timeout(2000)  # for the pictures, and for the frontend's message to go
            x, y, width, height = page.evaluate(SHOW_GRAPH)
            settle(page)
            picture = page.screenshot(clip={"x": x, "y": y, "width": width, "height": height})
            drawer = browser.new_page()
            thumbnail = path.with_suffix(".jpg")
            card(drawer, picture, headline, line).save(thumbnail, quality=75, optimize=True)
            drawer.close()
            say(f"{thumbnail.name}: {thumbnail.stat().st_size / 1000:.1f} kB")


if __name__ == "__main__":
    run_script(main, ServerError, NoBrowser)
