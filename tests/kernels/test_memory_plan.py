"""What outlives a launch is asked for outside of the plan that a host makes of the memory of calls."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from kernels import memory_plan

CARD = torch.device("cuda", 0)


@pytest.mark.parametrize("capturing", (False, True))
def test_what_a_stream_keeps_is_outside_of_the_plan(monkeypatch, capturing):
    """A CUDA graph fills its own at each replay: that one is part of the call."""
    gemm = pytest.importorskip("kernels.linear.gemm")
    inside, asked = [], []

    @contextmanager
    def outside():
        inside.append(True)
        yield
        inside.pop()

    def zeros(size, **_):
        asked.append(bool(inside))
        return torch.empty(size)

    monkeypatch.setattr(memory_plan, "_outside", outside)
    monkeypatch.setattr(gemm, "_arrivals_of_streams", {})
    monkeypatch.setattr(torch, "zeros", zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    first, second = gemm._arrivals(CARD, 8), gemm._arrivals(CARD, 8)
    assert asked == ([False, False] if capturing else [True])
    assert (first is second) != capturing
