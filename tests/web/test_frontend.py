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
    page.wait_for_selector(".int8-result .int8-headline")
    page.screenshot(path=tmp_path / "int8_glyphs.png")

    kinds = {kind for output in outputs.values() for kind in output}
    assert {"images", "saved", "int8_benchmark", "int8_dit_badges"} <= kinds
    assert "calibrated" in page.locator(BADGE).all_text_contents()
    # The workflow leaves the kernel to `auto`, which has nothing to choose on this machine, and says so once.
    text = page.wait_for_selector(WARNING).text_content()
    assert "runs in fp32" in text and page.locator(WARNING).count() == 1
    (node,) = re.findall(r"\(#(\d+)\)", text)
    title = page.evaluate("id => app.graph.getNodeById(id).title", int(node))
    assert title != node and text.count(f"{title} (#{node})") == 1


LOADER, QUANTIZER, BENCHMARK = "Load INT8 DiT", "Quantize to INT8 (SmoothQuant)", "Kernel Benchmark"
FIRST_FOUND = 3


SEARCHES = {  # what users type, and the node that they mean
    "int8": LOADER,
    "load int8": LOADER,
    "load int8 dit": LOADER,
    "w8a8": LOADER,
    "gguf": LOADER,
    "fp8": LOADER,
    "low vram": LOADER,
    "memory": LOADER,
    "faster": LOADER,
    "3090": LOADER,
    "rtx 30": LOADER,
    "unet loader": LOADER,
    "load diffusion model": LOADER,
    "quantize": QUANTIZER,
    "smoothquant": QUANTIZER,
    "convert model": QUANTIZER,
    "benchmark": BENCHMARK,
    "compare": "Compare Images (PSNR, SSIM)",
}


def test_node_search_finds_it_among_the_first(page: Page, subtests: pytest.Subtests) -> None:
    page.evaluate("app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
    for words, node in SEARCHES.items():
        with subtests.test(words):
            page.locator("input:focus").fill(words)
            page.wait_for_function(  # raises otherwise
                """([node, rank]) => [...document.querySelectorAll("[role=option]")].slice(0, rank).some(
                    option => option.innerText.startsWith(node))""",
                arg=[node, FIRST_FOUND],
            )
