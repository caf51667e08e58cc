"""Small JSON files that outlive the process: read without trust, and replaced whole.

Anybody may write to their folder: under a file's name there need not be a file, nor one that this pack wrote.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

_MOST_BYTES = 1 << 22  # some thousand results; as many brackets take 100 MB in Python
_MOST_SIZE = 1 << 31
_LEAST_MILLISECONDS, _MOST_MILLISECONDS = 1e-6, 1e7  # a nanosecond, hours
# Windows refuses to replace or open a file in the instant another process opens or replaces it.
_ATTEMPTS = 10
_PAUSE_SECONDS = 0.02

_Result = TypeVar("_Result")


def folder() -> Path:
    """Return INT8_DIT_TUNING_CACHE, or else `int8-dit` in the folder of Triton's compiled kernels."""
    from ..internals.triton_runtime import triton_cache_folder

    named = os.environ.get("INT8_DIT_TUNING_CACHE", "").strip()
    return Path(named).expanduser() if named else Path(triton_cache_folder()) / "int8-dit"


def path_for(machine: Mapping[str, str], kind: str = "") -> Path:
    """Return the path of a kind's file for a machine, which has a "card": another machine has another file."""
    slug = re.sub(r"[^a-z0-9]+", "-", machine["card"].lower()).strip("-")[:60]
    digest = hashlib.sha256("\n".join(machine.values()).encode()).hexdigest()[:16]
    return folder() / f"{kind}{slug}-{digest}.json"


def read_object(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object; None where there is something else. Raises OSError, also where nothing is."""
    data = _retried(lambda: _content(path))
    try:
        content = json.loads(data) if data is not None else None
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _content(path: Path) -> bytes | None:
    """Return a file's content, or None for a pipe, a device or a file that is far too large."""
    # A pipe would wait for its other end.
    without_waiting = getattr(os, "O_NONBLOCK", 0)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | without_waiting)) as file:
        found = os.fstat(file.fileno())
        return file.read() if stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES else None


def is_readable(content: dict[str, Any]) -> bool:
    """Whether `read_object` will read an object, once it is written: whether it is small enough."""
    return len(json.dumps(content)) <= _MOST_BYTES


def write_object(path: Path, content: dict[str, Any]) -> None:
    """Replace a file, so that a reader in any process sees the old one or the new one. Raises OSError."""
    # A name that nobody can guess, and only if it is new: a link put there would lead to another file.
    temporary = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.tmp")
    try:
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(json.dumps(content))
        _retried(lambda: os.replace(temporary, path))
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def is_size(value: Any) -> bool:
    """Whether a value from JSON is a number of rows or columns. Whole numbers have any size there."""
    return type(value) is int and 0 < value < _MOST_SIZE


def is_milliseconds(value: Any) -> bool:
    """Whether a value from JSON is a time that a product can take."""
    return type(value) in (int, float) and _LEAST_MILLISECONDS <= value < _MOST_MILLISECONDS


def _retried(action: Callable[[], _Result]) -> _Result:
    """Call `action`, again for a moment while access is denied."""
    for _ in range(_ATTEMPTS - 1):
        try:
            return action()
        except PermissionError:
            time.sleep(_PAUSE_SECONDS)
    return action()
