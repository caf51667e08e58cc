"""Screenshots of what a user sees, to be looked at one by one: each template as it opens, as a graph and with results,
each node fresh and with its result, runs that fail. In both renderers, in the dark and the light palette, in two sizes.

    COMFYUI_PATH=~/ComfyUI python tests/draw_screens.py FOLDER

README.md in the folder says what each shows, and at which zoom. CI keeps the folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from support import workflows_saved
from support.browser import NoBrowser, chromium
from support.environment import given, run_script, say
from support.failing_graphs import BROKEN, FAILING
from support.frontend import add_nodes, load, open_frontend, posting, set_setting, settle
from support.node_results import node_results, show_results
from support.node_texts import own_nodes
from support.server import ComfyServer, ServerError, serve
from support.workflows_saved import TEMPLATES, read

if TYPE_CHECKING:
    from playwright.sync_api import Page

RENDERERS = {"classic": False, "Vue": True}
PALETTES = ("dark", "light")
SIZES = ((1600, 1000), (1280, 720))
# A template is shown as the frontend fits it to the window when it opens one.
STATE = """() => ({
    zoom: app.canvas.ds.scale,
    words: app.canvas.low_quality ? "no" : "yes",
    width: Math.round(Math.max(...app.graph.nodes.map(({ pos, size }) => pos[0] + size[0]))),
    height: Math.round(Math.max(...app.graph.nodes.map(({ pos, size }) => pos[1] + size[1]))),
})"""


def run_and_wait(page: Page, server: ComfyServer) -> None:
    """Press Run, and let the prompt be refused or end, however it does."""
    with posting(page) as posted:
        page.evaluate("app.queuePrompt(0)")
    answer = posted.value.json()
    if "prompt_id" in answer:
        try:
            server.wait(answer["prompt_id"])
        except RuntimeError as error:
            say(f"  {str(error).splitlines()[0]}")


def screens(page: Page, server: ComfyServer, results: dict[str, dict], nodes: list[str]) -> Iterator[str]:
    """Bring the page into one state after the other; what it then shows."""
    for path in TEMPLATES:
        workflow = read(path)
        load(page, workflow)
        yield f"{path.stem}, as it opens"
        load(page, workflow | {"extra": workflow["extra"] | {"linearMode": False}})
        yield f"{path.stem}, as a graph"
        show_results(page, results)
        yield f"{path.stem}, with results"
    for node in nodes:
        add_nodes(page, {node: (node, {})}, [])
        yield f"{node}, fresh"
        if node in results:
            show_results(page, results)
            yield f"{node}, with its result"
    for what, (graph, links, change, _) in FAILING.items():
        add_nodes(page, graph, links)
        page.evaluate(*change)
        run_and_wait(page, server)
        yield f"failing: {what}"
        page.keyboard.press("Escape")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the pictures and the table go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| picture | shows | renderer | palette | window | zoom | words are drawn | graph |", "|" + " --- |" * 8]
    with (
        tempfile.TemporaryDirectory(prefix="int8-dit-screens-") as base,
        serve(given(), Path(base)) as server,
        workflows_saved.stand_ins(server, map(read, TEMPLATES)),
        chromium() as browser,
    ):
        results = node_results(server)
        (server.base / "models" / "diffusion_models" / BROKEN).write_bytes(b"no model")
        nodes = sorted(own_nodes(json.loads(server.get("/object_info"))))
        for (renderer, vue), palette, (width, height) in product(RENDERERS.items(), PALETTES, SIZES):
            with open_frontend(browser, server.url, viewport={"width": width, "height": height}) as page:
                set_setting(page, "Comfy.VueNodes.Enabled", vue)
                set_setting(page, "Comfy.ColorPalette", palette)
                page.wait_for_function("vue => LiteGraph.vueNodesMode === vue", arg=vue)
                for number, what in enumerate(screens(page, server, results, nodes)):
                    settle(page)
                    page.wait_for_timeout(700)  # for pictures, and for what fades in
                    name = f"{renderer}_{palette}_{width}_{number:03}.jpg"
                    page.screenshot(path=folder / name, type="jpeg", quality=75)
                    state = page.evaluate(STATE)
                    seen = (f"{state['zoom']:.0%}", state["words"], f"{state['width']} x {state['height']}")
                    cells = (f"[{name}]({name})", what, renderer, palette, f"{width} x {height}", *seen)
                    lines.append("| " + " | ".join(map(str, cells)) + " |")
            say(f"{renderer}, {palette}, {width} x {height}")
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_script(main, ServerError, NoBrowser)
