"""Which configurations are offered for a shape, and what they can be launched with."""

import random
from dataclasses import replace

import pytest

from kernels.linear.tiles import (
    ARCHITECTURES,
    KITCHEN,
    PIPELINES,
    GemmConfig,
    gemm_candidates,
    gpu_architecture,
    is_offered,
)

CARDS = {(8, 6): 82, (8, 0): 108, (8, 9): 128, (9, 0): 132, (12, 0): 170}
RINGS = {"ring", "kitchen"}
COPIES = {(8, 6): RINGS, (8, 0): RINGS, (8, 9): RINGS, (9, 0): {"descriptors"}, (12, 0): {"kitchen"}}


@pytest.mark.parametrize("capability", CARDS)
def test_a_few_different_ones_for_every_shape(capability):
    generator = random.Random(0)
    for _ in range(300):
        m, n, k = (int(2 ** generator.uniform(0, 16)) for _ in range(3))
        offered = gemm_candidates(capability, CARDS[capability], m, n, k)
        assert 1 <= len(offered) == len(set(offered)) <= 25
        assert len({config.kernel for config in offered if config != KITCHEN}) <= 10
        for config in offered:
            assert config.pipeline in COPIES[capability] or config.pipeline == "pointers"
            assert config.pipeline == "pointers" or k % 16 == 0
            assert config.split_k == 1 or k >= config.split_k * config.block_k
            assert is_offered(config)
        twice = gemm_candidates(capability, CARDS[capability], m, n, k, passes=2)
        assert 1 <= len(twice) == len(set(twice)) <= 25
        assert all(config.split_k == 1 and is_offered(config, passes=2) for config in twice)
        plain = gemm_candidates(capability, CARDS[capability], m, n, k, pipelines=["pointers"])
        assert {config.pipeline for config in plain} == {"pointers"} and all(map(is_offered, plain))


@pytest.mark.parametrize("m", (2560, 4352))
@pytest.mark.parametrize("n, k", ((13824, 4608), (4608, 4608), (12288, 4608), (4608, 12288)))
def test_the_best_ranked_come_first_on_large_matrices(m, n, k):
    rates = ARCHITECTURES["Ampere"].rates
    assert rates[replace(gemm_candidates((8, 6), 82, m, n, k)[0], split_k=1)] >= 0.98
    assert rates[gemm_candidates((8, 6), 82, m, n, k, passes=2)[0]] >= 0.8
    for passes in (1, 2):
        first = gemm_candidates((9, 0), 132, m, n, k, passes)[0]
        # No more rows of tiles than there are form a group.
        assert ARCHITECTURES["Hopper"].rates[replace(first, group_m=24)] == 1.0


def test_kitchens_gemm_is_tried_last_where_it_is_there_and_can_be_the_fastest():
    for capability, multiprocessors in CARDS.items():
        offered = gemm_candidates(capability, multiprocessors, 4096, 4608, 4608)
        assert (offered[-1] == KITCHEN) == (capability != (9, 0)) and KITCHEN not in offered[:-1]
    for passes, k, pipelines in ((2, 4608, PIPELINES), (1, 4600, PIPELINES), (1, 4608, ("pointers", "ring"))):
        assert KITCHEN not in gemm_candidates((8, 6), 82, 4096, 4608, k, passes, pipelines)
    assert is_offered(KITCHEN) and not is_offered(KITCHEN, passes=2)


def test_every_capability_has_one_architecture():
    capabilities = [capability for known in ARCHITECTURES.values() for capability in known.capabilities]
    assert len(capabilities) == len(set(capabilities))
    for known in ARCHITECTURES.values():
        assert all(gpu_architecture(capability) is known for capability in known.capabilities)
        assert max(known.rates.values()) <= 1.0 and min(known.rates.values()) > 0.0


@pytest.mark.parametrize("capability", ((8, 8), (13, 0)))
def test_an_unknown_card_gets_what_every_card_from_ampere_on_can_run(capability):
    assert gpu_architecture(capability) is ARCHITECTURES["Blackwell"]
    assert all(config.pipeline == "pointers" for config in gpu_architecture(capability).rates)


def test_few_tiles_of_many_channels_are_split_and_small_matrices_get_small_ones():
    assert gemm_candidates((9, 0), 132, 512, 4608, 53248)[0].split_k > 1
    assert all(config.split_k == 1 for config in gemm_candidates((9, 0), 132, 512, 4608, 512))

    assert gemm_candidates((8, 6), 82, 16, 256, 512)[0].block_m <= 32


def test_every_configuration_can_be_launched():
    """Also as it runs where rows do not begin on 16 bytes."""
    rated = [config for known in ARCHITECTURES.values() for config in known.rates]
    assert all(c.by_pointers.pipeline == "pointers" and c.by_pointers.group_m == c.group_m for c in rated)
    for config in (*rated, *(config.by_pointers for config in rated)):
        sizes = config.block_m, config.block_n, config.block_k, config.num_warps
        assert all(size.bit_count() == 1 for size in sizes) and config.pipeline in PIPELINES
        if config.pipeline == "ring":
            assert config.num_warps * 64 * 64 == config.block_m * config.block_n and config.num_stages >= 2


def test_a_ring_shares_the_tiles_of_the_last_round_where_that_makes_it_shorter():
    ring = GemmConfig(256, 128, 64, 8, 8, 4, "ring", split_k=3)
    assert [ring.shared_tiles(tiles, 82) for tiles in (0, 1, 54, 55, 82, 83, 83 + 54)] == [0, 1, 54, 0, 0, 1, 0]
    assert replace(ring, split_k=1).shared_tiles(83, 82) == 0
    others = replace(ring, pipeline="pointers")
    assert [replace(others, split_k=parts).shared_tiles(83, 82) for parts in (1, 3)] == [0, 83]


def test_what_shares_a_kernel():
    ring = GemmConfig(256, 128, 64, 8, 8, 4, "ring")
    assert ring.kernel == replace(ring, group_m=4, split_k=3).kernel != replace(ring, num_stages=3).kernel
    by_pointers = replace(ring, pipeline="pointers")
    assert by_pointers.kernel == replace(by_pointers, group_m=4).kernel != replace(by_pointers, split_k=3).kernel


def test_the_last_split_sums_as_much_as_its_registers_hold():
    assert GemmConfig(128, 128, 64, 8, 4, 3, split_k=3).part_n == 32
    assert GemmConfig(128, 128, 64, 8, 8, 3, split_k=3).part_n == 64
    assert GemmConfig(16, 64, 64, 8, 4, 3, split_k=2).part_n == 64
