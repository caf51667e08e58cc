"""Amdahl's law on made-up forwards."""

import pytest

from kernels.benchmark.forward_split import BlockCalls, Calls
from kernels.benchmark.methods import BF16, FUSED, NATIVE
from support.made_forwards import BLOCKS, DOWN, IN_BLOCKS, QKV, RESULTS, SPLIT, result


def test_shapes_that_matter_come_first_and_the_rest_is_left_out():
    assert SPLIT.shapes() == [QKV, DOWN]


def test_only_the_timed_linears_change():
    assert SPLIT.predicted(RESULTS, BF16) == pytest.approx(99.0)
    assert SPLIT.predicted(RESULTS, FUSED) == pytest.approx(99 * (100 - 62 + 4 * 4 + 2 * 3) / 100)
    assert SPLIT.predicted(RESULTS, NATIVE) is None  # not timed for w2


def test_only_ratios_of_products_alone_count_where_the_model_s_own_was_timed():
    """Alone, on a hotter card, every product takes twice as long."""
    hot = [result(QKV, **{BF16: 20.0, FUSED: 8.0}), result(DOWN, **{BF16: 22.0, FUSED: 6.0})]
    split = SPLIT._replace(in_bf16=True)
    assert split.predicted(hot, BF16) == pytest.approx(99.0)
    assert split.predicted(hot, FUSED) == pytest.approx(SPLIT.predicted(RESULTS, FUSED))


def test_blocks_by_amdahl_s_law():
    assert IN_BLOCKS.predicted_blocks() == pytest.approx(99 * (100 - 30 - 19) / 100)
    unknown = SPLIT._replace(blocks=(*BLOCKS, BlockCalls(1, 1.0, "odd", None)))
    assert unknown.predicted_blocks() is None and SPLIT.predicted_blocks() is None


def test_weights_that_come_over_the_bus_do_not_count_as_products():
    """In a model that does not fit the card, every product waits for its weight."""
    streaming = SPLIT._replace(
        watched=300.0, total=297.0, in_bf16=True, linears={QKV: Calls(4, 160.0), DOWN: Calls(2, 102.0)}
    )
    assert streaming.predicted(RESULTS, BF16) == pytest.approx(297 * (300 - 262 + 40 + 22) / 300)
    assert streaming.predicted(RESULTS, FUSED) == pytest.approx(297 * (300 - 262 + 16 + 6) / 300)
