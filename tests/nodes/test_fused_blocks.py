"""Blocks on the fused producers: as exact as ComfyUI's own, and run only where nothing needs those."""

import pytest


@pytest.fixture
def small(pack):
    from support import small_models

    return small_models


@pytest.fixture
def fused(pack, monkeypatch):
    """How many norms wrote INT8 so far."""
    from int8_dit.nodes.blocks import steps

    calls, run = [], steps.norm_quantize
    monkeypatch.setattr(steps, "norm_quantize", lambda *args: calls.append(1) or run(*args))
    return calls


def test_ideogram(small, monkeypatch, dit, fused):
    expected = small.output(small.ideogram4(monkeypatch))
    model = dit.quantize(small.ideogram4(monkeypatch))
    first = small.output(model)
    assert len(fused) == 4  # of two blocks; the first one's were compared, and ComfyUI's own came out
    assert dit.relative_error(first, expected) < 0.02
    assert dit.relative_error(small.output(model), first) < 0.02
