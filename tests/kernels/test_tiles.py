"""Which configurations are offered for a shape, and what a wrong one is told."""

import random
from dataclasses import replace

import pytest

from kernels.triton_kernels.tiles import (
    ARCHITECTURES,
    SHIPPED,
    GemmConfig,
    gemm_candidates,
    gpu_architecture,
    is_offered,
)
from kernels.triton_kernels.tuning import m_bucket

CARDS = {(8, 6): 82, (8, 0): 108, (8, 9): 128, (9, 0): 132, (12, 0): 170}


@pytest.mark.parametrize("capability", CARDS)
def test_a_few_different_ones_for_every_shape(capability):
    generator = random.Random(0)
    for _ in range(300):
        m, n, k = (int(2 ** generator.uniform(0, 16)) for _ in range(3))
        offered = gemm_candidates(capability, CARDS[capability], m, n, k)
        assert 1 <= len(offered) == len(set(offered)) <= 10
        for config in offered:
            assert config.pipeline == "pointers" or (capability == (9, 0) and k % 16 == 0)
            assert config.split_k == 1 or k >= config.split_k * config.block_k
            assert is_offered(config)
        twice = gemm_candidates(capability, CARDS[capability], m, n, k, passes=2)
        assert 1 <= len(twice) == len(set(twice)) <= 10
        assert all(config.split_k == 1 and is_offered(config, passes=2) for config in twice)


@pytest.mark.parametrize("m", (2560, 4352))
@pytest.mark.parametrize("n, k", ((13824, 4608), (4608, 4608), (12288, 4608), (4608, 12288)))
def test_the_best_ranked_come_first_on_large_matrices(m, n, k):
    assert ARCHITECTURES["Ampere"].rates[gemm_candidates((8, 6), 82, m, n, k)[0]] >= 0.98
    for passes in (1, 2):
        first = gemm_candidates((9, 0), 132, m, n, k, passes)[0]
        # No more rows of tiles than there are form a group.
        assert ARCHITECTURES["Hopper"].rates[replace(first, group_m=24)] == 1.0


def test_every_capability_has_one_architecture():
    capabilities = [capability for known in ARCHITECTURES.values() for capability in known.capabilities]
    assert len(capabilities) == len(set(capabilities))
    for known in ARCHITECTURES.values():
        assert all(gpu_architecture(capability) is known for capability in known.capabilities)
        assert max(known.rates.values()) <= 1.0 and min(known.rates.values()) > 0.0


@pytest.mark.parametrize("capability", ((8, 8), (13, 0)))
def test_an_unknown_card_gets_what_every_card_from_ampere_on_can_run(capability):
    assert gpu_architecture(capability) is ARCHITECTURES["Ampere"]
    assert all(config.pipeline == "pointers" for config in gpu_architecture(capability).rates)


def test_few_tiles_and_many_channels_split_them():
    assert gemm_candidates((9, 0), 132, 512, 4608, 53248)[0].split_k > 1
    assert all(config.split_k == 1 for config in gemm_candidates((9, 0), 132, 512, 4608, 512))


def test_small_matrices_get_small_tiles():
    assert gemm_candidates((8, 6), 82, 16, 256, 512)[0].block_m <= 32


def test_shipped_ones_are_found_by_the_tuner():
    for (card, bucket, n, k, passes), config in SHIPPED.items():
        assert card and m_bucket(bucket) == bucket and n > 0 and k > 0
        assert is_offered(config, passes)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"block_m": 96}, "block_m must be a power of two; got 96"),
        ({"num_stages": 0}, "num_stages must be a positive int; got 0"),
        ({"split_k": 1.0}, "split_k must be a positive int"),
        ({"pipeline": "magic"}, "pipeline must be one of pointers, descriptors"),
    ],
)
def test_a_wrong_configuration_is_refused(changes, message):
    values = {"block_m": 64, "block_n": 64, "block_k": 64, "group_m": 8, "num_warps": 4, "num_stages": 3}
    with pytest.raises(ValueError, match=message):
        GemmConfig(**{**values, **changes})


def test_the_last_split_sums_as_much_as_its_registers_hold():
    assert GemmConfig(128, 128, 64, 8, 4, 3, split_k=3).part_n == 32
    assert GemmConfig(128, 128, 64, 8, 8, 3, split_k=3).part_n == 64
    assert GemmConfig(16, 64, 64, 8, 4, 3, split_k=2).part_n == 64
