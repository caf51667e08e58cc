"""ComfyUI's frontend in a browser: pages of it, workflows in it, and what the pack shows there.

A page comes from Playwright, which only tests/web needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from .server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TIMEOUT_MS = 120_000
BADGE, WARNING, DETAILS = ".int8-badge", ".int8-warning", ".int8-details"
# A warning goes some time after nobody points at it: by then a busy machine may not have come to look at it.
_POINT_AT_WARNINGS = """
    new MutationObserver((records) => {
        for (const node of records.flatMap(({ addedNodes }) => [...addedNodes]))
            if (node.matches?.(".int8-warnings, .int8-warning"))
                for (const warning of node.matches(".int8-warning") ? [node] : node.children)
                    warning.dispatchEvent(new MouseEvent("mouseenter"));
    }).observe(document, { childList: true, subtree: true });
"""


@contextmanager
def open_frontend(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """The frontend as a client of its own with nothing stored: loaded, idle, its graph empty. Warnings stay.

    `options` are those of a browser's page. Raises AssertionError at the end if a script raised in it.
    """
    page = browser.new_page(**{"viewport": {"width": 1600, "height": 1000}} | options)
    page.set_default_timeout(TIMEOUT_MS)
    page.add_init_script(_POINT_AT_WARNINGS)
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(url)
    wait_until_loaded(page)
    yield page
    page.close()
    assert not errors


def reload(page: Page) -> None:
    page.reload()
    wait_until_loaded(page)


def wait_until_loaded(page: Page) -> None:
    page.wait_for_function("!!(window.app?.extensionManager && window.LiteGraph?.registered_node_types.LoadINT8DiT)")
    # The frontend opens a workflow of its own accord at last; it must not take the place of the test's.
    page.wait_for_function("!!app.extensionManager.workflow.activeWorkflow && !app.configuringGraph")
    page.evaluate("app.graph.clear()")


def settle(page: Page) -> None:
    """Let the page draw: what a busy machine takes longer for, it waits longer for."""
    page.evaluate(
        """async () => {
            for (let frame = 0; frame < 20; frame++) await new Promise(requestAnimationFrame);
        }"""
    )


def load(page: Page, workflow: dict) -> None:
    page.evaluate("workflow => app.loadGraphData(workflow)", workflow)


def saved(page: Page) -> dict:
    """The workflow as the frontend would save it."""
    return json.loads(page.evaluate("() => JSON.stringify(app.graph.serialize())"))


def posting(page: Page) -> AbstractContextManager[Any]:
    """What is done within posts a prompt; the value is the server's answer."""
    return page.expect_response(lambda answer: answer.url.endswith("/prompt") and answer.request.method == "POST")


def run(page: Page, server: ComfyServer, prompt: dict | None = None) -> dict[str, dict]:
    """Press the frontend's Run, or queue an API prompt as this client, and wait for the outputs."""
    given = "prompt => app.api.queuePrompt(0, { output: prompt, workflow: {} })"
    with posting(page) as posted:
        page.evaluate("app.queuePrompt(0)" if prompt is None else given, prompt)
    answer = posted.value.json()
    assert not answer["node_errors"]
    return server.wait(answer["prompt_id"])


def open_details(page: Page) -> None:
    """Press "Details" on the one node that has a result."""
    page.evaluate("selector => document.querySelector(selector)?.remove()", DETAILS)
    page.locator(".int8-more").click()
    page.wait_for_selector(DETAILS)


def set_setting(page: Page, name: str, value: object) -> None:
    """A setting of the frontend, which the server keeps for all clients."""
    page.evaluate("([name, value]) => app.extensionManager.setting.set(name, value)", [name, value])


def add_nodes(page: Page, nodes: dict[str, tuple[str, dict]], links: list[tuple[str, int, str, str]]) -> None:
    """Put nodes beside each other into a new workflow.

    Args:
        nodes: type and widget values by a name, which becomes the node's title.
        links: (name, output, name, input).
    """
    load(page, {"id": page.evaluate("crypto.randomUUID()"), "nodes": [], "links": [], "version": 0.4})
    page.evaluate(
        """([nodes, links]) => {
            const made = {};
            let x = 100;
            for (const [title, [type, values]] of Object.entries(nodes)) {
                const node = (made[title] = LiteGraph.createNode(type));
                node.title = title;
                app.graph.add(node);
                node.pos = [x, 120];
                x += node.size[0] + 40;
                for (const [name, value] of Object.entries(values)) {
                    node.widgets.find((widget) => widget.name === name).value = value;
                }
            }
            for (const [from, output, to, input] of links) made[from].connect(output, made[to], input);
            Object.assign(app.canvas.ds, { scale: 1, offset: [0, 0] });
            app.canvas.setDirty(true, true);
        }""",
        [nodes, links],
    )
