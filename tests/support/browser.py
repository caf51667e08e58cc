"""The real frontend in a real browser, for the tests and for the pictures of the nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

TIMEOUT_MS = 120_000


class NoBrowser(RuntimeError):
    """A tool is missing; the message says how to get it."""


@contextmanager
def chromium() -> Iterator[Browser]:
    """A headless Chromium. Raises NoBrowser where it or Playwright is not installed."""
    executable = shutil.which("chromium") or shutil.which("chromium-browser")
    if not executable:
        raise NoBrowser("chromium is not installed (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise NoBrowser("the playwright package is not installed (tests/run_tests.py installs it)") from None
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield browser
        browser.close()


@contextmanager
def open_frontend(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """A page with the frontend, loaded, idle and with an empty graph; `options` are those of a browser's page.

    Raises AssertionError at the end if a script raised in it.
    """
    page = browser.new_page(viewport={"width": 1600, "height": 1000}, **options)
    page.set_default_timeout(TIMEOUT_MS)
    errors = []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(url)
    wait_for_frontend(page)
    yield page
    page.close()
    assert not errors


def wait_for_frontend(page: Page) -> None:
    """Wait until the frontend knows this pack's nodes, and empty its graph."""
    page.wait_for_function("!!(window.app?.extensionManager && window.LiteGraph?.registered_node_types.LoadINT8DiT)")
    page.evaluate("app.graph.clear()")
