"""Names of the widgets below a widget that chooses among them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from support.frontend import add_nodes, load, saved

if TYPE_CHECKING:
    from playwright.sync_api import Page

CHOICES = {
    "error budget": ("percent", "max error %", 3.0),
    "number of layers": ("layers", "layers", 17),
    "share of all linears": ("percent", "protect %", 8.0),
}


def choose(page: Page, choice: str) -> None:
    page.evaluate(
        """choice => {
            app.graph.nodes[0].widgets.find((widget) => widget.name === "protect").value = choice;
        }""",
        choice,
    )


def nested(page: Page) -> list[list]:
    return page.evaluate(
        """() => app.graph.nodes[0].widgets.filter((widget) => widget.name.startsWith("protect."))
            .map(({ name, label, value }) => [name, label, value])"""
    )


def test_a_nested_widget_has_its_own_name(page: Page, renderer: str) -> None:
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
