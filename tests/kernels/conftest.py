"""Fixtures of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_kept() -> Iterator[None]:
    """No call finds a launch of another test's."""
    from kernels.call_cache import CACHE

    CACHE.clear()
    yield
    CACHE.clear()


@pytest.fixture(params=("kernel", "formulas"))
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The kernels, on a GPU or under the interpreter, and what stands for them without Triton."""
    if request.param == "formulas":
        monkeypatch.setattr("kernels.operators.uses_triton", lambda tensor: False)
    return request.param


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Which launches are to be compiled, each with who compiles it and its rank; none is."""
    from kernels.launching.launching import Launch

    found: list[tuple] = []
    monkeypatch.setattr(Launch, "compile_by", lambda launch, by, rank, *given: found.append((by, rank, launch)))
    return found
