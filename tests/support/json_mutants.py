"""Damaged copies of JSON texts: seeded mutants of what the pack keeps in small files and in metadata."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

VALUES = (None, True, "", "3", [], {}, [[]], -1, 0, 3, 1.5, 1e308, 1e-320, 1 << 62, 10**400, math.nan, math.inf)
TEXTS = ("", "null", "7", "[]", "{}", "[" * 100_000, '{"a":' * 50_000, "9" * 5000, "\x00", '"' + "x" * 999_999)

_Change = Callable[[random.Random, Any, Any], None]
"""Changes what stands in a container under a key or at a place."""


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container in a JSON value with each of its keys or places."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in pairs:
        yield value, key
        yield from _places(inner)


def _replace(rng: random.Random, holder: Any, key: Any) -> None:
    holder[key] = rng.choice(VALUES)


def _remove(rng: random.Random, holder: Any, key: Any) -> None:
    del holder[key]


def _rename(rng: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder, dict):
        holder[key + rng.choice("xy0_")] = holder.pop(key)
    else:
        holder.insert(rng.randrange(len(holder) + 1), rng.choice(VALUES))


def _repeat(rng: random.Random, holder: Any, key: Any) -> None:
    if isinstance(holder, list):
        holder.append(holder[key])
    else:
        holder[rng.choice(list(holder))] = holder[key]


def _near(rng: random.Random, holder: Any, key: Any) -> None:
    value = holder[key]
    if type(value) in (int, float):
        holder[key] = rng.choice((value + 1, value - 1, -value, value * 2, value / 2, value * 1e6))
    else:
        holder[key] = str(value)[1:]


def _parsed(change: _Change) -> Callable[[random.Random, str], str]:
    def mutate(rng: random.Random, text: str) -> str:
        content = json.loads(text)
        holder, key = rng.choice(list(_places(content)))
        change(rng, holder, key)
        return json.dumps(content)

    return mutate


def _character(rng: random.Random, text: str) -> str:
    place = rng.randrange(len(text))
    return text[:place] + chr(rng.randrange(1, 256)) + text[place + 1 :]


MUTATIONS: dict[str, Callable[[random.Random, str], str]] = {
    "a value replaced": _parsed(_replace),
    "a value removed": _parsed(_remove),
    "a key renamed or a value added": _parsed(_rename),
    "a value repeated": _parsed(_repeat),
    "a near value": _parsed(_near),
    "a character": _character,
    "truncated": lambda rng, text: text[: rng.randrange(len(text))],
    "too long": lambda rng, text: text + rng.choice(("x", "}", text, "\x00" * 1000)),
    "another text": lambda rng, text: rng.choice(TEXTS),
}
"""Each takes random numbers and a text, and gives another."""
