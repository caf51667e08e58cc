"""The cache of what calls found out, by the layouts of their tensors (shapes, strides, dtypes, devices) and constants.

Values hold no tensors. Cached are plans of ops and launches of their kernels, which way of exact attention runs,
whether a kernel is exact on a card, and what is compiled ahead.
"""

from collections.abc import Callable
from typing import Any

# Shapes of many models and prompts would otherwise add up.
MOST_KEPT = 4096
KEPT: dict[tuple, Any] = {}


def keep(key: tuple, value: Any) -> Any:
    """Store a value and return it. A full cache is cleared first."""
    if len(KEPT) >= MOST_KEPT:
        KEPT.clear()
    KEPT[key] = value
    return value


class KeptFor:
    """A cached function that is removed from the cache after so many calls."""

    def __init__(self, key: tuple, function: Callable[..., Any], calls: int) -> None:
        self._key, self._function, self._left = key, function, calls

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left <= 0:
            KEPT.pop(self._key, None)
        return self._function(*arguments)


def kept(key: tuple, make: Callable[[], Any]) -> Any:
    """Return the cached value of `key`; compute it by `make`, which must not return None, on first use."""
    value = KEPT.get(key)
    return keep(key, make()) if value is None else value
