"""Which tile configuration the fused GEMM runs with: candidates per architecture, measured once per card and shape."""

import contextlib
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import astuple
from time import monotonic

import torch

from ..card.timing import median_milliseconds
from ..internals.triton_runtime import is_unfit
from ..interruption import stop_if_asked
from ..memory_plan import unplanned_memory
from .exactness import WrongResult
from .tiles import SHIPPED, GemmConfig
from .tuning_cache import Measurement, TuningCache, TuningKey

logger = logging.getLogger(__name__)

# A first look at every candidate, then a closer one at those within reach of the best.
_SURVEY_REPETITIONS = 3
_FINAL_REPETITIONS = 15
_WITHIN_REACH = 1.15
# Wall clock for one shape. Nearly all of it is compilation, which is why the likely winners come first in the lists.
_SECONDS_PER_SHAPE = 10.0


@functools.cache
def device_name(index: int) -> str:
    """The card's name; kept, since it is part of the key of every launch."""
    return torch.cuda.get_device_name(index)


def m_bucket(m: int) -> int:
    """The smallest bucket at or above `m`: one measurement serves all M of a bucket.

    Buckets are the powers of two from 16 on and, above 1024 where an image's token count lies, those halfway between.
    """
    power = max(16, 1 << (m - 1).bit_length())
    halfway = power // 4 * 3
    return halfway if m <= halfway and halfway > 1024 else power


class Tuner:
    """Finds the fastest candidate of a key the first time it is asked for, and remembers it in the process and on disk.

    `measured` counts the keys for which this process had to measure.
    """

    def __init__(self) -> None:
        self.measured = 0
        self._chosen: dict[TuningKey, GemmConfig] = {}
        self._kept: dict[TuningKey, Measurement] = {}
        self._caches: dict[str, TuningCache] = {}
        self._lock = threading.Lock()

    def choose(
        self, key: TuningKey, configs_of_key: Callable[[], list[GemmConfig]], launch: Callable[[GemmConfig], None]
    ) -> GemmConfig:
        """The fastest of the configurations for `key`, which are asked for only while it is unknown.

        `launch(config)` runs the GEMM once on the current device.

        While a CUDA graph is being captured nothing can be measured: a key that neither the disk nor the pack knows
        then gets the first candidate. With INT8_DIT_TUNING set to 0 or off nothing is measured ever.
        Raises RuntimeError when no candidate runs on this card.
        """
        chosen = self._chosen.get(key)
        if chosen is not None:
            return chosen
        if torch.cuda.is_current_stream_capturing():
            configs = configs_of_key()  # a ring is used only where it was seen to be exact
            plain = next((config for config in configs if config.pipeline != "ring"), configs[0])
            return self._known(key) or plain
        with self._lock:
            if key not in self._chosen:
                self._chosen[key] = self._decide(key, configs_of_key, launch)
            return self._chosen[key]

    def _decide(
        self, key: TuningKey, configs_of_key: Callable[[], list[GemmConfig]], launch: Callable[[GemmConfig], None]
    ) -> GemmConfig:
        """What is known of `key` if it runs here (a shipped one may not, with another Triton), or else a new choice."""
        known = self._known(key)
        if known is not None and _runs(known, launch):
            return known
        configs = configs_of_key()
        config = self._measure(key, configs, launch) if tuning_enabled() else _first_running(configs, launch)
        if config is None:
            raise RuntimeError(f"no INT8 GEMM configuration runs on {key.device} for N = {key.n}, K = {key.k}")
        return config

    def _known(self, key: TuningKey) -> GemmConfig | None:
        """The configuration of `key` on disk or in the pack.

        The file is read again for a key it did not have before.
        """
        if key not in self._kept:
            self._kept |= self._cache(key.device).read()
        kept = self._kept.get(key)
        return kept.config if kept is not None else SHIPPED.get(astuple(key))

    def _measure(
        self, key: TuningKey, configs: list[GemmConfig], launch: Callable[[GemmConfig], None]
    ) -> GemmConfig | None:
        """The fastest candidate, kept on disk; None where none runs.

        With no memory left to measure in, the first that runs; the next process tries again.
        """
        cache = self._cache(key.device)
        if self.measured == 0:
            text = "INT8 GEMM: measuring what runs fastest on %s, once per card and shape; kept in %s"
            logger.info(text, key.device, cache.path)
        begin = monotonic()
        try:
            with unplanned_memory():
                fastest = _fastest(configs, launch)
        except torch.cuda.OutOfMemoryError:
            logger.info("INT8 GEMM: too little free memory on %s to tune N = %d, K = %d", key.device, key.n, key.k)
            return _first_running(configs, launch)
        if fastest is None:
            return None
        self.measured += 1
        walked = f"{key.k}" if key.passes == 1 else f"{key.passes} x {key.k}"
        text = "INT8 GEMM: shape %d, M <= %d, N = %d, K = %s, tuned in %.1f s: %s"
        logger.info(text, self.measured, key.m_bucket, key.n, walked, monotonic() - begin, fastest.config)
        cache.add(key, fastest)
        return fastest.config

    def _cache(self, card: str) -> TuningCache:
        if card not in self._caches:
            self._caches[card] = TuningCache(card)
        return self._caches[card]


def tuning_enabled() -> bool:
    """False where the environment variable INT8_DIT_TUNING is 0 or off."""
    return os.environ.get("INT8_DIT_TUNING", "").strip().lower() not in ("0", "off")


def _fastest(configs: list[GemmConfig], launch: Callable[[GemmConfig], None]) -> Measurement | None:
    """The fastest candidate that the time for one shape sufficed to measure, or None where none runs."""
    deadline = monotonic() + _SECONDS_PER_SHAPE
    survey = _measure_until(deadline, configs, launch, _SURVEY_REPETITIONS)
    reach = _WITHIN_REACH * min(survey.values(), default=0.0)
    finalists = sorted((config for config in survey if survey[config] <= reach), key=survey.__getitem__)
    if len(finalists) > 1 and monotonic() < deadline:
        survey = _measure_until(deadline, finalists, launch, _FINAL_REPETITIONS)
    config = min(survey, key=survey.__getitem__, default=None)
    return None if config is None else Measurement(config, survey[config])


def _measure_until(
    deadline: float, configs: list[GemmConfig], launch: Callable[[GemmConfig], None], repetitions: int
) -> dict[GemmConfig, float]:
    """Milliseconds of each candidate that runs; past the deadline no further one once there is a first."""
    milliseconds = {}
    for config in configs:
        stop_if_asked()
        if milliseconds and monotonic() >= deadline:
            break
        with _skipping_unfit():
            milliseconds[config] = median_milliseconds(
                functools.partial(launch, config), torch.device("cuda"), repetitions
            )
    return milliseconds


def _first_running(configs: list[GemmConfig], launch: Callable[[GemmConfig], None]) -> GemmConfig | None:
    return next((config for config in configs if _runs(config, launch)), None)


def _runs(config: GemmConfig, launch: Callable[[GemmConfig], None]) -> bool:
    """Whether the card can run the configuration: launches it."""
    with _skipping_unfit():
        launch(config)
        return True
    return False


@contextlib.contextmanager
def _skipping_unfit() -> Iterator[None]:
    """Swallow the errors of a configuration that needs more than the card has, that Triton cannot compile for it, or
    that does not compute exactly there."""
    try:
        yield
    except WrongResult:
        pass  # it was told where that was seen
    except Exception as error:
        if not is_unfit(error):
            raise


tuner = Tuner()
