"""The one cache of what a call found out, so that the next one like it need not ask again.

A key is of what was asked, of layouts of tensors (shapes, strides, dtypes, devices) and of constants. What is kept
holds no tensors: how ops are computed and their kernels launched, which way of exact attention runs, which kernel is
exact.
"""

from collections.abc import Callable
from typing import Any

# Shapes of many models and prompts would otherwise add up.
MOST_KEPT = 4096
KEPT: dict[tuple, Any] = {}


def keep(key: tuple, value: Any) -> Any:
    """Keep a value, and return it."""
    if len(KEPT) >= MOST_KEPT:
        KEPT.clear()
    KEPT[key] = value
    return value


class KeptFor:
    """A function that is kept for so many calls, and then forgotten."""

    def __init__(self, key: tuple, function: Callable[..., Any], calls: int) -> None:
        self._key, self._function, self._left = key, function, calls

    def __call__(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left <= 0:
            KEPT.pop(self._key, None)
        return self._function(*arguments)


def kept(key: tuple, make: Callable[[], Any]) -> Any:
    """What is kept under `key`, which `make` makes the first time; not None."""
    value = KEPT.get(key)
    return keep(key, make()) if value is None else value
