"""A card and its clock, imitated: for tests of what the tuner tries on calls, and what it keeps on disk."""

import threading
from typing import Any

from kernels.linear.tiles import ARCHITECTURES
from kernels.linear.tuning import Tuner
from kernels.linear.tuning_cache import TuningKey

CONFIGS = tuple(ARCHITECTURES["Blackwell"].rates)
CARD = "NVIDIA GeForce RTX 3090"
KEY = TuningKey(CARD, 1024, 4608, 18432)


def taking(*milliseconds):
    """The first candidates, by what they take."""
    return dict(zip(CONFIGS, milliseconds, strict=False))


class Card:
    """Stands in for the GPU: candidates by the milliseconds they take, or by the error they raise."""

    def __init__(self, times):
        self.times, self.now = times, 0.0
        self.launches, self._of_thread = [], threading.local()
        self.uncompiled = set()  # what no launch has compiled; all else is
        self.asked_for = []  # what is to be compiled, in the order of the requests
        self.is_behind = False  # whether the device has not come to the end of any span
        self.noise = lambda config, launches: 0.0
        self.timed = []

    def launch(self, config):
        self.launches.append(config)
        self._of_thread.launched = config
        self.uncompiled.discard(config)
        if isinstance(self.times[config], Exception):
            raise self.times[config]

    def is_ready(self, config, rank):
        if config in self.uncompiled and rank is not None:
            self.asked_for.append((rank, config))
        return config not in self.uncompiled

    # A stopwatch.
    def begin(self):
        return []

    def end(self, span):
        config = self._of_thread.launched
        span.append(self.times[config] + self.noise(config, self.timed.count(config)))
        self.timed.append(config)

    def is_over(self, span):
        return not self.is_behind

    def milliseconds(self, span):
        return span[0]

    def tuner(self: Any):
        tuner = Tuner(self)
        tuner.seconds_before, tuner.calls_a_try = 0.0, 1
        return tuner

    def call(self, tuner, key=KEY, m=1000):
        """What one call runs."""
        tuner.run(key, m, lambda: list(self.times), self.launch, self.is_ready)
        return self.launches[-1]

    def choose(self, key=KEY, tuner=None):
        """What stays after as many calls as it takes."""
        tuner = tuner or self.tuner()
        for _ in range(1000):
            self.call(tuner, key)
            if tuner.settled(key) is not None:
                return tuner.settled(key)
        raise AssertionError("nothing stays")
