"""Fixtures for everything under tests/.

Nothing but the standard library, pytest and torch is imported at the top: tests/kernels also runs on machines that have
no ComfyUI, and the kernel tests there must not need one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pytest
import torch

if TYPE_CHECKING:
    from support.server import ComfyServer

TESTS = Path(__file__).resolve().parent
PROJECT = TESTS.parent

# With no GPU the kernels run under Triton's interpreter, which must be asked for before triton is first imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Tuning compiles every candidate for each of the hundreds of shapes that tests use. What tests tuning turns it on.
os.environ.setdefault("INT8_DIT_TUNING", "off")

# For `import kernels`, and for the tests' own helpers. ComfyUI goes in front of both once a test asks for it: it owns
# the name `nodes`, which the project root has too.
sys.path[:0] = [str(PROJECT), str(TESTS)]


# Tests in these folders need minutes: a browser, training runs, whole studies.
SLOW_FOLDERS = ("studies", "web")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what needs a server, and those folders. Other tests say it themselves."""
    for item in items:
        if "server" in getattr(item, "fixturenames", ()) or item.path.relative_to(TESTS).parts[0] in SLOW_FOLDERS:
            item.add_marker("slow")


@pytest.fixture(scope="module", autouse=True)  # before what a module makes once
def eager_reference(request: pytest.FixtureRequest) -> Iterator[None]:
    """Outside of tests/kernels nothing runs under Triton's interpreter: a whole model would take hours."""
    with pytest.MonkeyPatch.context() as patch:
        if TESTS / "kernels" not in request.path.parents:
            patch.delenv("TRITON_INTERPRET", raising=False)
        yield


@pytest.fixture
def interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels run, on a CPU under Triton's interpreter. A card compiles them, and could not any more those of a module
    that is first imported while the interpreter is asked for."""
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def comfyui_path() -> Path:
    """Where ComfyUI is; skips the test when nobody said."""
    path = os.environ.get("COMFYUI_PATH")
    if not path:
        pytest.skip("COMFYUI_PATH is not set (tests/run_tests.py sets it)")
    return Path(path).resolve()


@pytest.fixture(scope="session")
def comfyui() -> Path:
    """ComfyUI's modules, importable in this process and computing on the CPU; the value is their folder.

    On the CPU also where there is a GPU, so that tolerances are float32's everywhere. What needs the GPU has a process
    of its own (tests/nodes/memory_modes.py).
    """
    from support.pack import import_comfyui

    path = comfyui_path()
    import_comfyui(path, cpu=True)
    return path


@pytest.fixture(scope="session")
def pack(comfyui: Path) -> ModuleType:
    """This pack, imported the way ComfyUI does it (`int8_dit`)."""
    from support.pack import import_pack

    return import_pack()


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ComfyServer]:
    """A real ComfyUI server on the CPU with this pack, shared by all tests."""
    from support.environment import Environment
    from support.server import serve

    environment = Environment(python=Path(sys.executable), comfyui=comfyui_path())
    with serve(environment, tmp_path_factory.mktemp("comfyui")) as running:
        yield running
