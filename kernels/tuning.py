"""Which tile configuration the fused GEMM runs with: candidates per architecture, measured once per shape."""

import functools
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.runtime.errors import OutOfResources

from .timing import median_milliseconds

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes in elements, tile-order group, warps per program and software pipeline stages."""

    block_m: int
    block_n: int
    block_k: int
    group_m: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class TuningKey:
    """What a measurement is valid for. M is bucketed, so that a new resolution does not tune again."""

    device: str
    m_bucket: int
    n: int
    k: int


# `mma.s8` with a cp.async pipeline, for Ampere and Ada; every entry fits the 99 KB a block may use on sm_86.
AMPERE_CONFIGS = (
    GemmConfig(128, 128, 64, 8, 4, 4),
    GemmConfig(128, 256, 64, 8, 8, 3),
    GemmConfig(256, 128, 64, 8, 8, 3),
    GemmConfig(128, 128, 128, 8, 8, 3),
    GemmConfig(128, 128, 64, 4, 8, 4),
    GemmConfig(128, 64, 64, 8, 4, 4),
    GemmConfig(64, 128, 128, 8, 4, 3),
    GemmConfig(64, 256, 64, 8, 4, 4),
    GemmConfig(64, 64, 128, 8, 4, 4),
    GemmConfig(32, 128, 128, 4, 4, 4),
    GemmConfig(32, 64, 256, 4, 4, 3),
    GemmConfig(16, 128, 128, 1, 4, 4),
    GemmConfig(16, 64, 256, 1, 4, 4),
)

# `wgmma` on Hopper. The first wins wherever M is large (measured on an H200): two of its blocks share an SM, so that one
# computes while the other is in its epilogue.
HOPPER_CONFIGS = (
    GemmConfig(128, 128, 128, 8, 4, 3),
    GemmConfig(128, 128, 128, 8, 4, 4),
    GemmConfig(128, 256, 128, 16, 8, 4),
    GemmConfig(256, 128, 128, 8, 8, 4),
    GemmConfig(64, 256, 128, 8, 4, 4),
    GemmConfig(128, 64, 128, 8, 4, 4),
    GemmConfig(64, 128, 128, 8, 4, 4),
    GemmConfig(64, 64, 256, 4, 4, 4),
    GemmConfig(64, 128, 256, 4, 4, 4),
    GemmConfig(16, 128, 256, 1, 4, 4),
)


def candidates(capability: tuple[int, int], m: int, n: int, k: int) -> list[GemmConfig]:
    """The configurations worth trying for [m, k] x [n, k] on a card of this compute capability.

    A tile more than twice as large as the matrix in some direction only computes what is thrown away; where all are,
    the smallest tile is left.
    """
    configs = HOPPER_CONFIGS if capability[0] == 9 else AMPERE_CONFIGS
    fitting = [c for c in configs if c.block_m <= max(16, 2 * m) and c.block_n <= 2 * n and c.block_k <= 2 * k]
    return fitting or [min(configs, key=lambda c: c.block_m * c.block_n * c.block_k)]


@functools.cache
def device_name(index: int) -> str:
    """The card's name; kept, since it is part of the key of every launch."""
    return torch.cuda.get_device_name(index)


def m_bucket(m: int) -> int:
    """The power of two at or above `m`, at least 16: one measurement serves all M of a bucket."""
    return max(16, 1 << (m - 1).bit_length())


class Tuner:
    """Measures the candidates of a key the first time it is asked for and remembers the fastest for the process."""

    def __init__(self) -> None:
        self._chosen: dict[TuningKey, GemmConfig] = {}
        self._lock = threading.Lock()

    def choose(
        self, key: TuningKey, configs_of_key: Callable[[], list[GemmConfig]], launch: Callable[[GemmConfig], None]
    ) -> GemmConfig:
        """The fastest of the configurations for `key`, which are asked for only while it is unknown.

        `launch(config)` runs the GEMM once on the current device.

        While a CUDA graph is being captured nothing can be measured: an unknown key then gets the first candidate.
        Raises RuntimeError when no candidate runs on this card.
        """
        chosen = self._chosen.get(key)
        if chosen is not None:
            return chosen
        if torch.cuda.is_current_stream_capturing():
            return configs_of_key()[0]
        with self._lock:
            if key not in self._chosen:
                self._chosen[key] = self._fastest(key, configs_of_key(), launch)
            return self._chosen[key]

    @staticmethod
    def _fastest(key: TuningKey, configs: list[GemmConfig], launch: Callable[[GemmConfig], None]) -> GemmConfig:
        best, best_time = None, float("inf")
        for config in configs:
            try:
                elapsed = median_milliseconds(lambda: launch(config), torch.device("cuda"), repetitions=7)
            except OutOfResources:
                continue
            if elapsed < best_time:
                best, best_time = config, elapsed
        if best is None:
            raise RuntimeError(f"no INT8 GEMM configuration runs on {key.device} for N = {key.n}, K = {key.k}")
        logger.info("INT8 GEMM tuned for %s, M <= %d, N = %d, K = %d", key.device, key.m_bucket, key.n, key.k)
        return best


tuner = Tuner()
