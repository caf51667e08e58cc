"""A right click on a loader: the pack's loader in its place, or its kernel behind it; saved files in the loaders."""

import pytest

from support.frontend import add_nodes, load, run, saved, settle
from support.workflows import GLYPH_MODEL

REPLACE, ADD = "Replace with Load INT8 DiT", "Add Apply Fused INT8 Kernel behind it"
NODES = {
    "load": ("UNETLoader", {"unet_name": GLYPH_MODEL}),
    "sample": ("ModelSamplingSD3", {}),
    "save": ("SaveINT8DiT", {}),
}
LINKS = [("load", 0, "sample", "model"), ("load", 0, "save", "model")]
OUTSIDE = """() => {
    const loader = app.graph.nodes.find((node) => node.type === "UNETLoader");
    const { subgraph, node } = app.graph.convertToSubgraph(new Set([loader]));
    node.title = "loads";
    app.canvas.setGraph(subgraph);
    Object.assign(app.canvas.ds, { scale: 1, offset: [0, 0] });
    for (const inner of subgraph.nodes) inner.pos = [400, 300];
}"""


def choose(page, kind, words):
    """Click with the right button on a node's title, then on an entry."""
    settle(page)  # a graph that was just opened is still moved to where it was looked at last
    page.evaluate(
        """kind => {
            const node = app.canvas.graph.nodes.find(({ type }) => type === kind);
            app.canvas.selectNode(node);
            app.canvas.centerOnNode(node);
        }""",
        kind,
    )
    settle(page)
    x, y = page.evaluate(
        """kind => {
            const node = app.canvas.graph.nodes.find(({ type }) => type === kind);
            const { left, top } = app.canvas.canvas.getBoundingClientRect();
            const [x, y] = app.canvas.ds.convertOffsetToCanvas([node.pos[0] + 60, node.pos[1] - 15]);
            return [left + x, top + y];
        }""",
        kind,
    )
    page.mouse.click(x, y, button="right")
    page.get_by_text(words, exact=True).click()


def prompt(page):
    """What would run: the inputs of each class of nodes, and the class of each id."""
    output = page.evaluate("async () => (await app.graphToPrompt()).output")
    inputs = {node["class_type"]: node["inputs"] for node in output.values()}
    return inputs, {key: node["class_type"] for key, node in output.items()}


def came_from(page, kind):
    """The class of the node that a node's model comes from."""
    inputs, classes = prompt(page)
    return classes[inputs[kind]["model"][0]]


@pytest.mark.parametrize("words, kind", ((REPLACE, "LoadINT8DiT"), (ADD, "ApplyFusedINT8Kernel")))
@pytest.mark.parametrize("place", ("workflow", "subgraph"))
def test_the_pack_gets_between_a_loader_and_what_it_feeds(page, renderer, place, words, kind):
    """In the loader's place, with its file, or behind it, where no node lies on another."""
    add_nodes(page, NODES, LINKS)
    if place == "subgraph":
        page.evaluate(OUTSIDE)
    choose(page, "UNETLoader", words)
    page.wait_for_function("kind => app.canvas.graph.nodes.some(({ type }) => type === kind)", arg=kind)
    assert came_from(page, "SaveINT8DiT") == came_from(page, "ModelSamplingSD3") == kind
    inputs = prompt(page)[0]
    if words == ADD:
        assert came_from(page, kind) == "UNETLoader"
    else:
        assert inputs[kind]["model_name"] == GLYPH_MODEL and "UNETLoader" not in inputs
    assert not page.evaluate(
        """() => {
            const nodes = app.canvas.graph.nodes.map((node) => [node.pos, node.size]);
            return nodes.some(([[x, y], [width, height]], one) => nodes.some(([[left, top], [w, h]], other) =>
                one !== other && x < left + w && left < x + width && y - 30 < top + h && top - 30 < y + height));
        }"""
    )
    page.evaluate("app.canvas.setGraph(app.rootGraph)")
    load(page, saved(page))  # what was linked by hand is what a workflow can hold
    assert came_from(page, "SaveINT8DiT") == came_from(page, "ModelSamplingSD3") == kind


@pytest.mark.parametrize("words, kind", ((REPLACE, "LoadINT8DiT"), (ADD, "ApplyFusedINT8Kernel")))
def test_one_undo_takes_it_back(page, renderer, words, kind):
    add_nodes(page, NODES, LINKS)
    page.evaluate("app.extensionManager.workflow.activeWorkflow.changeTracker.captureCanvasState()")
    before = prompt(page)
    choose(page, "UNETLoader", words)
    page.wait_for_function("kind => app.graph.nodes.some(({ type }) => type === kind)", arg=kind)
    page.evaluate("app.extensionManager.command.execute('Comfy.Undo')")
    page.wait_for_function("kind => !app.graph.nodes.some(({ type }) => type === kind)", arg=kind)
    assert prompt(page) == before


def test_a_gguf_loader_of_another_pack_is_replaced(page):
    """With its file, and no offer of the kernel, which needs a native INT8 file."""
    add_nodes(page, {"save": ("SaveINT8DiT", {})}, [])
    page.evaluate(
        """() => {
            class Loader extends LiteGraph.LGraphNode {
                constructor() {
                    super("Unet Loader (GGUF)");
                    this.addOutput("MODEL", "MODEL");
                    this.addWidget("combo", "unet_name", "a.gguf", () => {}, { values: ["a.gguf"] });
                }
            }
            LiteGraph.registerNodeType("UnetLoaderGGUF", Loader);
            const node = LiteGraph.createNode("UnetLoaderGGUF");
            app.graph.add(node);
            node.connect(0, app.graph.nodes.find(({ type }) => type === "SaveINT8DiT"), "model");
            const entries = app.collectNodeMenuItems(node).filter(Boolean);
            window.offered = entries.map(({ content }) => content);
            entries.find(({ content }) => content.startsWith("Replace")).callback();
        }"""
    )
    offered = page.evaluate("offered")
    assert REPLACE in offered and ADD not in offered
    assert came_from(page, "SaveINT8DiT") == "LoadINT8DiT"
    assert prompt(page)[0]["LoadINT8DiT"]["model_name"] == "a.gguf"


PRIMITIVE = """() => {
    const loader = app.graph.nodes.find(({ type }) => type === "UNETLoader");
    const primitive = LiteGraph.createNode("PrimitiveNode");
    app.graph.add(primitive);
    primitive.pos = [100, 600];
    primitive.connect(0, loader, "unet_name");
}"""
PROMOTED = """() => {
    const [loader] = app.canvas.graph.nodes;
    loader.graph.addInput("unet_name", "COMBO").connect(loader.inputs.find(({ name }) => name === "unet_name"), loader);
}"""


@pytest.mark.parametrize("source", ("PrimitiveNode", "loads"))
def test_the_file_still_comes_from_where_it_came(page, renderer, source):
    """From a node, or from outside of a subgraph."""
    add_nodes(page, NODES, LINKS)
    for script in [PRIMITIVE] if source == "PrimitiveNode" else [OUTSIDE, PROMOTED]:
        page.evaluate(script)
    choose(page, "UNETLoader", REPLACE)
    page.wait_for_function("app.canvas.graph.nodes.some(({ type }) => type === 'LoadINT8DiT')")
    page.evaluate("app.canvas.setGraph(app.rootGraph)")
    for _ in range(2):
        chosen = """name => {
            app.graph.nodes.find(({ title, type }) => [title, type].includes(name)).widgets[0].value = "other";
        }"""
        page.evaluate(chosen, source)
        assert prompt(page)[0]["LoadINT8DiT"]["model_name"] == "other"
        load(page, saved(page))


def test_a_saved_file_is_in_the_loaders_at_once(page, server, renderer):
    add_nodes(
        page,
        {
            "load": ("LoadINT8DiT", {"model_name": GLYPH_MODEL, "kernel": "fused int8"}),
            "save": ("SaveINT8DiT", {"filename_prefix": f"diffusion_models/just_saved_{renderer}"}),
        },
        [("load", 0, "save", "model")],
    )
    run(page, server)
    name = f"just_saved_{renderer}_00001_.safetensors"
    page.wait_for_function(
        """name => app.graph.nodes.find(({ type }) => type === "LoadINT8DiT").widgets[0].options.values.includes(name)
            && LiteGraph.createNode("UNETLoader").widgets[0].options.values.includes(name)""",
        arg=name,
    )
