"""Tuning results and where they outlive the process: one JSON file per card, kernel sources and Triton version."""

import errno
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import triton
from filelock import FileLock

from ..card.kept_files import is_milliseconds, is_size, path_for, read_object, write_object
from ..card.machine import kernel_source_hash
from .tiles import GemmConfig, is_offered

logger = logging.getLogger(__name__)

# Each write takes milliseconds; whoever waits longer than this waits for a process that hangs.
_LOCK_SECONDS = 5


def m_bucket(m: int) -> int:
    """The smallest bucket at or above `m`: one measurement serves all M of a bucket.

    Buckets are the powers of two from 16 on and, above 1024 where an image's token count lies, those halfway between.
    """
    power = max(16, 1 << (m - 1).bit_length())
    halfway = power // 4 * 3
    return halfway if m <= halfway and halfway > 1024 else power


@dataclass(frozen=True)
class TuningKey:
    """What a measurement is valid for. M is bucketed, so that a new resolution does not tune again.

    `passes` is how often K is walked: twice with activations of 16 bits.
    """

    device: str
    m_bucket: int
    n: int
    k: int
    passes: int = 1


# How much less time than the rule's another configuration takes to stay in its place: the clocks of calls differ.
_FASTER = 0.98


@dataclass(frozen=True)
class Tried:
    """The measured candidates of a key.

    Attributes:
        times: of the configurations tried, as a share of that of the rule's, which comes first.
        settled: whether nothing is left to try.
    """

    times: Mapping[GemmConfig, float]
    settled: bool = False

    def fastest(self) -> GemmConfig:
        """The fastest, which is the rule's unless another one is clearly faster."""
        fastest = min(self.times, key=self.times.__getitem__)
        return fastest if self.times[fastest] <= _FASTER else next(iter(self.times))

    @property
    def rule_suffices(self) -> bool:
        """Whether trying was worth nothing."""
        return self.settled and self.fastest() == next(iter(self.times))


class TuningCache:
    """The results of one card with the kernels and the Triton of this process, shared with other processes.

    Nothing here raises for the state of the disk: what cannot be read or written is said once and then only missing.
    """

    def __init__(self, card: str) -> None:
        self._header = {"card": card, "triton": triton.__version__, "kernel_source": kernel_source_hash("GEMM")}
        self.path = path_for(self._header)
        self._tried: dict[TuningKey, Tried] = {}
        self._said: set[str] = set()
        self._seen: tuple[int, ...] | None = None

    def read(self) -> dict[TuningKey, Tried]:
        """Read what all processes have measured so far; nothing where that was read before."""
        try:
            stamp = self._stamp()
            if stamp == self._seen:
                return {}
            found, self._seen = self._load(), stamp
            return found
        except OSError as error:
            self._say_unavailable(error)
            return {}

    def add(self, found: Mapping[TuningKey, Tried]) -> None:
        """Keep what this process found, along with what could not be written in its turn. What another process settled
        meanwhile stays."""
        self._tried |= found
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                there = self._load()
                settled = {key for key, tried in there.items() if tried.settled}
                self._replace(there | {key: t for key, t in self._tried.items() if t.settled or key not in settled})
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            self._say_unavailable(error)

    def _stamp(self) -> tuple[int, ...]:
        """Which file there is, each writer's another one. Raises OSError."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            return ()
        return found.st_ino, found.st_mtime_ns, found.st_size

    def _lock(self) -> FileLock:
        """A lock on the file. Raises OSError for a link in its place, which earlier versions of filelock follow."""
        place = f"{self.path}.lock"
        if os.path.islink(place):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place)
        return FileLock(place, timeout=_LOCK_SECONDS)

    def _load(self) -> dict[TuningKey, Tried]:
        """The file's valid entries; none where there is no file or not one of ours. Raises OSError."""
        try:
            content = read_object(self.path) or {}
        except FileNotFoundError:
            return {}
        ours = all(content.get(name) == value for name, value in self._header.items())
        stored = content.get("entries")
        if not ours or not isinstance(stored, list):
            self._warn_once(f"{self.path} is damaged or not a tuning file: it is ignored and written anew")
            return {}
        entries = (_parse(entry, self._header["card"]) for entry in stored)
        return dict(entry for entry in entries if entry is not None)

    def _replace(self, results: dict[TuningKey, Tried]) -> None:
        """Write the whole file so that a reader sees the old or the new one.

        Call with the lock held; raises OSError.
        """
        entries = [
            {
                "m_bucket": key.m_bucket,
                "n": key.n,
                "k": key.k,
                "passes": key.passes,
                "settled": tried.settled,
                "tried": [{**vars(config), "time": round(time, 4)} for config, time in tried.times.items()],
            }
            for key, tried in results.items()
        ]
        write_object(self.path, {**self._header, "entries": entries})

    def _say_unavailable(self, error: Exception) -> None:
        self._warn_once(
            f"INT8 GEMM tuning results cannot be kept in {self.path.parent} and are measured again at every start; "
            "set INT8_DIT_TUNING_CACHE to a folder that can be written",
            detail=f" ({error})",
        )

    def _warn_once(self, message: str, detail: str = "") -> None:
        if message not in self._said:
            self._said.add(message)
            logger.warning("%s%s", message, detail)


def _parse(entry: Any, card: str) -> tuple[TuningKey, Tried] | None:
    """An entry of the file, or None unless it is one that this version could have written."""
    try:
        sizes = [entry["m_bucket"], entry["n"], entry["k"], entry["passes"]]
        settled, times = entry["settled"], dict(map(_parsed_time, entry["tried"]))
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    offered = times and all(is_offered(config, sizes[3]) for config in times) if all(map(is_size, sizes)) else False
    if not offered or type(settled) is not bool or not all(map(is_milliseconds, times.values())):
        return None
    return TuningKey(card, *sizes), Tried(times, settled)


def _parsed_time(tried: Any) -> tuple[GemmConfig, Any]:
    """Raises TypeError, KeyError, AttributeError or ValueError for what is none."""
    if tried.keys() != {"time", *(field.name for field in fields(GemmConfig))}:
        raise ValueError("a configuration of another version")
    return GemmConfig(**{name: value for name, value in tried.items() if name != "time"}), tried["time"]
