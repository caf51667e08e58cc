"""The pack in the real frontend: a real server, a real browser, the workflows and pages that users meet."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from support import workflows
from support.server import PROJECT, ComfyServer, ExecutionFailed
from support.workflows import Prompt

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EXAMPLES = sorted(path.stem for path in (PROJECT / "example_workflows").glob("*.json"))
NODES = (
    "LoadINT8DiT",
    "QuantizeToINT8SmoothQuant",
    "SaveINT8DiT",
    "RecordINT8Calibration",
    "CollectINT8Calibration",
    "SaveINT8Calibration",
    "LoadINT8Calibration",
    "MergeINT8Calibrations",
    "INT8KernelBenchmark",
)
SAVED_MODEL = "INT8_00001_.safetensors"  # what the first run of int8_glyphs.json saves and then loads
IDEOGRAM_FILES = (
    "diffusion_models/ideogram4_fp8_scaled.safetensors",
    "diffusion_models/ideogram4_unconditional_fp8_scaled.safetensors",
    "diffusion_models/ideogram4_int8_convrot.safetensors",
    "diffusion_models/ideogram4_unconditional_int8_convrot.safetensors",
    "text_encoders/qwen3vl_8b_fp8_scaled.safetensors",
    "vae/flux2-vae.safetensors",
)
TIMEOUT_MS = 120_000
SMALL_TOKENS = 16


def _require(what: object, message: str) -> None:
    """Skip for a developer who lacks a tool; fail in CI, where a skip would hide that nothing was tested."""
    if not what:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    _require(chromium, "chromium is not installed (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    _require(sync_playwright, "the playwright package is not installed (tests/run_tests.py installs it)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield running
        running.close()


@pytest.fixture(scope="module")
def model_files(server: ComfyServer) -> None:
    """The files that the example workflows name: a real glyph model, and empty stand-ins for the big ones."""
    for name in IDEOGRAM_FILES:
        path = server.base / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if not (server.base / "output" / "diffusion_models" / SAVED_MODEL).exists():
        prompt = Prompt()
        workflows.save_model(
            prompt, workflows.calibrated_model(prompt, workflows.stock_model(prompt), text="A", steps=2)
        )
        server.queue(prompt)


@pytest.fixture
def page(browser: Browser, server: ComfyServer, model_files: None) -> Iterator[Page]:
    """The frontend, loaded and idle; the test fails if a script raised in it."""
    page = browser.new_page(viewport={"width": 1600, "height": 1000})
    page.set_default_timeout(TIMEOUT_MS)
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(server.url)
    page.wait_for_function("!!(window.app?.extensionManager && window.LiteGraph?.registered_node_types.LoadINT8DiT)")
    page.evaluate("app.graph.clear()")
    yield page
    page.close()
    assert not errors


def _template(server: ComfyServer, name: str) -> dict:
    """An example workflow as the template browser gets it."""
    return json.loads(server.get(f"/api/workflow_templates/int8_dit/{name}.json"))


def _load(page: Page, workflow: dict) -> None:
    page.evaluate("workflow => app.loadGraphData(workflow)", workflow)


def _run(page: Page, server: ComfyServer) -> dict[str, dict]:
    """Press the frontend's Run and wait for the outputs."""
    with page.expect_response(
        lambda response: response.url.endswith("/prompt") and response.request.method == "POST"
    ) as posted:
        page.evaluate("app.queuePrompt(0)")
    answer = posted.value.json()
    assert not answer["node_errors"]
    return server.wait(answer["prompt_id"])


def _drawn_table(page: Page) -> dict:
    """The benchmark table as the user reads it."""
    return page.evaluate(
        """() => {
            const texts = (root, selector) => [...root.querySelectorAll(selector)].map((e) => e.textContent);
            const sections = [...document.querySelectorAll(".int8-result section")];
            return sections.map((section) => ({
                title: section.querySelector("h4").textContent,
                columns: texts(section, "th"),
                rows: [...section.querySelectorAll("tbody tr")].map((row) => texts(row, "td")),
                notes: texts(section, "p"),
            }));
        }"""
    )


@pytest.mark.parametrize("name", EXAMPLES)
def test_example_workflow_opens_whole(page: Page, server: ComfyServer, name: str) -> None:
    assert name in json.loads(server.get("/workflow_templates"))["int8_dit"]
    workflow = _template(server, name)
    _load(page, workflow)

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
    saved = page.evaluate("() => JSON.parse(JSON.stringify(app.graph.serialize()))")
    for graph in (workflow, saved):
        graph["nodes"] = {node["id"]: (node["type"], node.get("widgets_values") or []) for node in graph["nodes"]}
        graph["links"].sort()
    assert saved["nodes"] == workflow["nodes"]
    assert saved["links"] == workflow["links"]


def test_glyph_workflow_runs_and_warns(page: Page, server: ComfyServer, tmp_path: Path) -> None:
    _load(page, _template(server, "int8_glyphs"))
    page.evaluate(  # a toast may be gone when a slow machine has drawn the letters
        "window.said = []; app.api.addEventListener('int8_dit.warning', ({ detail }) => said.push(detail.summary))"
    )
    outputs = _run(page, server)
    page.wait_for_selector(".int8-result td")
    page.screenshot(path=tmp_path / "int8_glyphs.png")

    kinds = {kind for output in outputs.values() for kind in output}
    assert {"images", "saved", "int8_benchmark"} <= kinds
    # The workflow leaves the kernel to `auto`, which has nothing to choose on this machine, and says so once.
    assert page.evaluate("said") == ["INT8 DiT runs in bf16"]


@pytest.mark.parametrize("name", ("ideogram4_int8", "ideogram4_calibrate"))
def test_ideogram_workflow_is_accepted(page: Page, server: ComfyServer, name: str) -> None:
    _load(page, _template(server, name))
    # Past validation, it can only fail at reading the empty files.
    with pytest.raises(ExecutionFailed) as failure:
        _run(page, server)
    assert failure.value.node_type in {"LoadINT8DiT", "UNETLoader", "CLIPLoader", "VAELoader"}


def test_benchmark_table_is_drawn_and_redrawn(page: Page, server: ComfyServer, tmp_path: Path) -> None:
    page.evaluate(
        """([model, tokens]) => {
            const [loader, node] = ["UNETLoader", "INT8KernelBenchmark"].map((type) => LiteGraph.createNode(type));
            const set = (node, name, value) => { node.widgets.find((widget) => widget.name === name).value = value; };
            app.graph.add(loader);
            app.graph.add(node);
            [loader.pos, node.pos] = [[100, 150], [500, 150]];
            set(loader, "unet_name", model);
            set(node, "tokens", tokens);
            loader.connect(0, node, "model");
            Object.assign(app.canvas.ds, { scale: 1, offset: [0, 0] });
        }""",
        [workflows.GLYPH_MODEL, SMALL_TOKENS],
    )
    assert page.locator(".int8-result").count() == 0  # nothing is shown before there is a result

    for tokens in (SMALL_TOKENS, 2 * SMALL_TOKENS):
        page.evaluate(
            """tokens => {
                const node = app.graph.nodes.find((node) => node.type === "INT8KernelBenchmark");
                node.widgets.find((widget) => widget.name === "tokens").value = tokens;
            }""",
            tokens,
        )
        (result,) = [output["int8_benchmark"] for output in _run(page, server).values() if "int8_benchmark" in output]
        page.wait_for_function(
            "title => document.querySelector('.int8-result h4')?.textContent === title", arg=result[0]["title"]
        )
        assert _drawn_table(page) == result
        assert page.locator(".int8-result").count() == 1

    page.wait_for_timeout(500)  # the node grows in the frames after the result
    page.screenshot(path=tmp_path / "benchmark.png")
    sizes = page.evaluate(
        """() => {
            const box = document.querySelector(".int8-result");
            return { inside: box.clientWidth, content: box.scrollWidth, height: box.clientHeight };
        }"""
    )
    assert sizes["content"] <= sizes["inside"] and sizes["height"] > 50

    workflow = page.evaluate("() => JSON.stringify(app.graph.serialize())")
    assert result[0]["title"] not in workflow  # a table that is not measured anew must not come back from a file
    _load(page, json.loads(workflow))
    assert page.locator(".int8-result").count() == 0


def test_a_repeated_warning_is_one_toast(page: Page) -> None:
    warn = """detail => app.api.dispatchEvent(new CustomEvent("int8_dit.warning", { detail }))"""
    for detail in ("first <b>detail</b>", "first <b>detail</b>", "second detail"):
        page.evaluate(warn, {"summary": "Summary", "detail": detail})
    page.wait_for_function("document.querySelectorAll('.p-toast-message').length === 2")
    texts = page.locator(".p-toast-message").all_text_contents()
    assert any("first <b>detail</b>" in text for text in texts) and any("second detail" in text for text in texts)


@pytest.mark.parametrize("node", NODES)
def test_help_page_is_served_and_names_every_input(server: ComfyServer, node: str) -> None:
    help_page = server.get(f"/extensions/int8_dit/docs/{node}.md").decode()
    info = server.object_info(node)
    assert help_page.startswith(f"# {info['display_name']}\n")
    documented = {name for bold in re.findall(r"\*\*([^*]+)\*\*", help_page) for name in bold.split(", ")}
    inputs = {name for group in ("required", "optional") for name in info["input"].get(group, {})}
    assert inputs <= documented


def test_what_runs_where_is_shown_on_the_node(page: Page, server: ComfyServer, tmp_path: Path) -> None:
    """Also on a page that is opened after the MODEL was loaded, when it comes out of the cache."""
    add_nodes = """model => {
        const [loader, text] = ["LoadINT8DiT", "PreviewAny"].map((type) => LiteGraph.createNode(type));
        app.graph.add(loader);
        app.graph.add(text);
        [loader.pos, text.pos] = [[100, 150], [600, 150]];
        loader.widgets.find((widget) => widget.name === "model_name").value = model;
        loader.widgets.find((widget) => widget.name === "kernel").value = "fused int8";
        loader.connect(1, text, 0);
        Object.assign(app.canvas.ds, { scale: 1, offset: [0, 0] });
    }"""
    for opened in ("first", "reloaded"):
        page.evaluate(add_nodes, workflows.GLYPH_MODEL)
        outputs = _run(page, server)
        (shown,) = [output["int8_dit_summary"] for output in outputs.values() if "int8_dit_summary" in output]
        page.wait_for_selector(".int8-result p")
        page.wait_for_timeout(500)  # the node grows in the frames after the result
        page.screenshot(path=tmp_path / f"{opened}.png")
        assert page.locator(".int8-result p").all_text_contents() == shown
        assert shown[0].startswith("21 of 34 linears INT8")
        box = page.evaluate(
            """() => {
                const { clientWidth, scrollWidth, clientHeight, scrollHeight } = document.querySelector(".int8-result");
                return { clientWidth, scrollWidth, clientHeight, scrollHeight };
            }"""
        )
        assert box["scrollWidth"] <= box["clientWidth"] and 0 < box["scrollHeight"] <= box["clientHeight"]
        workflow = page.evaluate("() => JSON.stringify(app.graph.serialize())")
        assert shown[0] not in workflow
        page.reload()
        page.wait_for_function(
            "!!(window.app?.extensionManager && window.LiteGraph?.registered_node_types.LoadINT8DiT)"
        )
        page.evaluate("app.graph.clear()")


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
