"""The projection's arithmetic, that its model reproduces what was measured on an H200, and its stored documents."""

import pytest

from studies import rtx3090_projection as study
from studies.rtx3090_projection import FFN, H200, PACK, RTX_3090, WIDTH, AttentionTile, Pass, Tile
from support.sass import AttentionLoop, MainLoop

TILES, ATTENTION, OF_FAMILIES = study.stored()
STEPS = study.projection(RTX_3090, TILES, ATTENTION)
# 64 instructions of 16 cycles each beside 256 others: the tensor cores work for 0.8 of the time.
LOOP = MainLoop(tensor=64, instructions=320, operations=8192)
ENGINE = study.Engine(tops=1.0, per_cycle=512, sustained=0.5)
RATE = 1e12 * 0.5 * 0.8 / 82


@pytest.mark.parametrize("tiles, rounds", ((1, 1), (82, 1), (83, 2), (164, 2), (165, 3)))
def test_tiles_run_in_rounds_over_the_multiprocessors(tiles, rounds):
    large = Tile(128, 128, LOOP)
    seconds = study.gemm_seconds(RTX_3090, ENGINE, [Tile(128, 64, LOOP)], 128, 64 * tiles - 1, 4608)
    assert seconds == pytest.approx(rounds * 2 * 128 * 64 * (4608 + study.TILE_OVERHEAD) / RATE)
    both = study.gemm_seconds(RTX_3090, ENGINE, [large, Tile(128, 64, LOOP)], 128, 64 * tiles - 1, 4608)
    assert both == min(seconds, study.gemm_seconds(RTX_3090, ENGINE, [large], 128, 64 * tiles - 1, 4608))


@pytest.mark.parametrize("tiles, whole, parts", ((41, 0, 2), (82 + 27, 1, 3), (82 + 41, 1, 2)))
def test_a_ring_shares_the_tiles_of_its_last_round(tiles, whole, parts):
    k = 12288
    seconds = study.gemm_seconds(RTX_3090, ENGINE, [Tile(128, 64, LOOP, ring=True)], 128, 64 * tiles, k)
    tail = k / parts + study.TILE_OVERHEAD + study.SPLIT_OVERHEAD
    assert seconds == pytest.approx(2 * 128 * 64 * (whole * (k + study.TILE_OVERHEAD) + tail) / RATE)


def test_a_pass_takes_its_bytes_and_its_launches():
    seconds = study.pass_seconds(RTX_3090, [Pass(4, 0, 2), Pass(0, 5)], m=1000)
    assert seconds == pytest.approx((8 * WIDTH + 5 * FFN) * 1000 / (0.9 * 936e9) + 3 * 9e-6)


def test_a_second_walk_over_k_costs_less_than_a_second_gemm():
    def seconds(tiles, walks):
        return study.gemm_seconds(RTX_3090, RTX_3090.engines[PACK], tiles, 4352, WIDTH, FFN, walks)

    tiles = TILES[RTX_3090.name]
    once, twice = (seconds([tile for tile in tiles if not tile.ring], walks) for walks in (1, 2))
    assert 1.9 * once < twice < 2 * once and seconds(tiles, 1) < once
    assert seconds(tiles, 2) == twice  # which is without a ring


def test_int8_attention_takes_its_warps_in_turn():
    loop = AttentionLoop(tensor=96, cycles=1536, exponentials=10, instructions=600)
    tile = AttentionTile(128, 32, 8, loop)
    assert tile.cycles() == 2 * (1536 + 80 + 494)
    a_round, two = (study.int8_attention_seconds(RTX_3090, tile, m, m, 18) for m in (512, 640))
    # 18 heads of 4 blocks are one round on 82 multiprocessors, of 5 two, each of more keys.
    assert two == pytest.approx(a_round * 2 * 5 / 4)


def test_bf16_takes_its_operations_at_the_card_s_rate():
    blocks = study.Blocks(2, ((1000, ((128, 256),)),), ((1000, 500),), 1280, 1)
    parts = study.forward(RTX_3090, study.VARIANTS[study.BF16], blocks, {}, None, 71)
    assert parts["GEMM"] == pytest.approx(2 * 2 * 1000 * 128 * 256 / (0.92 * 71e12))
    assert parts["attention"] == pytest.approx(2 * 4 * 1000 * 500 * 1280 / 71e12)


# Billions of weights in the linears of all blocks, without modulations and embeddings.
@pytest.mark.parametrize(
    ("name", "billions"),
    (("Flux.1", (8.0, 9.2)), ("Qwen-Image", (13.0, 14.0)), ("Z-Image", (5.0, 5.6)), ("Wan 14 B", (13.5, 14.2))),
)
def test_the_families_are_as_large_as_the_models(name, billions):
    found = sum(blocks.count * n * k for blocks in study.FAMILIES[name] for _, own in blocks.streams for n, k in own)
    assert billions[0] < found / 1e9 < billions[1]


def test_steps_measured_on_an_h200_are_reproduced_within_a_tenth():
    assert set(study.MEASURED) <= set(study.VARIANTS)
    errors = study.errors(study.projection(H200, TILES))
    assert len(errors) >= 8 and max(map(abs, errors.values())) <= 0.1


@pytest.mark.parametrize("pixels", study.PIXELS)
def test_variants_differ_in_their_own_parts_alone(pixels):
    bf16, fp16, fused, int8 = (
        STEPS[name][pixels] for name in (study.BF16, study.FP16_SUMS, study.FUSED, study.INT8_ATTENTION)
    )
    assert fp16["GEMM"] == pytest.approx(bf16["GEMM"] / 2) and {**fp16, "GEMM": 0} == {**bf16, "GEMM": 0}
    assert int8["attention"] < fused["attention"] and int8["passes"] > fused["passes"]
    assert {**int8, "attention": 0, "passes": 0} == {**fused, "attention": 0, "passes": 0}
    in_bf16, in_16_bits = study.protection_costs(STEPS, pixels)
    assert 0 < in_16_bits <= in_bf16 / 2


@pytest.mark.parametrize(
    "name, document, attention",
    (
        ("rtx3090_projection", study.document, ATTENTION),
        ("families", study.families_document, OF_FAMILIES),
    ),
)
def test_the_stored_documents_are_what_the_model_says_now(name, document, attention):
    lines = (study.RESULTS / f"{name}.md").read_text().splitlines()
    assert lines[0].endswith("a projection") and lines[2].startswith("**Nothing here was measured on an RTX 3090.**")
    assert document(TILES, attention, lines[2].partition("** ")[2]).splitlines() == lines
