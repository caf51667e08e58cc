"""The one cache of what a call found out, so that the next one like it need not ask again.

A key consists of what was asked, layouts of tensors (shapes, strides, dtypes, devices) and constants. Values hold no
tensors. Cached are: plans of ops and launches of their kernels, which way of exact attention runs, whether a kernel is
exact on a card, and what is compiled ahead.
"""

from collections.abc import Callable
from typing import Any

# Shapes of many models and prompts would otherwise add up.
MOST_KEPT = 4096
KEPT: dict[tuple, Any] = {}


def keep(key: tuple, value: Any) -> Any:
    """Store a value, and return it."""
    if len(KEPT) >= MOST_KEPT:
        KEPT.clear()
    KEPT[key] = value
    return value


class KeptFor:
    """A cached function that leaves the cache after so many calls."""

    def __init__(self, key: tuple, function: Callable[..., Any], calls: int) -> None:
        self._key, self._function, self._left = key, function, calls

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left <= 0:
            KEPT.pop(self._key, None)
        return self._function(*arguments)


def kept(key: tuple, make: Callable[[], Any]) -> Any:
    """The cached value of `key`. A call that finds none stores what `make` returns, which must not be None."""
    value = KEPT.get(key)
    return keep(key, make()) if value is None else value
