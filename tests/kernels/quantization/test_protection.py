"""Which layers are protected from 8-bit activations, and what must be left."""

import math

import pytest

from kernels import Protection


def test_an_error_budget_holds_for_protected_layers_too():
    assert Protection("error", 0.01).accepts(0.01) and not Protection("error", 0.01).accepts(0.011)
    assert Protection("number", 3).accepts(1.0) and Protection("share", 0.1).accepts(1.0)


FRAGILITY = {"d": 0.01, "a": 0.04, "c": 0.04, "b": 0.02, "e": 0.005}
ERRORS = {"d": 0.009, "a": 0.008, "c": 0.011, "b": 0.012, "e": 0.004}


def choose(kind, value):
    return "".join(Protection(kind, value).choose(FRAGILITY, ERRORS, 7))


@pytest.mark.parametrize(
    "kind, value, chosen",
    (
        ("number", 0, ""),
        ("number", 3, "acb"),  # equals by name
        ("share", 0.0, ""),
        ("share", 0.3, "ac"),  # 2.1 of 7
        ("share", 0.4, "acb"),  # 2.8
        ("error", 0.01, "cb"),  # of layers as they are quantized
        ("error", 0.012, ""),
    ),
)
def test_which_layers_are_protected(kind, value, chosen):
    assert choose(kind, value) == chosen


@pytest.mark.parametrize(
    "kind, value, rule",
    (("number", 5, "5 layers"), ("share", 1.0, "1 of 7 linears"), ("error", 0.0, "layers with .* above 0")),
)
def test_something_must_be_left(kind, value, rule):
    protection, chosen = Protection(kind, value), choose(kind, value)
    assert len(chosen) == 5
    with pytest.raises(ValueError, match=f"protecting {rule} leaves none of the model's 5 quantizable layers"):
        protection.check_left(5, len(chosen), 7)
    protection.check_left(5, 4, 7)


@pytest.mark.parametrize("kind, value", (("share", 1.01), ("share", -0.1), ("number", -1), ("error", math.nan)))
def test_a_protection_that_makes_no_sense(kind, value):
    with pytest.raises(ValueError, match=f"the {kind} to protect must be between"):
        Protection(kind, value)
