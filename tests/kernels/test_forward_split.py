"""Amdahl's law on made-up forwards."""

import dataclasses

import pytest

from kernels.benchmark.forward import (
    BlockCalls,
    Calls,
    ForwardSplit,
    Product,
    auto_choice_sentence,
    forward_table,
    headline,
    relative_times,
)
from kernels.benchmark.methods import BF16, COMFYUI_INT8, FUSED
from kernels.benchmark.report import ShapeResult
from kernels.benchmark.shapes import LinearShape
from kernels.card.device import FUSED as FUSED_WAY
from kernels.card.device import NATIVE as NATIVE_WAY

QKV, DOWN, TINY = Product(100, 30, 10), Product(100, 10, 40), Product(1, 30, 10)
LINEARS = {QKV: Calls("qkv", 4, 40.0), DOWN: Calls("w2", 2, 22.0), TINY: Calls("tiny", 1, 0.5)}
SPLIT = ForwardSplit(99.0, 100.0, LINEARS, 20.0)


def result(product, **milliseconds):
    rounds = {method: [time] * 3 for method, time in milliseconds.items()}
    return ShapeResult(LinearShape("", product.n, product.k, product.m), product.m, rounds=rounds)


RESULTS = [
    result(QKV, **{BF16: 10.0, FUSED: 4.0, COMFYUI_INT8: 5.0}),
    result(DOWN, **{BF16: 11.0, FUSED: 3.0}),
]


def test_shapes_that_matter_come_first_and_the_rest_is_left_out():
    assert [(shape.name, shape.tokens, shape.n, shape.k) for shape in SPLIT.shapes()] == [
        ("qkv", 100, 30, 10),
        ("w2", 100, 10, 40),
    ]
    assert SPLIT.linear_milliseconds == 62.5


def test_only_the_timed_linears_change():
    assert SPLIT.predicted(RESULTS, BF16) == pytest.approx(99.0)
    assert SPLIT.predicted(RESULTS, FUSED_WAY) == pytest.approx(99 * (100 - 62 + 4 * 4 + 2 * 3) / 100)
    assert SPLIT.predicted(RESULTS, NATIVE_WAY) is None  # not timed for w2


def test_only_ratios_of_products_alone_count_where_the_model_s_own_was_timed():
    """Alone, on a hotter card, every product takes twice as long."""
    hot = [result(QKV, **{BF16: 20.0, FUSED: 8.0}), result(DOWN, **{BF16: 22.0, FUSED: 6.0})]
    split = dataclasses.replace(SPLIT, now=BF16)
    assert split.predicted(hot, BF16) == pytest.approx(99.0)
    assert split.predicted(hot, FUSED_WAY) == pytest.approx(SPLIT.predicted(RESULTS, FUSED_WAY))


BLOCKS = (BlockCalls("double", 4, 60.0, 2.0), BlockCalls("single", 8, 38.0, 2.0))


def test_blocks_by_amdahl_s_law():
    split = dataclasses.replace(SPLIT, block_watched=100.0, blocks=BLOCKS)
    assert split.predicted_blocks() == pytest.approx(99 * (100 - 30 - 19) / 100)
    unknown = dataclasses.replace(split, blocks=(*BLOCKS, BlockCalls("odd", 1, 1.0, None)))
    assert unknown.predicted_blocks() is None and SPLIT.predicted_blocks() is None


def test_the_sentence_says_what_an_image_takes():
    sentence = auto_choice_sentence(SPLIT, RESULTS)
    assert "linears are 62% of a step" in sentence and "2.8 x" in sentence
    assert "0.60 of the time (59 ms a forward instead of 99)" in sentence and "fused too" not in sentence
    sentence = auto_choice_sentence(dataclasses.replace(SPLIT, block_watched=99.0, blocks=BLOCKS), RESULTS)
    assert "alone leaves 0.60" in sentence and "image takes 0.51 of it (50 ms" in sentence


def test_noise_is_called_noise():
    noise = [result(QKV, **{BF16: 10.0, FUSED: 10.0})]
    noise[0].rounds = {BF16: [9.0, 11.0], FUSED: [10.0, 12.0]}
    assert "no more than noise" in auto_choice_sentence(SPLIT, noise)


def test_where_the_card_waits_for_python_nothing_is_predicted():
    """Each clock costs the host time, which is then all that is measured."""
    late = dataclasses.replace(SPLIT, watched=300.0)
    sentence = auto_choice_sentence(late, RESULTS)
    assert "waits for Python" in sentence and "99 ms one of 300" in sentence
    assert forward_table(late, RESULTS)[1] == [["one forward, as the model is", "99.0"]]


def test_without_the_kernel_there_is_no_prediction():
    assert "No prediction" in auto_choice_sentence(SPLIT, [result(QKV, **{BF16: 1.0})])


def test_the_table_adds_up():
    columns, rows = forward_table(SPLIT, RESULTS)
    by_name = {row[0]: row[1:] for row in rows}
    assert len(columns) == 3
    assert by_name["linears"][0] == "62.5" and by_name["attention"][0] == "20.0" and by_name["the rest"][0] == "17.5"
    assert by_name[f"predicted, linears in {FUSED}"] == ["59.4", "1.67 x bf16"]
    assert f"predicted, linears in {COMFYUI_INT8}" not in by_name


def test_linears_count_as_often_as_they_are_called():
    assert relative_times(RESULTS, SPLIT) == pytest.approx({FUSED: (4 * 4 + 2 * 3) / (4 * 10 + 2 * 11), BF16: 1.0})
    assert relative_times(RESULTS, None) == pytest.approx({FUSED: 7 / 21, BF16: 1.0})
    assert relative_times([], None) == relative_times([result(QKV, **{FUSED: 1.0})], None) == {}


SLOW = [result(QKV, **{BF16: 10.0, FUSED: 12.5}), result(DOWN, **{BF16: 11.0, FUSED: 12.0})]
NOISE = [result(QKV, **{BF16: 10.0, FUSED: 10.0})]
ABSENT = ShapeResult(LinearShape("", 30, 10), 100, rounds={BF16: [1.0]}, absent={FUSED: "no GPU"})


@pytest.mark.parametrize(
    "results, split, says",
    (
        (RESULTS, SPLIT, "On this card INT8 is 1.67 × bf16; your image takes 0.60 of the time"),
        (
            RESULTS,
            dataclasses.replace(SPLIT, block_watched=99.0, blocks=BLOCKS),
            "On this card INT8 is 1.98 × bf16; your image takes 0.51 of the time",
        ),
        (SLOW, SPLIT, "On this card INT8 is only 0.89 × bf16; your image takes 1.12 of the time"),
        (RESULTS, None, "On this card INT8 is 3.00 × bf16 in the linears"),
        (RESULTS, dataclasses.replace(SPLIT, watched=300.0), "On this card INT8 is 2.82 × bf16 in the linears"),
        (NOISE, None, "On this card INT8 and bf16 are equally fast, within noise"),
        ([ABSENT], None, "INT8 was not timed beside bf16 here: no GPU"),
        ([], None, "INT8 was not timed beside bf16 here"),
    ),
)
def test_the_headline(results, split, says):
    assert headline(results, split) == says
