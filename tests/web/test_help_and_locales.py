"""What a user reads of the nodes in the real frontend: help pages with their pictures, names in other languages."""

from __future__ import annotations

import pytest

from support.frontend import open_frontend
from support.node_texts import read_texts
from support.server import PROJECT

NODES = tuple(read_texts("zh"))


HELP = PROJECT / "web" / "docs"
LANGUAGES = {"en": "en-US", "zh": "zh-CN", "ja": "ja-JP"}
PANEL_WIDTHS = (282, 285)  # of a help page as frontends open it, in pixels: 1.47 and 1.58


@pytest.fixture(scope="module", params=LANGUAGES)
def page_of(request, browser, server):
    with open_frontend(browser, server.url, locale=LANGUAGES[request.param]) as page:
        yield request.param, page


@pytest.mark.parametrize("node", NODES)
def test_help_opens_with_its_picture_and_fits(page_of, node):
    (language, page), answers = page_of, []

    def heard(response):
        answers.append(response)

    page.on("response", heard)
    page.evaluate(
        """type => {
            app.graph.clear();
            const node = LiteGraph.createNode(type);
            app.graph.add(node);
            node.pos = [300, 300];
            Object.assign(app.canvas.ds, { scale: 1, offset: [0, 0] });
        }""",
        node,
    )
    path = HELP / (f"{node}.md" if language == "en" else f"{node}/{language}.md")
    title = path.read_text("utf-8").partition("\n")[0].removeprefix("# ")
    picture = page.locator(f".node-help-content img[alt='{title}']")
    # Press the button until it has worked: it comes and goes with selections, which the frontend first does not hear.
    page.wait_for_function(
        """alt => {
            const picture = document.querySelector(`.node-help-content img[alt='${alt}']`);
            if (picture) return picture.complete;
            const [node] = app.graph.nodes;
            const button = document.querySelector("[data-testid=info-button]");
            if (!app.canvas.selected_nodes[node.id]) app.canvas.selectNode(node);
            else if (button) button.click();
            else if (!document.querySelector(".node-help-content")) app.canvas.deselectAll();
        }""",
        arg=title,
        polling=1000,
    )
    assert picture.evaluate("image => image.naturalWidth") > 100
    assert page.locator(".node-help-content h1").text_content() == title
    # The frontend asks for the page in its language first; there is no other one in English.
    page.remove_listener("response", heard)
    missing = [answer.url for answer in answers if answer.status >= 400 and not answer.url.endswith(f"/{node}/en.md")]
    assert not missing
    width, cut = page.evaluate(
        """() => {
            const help = document.querySelector(".node-help-content");
            const right = help.getBoundingClientRect().right;
            const reach = (part) => Math.max(...[...part.getClientRects()].map((box) => box.right));
            const cut = [...help.querySelectorAll("*")].filter((part) => reach(part) > right + 0.5);
            return [help.clientWidth, cut.map((part) => part.textContent.slice(0, 60))];
        }"""
    )
    assert width in PANEL_WIDTHS and not cut


@pytest.mark.parametrize("language", ("zh", "ja"))
def test_names_are_translated(browser, server, language):
    """Names of nodes, inputs and outputs, the one inside of a widget that has more below it among them."""
    own = read_texts(language)["QuantizeToINT8SmoothQuant"]
    with open_frontend(browser, server.url, locale=LANGUAGES[language]) as page:
        title, widgets, inputs, outputs = page.evaluate(
            """() => {
                const { title, widgets, inputs, outputs } = LiteGraph.createNode("QuantizeToINT8SmoothQuant");
                const names = (all, of) => Object.fromEntries(all.map((one) => [one.name, one[of]]));
                return [title, names(widgets, "label"), names(inputs, "localized_name"),
                    outputs.map(({ localized_name }) => localized_name)];
            }"""
        )
    assert title == own["display_name"]
    named = {name.replace(".", "_"): label for name, label in (inputs | widgets).items()}
    shared = named.keys() & own["inputs"].keys()
    assert "protect_percent" in shared and len(shared) > 10
    assert {name: named[name] for name in shared} == {name: own["inputs"][name]["name"] for name in shared}
    assert all(outputs[int(place)] == text["name"] for place, text in own["outputs"].items() if "name" in text)
