"""Amdahl's law on made-up forwards."""

import dataclasses

import pytest

from kernels.benchmark.health import Health
from kernels.benchmark.methods import BF16, COMFYUI_INT8, FUSED, NATIVE
from kernels.benchmark.outcome import (
    BlockCalls,
    Calls,
    ForwardSplit,
    Outcome,
    deployment_table,
    forward_table,
    relative_times,
    totals_by_shape,
)
from kernels.benchmark.shape_results import LinearShape, ShapeResult

QKV, DOWN, TINY = (LinearShape(*each) for each in (("qkv", 30, 10, 100), ("w2", 10, 40, 100), ("tiny", 30, 10, 1)))
SPLIT = ForwardSplit(99.0, 100.0, {QKV: Calls(4, 40.0), DOWN: Calls(2, 22.0), TINY: Calls(1, 0.5)}, 20.0)
BLOCKS = (BlockCalls(4, 60.0, "double", 2.0), BlockCalls(8, 38.0, "single", 2.0))
IN_BLOCKS = dataclasses.replace(SPLIT, blocks=BLOCKS)
WAITING = dataclasses.replace(SPLIT, watched=300.0)


def result(shape, **milliseconds):
    rounds = {method: [0.95 * time, time, 1.05 * time] for method, time in milliseconds.items()}
    return ShapeResult(shape, shape.tokens, rounds=rounds)


RESULTS = [
    result(QKV, **{BF16: 10.0, FUSED: 4.0, COMFYUI_INT8: 5.0}),
    result(DOWN, **{BF16: 11.0, FUSED: 3.0}),
]
SLOW = [result(QKV, **{BF16: 10.0, FUSED: 12.5}), result(DOWN, **{BF16: 11.0, FUSED: 13.0})]
NOISE = [result(QKV, **{BF16: 10.0, FUSED: 10.2, COMFYUI_INT8: 20.0})]


def test_shapes_that_matter_come_first_and_the_rest_is_left_out():
    assert SPLIT.shapes() == [QKV, DOWN]


def test_only_the_timed_linears_change():
    assert SPLIT.predicted(RESULTS, BF16) == pytest.approx(99.0)
    assert SPLIT.predicted(RESULTS, FUSED) == pytest.approx(99 * (100 - 62 + 4 * 4 + 2 * 3) / 100)
    assert SPLIT.predicted(RESULTS, NATIVE) is None  # not timed for w2


def test_only_ratios_of_products_alone_count_where_the_model_s_own_was_timed():
    """Alone, on a hotter card, every product takes twice as long."""
    hot = [result(QKV, **{BF16: 20.0, FUSED: 8.0}), result(DOWN, **{BF16: 22.0, FUSED: 6.0})]
    split = dataclasses.replace(SPLIT, in_bf16=True)
    assert split.predicted(hot, BF16) == pytest.approx(99.0)
    assert split.predicted(hot, FUSED) == pytest.approx(SPLIT.predicted(RESULTS, FUSED))


def test_blocks_by_amdahl_s_law():
    assert IN_BLOCKS.predicted_blocks() == pytest.approx(99 * (100 - 30 - 19) / 100)
    unknown = dataclasses.replace(SPLIT, blocks=(*BLOCKS, BlockCalls(1, 1.0, "odd", None)))
    assert unknown.predicted_blocks() is None and SPLIT.predicted_blocks() is None


def test_the_table_adds_up():
    columns, rows = forward_table(IN_BLOCKS, RESULTS)
    by_name = {row[0]: row[1:] for row in rows}
    assert len(columns) == 3
    assert by_name["linears"][0] == "62.5" and by_name["attention"][0] == "20.0" and by_name["the rest"][0] == "17.5"
    assert by_name[f"predicted, linears in {FUSED}"] == ["59.4", "1.67 x bf16"]
    assert by_name["predicted, whole blocks on the fused kernels"] == ["50.5", "1.96 x bf16"]
    assert f"predicted, linears in {COMFYUI_INT8}" not in by_name
    # Each clock costs the host time, which is then all that is measured.
    assert forward_table(WAITING, RESULTS)[1] == [["one forward, as the model is", "99.0"]]


def test_linears_count_as_often_as_they_are_called():
    assert relative_times(RESULTS, SPLIT) == pytest.approx({FUSED: (4 * 4 + 2 * 3) / (4 * 10 + 2 * 11), BF16: 1.0})
    assert relative_times(RESULTS, None) == pytest.approx({FUSED: 7 / 21, BF16: 1.0})
    assert relative_times([], None) == relative_times([result(QKV, **{FUSED: 1.0})], None) == {}
    assert totals_by_shape(RESULTS, SPLIT) == {
        (30, 10): {BF16: 40, FUSED: 16, NATIVE: 20},
        (10, 40): {BF16: 22, FUSED: 6},
    }
    both = [*RESULTS, result(TINY, **{BF16: 1.0, FUSED: 2.0})]
    assert totals_by_shape(both, None)[30, 10] == {BF16: 11, FUSED: 6}


def test_the_deployment_table_names_the_fastest_and_the_noise():
    columns, rows = deployment_table([*RESULTS, *NOISE, result(TINY)])
    assert [row[-1] for row in rows] == [FUSED, FUSED, f"{FUSED} (noise: {BF16})", "-"]
    assert rows[1][2:5] == ["11.000", "3.000", "-"] and len(columns) == len(rows[0])


ABSENT = ShapeResult(QKV, 100, rounds={BF16: [1.0]}, absent={FUSED: "no GPU"})
WITHOUT_BF16 = ShapeResult(QKV, 100, rounds={FUSED: [1.0]}, absent={BF16: "out of memory"})


@pytest.mark.parametrize(
    "results, split, says",
    (
        (RESULTS, SPLIT, "On this card INT8 is 1.67 × bf16; your image takes 0.60 of the time"),
        (RESULTS, IN_BLOCKS, "On this card INT8 is 1.96 × bf16; your image takes 0.51 of the time"),
        (SLOW, SPLIT, "On this card INT8 is only 0.88 × bf16; your image takes 1.14 of the time"),
        (RESULTS, None, "On this card INT8 is 3.00 × bf16 in the linears"),
        (RESULTS, WAITING, "On this card INT8 is 2.82 × bf16 in the linears"),
        (NOISE, None, "On this card INT8 and bf16 are equally fast, within noise"),
        ([ABSENT], None, "INT8 was not timed beside bf16 here: no GPU"),
        ([WITHOUT_BF16], None, "INT8 was not timed beside bf16 here: out of memory"),
        ([], None, "INT8 was not timed beside bf16 here"),
    ),
)
def test_the_headline(results, split, says):
    assert Outcome({}, Health(None, None), results, [], split, [], []).headline == says
