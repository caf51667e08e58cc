"""Interruption of long work: its caller sets a check, which the work calls between its parts."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar

_check: ContextVar[Callable[[], None] | None] = ContextVar("int8_dit_check", default=None)


@contextlib.contextmanager
def interruptible(check: Callable[[], None]) -> Iterator[None]:
    """Set the check of this thread's work within the block; it raises to stop the work."""
    token = _check.set(check)
    try:
        yield
    finally:
        _check.reset(token)


def stop_if_asked() -> None:
    """Call the check of the innermost `interruptible`, if there is one."""
    check = _check.get()
    if check is not None:
        check()
