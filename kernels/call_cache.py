"""The cache of what calls found out, by the layouts of their tensors (shapes, strides, dtypes, devices) and constants.

Values hold no tensors. Cached are plans of ops and launches of their kernels, which way of exact attention runs,
whether a kernel is exact on a card, and what is compiled ahead.
"""

from collections.abc import Callable
from typing import Any

# Shapes of many models and prompts would otherwise add up.
MOST_ENTRIES = 4096
CACHE: dict[tuple, Any] = {}


def store(key: tuple, value: Any) -> Any:
    """Store a value and return it. A full cache is cleared first."""
    if len(CACHE) >= MOST_ENTRIES:
        CACHE.clear()
    CACHE[key] = value
    return value


class ExpiringEntry:
    """A cached function that is removed from the cache after so many calls."""

    def __init__(self, key: tuple, function: Callable[..., Any], calls: float) -> None:
        self._key, self._function, self._left = key, function, calls

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left <= 0:
            CACHE.pop(self._key, None)
        return self._function(*arguments)


def cached(key: tuple, make: Callable[[], Any]) -> Any:
    """Return the cached value of `key`; compute it by `make`, which must not return None, on first use."""
    value = CACHE.get(key)
    return store(key, make()) if value is None else value
