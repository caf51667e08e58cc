"""A browser, and pages of ComfyUI's frontend in it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from support import frontend, workflows
from support.server import ComfyServer
from support.workflows import Prompt

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

SAVED_MODEL = "INT8_00001_.safetensors"  # what the first run of int8_glyphs.json saves and then loads
IDEOGRAM_FILES = (
    "diffusion_models/ideogram4_fp8_scaled.safetensors",
    "diffusion_models/ideogram4_unconditional_fp8_scaled.safetensors",
    "diffusion_models/ideogram4_int8_convrot.safetensors",
    "diffusion_models/ideogram4_unconditional_int8_convrot.safetensors",
    "text_encoders/qwen3vl_8b_fp8_scaled.safetensors",
    "vae/flux2-vae.safetensors",
)


def _require(what: object, message: str) -> None:
    """Skip for a developer who lacks a tool; fail in CI, where a skip would hide that nothing was tested."""
    if not what:
        (pytest.fail if os.environ.get("CI") else pytest.skip)(message)


# Not for the whole session: its event loop stands in the way of tests/nodes that run one of their own.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    _require(chromium, "chromium is not installed (apt-get install chromium)")
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        sync_playwright = None
    _require(sync_playwright, "the playwright package is not installed (tests/run_tests.py installs it)")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(
            executable_path=chromium, args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
        )
        yield running
        running.close()


@pytest.fixture(scope="session")
def model_files(server: ComfyServer) -> None:
    """The files that the example workflows name: a real glyph model, and empty stand-ins for the big ones."""
    for name in IDEOGRAM_FILES:
        path = server.base / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    if not (server.base / "output" / "diffusion_models" / SAVED_MODEL).exists():
        prompt = Prompt()
        workflows.save_model(
            prompt, workflows.calibrated_model(prompt, workflows.stock_model(prompt), text="A", steps=2)
        )
        server.queue(prompt)


@pytest.fixture
def new_client(browser: Browser, server: ComfyServer, model_files: None) -> Iterator[Callable[[], Page]]:
    """Open the frontend in a browser of its own, with nothing stored; the test fails if a script raised in one."""
    pages, errors = [], []

    def new_client() -> Page:
        pages.append(frontend.open_page(browser, server))
        pages[-1].on("pageerror", lambda error: errors.append(error))
        return pages[-1]

    yield new_client
    for page in pages:
        page.close()
    assert not errors


@pytest.fixture
def page(new_client: Callable[[], Page]) -> Page:
    """The frontend, loaded and idle."""
    return new_client()


@pytest.fixture(params=("classic", "Vue"))
def renderer(page: Page, request: pytest.FixtureRequest) -> Iterator[str]:
    """Each way in which the frontend draws nodes."""
    frontend.set_setting(page, "Comfy.VueNodes.Enabled", request.param == "Vue")
    yield request.param
    frontend.set_setting(page, "Comfy.VueNodes.Enabled", False)
