"""How many widgets a node shows, in both renderers: the rare ones behind a click, unless they say something."""

from itertools import pairwise

import pytest

from support.frontend import add_nodes, load, saved, set_setting, settle

SHOWN = {"QuantizeToINT8SmoothQuant": 6, "LoadINT8DiT": 3, "INT8KernelBenchmark": 3, "CompareImagesINT8DiT": 0}
MORE = "more settings"
# The names of the widgets that are drawn, without the button. Newer frontends call one with a link hidden, too.
CLASSIC = """() => app.graph.nodes.map((node) => node.widgets
    .filter((widget) => node.isWidgetRowVisible?.(widget) ?? node.isWidgetVisible(widget))
    .map(({ name }) => name).filter((name) => name !== "more settings"))"""
VUE = """() => [...document.querySelectorAll("[data-node-id]")].map((node) =>
    [...node.querySelectorAll("[data-testid=node-widget]")].length)"""


def add(page, node, **widgets):
    add_nodes(page, {"node": (node, widgets)}, [])
    settle(page)


def drawn(page):
    """The names of the widgets that the classic renderer draws on the one node."""
    (names,) = page.evaluate(CLASSIC)
    return names


def press(page):
    page.evaluate("name => app.graph.nodes[0].widgets.find((widget) => widget.name === name).callback()", MORE)


@pytest.mark.parametrize("node", SHOWN)
def test_the_classic_renderer_shows_few(page, node):
    add(page, node)
    few, values, (_, height) = drawn(page), saved(page)["nodes"][0].get("widgets_values"), size(page)
    assert len(few) == SHOWN[node]
    press(page)
    settle(page)
    assert len(drawn(page)) > len(few) and size(page)[1] > height
    press(page)
    settle(page)
    assert drawn(page) == few and size(page)[1] == height
    assert saved(page)["nodes"][0].get("widgets_values") == values


def size(page):
    return page.evaluate("() => [...app.graph.nodes[0].size]")


def test_no_gap_is_left(page):
    """Each widget that is drawn stands right below the one before it."""
    add(page, "QuantizeToINT8SmoothQuant")
    tops = page.evaluate("""() => {
        const [node] = app.graph.nodes;
        return node.widgets.filter((widget) => node.isWidgetVisible(widget)).map(({ y }) => y);
    }""")
    assert len({after - before for before, after in pairwise(tops)}) == 1


def test_what_differs_or_is_connected_stays_in_sight(page):
    add(page, "QuantizeToINT8SmoothQuant", alpha=0.75, seed=7)
    workflow = saved(page)
    load(page, workflow)
    assert len(drawn(page)) == SHOWN["QuantizeToINT8SmoothQuant"] + 3  # "control after generate" with its seed
    assert {"alpha", "seed"} <= set(drawn(page))
    assert saved(page)["nodes"][0]["widgets_values"] == workflow["nodes"][0]["widgets_values"]
    add_nodes(
        page,
        {"text": ("PrimitiveFloat", {}), "node": ("QuantizeToINT8SmoothQuant", {})},
        [("text", 0, "node", "cfg")],
    )
    assert "cfg" in page.evaluate(CLASSIC)[1] and "alpha" not in page.evaluate(CLASSIC)[1]


def test_the_vue_renderer_shows_as_few(page):
    set_setting(page, "Comfy.VueNodes.Enabled", True)
    for node, count in SHOWN.items():
        add(page, node)
        page.wait_for_function("([script, count]) => eval(script)()[0] === count", arg=[VUE, count])
        assert page.locator("[data-node-id]").get_by_text(MORE).count() == 0


def test_a_node_that_is_there_when_the_renderer_changes(page):
    add(page, "LoadINT8DiT")
    assert len(drawn(page)) == SHOWN["LoadINT8DiT"]
    hidden = "() => app.graph.nodes[0].widgets.some((widget) => widget.hidden)"
    set_setting(page, "Comfy.VueNodes.Enabled", True)
    page.wait_for_function(f"!({hidden})()")
    set_setting(page, "Comfy.VueNodes.Enabled", False)
    page.wait_for_function(f"count => ({CLASSIC})()[0].length === count", arg=SHOWN["LoadINT8DiT"])


def test_a_rare_widget_that_is_promoted_is_seen_on_the_subgraph(page):
    add(page, "QuantizeToINT8SmoothQuant")
    page.evaluate("""() => {
        const { node } = app.graph.convertToSubgraph(new Set([app.graph.nodes[0]]));
        const [inner] = node.subgraph.nodes;
        const slot = inner.inputs.find(({ name }) => name === "alpha");
        node.subgraph.addInput("alpha", slot.type).connect(slot, inner);
    }""")
    settle(page)
    assert "alpha" in drawn(page)
    load(page, saved(page))
    assert "alpha" in drawn(page)
