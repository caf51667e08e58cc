"""What is kept of the calls of a fused op."""

import torch

from kernels import Norm, norm_quantize, norm_rope
from kernels.ops import fused_op
from kernels.triton_kernels import launching
from support.tensors import DEVICE, random_float

RMS = Norm("rms", 1e-6)


def test_what_is_kept_has_a_bound(monkeypatch):
    monkeypatch.setattr(norm_quantize, "_plans", {})
    monkeypatch.setattr(fused_op, "MOST_KEPT", 2)
    for tokens in range(1, 6):
        expected = norm_quantize.reference(random_float(tokens, 16), RMS)
        for _ in range(2):
            torch.testing.assert_close(norm_quantize(random_float(tokens, 16), RMS)[1], expected[1])
        assert len(norm_quantize._plans) <= 2


def test_another_number_of_tokens_finds_the_same_launch():
    def both(tokens):
        norm_quantize(random_float(2, tokens, 16), RMS)
        q = random_float(2, tokens, 2, 16)
        norm_rope(q, q, RMS, None, torch.zeros(tokens, 8, 2, 2, device=DEVICE), "halves")

    launching.forget_launches()
    for op in (norm_quantize, norm_rope):
        op._plans.clear()
    both(3)
    kept = len(launching._kept)
    both(5)
    assert len(launching._kept) == kept == 2
