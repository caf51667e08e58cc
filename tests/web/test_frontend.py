"""The pack in the real frontend: a real server, a real browser, the workflows and pages that users meet."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support.frontend import BADGE, WARNING, load, run, saved, template
from support.server import PROJECT, ComfyServer, ExecutionFailed

if TYPE_CHECKING:
    from playwright.sync_api import Page

EXAMPLES = sorted(path.stem for path in (PROJECT / "example_workflows").glob("*.json"))


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_workflow_opens_whole(page: Page, server: ComfyServer, name: str) -> None:
    assert name in json.loads(server.get("/workflow_templates"))["int8_dit"]
    workflow = template(server, name)
    load(page, workflow)

    nodes = page.evaluate(
        """() => app.graph.nodes.map((node) => ({
            type: node.type,
            registered: node.type in LiteGraph.registered_node_types,
            errors: !!node.has_errors,
            combos: (node.widgets ?? []).filter((widget) => widget.type === "combo")
                .map(({ name, value, options }) => ({ name, value, options: [...options.values] })),
        }))"""
    )
    for node in nodes:
        assert node["registered"] and not node["errors"], node
        for combo in node["combos"]:
            assert combo["value"] in combo["options"], (node["type"], combo)
    assert page.locator("[role=dialog]").count() == 0

    # What the frontend would save is what was opened. A link to an input that is gone would be missing from it, and a
    # widget that a node gained or lost would have shifted the values of the others.
    opened = saved(page)
    for graph in (workflow, opened):
        graph["nodes"] = {node["id"]: (node["type"], node.get("widgets_values") or []) for node in graph["nodes"]}
        graph["links"].sort()
    assert opened["nodes"] == workflow["nodes"]
    assert opened["links"] == workflow["links"]


def test_glyph_workflow_runs_and_warns(page: Page, server: ComfyServer, tmp_path: Path) -> None:
    load(page, template(server, "int8_glyphs"))
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


@pytest.mark.parametrize("name", ("ideogram4_int8", "ideogram4_calibrate"))
def test_ideogram_workflow_is_accepted(page: Page, server: ComfyServer, name: str) -> None:
    load(page, template(server, name))
    # Past validation, it can only fail at reading the empty files.
    with pytest.raises(ExecutionFailed) as failure:
        run(page, server)
    assert failure.value.node_type in {"LoadINT8DiT", "UNETLoader", "CLIPLoader", "VAELoader"}




LOADER, QUANTIZER = "INT8 DiT Loader", "Quantize to INT8 (SmoothQuant, ConvRot)"


@pytest.mark.parametrize(
    "words, node, rank",
    (
        ("int8", LOADER, 1),
        ("w8a8", LOADER, 3),
        ("low vram", LOADER, 3),
        ("unet loader", LOADER, 3),
        ("load diffusion model", LOADER, 3),
        ("load int8 dit", LOADER, 1),
        ("convrot", QUANTIZER, 3),
        ("quantize", QUANTIZER, 3),
        ("smoothquant", QUANTIZER, 3),
        ("convert model", QUANTIZER, 3),
        ("benchmark", "Kernel Benchmark", 3),
    ),
)
def test_node_search_finds_it_among_the_first(page: Page, words: str, node: str, rank: int) -> None:
    page.evaluate("app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
    page.locator("input:focus").fill(words)
    page.wait_for_function(  # raises otherwise
        """([node, rank]) => [...document.querySelectorAll("[role=option]")].slice(0, rank).some(
            option => option.innerText.startsWith(node))""",
        arg=[node, rank],
        timeout=15_000,
    )
