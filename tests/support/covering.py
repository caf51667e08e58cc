"""Covering arrays: not each kind of one list with each of another, but each kind of either at least once."""

from __future__ import annotations

from collections.abc import Collection

import pytest


def covering(first: Collection, second: Collection, slow_rounds: int = 0) -> list:
    """Cases (one of `first`, one of `second`) for pytest.mark.parametrize, as many as the longer has.

    Each of `slow_rounds` adds as many, of other pairs as long as there are any, that are marked slow.
    """
    first, second = list(first), list(second)
    cases = {}
    for turn in range(1 + slow_rounds):
        for number in range(max(len(first), len(second))):
            a, b = number % len(first), (number + 7 * turn) % len(second)
            marks = [pytest.mark.slow] if turn else []
            cases.setdefault((a, b), pytest.param(first[a], second[b], marks=marks))
    return list(cases.values())
