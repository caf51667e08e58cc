"""The pack's nodes in the frontend's search."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page


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
