"""The projection's arithmetic, and that its model reproduces what was measured on an H200."""

import pytest

from studies import rtx3090_projection as study
from studies.rtx3090_projection import FFN, H200, PACK, RTX_3090, WIDTH, AttentionTile, Pass, Tile
from support.sass import AttentionLoop, MainLoop

STORED = study.RESULTS / "rtx3090_projection.md"
# 64 instructions of 16 cycles each beside 256 others: the tensor cores work for 0.8 of the time.
LOOP = MainLoop(tensor=64, instructions=320, operations=8192)
ENGINE = study.Engine(tops=1.0, per_cycle=512, sustained=0.5)


def test_a_main_loop_of_other_instructions_keeps_the_tensor_cores_waiting():
    assert ENGINE.efficiency(LOOP) == pytest.approx(0.8)
    assert ENGINE.efficiency(MainLoop(64, 64, 8192)) == 1


@pytest.mark.parametrize("tiles, rounds", ((1, 1), (82, 1), (83, 2), (164, 2), (165, 3)))
def test_tiles_run_in_rounds_over_the_multiprocessors(tiles, rounds):
    seconds = study.gemm_seconds(RTX_3090, ENGINE, [Tile(128, 64, LOOP)], 128, 64 * tiles - 1, 4608)
    per_tile = 2 * 128 * 64 * (4608 + study.TILE_OVERHEAD) / (1e12 * 0.5 * 0.8 / 82)
    assert seconds == pytest.approx(rounds * per_tile)


def test_the_fastest_tile_runs():
    small, large = Tile(64, 64, LOOP), Tile(128, 128, LOOP)
    shape = (64, 64 * 82, 4608)
    alone = study.gemm_seconds(RTX_3090, ENGINE, [small], *shape)
    assert study.gemm_seconds(RTX_3090, ENGINE, [large, small], *shape) == alone


def test_a_pass_takes_its_bytes_and_its_launches():
    passes = [Pass(4, 0, 2), Pass(0, 5)]
    seconds = study.pass_seconds(RTX_3090, passes, m=1000)
    assert seconds == pytest.approx((8 * WIDTH + 5 * FFN) * 1000 / (0.9 * 936e9) + 3 * 9e-6)


def test_a_second_walk_over_k_costs_less_than_a_second_gemm():
    tiles = study.stored_tiles()[RTX_3090.name]
    gemm = RTX_3090, RTX_3090.engines[PACK]
    shape = 4352, WIDTH, FFN
    once, twice = (
        study.gemm_seconds(*gemm, [tile for tile in tiles if not tile.ring], *shape, walks) for walks in (1, 2)
    )
    assert 1.9 * once < twice < 2 * once
    assert study.gemm_seconds(*gemm, tiles, *shape, 2) == twice  # which is without a ring
    assert study.gemm_seconds(*gemm, tiles, *shape) < once


@pytest.mark.parametrize("tiles, whole, parts", ((41, 0, 2), (82 + 27, 1, 3), (82 + 41, 1, 2)))
def test_a_ring_shares_the_tiles_of_its_last_round(tiles, whole, parts):
    k = 12288
    seconds = study.gemm_seconds(RTX_3090, ENGINE, [Tile(128, 64, LOOP, ring=True)], 128, 64 * tiles, k)
    tail = k / parts + study.TILE_OVERHEAD + study.SPLIT_OVERHEAD
    rate = 1e12 * 0.5 * 0.8 / 82
    assert seconds == pytest.approx(2 * 128 * 64 * (whole * (k + study.TILE_OVERHEAD) + tail) / rate)


def test_steps_measured_on_an_h200_are_reproduced_within_a_tenth():
    assert set(study.MEASURED) <= set(study.VARIANTS)
    errors = study.errors(study.projection(H200, study.stored_tiles()))
    assert len(errors) >= 8
    assert not {case: error for case, error in errors.items() if abs(error) > 0.1}


def test_int8_attention_takes_its_warps_in_turn():
    loop = AttentionLoop(tensor=96, cycles=1536, exponentials=10, instructions=600)
    assert AttentionTile(128, 32, 8, loop).cycles() == 2 * (1536 + 80 + 494)
    a_round, two = (study.int8_attention_seconds(RTX_3090, AttentionTile(128, 32, 8, loop), m) for m in (512, 640))
    # 18 heads of 4 blocks are one round on 82 multiprocessors, of 5 two, each of more keys.
    assert two == pytest.approx(a_round * 2 * 5 / 4)


def test_int8_attention_changes_attention_and_its_passes_alone():
    steps = study.projection(RTX_3090, study.stored_tiles(), study.stored_attention())
    for pixels in study.PIXELS:
        exact, int8 = steps[study.FUSED][pixels], steps[study.INT8_ATTENTION][pixels]
        assert int8["attention"] < exact["attention"] and int8["passes"] > exact["passes"]
        assert {**int8, "attention": 0, "passes": 0} == {**exact, "attention": 0, "passes": 0}


def test_fp16_sums_double_the_rate_of_linears_and_change_nothing_else():
    steps = study.projection(RTX_3090, study.stored_tiles(), study.stored_attention())
    for pixels in study.PIXELS:
        bf16, fp16 = steps[study.BF16][pixels], steps[study.FP16_SUMS][pixels]
        assert fp16["GEMM"] == pytest.approx(bf16["GEMM"] / 2)
        assert {**fp16, "GEMM": 0} == {**bf16, "GEMM": 0}


@pytest.mark.parametrize("pixels", study.PIXELS)
def test_16_bit_protection_adds_at_most_half_of_what_bf16_protection_adds(pixels):
    in_bf16, in_16_bits = study.protection_costs(
        study.projection(RTX_3090, study.stored_tiles(), study.stored_attention()), pixels
    )
    assert 0 < in_16_bits <= in_bf16 / 2


def test_the_stored_document_is_what_the_model_says_now():
    lines = STORED.read_text().splitlines()
    assert lines[0].endswith("a projection") and lines[2].startswith("**Nothing here was measured on an RTX 3090.**")
    heading = lines[2].partition("** ")[2]
    assert study.document(study.stored_tiles(), study.stored_attention(), heading).splitlines() == lines
