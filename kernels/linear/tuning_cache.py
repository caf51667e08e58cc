"""Tuning results and where they outlive the process: one JSON file per card, kernel sources and Triton version."""

import errno
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
from filelock import FileLock

from ..card.json_files import is_milliseconds, is_readable, is_size, path_for, read_object, write_object
from ..card.machine import kernel_source_hash
from .tiles import GemmConfig, is_offered

logger = logging.getLogger(__name__)

# Each write takes milliseconds; whoever waits longer than this waits for a process that hangs.
_LOCK_SECONDS = 5
# How much less time than the rule's another configuration takes to stay in its place: the clocks of calls differ.
_FASTER = 0.98
_SIZES = ("m_bucket", "n", "k", "passes")


def m_bucket(m: int) -> int:
    """Return the smallest bucket at or above `m`: one measurement serves all M of a bucket.

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


class Tried(NamedTuple):
    """The measured candidates of a key."""

    times: Mapping[GemmConfig, float]  # of those tried, as a share of the time of the rule's, which comes first
    settled: bool = False  # whether nothing is left to try

    def fastest(self) -> GemmConfig:
        """Return the fastest, which is the rule's unless another one is clearly faster."""
        fastest = min(self.times, key=self.times.__getitem__)
        return fastest if self.times[fastest] <= _FASTER else next(iter(self.times))


class TuningCache:
    """The results of one card with the kernels and the Triton of this process, shared with other processes.

    Nothing here raises for the state of the disk: what cannot be read or written is said once and then only missing.
    """

    def __init__(self, card: str) -> None:
        self._header = {"card": card, "triton": triton.__version__, "kernel_source": kernel_source_hash("GEMM")}
        self.path = path_for(self._header)
        self._said: set[str] = set()
        self._seen: tuple[int, ...] | None = None

    def read(self) -> dict[TuningKey, Tried]:
        """Return what all processes have measured so far; nothing where the file is the one of the last call."""
        try:
            found = os.stat(self.path)
            stamp = found.st_ino, found.st_mtime_ns, found.st_size  # of which each writer's file has others
            if stamp != self._seen:
                entries, self._seen = self._load(), stamp
                return entries
        except FileNotFoundError:
            pass
        except OSError as error:
            self._say_unavailable(error)
        return {}

    def add(self, found: Mapping[TuningKey, Tried]) -> None:
        """Write what this process found beside the results of others, which stay where only those are settled."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = f"{self.path}.lock"
            if os.path.islink(lock):  # earlier versions of filelock follow it
                raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), lock)
            with FileLock(lock, timeout=_LOCK_SECONDS):
                there, entries = self._load(), []
                settled = {key for key, tried in there.items() if tried.settled}
                results = there | {key: t for key, t in found.items() if t.settled or key not in settled}
                for key, tried in results.items():
                    times = [{**vars(config), "time": round(time, 4)} for config, time in tried.times.items()]
                    sizes = {name: getattr(key, name) for name in _SIZES}
                    entries.append({**sizes, "settled": tried.settled, "tried": times})
                content = {**self._header, "entries": entries}
                while not is_readable(content):
                    del entries[: 1 + len(entries) // 8]  # the oldest
                write_object(self.path, content)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            self._say_unavailable(error)

    def _load(self) -> dict[TuningKey, Tried]:
        """Return the file's valid entries; none where there is no file or not one of ours. Raises OSError."""
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
    """Return an entry of the file; None unless this version could have written it."""
    times: dict[GemmConfig, Any] = {}
    try:
        settled, sizes = entry["settled"], [entry[name] for name in _SIZES]
        numbers = list(sizes)
        for tried in entry["tried"]:
            time, config = tried.pop("time"), GemmConfig(**tried)
            times[config] = time
            numbers += [value for name, value in vars(config).items() if name != "pipeline"]
        valid = all(map(is_size, numbers)) and all(is_offered(config, sizes[3]) for config in times)
    except (TypeError, KeyError, AttributeError):
        return None
    valid = valid and times and type(settled) is bool and all(map(is_milliseconds, times.values()))
    return (TuningKey(card, *sizes), Tried(times, settled)) if valid else None
