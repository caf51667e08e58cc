"""What follows from a fused op: its operator, its arguments by name and default, and what is kept of its calls."""

import pytest
import torch

from kernels import ChannelTransform, Norm, gated_residual, norm_quantize, norm_rope
from kernels.ops import fused_op
from kernels.triton_kernels import launching
from support.tensors import DEVICE, random_float

RMS = Norm("rms", 1e-6)
NORM = "str? {0}kind, float {0}eps, Tensor? {0}weight, Tensor? {0}bias"
TRANSFORM = "Tensor? smooth, int? rotation_group"
# Compiled graphs name them.
SCHEMAS = {
    "norm_quantize": f"Tensor x, {NORM.format('')}, Tensor? scale, Tensor? shift, {TRANSFORM}, int activation_bits"
    ", Tensor? rows",
    "activate_quantize": f"Tensor gate, str activation, Tensor? up, Tensor? beside, {TRANSFORM}, int activation_bits",
    "gated_residual": f"Tensor residual, Tensor x, Tensor? gate, {NORM.format('')}, Tensor? rows",
    "norm_rope": f"Tensor q, Tensor k, {NORM.format('q_')}, {NORM.format('k_')}, Tensor freqs, str pairs",
}


@pytest.mark.parametrize("name", fused_op.FUSED_OPS)
def test_the_operator_has_the_fields_of_the_values(name):
    results = "Tensor" if name == "gated_residual" else "(Tensor, Tensor)"
    schema = str(getattr(torch.ops.int8_dit, name).default._schema)
    assert schema == f"int8_dit::{name}({SCHEMAS[name]}) -> {results}"


def test_arguments_by_name_and_by_place():
    x, transform = random_float(2, 3, 16), ChannelTransform(None, 16)
    expected = norm_quantize(x, RMS, None, None, transform, 16)
    for result in (
        norm_quantize(x, RMS, transform=transform, activation_bits=16),
        norm_quantize(activation_bits=16, transform=transform, norm=RMS, x=x),
    ):
        assert all(map(torch.equal, result, expected))
    assert torch.equal(gated_residual(x, x, gate=x), gated_residual(x, x, x))


@pytest.mark.parametrize(
    "given, named, message",
    (
        ((), {}, "missing a required argument: 'norm'"),
        ((RMS,), {"gate": 1}, "unexpected keyword argument 'gate'"),
        ((RMS,), {"x": 1}, "multiple values for argument 'x'"),
        ((RMS, None, None, ChannelTransform(), 8, None, 8), {}, "too many positional arguments"),
    ),
)
def test_arguments_that_it_has_not(given, named, message):
    with pytest.raises(TypeError, match=message):
        norm_quantize(random_float(3, 16), *given, **named)


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
