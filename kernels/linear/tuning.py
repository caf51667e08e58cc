"""Which tile configuration the fused GEMM runs with: a rule's, until another was faster on calls made anyway."""

import functools
import logging
import os
import threading
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from time import monotonic, sleep

import torch

from ..card.timing import Stopwatch
from ..internals.triton_runtime import COMPILES_ALONE, is_unfit
from ..interruption import stop_if_asked
from ..launching.background import beside_calls, beside_loading, foreground
from ..memory_plan import unplanned_memory
from .exactness import WrongResult
from .tiles import GemmConfig
from .tuning_cache import Tried, TuningCache, TuningKey

logger = logging.getLogger(__name__)

# Launches of each candidate: untimed ones, for what a first launch does once; those of a first look at all candidates;
# those of a closer look at candidates within reach of the rule's.
_UNTIMED, _SURVEY, _FINAL = 1, 3, 9
_WITHIN_REACH = 1.05
# Whether a candidate is compiled is asked once in so many calls, as asking costs the host time. After so many seconds
# what is known stays; a later process adds to it.
_CALLS_BETWEEN, _MOST_SECONDS = 8, 300.0
# One call in so many asks what to run, which costs the host time, and may try a slower candidate.
_CALLS_A_TRY = 8
# Compiling takes the host's time from the first steps of a shape, and most of their calls would try slower candidates.
_SECONDS_BEFORE = 3.0
# To settle a shape while its caller waits: compiling takes nearly all of it.
_SECONDS_TO_SETTLE, _SECONDS_BETWEEN = 10.0, 1e-3
# Whether anything is tried for a shape, so many neighbours say: shapes whose M, N and K differ by at most this factor.
_NEAR, _NEIGHBOURS = 2, 2

Candidates = Callable[[], list[GemmConfig]]
"""Gives the candidates of a key, likely winners first."""
Launch = Callable[[GemmConfig], None]
"""Runs the GEMM of a call once. Raises WrongResult or what `is_unfit` knows where the card cannot."""
IsReady = Callable[[GemmConfig, int | None], bool]
"""Whether a configuration is compiled for a call. If not, it is asked for, with a rank; with None it is not."""


@functools.cache
def device_name(index: int) -> str:
    """Return the card's name, cached: it is part of the key of every launch."""
    return torch.cuda.get_device_name(index)


@dataclass
class Trial:
    """The candidates of a key while it is open which of them stays. It launches nothing itself.

    In a round the rule's candidate and all others that are compiled and not known yet take turns, so that a drifting
    clock meets all alike. Those within reach of the rule's have a second round. Times are compared among calls of as
    many rows, and read once the device has come so far. Meanwhile the fastest known one runs, or one that is compiled.
    """

    candidates: list[GemmConfig]  # the rule's first
    times: dict[GemmConfig, float]  # what is known: shares of the rule's time
    watch: Stopwatch  # what times launches
    waits: Callable[[], bool]  # whether nothing is to be compiled in order to be tried, and no round to begin
    decided: bool  # whether the first one stays if it runs; the others are for where it does not
    # What was timed in this round: a configuration, its call's rows, a span of the watch.
    spans: list[tuple[GemmConfig, int, list]] = field(default_factory=list)
    calls: int = 0
    _round: list[GemmConfig] = field(default_factory=list)  # what is compared now, and what of it is to be launched
    _to_launch: list[GemmConfig] = field(default_factory=list)
    _is_final: bool = False
    _began: float = field(default_factory=lambda: monotonic())

    @property
    def tried(self) -> Tried:
        """The candidates whose times are known, the rule's first."""
        known = all(config in self.times for config in self.candidates[1:])
        return Tried({self.candidates[0]: 1.0, **self.times}, known)

    @property
    def choice(self) -> GemmConfig:
        """The fastest known candidate."""
        return self.candidates[0] if self.decided else self.tried.fastest()

    @property
    def is_over(self) -> bool:
        """Whether nothing is left to try, or not in time."""
        return self.decided or self.tried.settled or monotonic() - self._began > _MOST_SECONDS

    @property
    def is_untouched(self) -> bool:
        """Whether nothing was tried yet."""
        return not (self.times or self._round or self.decided)

    def next(self, is_ready: IsReady, may_time: bool) -> tuple[GemmConfig, bool]:
        """Return the configuration that a call runs, and whether it is to be timed."""
        self.calls += 1
        config = self.choice
        if not is_ready(config, 0):
            return next((other for other in self.candidates if is_ready(other, None)), config), False
        if self.decided or not may_time:
            return config, False
        if self._round and not self._to_launch and all(self.watch.is_over(span) for _, _, span in self.spans):
            self._judge()
        if not self._round and self.calls % _CALLS_BETWEEN == 1 and not self.waits():
            rule, *others = self.candidates
            unknown = [other for other in others if other not in self.times]
            ready = [other for rank, other in enumerate(unknown, 1) if is_ready(other, rank)]
            if ready and is_ready(rule, 0):
                self._begin([rule, *ready], False)
        tried = self._to_launch.pop() if self._to_launch else None
        # It may be compiled for other calls of the key, such as those without a bias.
        return (config, False) if tried is None or not is_ready(tried, None) else (tried, True)

    def drop(self, config: GemmConfig) -> None:
        """Drop a candidate that does not run here. The next one may come in the place of a first one, and be tried."""
        if config == self.candidates[0]:
            self.times, self.decided = {}, not tuning_enabled()
        self.candidates.remove(config)
        self.times.pop(config, None)
        self._round, self._to_launch, self.spans = [], [], []

    def _begin(self, candidates: list[GemmConfig], is_final: bool) -> None:
        self._round, self._is_final, self.spans = candidates, is_final, []
        turns = _UNTIMED + (_FINAL if is_final else _SURVEY)
        # There and back, so that calls of two numbers of rows in turn meet all. Taken from its end.
        self._to_launch = [each for turn in range(turns) for each in candidates[:: -1 if turn % 2 else 1]][::-1]

    def _judge(self) -> None:
        """Read the times of a round, and keep them or begin a closer look."""
        times = {
            config: [(m, self.watch.milliseconds(span)) for timed, m, span in self.spans if timed == config][_UNTIMED:]
            for config in self._round
        }
        rule, *others = self._round
        usual = {m: _typical([time for rows, time in times[rule] if rows == m]) for m, _ in times[rule]}
        shares = {}
        for config in others:
            each = [time / usual[m] for m, time in times[config] if m in usual]
            if each:  # none where its launches failed
                shares[config] = _typical(each)
        near = [] if self._is_final else [config for config in shares if shares[config] <= _WITHIN_REACH]
        self.times |= {config: share for config, share in shares.items() if config not in near}
        self._round, self.spans = [], []
        if near:
            self._begin([rule, *near], True)


def _typical(times: list[float]) -> float:
    """Return the lower quartile: what else the device and the host do only adds."""
    return sorted(times)[len(times) // 4]


class Tuner:
    """What runs for a key, and what is tried meanwhile; remembered in the process and on disk.

    `measured` counts the keys that this process settled by measuring. For `seconds_before` after the first call of a
    key nothing is tried of any. Of `calls_a_try` calls one should be `run`, while the others launch what is `passing`.

    Args:
        watch: what times launches on the current device; None is a GPU's.
    """

    def __init__(self, watch: Stopwatch | None = None) -> None:
        self.measured, self.seconds_before, self.calls_a_try = 0, _SECONDS_BEFORE, _CALLS_A_TRY
        self._newest = 0.0
        self._watch = watch or Stopwatch(torch.device("cuda"))
        self._settled: dict[TuningKey, GemmConfig] = {}
        self._trials: dict[TuningKey, Trial] = {}
        self._kept: dict[TuningKey, Tried] = {}  # all that is known, and what this process found of it
        self._found: dict[TuningKey, Tried] = {}
        self._caches: dict[str, TuningCache] = {}
        self._unwritten: set[str] = set()  # cards of which more is known than is on disk
        self._lock = threading.Lock()

    def is_open_in(self, work: Callable[[], object]) -> bool:
        """Do some work, and return whether a GEMM in it is not settled after that."""
        with self._lock:
            calls = {key: trial.calls for key, trial in self._trials.items()}
        work()
        with self._lock:
            return any(calls.get(key) != trial.calls for key, trial in self._trials.items())

    def settled(self, key: TuningKey) -> GemmConfig | None:
        """Return the configuration that stays for a key; None while that is open."""
        return self._settled.get(key)

    def passing(self, key: TuningKey, is_ready: IsReady) -> GemmConfig | None:
        """Return what the next calls of an open key launch, less those that try; None where each should be `run`."""
        trial = self._trials.get(key)
        if trial is None or self.calls_a_try < 2:
            return None
        return trial.choice if is_ready(trial.choice, None) else None

    def likely(self, key: TuningKey, candidates: Candidates) -> GemmConfig:
        """Return the configuration that a first call of a key runs, without opening the key."""
        with self._lock:
            known = self._known(key)
        return candidates()[0] if known is None else known.fastest()

    def run(self, key: TuningKey, m: int, candidates: Candidates, launch: Launch, is_ready: IsReady) -> None:
        """Run the GEMM of `m` rows with what stays for `key`, or with what is to be known better.

        Nothing is tried during the capture of a CUDA graph, nor beside other streams. With INT8_DIT_TUNING set to 0 or
        off nothing is tried ever. Raises RuntimeError when no candidate runs on this card.
        """
        config = self._settled.get(key)
        if torch.cuda.is_current_stream_capturing():
            self._run_captured(key, candidates(), launch)
        elif config is None:
            with unplanned_memory():  # another one of the next calls may ask for other memory
                while not self._ran(key, m, candidates, launch, is_ready):
                    pass
        elif not _runs(config, launch) and not any(_runs(c, launch) for c in candidates() if c != config):
            raise _none_runs(key)

    def _run_captured(self, key: TuningKey, candidates: list[GemmConfig], launch: Launch) -> None:
        """Run what is known to be exact for such operands: within a capture a card cannot be asked."""
        with self._lock:
            trial, first = self._trials.get(key), self._settled.get(key)
            if first is None and trial is not None and (trial.times or trial.decided):
                first = trial.choice
            if first is None and (known := self._known(key)) is not None:
                first = known.fastest()
        if first is None:
            first = next((config for config in candidates if config.pipeline != "ring"), candidates[0])
        if not any(_runs(config, launch) for config in (first, *(other for other in candidates if other != first))):
            raise RuntimeError(
                "no INT8 GEMM is known to be exact here: run the model once before the graph is captured"
            )

    def _ran(self, key: TuningKey, m: int, candidates: Candidates, launch: Launch, is_ready: IsReady) -> bool:
        """Return whether a candidate ran. One that cannot is dropped."""
        with self._lock:
            trial = self._trials.get(key) or self._begin(key, candidates())
            known = len(trial.times)
            may_time = torch.cuda.current_stream() == torch.cuda.default_stream()
            config, timed = trial.next(is_ready, may_time)
            if len(trial.times) > known:
                self._keep(key, trial.tried)
        try:
            span = self._watch.begin() if timed else []
            launch(config)
        except Exception as error:
            spared = timed and config != trial.candidates[0] and isinstance(error, torch.cuda.OutOfMemoryError)
            if not (spared or isinstance(error, WrongResult) or is_unfit(error)):
                raise
            with self._lock:
                if config in trial.candidates:
                    trial.drop(config)
                if not trial.candidates:
                    self._trials.pop(key, None)
                    raise _none_runs(key) from error
            return False
        with self._lock:
            if timed:
                self._watch.end(span)
                trial.spans.append((config, m, span))
            elif trial.is_over and config == trial.choice:
                self._settle(key, trial)
        return True

    def _begin(self, key: TuningKey, configs: list[GemmConfig]) -> Trial:
        known, tries = self._known(key), tuning_enabled() and COMPILES_ALONE
        if known is not None:  # what an earlier call was about, which may have had another M
            first = known.fastest() if known.settled or not tries else next(iter(known.times))
            configs = [first, *(config for config in configs if config != first)]
        decided = not tries or (known is not None and known.settled) or self._rule_suffices(key)
        times = {} if known is None else dict(known.times)
        self._newest = monotonic()
        trial = Trial(configs, times, self._watch, lambda: monotonic() - self._newest < self.seconds_before, decided)
        self._trials[key] = trial
        return trial

    def _rule_suffices(self, key: TuningKey) -> bool:
        """Return whether the rule's was the fastest for the neighbours of a shape."""
        near = [tried for other, tried in self._kept.items() if tried.settled and _are_near(key, other)]
        return len(near) >= _NEIGHBOURS and all(tried.fastest() == next(iter(tried.times)) for tried in near)

    def _settle(self, key: TuningKey, trial: Trial) -> None:
        """Let the fastest stay, and decide untouched keys for which that shows that trying is worth nothing."""
        if self._trials.pop(key, None) is not trial:  # another thread has
            return
        self._settled[key] = trial.choice
        if trial.decided:
            return
        self.measured += 1
        tried = trial.tried
        if self._kept.get(key) != tried:
            self._keep(key, tried)
        walked = f"{key.k}" if key.passes == 1 else f"{key.passes} x {key.k}"
        text = "INT8 GEMM: M <= %d, N = %d, K = %s: of %d configurations %s stays, in %.3f of the first one's time"
        shown = (len(tried.times), trial.choice, tried.times[trial.choice])
        logger.info(text, key.m_bucket, key.n, walked, *shown)
        for other, open_trial in self._trials.items():
            open_trial.decided |= open_trial.is_untouched and self._rule_suffices(other)

    def _known(self, key: TuningKey) -> Tried | None:
        """Return what is known of `key`. For an unknown one the file is read again if others have written it."""
        if key not in self._kept:
            self._kept = self._cache(key.device).read() | self._kept
        return self._kept.get(key)

    def _keep(self, key: TuningKey, tried: Tried) -> None:
        """Remember what is known, on disk in the background, since other processes may hold the file."""
        self._kept[key] = self._found[key] = tried
        if key.device not in self._unwritten:
            self._unwritten.add(key.device)
            beside_calls.submit(-1, functools.partial(self._write, key.device))

    def _write(self, card: str) -> None:
        self._unwritten.discard(card)  # before the copy: what is found from now on is written by another task
        found = self._found.copy()
        self._cache(card).add({key: tried for key, tried in found.items() if key.device == card})

    def _cache(self, card: str) -> TuningCache:
        return self._caches.setdefault(card, TuningCache(card))


def _runs(config: GemmConfig, launch: Launch) -> bool:
    """Launch, and return whether the card can."""
    try:
        launch(config)
    except Exception as error:
        if isinstance(error, WrongResult) or is_unfit(error):
            return False
        raise
    return True


def _none_runs(key: TuningKey) -> RuntimeError:
    return RuntimeError(f"no INT8 GEMM configuration runs on {key.device} for N = {key.n}, K = {key.k}")


def _are_near(key: TuningKey, other: TuningKey) -> bool:
    sizes = zip(astuple(key)[1:4], astuple(other)[1:4], strict=True)
    alike = (key.device, key.passes) == (other.device, other.passes)
    return alike and all(max(pair) <= _NEAR * min(pair) for pair in sizes)


def tuning_enabled() -> bool:
    """Return False where the environment variable INT8_DIT_TUNING is 0 or off."""
    return os.environ.get("INT8_DIT_TUNING", "").strip().lower() not in ("0", "off")


tuner = Tuner()


def settle(work: Callable[[], object], device: torch.device) -> None:
    """Do some work again and again, at most for seconds, until its GEMMs run with what stays for their shapes.

    Nor is anything compiled then, which would keep Python's lock from what is timed next.
    """
    deadline = monotonic() + _SECONDS_TO_SETTLE
    before = tuner.seconds_before, tuner.calls_a_try
    tuner.seconds_before, tuner.calls_a_try = 0.0, 1
    try:
        with foreground.waiting():
            while tuner.is_open_in(work) or not (beside_loading.is_idle and beside_calls.is_idle):
                if monotonic() >= deadline:
                    break
                stop_if_asked()
                torch.cuda.synchronize(device)
                sleep(_SECONDS_BETWEEN)  # for the thread that compiles
    finally:
        tuner.seconds_before, tuner.calls_a_try = before
