"""A browser, and pages of ComfyUI's frontend in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from support import frontend
from support.browser import NoBrowser, chromium
from support.server import ComfyServer

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


# Not for the whole session: its event loop stands in the way of tests/nodes that run one of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Skipped for a developer who has none; an error in CI, where a skip would hide that nothing was tested."""
    try:
        with chromium() as running:
            yield running
    except NoBrowser as missing:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(str(missing))


@pytest.fixture(autouse=True)
def settings_of_a_new_user(request: pytest.FixtureRequest) -> Iterator[None]:
    """After each test: the server keeps settings for all clients, also for those of the next test."""
    yield
    if "server" in request.fixturenames:
        request.getfixturevalue("server").forget_settings()


@pytest.fixture
def new_client(browser: Browser, server: ComfyServer) -> Iterator[Callable[[], Page]]:
    """Open the frontend as a client of its own; the test fails if a script raised in one."""
    with ExitStack() as pages:
        yield lambda: pages.enter_context(frontend.open_frontend(browser, server.url))


@pytest.fixture
def page(new_client: Callable[[], Page]) -> Page:
    """The frontend, loaded and idle."""
    return new_client()


@pytest.fixture(params=("classic", "Vue"))
def renderer(page: Page, request: pytest.FixtureRequest) -> str:
    """Each way in which the frontend draws nodes."""
    frontend.set_setting(page, "Comfy.VueNodes.Enabled", request.param == "Vue")
    return request.param
