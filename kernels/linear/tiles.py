"""Tile configurations of the fused GEMM: a table of architectures, and what is worth trying on a card for a shape."""

import functools
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

# Each with the numbers of programs that may share the K of a tile.
_SPLITS = {"pointers": (1, 2, 3, 5), "descriptors": (1, 2, 3, 5), "ring": (1, 2, 3, 4, 5), "kitchen": (1,)}
PIPELINES = tuple(_SPLITS)
_PARTIAL_SUMS_PER_THREAD = 128


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes in elements, powers of two; tile-order group; warps per program; software pipeline stages; how
    operands are fetched, one of PIPELINES; how many programs share the K of a tile: of each, with `ring` of those in
    the last round of the multiprocessors. A ring has two stages or more, and a warp for each 64 x 64 of a tile."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int
    pipeline: str = "pointers"
    split_k: int = 1

    def tiles(self, m: int, n: int) -> int:
        """Return the number of tiles of an [m, n] output."""
        return -(-m // self.block_m) * -(-n // self.block_n)

    def shared_tiles(self, tiles: int, multiprocessors: int) -> int:
        """Return how many of the tiles have their K shared by `split_k` programs each.

        With `ring`, where a multiprocessor holds one program, those of the last round if sharing makes it shorter.
        """
        if self.split_k == 1 or self.pipeline != "ring":
            return tiles if self.split_k > 1 else 0
        rest = tiles % multiprocessors
        return rest if -(-rest * self.split_k // multiprocessors) < self.split_k else 0

    @property
    def kernel(self) -> "GemmConfig":
        """One for all that share a compiled kernel, which gets its group at the launch, a ring its split, too."""
        return replace(self, group_m=1, split_k=1 if self.pipeline == "ring" else self.split_k)

    @property
    def by_pointers(self) -> "GemmConfig":
        """The one in its place where rows do not begin on 16 bytes. A ring's tile is too large for that."""
        if self.pipeline in ("ring", "kitchen"):
            return GemmConfig(128, 128, 64, self.group_m, 4, 3)
        return replace(self, pipeline="pointers")

    @property
    def part_n(self) -> int:
        """Columns of a tile that the last of `split_k` programs sums at a time: as many as its registers hold."""
        columns = _PARTIAL_SUMS_PER_THREAD * 32 * self.num_warps // (self.split_k * self.block_m)
        return max(16, min(self.block_n, 1 << (max(1, columns).bit_length() - 1)))


class Architecture(NamedTuple):
    """A family of cards that run the same configurations."""

    capabilities: tuple[tuple[int, int], ...]  # of its cards
    rates: Mapping[GemmConfig, float]  # the share of the best one's rate that each reaches on large matrices
    balance: int  # multiply-adds of a multiprocessor's tensor cores while one byte of an operand reaches it
    tries_kitchen: bool = True  # whether comfy-kitchen's GEMM is tried beside them: where Triton's machine code is slow


# comfy-kitchen's GEMM, which chooses its tiles itself.
KITCHEN = GemmConfig(1, 1, 1, 1, 1, 1, "kitchen")

# `mma.s8` with a cp.async pipeline. Every entry fits the 99 KB that a block may use on sm_86. The rates are those of
# the sm_80 build on an H200 with as many blocks per multiprocessor as the shared memory of sm_86 holds: the geometric
# mean over Ideogram 4's block shapes (tests/studies/ampere_on_hopper.py).
_MMA_RATES = {
    GemmConfig(64, 256, 64, 16, 4, 3): 0.99,
    GemmConfig(256, 64, 64, 16, 4, 3): 0.98,
    GemmConfig(128, 128, 128, 16, 4, 2): 0.95,
    GemmConfig(128, 128, 64, 8, 4, 3): 0.93,
    GemmConfig(128, 64, 128, 16, 4, 3): 0.93,
    GemmConfig(128, 128, 128, 16, 4, 3): 0.92,
    GemmConfig(64, 128, 128, 16, 4, 3): 0.92,
    GemmConfig(64, 64, 128, 8, 4, 3): 0.76,
    GemmConfig(32, 64, 256, 4, 4, 3): 0.48,
    GemmConfig(32, 128, 128, 4, 4, 4): 0.47,
    GemmConfig(16, 128, 128, 1, 4, 4): 0.23,
    GemmConfig(16, 64, 256, 1, 4, 4): 0.21,
}

# `mma.s8` with a ring of shared buffers, rates like those above. Their registers leave a multiprocessor room for one
# program. What else Ampere runs reaches 0.82 of the best of them.
_BESIDE_A_RING = 0.82
_RING_RATES = {
    GemmConfig(256, 128, 64, 4, 8, 4, "ring"): 1.0,
    GemmConfig(256, 128, 64, 8, 8, 4, "ring"): 0.995,
    GemmConfig(256, 128, 64, 16, 8, 4, "ring"): 0.99,
    GemmConfig(128, 256, 64, 4, 8, 4, "ring"): 0.98,
    GemmConfig(128, 256, 64, 16, 8, 4, "ring"): 0.97,
    GemmConfig(128, 256, 128, 16, 8, 2, "ring"): 0.965,
}
_AMPERE_RATES = {**_RING_RATES, **{config: _BESIDE_A_RING * rate for config, rate in _MMA_RATES.items()}}

# `wgmma`, operands fetched by Hopper's copy engine. With three stages two blocks share a multiprocessor, so that one
# computes while the other is in its epilogue. Rates from an H200.
_WGMMA_RATES = {
    GemmConfig(128, 128, 128, 24, 4, 3, "descriptors"): 1.0,
    GemmConfig(128, 128, 128, 32, 4, 3, "descriptors"): 0.99,
    GemmConfig(128, 128, 128, 16, 4, 3, "descriptors"): 0.98,
    GemmConfig(128, 128, 128, 8, 4, 3, "descriptors"): 0.97,
    GemmConfig(128, 256, 128, 16, 8, 4, "descriptors"): 0.93,
    GemmConfig(128, 128, 128, 4, 8, 3, "descriptors"): 0.92,
    GemmConfig(128, 64, 128, 8, 4, 3, "descriptors"): 0.9,
    GemmConfig(128, 64, 128, 8, 4, 4, "descriptors"): 0.88,
    GemmConfig(128, 128, 128, 1, 8, 4, "descriptors"): 0.8,
    GemmConfig(128, 128, 128, 1, 4, 4, "descriptors"): 0.8,
    GemmConfig(64, 128, 256, 1, 4, 4, "descriptors"): 0.7,
    GemmConfig(64, 64, 256, 1, 4, 4, "descriptors"): 0.6,
    GemmConfig(16, 128, 256, 1, 4, 4): 0.2,
}

ARCHITECTURES = {
    # And Ada, whose tensor cores take the same instructions.
    "Ampere": Architecture(((8, 0), (8, 6), (8, 7), (8, 9)), _AMPERE_RATES, balance=32),
    "Hopper": Architecture(((9, 0),), _WGMMA_RATES, balance=50, tries_kitchen=False),
    # These run `mma.s8` too. Nothing was measured on them.
    "Blackwell": Architecture(((10, 0), (10, 3), (11, 0), (12, 0), (12, 1)), _MMA_RATES, balance=32),
}

# Where the second walk over K leaves ptxas no register for one number.
_ONE_PASS_ONLY = frozenset({GemmConfig(128, 128, 128, 16, 4, 3)})


def gpu_architecture(capability: tuple[int, int]) -> Architecture:
    """Return the architecture of a compute capability; an unknown one gets what all cards from Ampere on can run."""
    known = (known for known in ARCHITECTURES.values() if capability in known.capabilities)
    return next(known, ARCHITECTURES["Blackwell"])


def walks_twice(config: GemmConfig) -> bool:
    """Return whether a configuration can walk K twice, as activations of 16 bits want it."""
    return config.split_k == 1 and config.pipeline != "ring" and replace(config, group_m=16) not in _ONE_PASS_ONLY


# Channels whose multiplication takes as long as starting a tile and its epilogue, and as long as summing its splits.
_TILE_OVERHEAD, _SPLIT_OVERHEAD = 512, 1024
_CHANNELS_PER_SPLIT = 1024
# To compile kernels takes nearly all of the time, and a ring twice as long as another.
_COMPILE_COST = {"pointers": 1, "descriptors": 1, "ring": 2}
_MOST_COMPILE_COST = 10


def gemm_candidates(
    capability: tuple[int, int],
    multiprocessors: int,
    m: int,
    n: int,
    k: int,
    passes: int = 1,
    pipelines: Collection[str] = PIPELINES,
) -> list[GemmConfig]:
    """Return the configurations worth trying for [m, k] x [n, k] on a card, likely winners first.

    With two passes K is walked twice. `pipelines` are those of PIPELINES that can run; `pointers` always can.

    They are in the order of an estimate of their time: the rounds in which the multiprocessors work off the tiles, each
    as long as its multiplications or its loads take. Where nothing can be measured, the first is what runs.
    """
    architecture = gpu_architecture(capability)

    def estimate(config: GemmConfig, rate: float) -> float:
        tiles = config.tiles(m, n)
        shared = config.shared_tiles(tiles, multiprocessors)
        multiplications = config.block_m * config.block_n / rate
        loads = (min(config.block_m, m) + min(config.block_n, n)) * architecture.balance
        channel = passes * max(multiplications, loads)
        whole_rounds = -(-(tiles - shared) // multiprocessors)
        shared_rounds = -(-shared * config.split_k // multiprocessors)
        return whole_rounds * (k * channel + _TILE_OVERHEAD * multiplications) + shared_rounds * (
            k / config.split_k * channel + (_TILE_OVERHEAD + _SPLIT_OVERHEAD) * multiplications
        )

    estimates: dict[GemmConfig, float] = {}
    for config, rate in architecture.rates.items():
        # Groups of more tile rows than there are differ in nothing.
        fitted = replace(config, group_m=min(config.group_m, -(-m // config.block_m)))
        if k % 16 or config.pipeline not in pipelines:  # the copies of the others want rows on 16 bytes
            if config.pipeline == "ring":
                continue
            fitted = fitted.by_pointers
        for splits in _SPLITS[fitted.pipeline]:
            split = replace(fitted, split_k=splits)
            shares = k >= splits * _CHANNELS_PER_SPLIT and split.shared_tiles(split.tiles(m, n), multiprocessors)
            if (splits == 1 or shares) and (passes == 1 or walks_twice(split)):
                estimates.setdefault(split, estimate(split, rate))
    kernels: set[GemmConfig] = set()
    unsplit: set[GemmConfig] = set()  # rings that have a split among the candidates: the likeliest one of each
    cost, candidates = 0, []
    for config in sorted(estimates, key=estimates.__getitem__):
        to_compile = 0 if config.kernel in kernels else _COMPILE_COST[config.pipeline]
        if cost + to_compile > _MOST_COMPILE_COST:
            continue
        if config.pipeline == "ring" and config.split_k > 1:
            if replace(config, split_k=1) in unsplit:
                continue
            unsplit.add(replace(config, split_k=1))
        cost += to_compile
        kernels.add(config.kernel)
        candidates.append(config)
    if architecture.tries_kitchen and "kitchen" in pipelines and passes == 1 and k % 16 == 0:
        candidates.append(KITCHEN)
    return candidates


@functools.lru_cache(4096)
def is_offered(config: GemmConfig, passes: int = 1) -> bool:
    """Return whether `gemm_candidates` can offer a configuration of positive numbers, on some card for some shape."""
    if config == KITCHEN:
        return passes == 1
    if config.split_k not in _SPLITS.get(config.pipeline, ()) or passes > (2 if walks_twice(config) else 1):
        return False
    return any(
        config.group_m <= known.group_m and config == replace(form, group_m=config.group_m, split_k=config.split_k)
        for architecture in ARCHITECTURES.values()
        for known in architecture.rates
        for form in (known, known.by_pointers)
    )
