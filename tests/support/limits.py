"""What a step of a test may take: time, and memory."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_hang(seconds: int) -> Iterator[None]:
    """TimeoutError for what takes longer, on systems that have alarms."""
    if not hasattr(signal, "SIGALRM"):  # Windows
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError("this takes too long")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak_memory() -> int:
    """The most memory that this process has had, in bytes."""
    import resource  # Windows has none

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
