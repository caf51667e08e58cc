"""Fixtures of the tests of linears."""

from types import SimpleNamespace

import pytest
import torch

from support.tuned_card import Card, taking


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card on which the second of three candidates wins, and a cache folder of its own."""
    from kernels.linear import tuning

    card = Card(taking(3.0, 1.0, 2.0))
    monkeypatch.setattr(tuning, "monotonic", lambda: card.now)
    at_once = SimpleNamespace(submit=lambda rank, task: task(), is_idle=True)
    monkeypatch.setattr(tuning, "beside_calls", at_once)
    for name, value in (("is_current_stream_capturing", False), ("current_stream", 0), ("default_stream", 0)):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)  # which raise where no driver is
    monkeypatch.setenv("INT8_DIT_TUNING_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("INT8_DIT_TUNING", raising=False)
    return card
