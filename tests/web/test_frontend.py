"""The pack in the real frontend: a real server, a real browser, the workflows and pages that users meet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.frontend import BADGE, WARNING, load, run, template
from support.server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Page


def test_glyph_workflow_runs_and_warns(page: Page, server: ComfyServer, tmp_path: Path) -> None:
    load(page, template(server, "int8_glyphs", "glyph_nodes"))
    outputs = run(page, server)
    page.wait_for_selector(".int8-result td")
    page.screenshot(path=tmp_path / "int8_glyphs.png")

    kinds = {kind for output in outputs.values() for kind in output}
    assert {"images", "saved", "int8_benchmark", "int8_dit_badges"} <= kinds
    assert "calibrated" in page.locator(BADGE).all_text_contents()
    # The workflow leaves the kernel to `auto`, which has nothing to choose on this machine, and says so once.
    text = page.wait_for_selector(WARNING).text_content()
    assert "bf16" in text and page.locator(WARNING).count() == 1
    (node,) = re.findall(r"\(#(\d+)\)", text)
    title = page.evaluate("id => app.graph.getNodeById(id).title", int(node))
    assert title != node and text.count(f"{title} (#{node})") == 1


LOADER, QUANTIZER = "INT8 DiT Loader", "Quantize to INT8 (SmoothQuant, ConvRot)"


SEARCHES = {
    "int8": (LOADER, 1),
    "w8a8": (LOADER, 3),
    "low vram": (LOADER, 3),
    "unet loader": (LOADER, 3),
    "load diffusion model": (LOADER, 3),
    "load int8 dit": (LOADER, 1),
    "convrot": (QUANTIZER, 3),
    "quantize": (QUANTIZER, 3),
    "smoothquant": (QUANTIZER, 3),
    "convert model": (QUANTIZER, 3),
    "benchmark": ("Kernel Benchmark", 3),
}


def test_node_search_finds_it_among_the_first(page: Page, subtests: pytest.Subtests) -> None:
    page.evaluate("app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
    for words, (node, rank) in SEARCHES.items():
        with subtests.test(words):
            page.locator("input:focus").fill(words)
            page.wait_for_function(  # raises otherwise
                """([node, rank]) => [...document.querySelectorAll("[role=option]")].slice(0, rank).some(
                    option => option.innerText.startsWith(node))""",
                arg=[node, rank],
            )
