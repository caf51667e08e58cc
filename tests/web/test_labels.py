"""Names of widgets, slots and nodes: that each is there, that it fits, and that it is found."""

import pytest

from support.frontend import add_nodes, load, open_frontend, saved, settle
from support.node_texts import read_texts
from support.workflows_saved import BLUEPRINTS, read

CHOICES = {
    "error budget": ("percent", "max error %", 3.0),
    "number of layers": ("layers", "layers", 17),
    "share of all linears": ("percent", "protect %", 8.0),
}


def choose(page, choice):
    page.evaluate(
        """choice => {
            app.graph.nodes[0].widgets.find((widget) => widget.name === "protect").value = choice;
        }""",
        choice,
    )


def nested(page):
    return page.evaluate(
        """() => app.graph.nodes[0].widgets.filter((widget) => widget.name.startsWith("protect."))
            .map(({ name, label, value }) => [name, label, value])"""
    )


def test_a_nested_widget_has_its_own_name(page, renderer):
    add_nodes(page, {"quantize": ("QuantizeToINT8SmoothQuant", {})}, [])
    assert nested(page) == [["protect.percent", "protect %", 8.0]]
    for choice, (name, label, value) in CHOICES.items():
        expected = [[f"protect.{name}", label, value]]
        choose(page, choice)
        assert nested(page) == expected
        load(page, saved(page))
        assert nested(page) == expected
        if renderer == "Vue":
            page.get_by_text(label, exact=True).wait_for()
        prompt = page.evaluate("async () => (await app.graphToPrompt()).output")
        (inputs,) = [node["inputs"] for node in prompt.values()]
        assert inputs["protect"] == choice and inputs[f"protect.{name}"] == value


@pytest.mark.parametrize("tag", ("en-US", "zh-CN", "ja-JP"))
def test_titles_fit_their_nodes(browser, server, tag):
    """As the classic renderer draws them, behind a dot as high as the title; it cuts what is wider."""
    with open_frontend(browser, server.url, locale=tag) as page:
        cut = page.evaluate(
            """types => types.filter((type) => {
                const node = LiteGraph.createNode(type);
                const context = document.createElement("canvas").getContext("2d");
                context.font = `${LiteGraph.NODE_TEXT_SIZE}px ${LiteGraph.NODE_FONT}`;
                return context.measureText(node.title).width > node.size[0] - 1.5 * LiteGraph.NODE_TITLE_HEIGHT;
            })""",
            list(read_texts("zh")),
        )
    assert not cut


def slots(page):
    return page.evaluate(
        """() => app.graph.nodes.find(({ type }) => type === "QuantizeToINT8SmoothQuant").inputs
            .filter(({ name }) => name.startsWith("positive.")).map(({ label }) => label)"""
    )


def test_growing_slots_have_numbers(page, renderer):
    nodes = {"text": ("CLIPTextEncode", {}), "quantize": ("QuantizeToINT8SmoothQuant", {})}
    add_nodes(page, nodes, [("text", 0, "quantize", "positive.positive_0")])
    page.wait_for_function(
        """() => app.graph.nodes.find(({ title }) => title === "quantize").inputs
            .some(({ label }) => label === "positive 2")"""
    )
    if renderer == "Vue":
        page.get_by_text("positive 2", exact=True).wait_for()
    load(page, saved(page))
    assert slots(page) == ["positive 1", "positive 2"]


LINKED = """nodes => nodes.filter(({ type }) => type === "QuantizeToINT8SmoothQuant").map((node) =>
    Object.fromEntries(node.inputs.map(({ name }, slot) => [name, node.getInputNode(slot)?.title])
        .filter(([, origin]) => origin)))"""


def linked(page, nodes="app.graph.nodes"):
    return page.evaluate(f"({LINKED})({nodes})")


def test_a_copy_has_the_links_of_the_original(page, renderer):
    """The frontend links it by the places of the inputs, and slots grow in the middle."""
    sources = {"positive.positive_0": "CLIPTextEncode", "positive.positive_1": "CLIPTextEncode"}
    sources |= {"negative": "CLIPTextEncode", "sampler": "KSamplerSelect", "latent_image": "EmptySD3LatentImage"}
    nodes = {name: (kind, {}) for name, kind in sources.items()}
    quantize = {"quantize": ("QuantizeToINT8SmoothQuant", {"protect": "number of layers"})}
    add_nodes(page, nodes | quantize, [(name, 0, "quantize", name) for name in sources])
    settle(page)
    page.evaluate("app.canvas.selectItems(app.graph.nodes)")
    page.evaluate("app.canvas.copyToClipboard()")
    page.evaluate("app.canvas.pasteFromClipboard()")
    for _ in range(2):
        settle(page)
        assert linked(page) == [{name: name for name in sources}] * 2
        load(page, saved(page))


def test_an_unpacked_blueprint_has_the_links_that_it_had(page):
    (blueprint,) = (path for path in BLUEPRINTS if path.stem.startswith("Quantize"))
    load(page, read(blueprint))
    settle(page)
    before = linked(page, "app.graph.nodes[0].subgraph.nodes")
    assert len([name for name in before[0] if name.startswith("positive.")]) == 3
    page.evaluate("app.graph.unpackSubgraph(app.graph.nodes[0])")
    settle(page)
    assert linked(page) == before


def test_a_slot_keeps_the_name_that_the_user_gave_it(page):
    add_nodes(page, {"quantize": ("QuantizeToINT8SmoothQuant", {})}, [])
    page.evaluate("""app.graph.nodes[0].inputs.find(({ name }) => name === "positive.positive_0").label = 'a cat'""")
    load(page, saved(page))
    assert slots(page) == ["a cat"]


def test_an_empty_list_of_files_says_so(page):
    label = page.evaluate("LiteGraph.createNode('LoadINT8Calibration').widgets[0].options.getOptionLabel(undefined)")
    assert label == "nothing saved yet"


# In the frontend's search

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


def test_node_search_finds_it_among_the_first(page, subtests):
    page.evaluate("app.extensionManager.command.execute('Workspace.SearchBox.Toggle')")
    for words, node in SEARCHES.items():
        with subtests.test(words):
            page.locator("input:focus").fill(words)
            page.wait_for_function(  # raises otherwise
                """([node, rank]) => [...document.querySelectorAll("[role=option]")].slice(0, rank).some(
                    option => option.innerText.startsWith(node))""",
                arg=[node, FIRST_FOUND],
            )
