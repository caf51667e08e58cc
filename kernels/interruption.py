"""Stopping long work: whoever starts it says how to ask whether to go on, and the work asks between its parts."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_check: ContextVar[Callable[[], None] | None] = ContextVar("int8_dit_check", default=None)


@contextlib.contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """Let work of this thread within the block call `check`, which raises to stop it."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def stop_if_asked() -> None:
    """Raise what the innermost `interruptible` raises; nothing outside of one."""
    check = _check.get()
    if check is not None:
        check()
