"""The benchmark of attention: what its operands are, what a CPU times, and what its figures say."""

import json

import pytest
import torch

from kernels.attention.exact_attention import CUDNN, FLASH, PYTORCH, AttentionShape
from kernels.benchmark.attention_rows import (
    ATTENTION_METHODS,
    COMFYUI_CHOICE,
    KITCHEN_INT8,
    AttentionMethod,
    AttentionSizes,
    attention_memory,
    benchmark_attention,
    feasible_call,
    ideogram4_attention,
)
from kernels.benchmark.shape_results import Unavailable

CPU = torch.device("cpu")


def a_call(heads=4, width=64, tokens=40, keys=None, masked=False, key_heads=None, batch=2):
    return AttentionSizes(
        "a block", heads, AttentionShape(tokens, keys or tokens, width, masked), key_heads or heads, batch
    )


@pytest.mark.parametrize(
    "call",
    [a_call(), a_call(keys=23), a_call(key_heads=2), a_call(masked=True), a_call(key_heads=1, keys=32, masked=True)],
    ids=AttentionSizes.place,
)
def test_a_cpu_times_what_pytorch_has_and_names_the_rest(call):
    said = []
    result = benchmark_attention(call, CPU, rounds=2, say=said.append)
    assert said == [f"a block: {method.name}" for method in ATTENTION_METHODS]
    assert {PYTORCH, COMFYUI_CHOICE} <= result.rounds.keys() and {FLASH, CUDNN, KITCHEN_INT8} <= result.absent.keys()
    assert all(len(rounds) == 2 for rounds in result.rounds.values())
    assert all(result.relative_errors[name] < 0.01 for name in (PYTORCH, COMFYUI_CHOICE))
    assert result.exact_milliseconds() == {PYTORCH: result.milliseconds[PYTORCH]}
    columns, rows = result.table()
    assert columns == ["", "ms", "spread", f"x {COMFYUI_CHOICE}", "error"] and len(rows) == len(result.rounds)
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))["call"]["shape"]["keys"] == call.shape.keys


def test_the_reference_tells_a_wrong_method():
    call = a_call(masked=True, keys=48)

    def without_mask(operands):
        q, k, v = operands.q, operands.k, operands.v
        return lambda _: torch.nn.functional.scaled_dot_product_attention(q, k, v)

    result = benchmark_attention(call, CPU, [AttentionMethod("wrong", without_mask)], rounds=1)
    assert result.relative_errors["wrong"] > 0.1


@pytest.mark.parametrize(
    "raised, foreign, absent",
    [
        (Unavailable("not here"), False, "not here"),
        (torch.OutOfMemoryError("none left"), False, "not enough memory"),
        (ValueError("no plan\nfor it"), True, "no plan"),
        (ValueError("a defect"), False, None),
    ],
)
def test_what_fails_is_left_out_and_named(raised, foreign, absent):
    def fails(operands):
        raise raised

    def timed():
        return benchmark_attention(a_call(), CPU, [AttentionMethod("it", fails, foreign)])

    if absent is None:
        with pytest.raises(ValueError, match="a defect"):
            timed()
    else:
        result = timed()
        assert result.absent == {"it": absent} and not result.rounds


def test_a_cpu_times_fewer_tokens():
    wan = a_call(heads=40, width=128, tokens=32760, keys=512, batch=1)
    small = feasible_call(wan, CPU)
    assert small.shape.tokens * small.shape.keys * small.heads <= 1 << 20 and small.shape.head_dim == 128
    assert feasible_call(a_call(), CPU) == a_call()
    assert feasible_call(wan, torch.device("cuda", 0)) == wan


def test_ideogram_4s_calls_are_those_of_its_tokens_and_of_2048_px():
    """As far as it has so many, each once, in memory that a card of 8 GB has; on a CPU one."""
    card = torch.device("cuda", 0)
    for tokens, sizes in ((4352, [4352, 16640]), (16640, [16640]), (1 << 20, [1 << 15, 16640])):
        calls = ideogram4_attention(tokens, card)
        assert [call.shape for call in calls] == [AttentionShape(size, size, 256, False) for size in sizes]
        assert attention_memory(calls[-1]) < 3.4e9
    (call,) = ideogram4_attention(4352, CPU)
    assert call.name == "Ideogram 4" and call.shape.tokens < 4352
