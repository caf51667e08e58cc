"""How long a step of a test may take."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_hang(seconds: float) -> Iterator[None]:
    """TimeoutError for what takes longer, on systems that have alarms."""
    if not hasattr(signal, "SIGALRM"):  # Windows
        yield
        return

    def stop(*_: object) -> None:
        raise TimeoutError(f"more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
