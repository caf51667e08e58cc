"""What nodes show of their last run, in the node itself."""

import json
import re
from pathlib import Path

from support import workflows
from support.frontend import BADGE, DETAILS, add_nodes, load, open_details, reload, run, saved, settle
from support.node_results import node_results, show_results

RESULT, OLD, HEADLINE = ".int8-result", ".int8-result-old", ".int8-result .int8-headline"
SMALL_TOKENS = 16
SIZE = "() => [...app.graph.nodes[0].size]"
TABLE = {"title": "A machine", "columns": ["linear", "ms"], "rows": [["qkv", "1.0"]], "notes": ["a note"]}


def add_loader(page):
    """Load INT8 DiT in a new workflow, and a node that makes it run."""
    widgets = {"model_name": workflows.GLYPH_MODEL, "kernel": "fused int8"}
    add_nodes(page, {"loader": ("LoadINT8DiT", widgets), "text": ("PreviewAny", {})}, [("loader", 1, "text", "source")])


def add_benchmark(page):
    nodes = {
        "loader": ("UNETLoader", {"unet_name": workflows.GLYPH_MODEL}),
        "benchmark": ("INT8KernelBenchmark", {"tokens": SMALL_TOKENS}),
    }
    add_nodes(page, nodes, [("loader", 0, "benchmark", "model")])


def end_benchmark(page, result):
    """What the page gets from the server when the benchmark of the graph has run; then its details are opened."""
    page.evaluate(
        """result => {
            const node = String(app.graph.nodes.find((node) => node.type === "INT8KernelBenchmark").id);
            const detail = { node, display_node: node, output: { int8_benchmark: [result] }, prompt_id: "" };
            app.api.dispatchEvent(new CustomEvent("executed", { detail }));
        }""",
        result,
    )
    page.wait_for_selector(HEADLINE)
    open_details(page)


def drawn_tables(page):
    """The details of a benchmark as the user reads them; the title of the first is the headline on the node."""
    return page.evaluate(
        """() => {
            const texts = (root, selector) => [...root.querySelectorAll(selector)].map((e) => e.textContent);
            const headline = document.querySelector(".int8-result .int8-headline").textContent;
            return [...document.querySelectorAll(".int8-details section")].map((section) => ({
                title: section.querySelector("h4")?.textContent ?? headline,
                columns: texts(section, "th"),
                rows: [...section.querySelectorAll("tbody tr")].map((row) => texts(row, "td")),
                notes: texts(section, "p"),
            }));
        }"""
    )


def shown(outputs):
    return [badge for output in outputs.values() for badge in output.get("int8_dit_badges", [])]


def sizes(page):
    """How much room each result has on the page, and how much it takes."""
    settle(page)  # a node grows in the frames after the result
    return page.evaluate(
        """() => [...document.querySelectorAll(".int8-result")].map(
            ({ clientWidth, scrollWidth, clientHeight, scrollHeight }) =>
                ({ clientWidth, scrollWidth, clientHeight, scrollHeight }))"""
    )


def test_badges_show_in_both_renderers(page, server, renderer, tmp_path):
    file = {"unet_name": workflows.GLYPH_MODEL}
    nodes = {
        "file": ("UNETLoader", file),
        "quantize": ("QuantizeToINT8SmoothQuant", {"kernel": "fused int8"}),
        "save": ("SaveINT8DiT", {"filename_prefix": f"badges_{renderer}"}),
        "load": ("LoadINT8DiT", {"model_name": workflows.GLYPH_MODEL}),
        "quantized": ("LoadINT8DiT", {"model_name": workflows.GLYPH_MODEL, "kernel": "fused int8"}),
        "apply": ("ApplyFusedINT8Kernel", {}),
        "text": ("PreviewAny", {}),
        "other text": ("PreviewAny", {}),
    }
    links = [
        ("file", 0, "quantize", "model"),
        ("quantize", 0, "save", "model"),
        ("load", 1, "text", "source"),
        ("quantized", 0, "apply", "model"),
        ("apply", 1, "other text", "source"),
    ]
    add_nodes(page, nodes, links)
    page.evaluate("app.canvas.ds.scale = 0.5; app.canvas.setDirty(true, true)")  # all of them in view
    assert page.locator(RESULT).count() == 0  # nothing is shown before there is a result
    badges = shown(run(page, server))
    page.wait_for_function(
        "([badge, count]) => document.querySelectorAll(badge).length === count", arg=[BADGE, len(badges)]
    )
    page.screenshot(path=tmp_path / "badges.png")

    drawn = page.evaluate(
        """badge => [...document.querySelectorAll(badge)].map(element =>
            [element.dataset.severity, element.textContent, element.title])""",
        BADGE,
    )
    assert sorted(drawn) == sorted([badge["severity"], badge["text"], badge["detail"]] for badge in badges)
    texts = [text for _, text, _ in drawn]
    assert {"fp32: no GPU", "INT8 without a GPU: 21 of 34", "uncalibrated: nothing is smoothed"} <= set(texts)
    assert any(text.startswith(f"saved badges_{renderer}_00001_.safetensors, ") for text in texts)
    for badge in page.locator(BADGE).all():
        assert badge.is_visible()
    for size in sizes(page):
        assert size["scrollWidth"] <= size["clientWidth"]
        assert 0 < size["scrollHeight"] <= size["clientHeight"]


def test_a_cached_node_shows_its_line_again(page, server):
    """Also on a page that is opened after the MODEL was loaded, in a workflow that it never ran."""
    for _ in range(2):
        add_loader(page)
        (badge,) = shown(run(page, server))
        page.wait_for_selector(BADGE)
        open_details(page)
        assert page.locator(f"{DETAILS} section p").all_text_contents() == [badge["detail"]]
        assert badge["detail"].startswith("21 of 34 linears INT8") and page.locator(OLD).count() == 0
        reload(page)


def test_the_last_result_comes_back_with_the_page(page, server, new_client, renderer):
    add_loader(page)
    (badge,) = shown(run(page, server))
    page.wait_for_selector(BADGE)
    workflow = saved(page)
    assert badge["text"] not in json.dumps(workflow)  # who gets the workflow has another machine

    reload(page)
    load(page, workflow)
    page.wait_for_selector(f"{OLD} {BADGE}")
    assert page.locator(OLD).get_attribute("title").startswith("Last run in this browser: ")
    assert page.locator(BADGE).all_text_contents() == [badge["text"]]
    open_details(page)
    assert page.locator(f"{DETAILS} section p").all_text_contents() == [badge["detail"]]

    other = new_client()
    load(other, workflow)
    settle(other)
    assert other.locator(RESULT).count() == 0

    run(page, server)
    page.wait_for_function("([old]) => !document.querySelector(old)", arg=[OLD])
    assert page.locator(RESULT).get_attribute("title") == ""


def test_another_node_has_not_what_one_showed(page, server):
    add_benchmark(page)
    end_benchmark(page, TABLE)
    workflow = saved(page)
    for change in ({"id": "11111111-2222-3333-4444-555555555555"}, {}):
        changed = workflow | change
        if not change:
            changed["nodes"] = [node | {"id": node["id"] + 10} for node in workflow["nodes"]]
            changed["links"] = []
        load(page, changed)
        settle(page)
        assert page.locator(RESULT).count() == 0
    load(page, workflow)
    page.wait_for_selector(OLD)


def test_a_benchmark_is_drawn(page, server, tmp_path):
    add_benchmark(page)
    (result,) = [output["int8_benchmark"] for output in run(page, server).values() if "int8_benchmark" in output]
    page.wait_for_selector(HEADLINE)
    open_details(page)
    for drawn, expected in zip(drawn_tables(page), result, strict=True):
        assert drawn["title"] == expected["title"]
        assert drawn["columns"] == expected["columns"] and drawn["rows"] == expected["rows"]
        assert drawn["notes"] == [*expected.get("summary", []), *expected["notes"]]
    (size,) = sizes(page)
    page.screenshot(path=tmp_path / "benchmark.png")
    assert size["scrollWidth"] <= size["clientWidth"] and size["scrollHeight"] <= size["clientHeight"]


BARS = [
    {"name": "fused int8", "ratio": 0.36, "ours": True},
    {"name": "other", "ratio": 0.7, "ours": False},
    {"name": "bf16", "ratio": 1.0, "ours": False},
]


def test_a_benchmark_says_what_matters_and_offers_its_json(page, server, renderer):
    """The node has this pack's bar and that of bf16, the details have all; of what is missing there is nothing."""
    add_benchmark(page)
    end_benchmark(page, TABLE)
    assert drawn_tables(page) == [TABLE] and page.locator(f"{DETAILS} a").count() == 0
    (server.base / "output" / "benchmarks").mkdir(exist_ok=True)
    (server.base / "output" / "benchmarks" / "a b.json").write_text('{"measured": true}')
    download = {"filename": "a b.json", "subfolder": "benchmarks", "type": "output"}
    bars = """root => [...document.querySelectorAll(`${root} .int8-bars`)].map((bars) =>
        [...bars.querySelectorAll("span")].map((part) => part.textContent))"""
    for valid in (True, False):
        summary = f"{valid} <b>1.5 x</b>"
        end_benchmark(page, TABLE | {"bars": BARS, "summary": [summary], "valid": valid, "download": download})
        assert page.locator(f"{DETAILS} .int8-summary").all_text_contents() == [summary]
        assert page.locator(BADGE).all_text_contents() == ([] if valid else ["not a valid measurement"])
    assert page.locator(HEADLINE).all_text_contents() == [TABLE["title"]]
    assert page.evaluate(bars, RESULT) == [["fused int8", "0.36", "bf16", "1.00"]]
    assert page.evaluate(bars, DETAILS) == [["fused int8", "0.36", "other", "0.70", "bf16", "1.00"]]
    with page.expect_download() as downloaded:
        page.click(f"{DETAILS} a")
    assert json.loads(Path(downloaded.value.path()).read_text()) == {"measured": True}
    page.locator(f"{DETAILS} [aria-label=Close]").click()
    assert page.locator(DETAILS).count() == 0


COPY = ".int8-result .int8-copy"


def test_a_button_copies_the_json(page, server, renderer, tmp_path):
    """Also where a page of another machine, without https, has no navigator.clipboard; a paste reads it.

    No text names a path or who runs ComfyUI; a result of an earlier version, which might, has no button.
    """
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    add_benchmark(page)
    end_benchmark(page, TABLE)
    assert page.locator(COPY).count() == 0
    page.locator(f"{DETAILS} [aria-label=Close]").click()
    (result,) = [output["int8_benchmark"] for output in run(page, server).values() if "int8_benchmark" in output]
    download = result[0]["download"]["filename"]
    text = (server.base / "output" / download).read_text()
    assert json.loads(text)["shapes"] and not re.search(r"[/\\]\w+[/\\]", text)
    button = page.locator(COPY)
    button.wait_for()
    page.screenshot(path=tmp_path / f"copy_{renderer}.png")
    field = page.locator("#copied")
    page.evaluate("document.body.append(Object.assign(document.createElement('textarea'), { id: 'copied' }))")
    forbid = "Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true })"
    for prepare in ("navigator.clipboard.writeText('something else')", forbid):
        page.evaluate(prepare)
        assert button.text_content() == "Copy JSON"
        button.click()
        page.wait_for_function("selector => document.querySelector(selector).textContent === 'Copied'", arg=COPY)
        field.fill("")
        field.focus()
        page.keyboard.press("Control+v")
        assert field.input_value() == text
        page.wait_for_function("selector => document.querySelector(selector).textContent !== 'Copied'", arg=COPY)
    page.evaluate("document.execCommand = () => false")
    button.click()
    page.wait_for_function("selector => document.querySelector(selector).textContent.startsWith('Not ')", arg=COPY)


def test_a_run_lets_a_node_keep_its_size(page, server, renderer):
    """Each of them as it is new: what its result needs it keeps free."""
    results = node_results(server)
    shown = [node for node in results if any(key.startswith("int8_") for key in results[node])]
    assert len(shown) == 7
    grown = {}
    for node in shown:
        add_nodes(page, {node: (node, {})}, [])
        settle(page)
        before = page.evaluate(SIZE)
        show_results(page, results)
        page.wait_for_selector(RESULT)
        settle(page)
        if (after := page.evaluate(SIZE)) != before:
            grown[node] = (before, after)
    assert not grown


def test_two_images_lie_over_each_other_with_a_slider(page, server):
    size = {"width": 96, "height": 64}
    nodes = {
        "one": ("EmptyImage", size | {"color": 0x336699}),
        "other": ("EmptyImage", size | {"color": 0x346799}),
        "compare": ("CompareImagesINT8DiT", {}),
    }
    add_nodes(page, nodes, [("one", 0, "compare", "reference"), ("other", 0, "compare", "image")])
    run(page, server)
    page.wait_for_selector(HEADLINE)
    open_details(page)
    page.wait_for_function(
        "() => [...document.querySelectorAll('.int8-pair img')].every((image) => image.naturalWidth === 96)"
    )
    first, second = (image.bounding_box() for image in page.locator(".int8-pair img").all())
    assert first == second and page.locator(".int8-details section").first.locator("img").count() == 2
    slider = page.locator(".int8-details input[type=range]")
    shown = "() => document.querySelectorAll('.int8-pair img')[1].style.clipPath"
    slider.focus()
    for key, left in (("Home", 0), ("ArrowRight", 1), ("End", 100)):
        page.keyboard.press(key)
        assert page.evaluate(shown).endswith(f" {left}%)") or (left == 0 and page.evaluate(shown) == "inset(0px)")
