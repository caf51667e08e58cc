"""What a user reads of the nodes in the real frontend: help pages and what leads to them, names in other languages."""

import pytest

from support.frontend import BADGE, WARNING, add_nodes, open_frontend
from support.node_texts import read_texts

NODES = tuple(read_texts("zh"))
LANGUAGES = {"en": "en-US", "zh": "zh-CN", "ja": "ja-JP"}
PANEL_WIDTHS = (282, 285)  # of a help page as frontends open it, in pixels: 1.47 and 1.58


@pytest.fixture(scope="module", params=LANGUAGES)
def page_of(request, browser, server):
    with open_frontend(browser, server.url, locale=LANGUAGES[request.param]) as page:
        yield page


@pytest.mark.parametrize("node", NODES)
def test_help_opens_with_its_picture_and_fits(page_of, node):
    page, answers = page_of, []

    def heard(response):
        answers.append(response)

    page.on("response", heard)
    title = page.evaluate(
        """type => {
            app.graph.clear();
            const node = LiteGraph.createNode(type);
            app.graph.add(node);
            node.pos = [300, 300];
            Object.assign(app.canvas.ds, { scale: 1, offset: [0, 0] });
            return node.title;
        }""",
        node,
    )
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


# What a warning leads to: the paragraph of a help page, and Kernel Benchmark


LOADER = {"load": ("LoadINT8DiT", {}), "sample": ("ModelSamplingSD3", {})}
LINKS = [("load", 0, "sample", "model")]
PARAGRAPH = {"en-US": "kernel", "zh-CN": "内核", "ja-JP": "カーネル"}  # of the loader's page


def warn(page, reason, node):
    """Of the second node, which is none of the pack's, as a sampler would."""
    page.evaluate(
        """([reason, title]) => {
            const node = `${app.graph.nodes.find((node) => node.title === title).id}`;
            const detail = { reason, summary: "Summary", detail: "detail", node };
            app.api.dispatchEvent(new CustomEvent("int8_dit.warning", { detail }));
        }""",
        [reason, node],
    )


@pytest.mark.parametrize("tag", PARAGRAPH)
def test_more_opens_the_paragraph(browser, server, tag):
    with open_frontend(browser, server.url, locale=tag) as page:
        add_nodes(page, LOADER, LINKS)
        warn(page, "bf16", "sample")
        page.locator(f"{WARNING} button:not(.int8-warning-close)").first.click()
        title = page.locator(".node-help-content h2", has_text=PARAGRAPH[tag]).first
        title.wait_for()
        page.wait_for_function(
            """title => {
                const { top } = title.getBoundingClientRect();
                return top >= 0 && top < innerHeight / 2;
            }""",
            arg=title.element_handle(),
        )


def test_more_opens_the_page_alone_where_the_frontend_has_no_such_panel(page):
    """Of another version, whose app or stores may be elsewhere."""
    add_nodes(page, LOADER, LINKS)
    opened = page.evaluate(
        """async () => {
            const { openHelp } = await import("/extensions/int8_dit/help.js");
            const root = document.querySelector("#vue-app"), { __vue_app__: app_, id } = root, opened = [];
            window.open = (url) => opened.push(`${url}`);
            const node = app.graph.nodes.find(({ title }) => title === "load");
            const without = [
                () => (root.__vue_app__ = undefined),
                () => (root.__vue_app__ = { config: { globalProperties: {} } }),
                () => (root.__vue_app__ = { config: { globalProperties: { $pinia: {} } } }),
                () => (root.id = "another"),
            ];
            for (const take of without) {
                take();
                await openHelp(node, "kernel");
                Object.assign(root, { id, __vue_app__: app_ });
            }
            return opened;
        }"""
    )
    assert len(opened) == 4 and all(url.endswith("/int8_dit/docs/LoadINT8DiT.md") for url in opened)


def test_every_paragraph_is_there(page):
    missing = page.evaluate(
        """async () => {
            const { PARAGRAPHS } = await import("/extensions/int8_dit/help.js");
            const missing = [];
            for (const [node, heading] of Object.values(PARAGRAPHS).flatMap(Object.entries)) {
                const help = await (await fetch(`/extensions/int8_dit/docs/${node}.md`)).text();
                if (!help.includes(`\\n## ${heading}\\n`)) missing.push(`${node}: ${heading}`);
            }
            return missing;
        }"""
    )
    assert not missing


def test_the_benchmark_measures_the_model_that_the_warning_is_about(page, renderer):
    add_nodes(page, LOADER, LINKS)
    for _ in range(2):  # the second time it is there already
        page.evaluate("sessionStorage.clear()")
        warn(page, "bf16", "sample")
        assert "sample (#" in page.locator(WARNING).text_content()
        page.get_by_role("button", name="Open Kernel Benchmark").click()
        page.click(f"{WARNING} .int8-warning-close")
        benchmarks = page.evaluate(
            """() => app.graph.nodes.filter(({ type }) => type === "INT8KernelBenchmark")
                .map((node) => node.getInputNode(node.findInputSlot("model")).title)"""
        )
        assert benchmarks == ["load"]


def test_more_beside_a_bad_badge_opens_its_paragraph(page, renderer):
    """And beside a failure the typical errors; what is good leads nowhere."""
    add_nodes(page, LOADER, LINKS)
    show = """([severity, reason]) => {
        const badge = { severity, text: "bf16: no GPU", detail: "why", reason };
        app.graph.nodes.find(({ title }) => title === "load").onExecuted({ int8_dit_badges: [badge] });
    }"""
    more = page.get_by_role("button", name="More", exact=True)
    page.evaluate(show, ["good", ""])
    page.wait_for_selector(BADGE)
    assert more.count() == 0
    page.evaluate(show, ["warn", "bf16"])
    more.click()
    page.locator(".node-help-content h2", has_text=PARAGRAPH["en-US"]).first.wait_for()
    page.evaluate(
        """async () => {
            const { showFailure } = await import("/extensions/int8_dit/results.js");
            showFailure(app.graph.nodes.find(({ title }) => title === "load"), "failed", ["it went wrong"]);
        }"""
    )
    more.click()
    title = page.locator(".node-help-content h2", has_text="Typical errors").first
    page.wait_for_function(
        "title => title.getBoundingClientRect().top >= 0 && title.getBoundingClientRect().top < innerHeight",
        arg=title.element_handle(),
    )
