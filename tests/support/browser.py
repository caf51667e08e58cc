"""A real browser, for the tests and for the pictures of the nodes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser


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
