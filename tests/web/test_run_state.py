"""A failed run looks failed: the sentence on the node, and nothing green."""

import re

import pytest

from support import workflows
from support.failing_graphs import BROKEN, FAILING, SET, SHOWN_LOADER
from support.frontend import BADGE, add_nodes, load, open_frontend, reload, run, saved, settle

RESULT, FAILURE, OLD = ".int8-result", ".int8-error", ".int8-result-old"
PROGRESS = "$$node-text-preview"
ENGLISH = r"\b[a-z]{2,}(?: [a-z]{2,}){2,}"  # three words after each other


def severities(page):
    return page.evaluate("badge => [...document.querySelectorAll(badge)].map(e => e.dataset.severity)", BADGE)


def old(page):
    """Of each result whether it looks like one of an earlier run."""
    return page.evaluate(
        "result => [...document.querySelectorAll(result)].map(e => e.matches('.int8-result-old'))", RESULT
    )


def dispatch(page, event, **detail):
    page.evaluate("([name, detail]) => app.api.dispatchEvent(new CustomEvent(name, { detail }))", [event, detail])


def fail(page, change):
    page.evaluate(*change)
    page.evaluate("() => void app.queuePrompt(0)")
    page.wait_for_selector(FAILURE)
    settle(page)


@pytest.mark.parametrize("case", FAILING)
def test_the_node_says_what_failed(page, server, renderer, case, tmp_path):
    nodes, links, change, sentence = FAILING[case]
    (server.base / "models" / "diffusion_models" / BROKEN).write_bytes(b"no model")
    add_nodes(page, nodes, links)
    run(page, server)
    page.wait_for_selector(BADGE)
    fail(page, change)
    page.screenshot(path=tmp_path / "failed.png")
    widgets = page.evaluate("app.graph.nodes.flatMap(({ widgets }) => widgets?.map(({ name }) => name) ?? [])")
    assert PROGRESS not in widgets
    assert sentence in page.locator(FAILURE).text_content()
    assert severities(page) == ["error"] and page.locator(FAILURE).is_visible()


def test_what_a_run_is_about_to_replace_is_grey(page, server, renderer):
    """While it runs and when it is interrupted; a result that comes out of the cache is as good as new."""
    add_nodes(page, *SHOWN_LOADER)
    run(page, server)
    page.wait_for_selector(BADGE)
    loader = page.evaluate("`${app.graph.nodes.find(({ title }) => title === 'node').id}`")
    page.evaluate(
        """old => app.api.addEventListener("execution_start", ({ detail }) => {
            Object.assign(window, { started: detail, wasOld: Boolean(document.querySelector(old)) });
        })""",
        OLD,
    )
    run(page, server)
    page.wait_for_function("([old]) => !document.querySelector(old)", arg=[OLD])
    assert page.evaluate("wasOld") and old(page) == [False]

    ids = {"prompt_id": page.evaluate("started.prompt_id"), "node_id": loader, "node_type": "LoadINT8DiT"}
    dispatch(page, "execution_interrupted", **ids | {"prompt_id": "of another browser"})
    assert old(page) == [False] and page.locator(FAILURE).count() == 0
    dispatch(page, "execution_interrupted", **ids)
    assert severities(page) == ["warn"] and page.locator(BADGE).text_content() == "interrupted"
    run(page, server)
    page.wait_for_function("([old]) => !document.querySelector(old)", arg=["section[role=alert]"])
    page.wait_for_selector(BADGE)
    assert "interrupted" not in page.locator(BADGE).all_text_contents() and old(page) == [False]


@pytest.mark.parametrize("tag", ("zh-CN", "ja-JP"))
def test_inputs_are_called_what_the_user_sees(browser, server, tag):
    with open_frontend(browser, server.url, locale=tag) as page:
        nodes, links, change, _ = FAILING["missing calibration input"]
        add_nodes(page, nodes, links)
        fail(page, change)
        text = page.locator(FAILURE).text_content()
        names = page.evaluate(
            """() => app.graph.nodes.find(({ title }) => title === "node").inputs
                .filter(({ name }) => ["sampler", "sigmas", "latent_image"].includes(name))
                .map(({ localized_name }) => localized_name)"""
        )
        assert len(names) == 3 and all(name in text for name in names)
        assert not re.search(ENGLISH, text + page.locator(BADGE).text_content())
        add_nodes(page, *SHOWN_LOADER)
        fail(page, FAILING["missing file"][2])
        text = page.locator(FAILURE).text_content()
        assert "gone.safetensors" in text and not re.search(ENGLISH, text)


def test_a_failure_comes_back_in_grey_until_the_node_runs_again(page, server, renderer):
    add_nodes(page, *SHOWN_LOADER)
    fail(page, FAILING["missing file"][2])
    said, workflow = page.locator(FAILURE).text_content(), saved(page)
    for _ in range(2):
        reload(page)
        load(page, workflow)
        page.wait_for_selector(FAILURE)
        assert page.locator(FAILURE).text_content() == said and old(page) == [True]
    page.evaluate(SET, {"model_name": workflows.GLYPH_MODEL})
    run(page, server)
    page.wait_for_selector(f"{BADGE}[data-severity=good], {BADGE}[data-severity=note], {BADGE}[data-severity=warn]")
    assert page.locator(FAILURE).count() == 0 and old(page) == [False]
    reload(page)
    load(page, workflow)
    page.wait_for_selector(BADGE)
    assert page.locator(FAILURE).count() == 0


def test_a_node_without_results_says_what_failed_until_it_runs(page, renderer):
    add_nodes(
        page,
        {"node": ("MergeINT8Calibrations", {}), "save": ("SaveINT8Calibration", {})},
        [("node", 0, "save", "calibration")],
    )
    page.evaluate("() => void app.queuePrompt(0)")
    page.wait_for_selector(FAILURE)
    assert severities(page) == ["error"]
    kept = "() => Object.values(JSON.parse(localStorage.getItem('int8_dit.last_results'))).length"
    before = page.evaluate(kept)
    page.evaluate(
        """async () => {
            const { endFailure } = await import("/extensions/int8_dit/results.js");
            app.graph.nodes.forEach(endFailure);
        }"""
    )
    assert before >= 1 and page.evaluate(kept) < before and page.locator(FAILURE).count() == 0
