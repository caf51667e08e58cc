"""Tuning results and where they outlive the process: one JSON file per card, kernel sources and Triton version."""

import errno
import logging
import os
from dataclasses import asdict, dataclass, fields
from typing import Any

import triton
from filelock import FileLock

from ..card.kept_files import is_milliseconds, is_size, path_for, read_object, write_object
from ..card.machine import kernel_source_hash
from .tiles import GemmConfig, is_offered

logger = logging.getLogger(__name__)

# Each write takes milliseconds; whoever waits longer than this waits for a process that hangs.
_LOCK_SECONDS = 5


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


@dataclass(frozen=True)
class Measurement:
    """The fastest configuration of a key and the time of its launch."""

    config: GemmConfig
    milliseconds: float


class TuningCache:
    """The results of one card with the kernels and the Triton of this process, shared with other processes.

    Nothing here raises for the state of the disk: what cannot be read or written is said once and then only missing.
    """

    def __init__(self, card: str) -> None:
        self._header = {"card": card, "triton": triton.__version__, "kernel_source": kernel_source_hash()}
        self.path = path_for(self._header)
        self._measured: dict[TuningKey, Measurement] = {}
        self._said: set[str] = set()

    def read(self) -> dict[TuningKey, Measurement]:
        """What all processes have measured so far."""
        try:
            return self._load()
        except OSError as error:
            self._say_unavailable(error)
            return {}

    def add(self, key: TuningKey, measurement: Measurement) -> None:
        """Keep a measurement of this process, along with earlier ones that could not be written in their turn."""
        self._measured[key] = measurement
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self._lock():
                self._replace(self._load() | self._measured)
        except (OSError, NotImplementedError) as error:  # the latter: a file system without locks
            self._say_unavailable(error)

    def _lock(self) -> FileLock:
        """A lock on the file. Raises OSError for a link in its place, which earlier versions of filelock follow."""
        place = f"{self.path}.lock"
        if os.path.islink(place):
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), place)
        return FileLock(place, timeout=_LOCK_SECONDS)

    def _load(self) -> dict[TuningKey, Measurement]:
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

    def _replace(self, results: dict[TuningKey, Measurement]) -> None:
        """Write the whole file so that a reader sees the old or the new one.

        Call with the lock held; raises OSError.
        """
        entries = [
            {
                "m_bucket": key.m_bucket,
                "n": key.n,
                "k": key.k,
                "passes": key.passes,
                "config": asdict(result.config),
                "milliseconds": round(result.milliseconds, 6),
            }
            for key, result in results.items()
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


def _parse(entry: Any, card: str) -> tuple[TuningKey, Measurement] | None:
    """An entry of the file, or None unless it is one that this version could have written."""
    try:
        # Older files name no passes.
        sizes = [entry["m_bucket"], entry["n"], entry["k"], entry.get("passes", 1)]
        values, milliseconds = entry["config"], entry["milliseconds"]
        if values.keys() != {field.name for field in fields(GemmConfig)}:
            return None
        config = GemmConfig(**values)
    except (TypeError, KeyError, AttributeError, ValueError):
        return None
    if not (all(map(is_size, sizes)) and is_milliseconds(milliseconds) and is_offered(config, sizes[3])):
        return None
    return TuningKey(card, *sizes), Measurement(config, milliseconds)
