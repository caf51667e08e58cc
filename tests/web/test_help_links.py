"""What a warning leads to: the paragraph of the help page, in each language, and Kernel Benchmark."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from support.frontend import BADGE, WARNING, add_nodes, open_frontend

if TYPE_CHECKING:
    from playwright.sync_api import Page

LOADER = {"load": ("LoadINT8DiT", {}), "sample": ("ModelSamplingSD3", {})}
LINKS = [("load", 0, "sample", "model")]
PARAGRAPH = {"en-US": "kernel", "zh-CN": "内核", "ja-JP": "カーネル"}  # of the loader's page


def warn(page: Page, reason: str, node: str) -> None:
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
def test_more_opens_the_paragraph(browser, server, tag) -> None:
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


def test_every_paragraph_is_there(page: Page) -> None:
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


def test_the_benchmark_measures_the_model_that_the_warning_is_about(page: Page, renderer: str) -> None:
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


def test_more_beside_a_bad_badge_opens_its_paragraph(page: Page, renderer: str) -> None:
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
