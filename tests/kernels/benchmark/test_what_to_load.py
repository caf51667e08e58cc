"""Ways to load a model, on made-up machines."""

import pytest

from kernels.benchmark.methods import BF16, FUSED, FUSED_CODES, FUSED_GGUF
from kernels.benchmark.what_to_load import (
    LoadedSizes,
    Room,
    answer,
    best_form,
    loaded_forms,
    loading_table,
    step_milliseconds,
)
from support.made_forwards import DOWN, IN_BLOCKS, QKV, RESULTS, SPLIT, WAITING, result

TIMED = [
    result(QKV, **{BF16: 10.0, FUSED: 4.0, FUSED_CODES: 5.0, FUSED_GGUF: 4.5}),
    result(DOWN, **{BF16: 11.0, FUSED: 3.0, FUSED_CODES: 3.5, FUSED_GGUF: 4.0}),
]
SIZES = LoadedSizes(2, 16_000_000_000, 1_000_000_000)
LARGE = Room(card=24_000_000_000, host=64_000_000_000, step=500_000_000, bus=20e9)
SMALL = LARGE._replace(card=8_500_000_000)


def test_a_form_adds_what_its_linears_take_longer():
    int8, codes, gguf = loaded_forms(IN_BLOCKS, TIMED, SIZES, LARGE)
    assert int8.milliseconds == pytest.approx(2 * IN_BLOCKS.predicted_blocks())
    assert codes.milliseconds == pytest.approx(2 * (IN_BLOCKS.predicted_blocks() + 4 * 1.0 + 2 * 0.5))
    assert gguf.milliseconds == pytest.approx(2 * (IN_BLOCKS.predicted_blocks() + 4 * 0.5 + 2 * 1.0))
    assert (int8.weights, codes.weights, gguf.weights) == (17e9, 16e9 * 9 / 16 + 1e9, 16e9 * 144 / 256 + 1e9)
    assert {each.streamed for each in (int8, codes, gguf)} == {0}
    assert int8.peak == 17.5e9 and int8.seconds == pytest.approx(20 * int8.milliseconds / 1000)


def test_without_blocks_the_linears_alone_are_predicted():
    (int8, *_) = loaded_forms(SPLIT, TIMED, SIZES, LARGE)
    assert int8.milliseconds == pytest.approx(2 * SPLIT.predicted(TIMED, FUSED))


def test_a_form_without_times_is_left_out():
    assert [each.name for each in loaded_forms(SPLIT, RESULTS, SIZES, LARGE)] == ["INT8"]
    assert loaded_forms(SPLIT, [result(QKV, **{BF16: 1.0})], SIZES, LARGE) == []


def test_a_forward_that_waits_for_python_takes_as_long_in_any_form():
    forms = loaded_forms(WAITING, TIMED, SIZES, LARGE)
    assert {each.milliseconds for each in forms} == {2 * WAITING.total} and best_form(forms).name == "INT8"
    assert best_form(loaded_forms(WAITING, TIMED, SIZES, SMALL)).name == "W4A8 as stored"


@pytest.mark.parametrize(
    "bus, milliseconds",
    (
        (20e9, 50 + 425),  # the half that streams takes as long as the bus
        (500e9, 100),  # a bus that is faster than the products hides behind them
    ),
)
def test_the_slower_of_bus_and_products_counts(bus, milliseconds):
    assert step_milliseconds(100.0, 17_000_000_000, 8_500_000_000, bus) == pytest.approx(milliseconds)


def test_the_most_exact_of_the_fast_ones_is_named():
    assert best_form(loaded_forms(IN_BLOCKS, TIMED, SIZES, LARGE)).name == "INT8"
    small = loaded_forms(IN_BLOCKS, TIMED, SIZES, SMALL)
    assert small[0].streamed == 8.5e9 and small[0].peak == 9e9
    assert best_form(small).name == "W4A8 as stored"
    assert answer(small).startswith("Load W4A8 as stored here: ") and answer(small).endswith("9.0 GB of the card")


def test_what_the_host_cannot_hold_is_not_named():
    little = LARGE._replace(host=8_000_000_000)  # one of the two models in fewer bits, none in INT8
    forms = loaded_forms(IN_BLOCKS, TIMED, SIZES, little)
    assert [each.fits for each in forms] == [False, True, True] and best_form(forms) == forms[1]
    columns, rows = loading_table(forms)
    assert rows[0][1] == "does not fit the host's memory" and all(len(row) == len(columns) for row in rows)
    assert answer(loaded_forms(IN_BLOCKS, TIMED, SIZES, LARGE._replace(host=1))) is None
    assert answer([]) is None
