"""The fastest ways by a card's own benchmark, stored for `auto`: of linears and of exact attention.

A choice counts only for the card, the driver and the versions that it was measured with.
"""

import contextlib
import datetime
import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .json_files import is_milliseconds, is_size, path_for, read_object, write_object

# The share by which another way must be faster than the usual one: less is noise.
_MARGIN = 0.03

Shape = tuple
"""(size, size, *class): times are compared within a class. (N, K) of a linear, or an AttentionShape."""


class Choice(NamedTuple):
    """The measurements of a healthy card."""

    date: str  # in ISO 8601
    milliseconds: Mapping[Shape, Mapping[str, float]]  # of each way that ran, for at least one shape

    def fastest(self, shape: Shape, ways: Collection[str], usual: str, within: float = math.inf) -> str | None:
        """Return the fastest of `ways` for a shape, `usual` where no other is clearly faster; None where none ran.

        A shape that was not measured is judged by the nearest of its class, in factors of its sizes, each of which is
        at most `within`.
        """
        factors = {
            other: [max(mine / its, its / mine) for mine, its in zip(shape[:2], other[:2], strict=True)]
            for other in self.milliseconds
            if other[2:] == shape[2:]
        }
        alike = {other: math.prod(each) for other, each in factors.items() if max(each) <= within}
        if not alike:
            return None
        nearest = min(alike, key=alike.__getitem__)
        return fastest({way: time for way, time in self.milliseconds[nearest].items() if way in ways}, usual)


def fastest(times: Mapping[str, float], usual: str) -> str | None:
    """Return the way with the least time, `usual` where no other is clearly faster; None without ways."""
    best = min(times, key=times.__getitem__, default=None)
    return usual if best is not None and times.get(usual, math.inf) <= (1 + _MARGIN) * times[best] else best


@dataclass(eq=False)
class Choices:
    """The choices of one kind, one for each card."""

    kind: str  # the prefix of their files' names
    fields: tuple[str, ...]  # the names of a shape's parts
    ways: Collection[str]  # to choose from
    machine: Callable[[torch.device], Mapping[str, str]]  # -> the "card" and all else that a choice is bound to

    def __post_init__(self) -> None:
        self.stored = functools.cache(self._stored)
        """Return the choice that counts for a GPU, or None where none was stored for it and its versions."""
        self.after_change: list[Callable[[], object]] = [self.stored.cache_clear]
        """Called after a change, to clear the caches of what follows from a choice."""

    def decide_by(self, device: torch.device, choice: Choice | None) -> bool:
        """Store the choice of a GPU in place of an earlier one; with None remove that one.

        Returns whether there was one. Raises OSError where it cannot be stored; then the earlier one stays, whole.
        """
        before = self.stored(device) is not None
        try:
            if choice is None:
                with contextlib.suppress(ImportError):  # without Triton there is no folder
                    self.path(device).unlink(missing_ok=True)
            else:
                path, entries = self.path(device), []
                for shape, times in choice.milliseconds.items():
                    entries.append(dict(zip(self.fields, shape, strict=True)) | {"milliseconds": dict(times)})
                path.parent.mkdir(parents=True, exist_ok=True)
                write_object(path, {"machine": dict(self.machine(device)), "date": choice.date, "shapes": entries})
        finally:
            for forget in self.after_change:
                forget()
        return before

    def beside_earlier(self, device: torch.device, milliseconds: Mapping[Shape, Mapping[str, float]]) -> Choice:
        """Return what was measured today, beside earlier times of other shapes on a GPU."""
        earlier = self.stored(device)
        return Choice(datetime.date.today().isoformat(), {**(earlier.milliseconds if earlier else {}), **milliseconds})

    def path(self, device: torch.device) -> Path:
        """Return the file of a GPU's choice. Raises ImportError without Triton."""
        return path_for(self.machine(device), f"{self.kind}-")

    def _stored(self, device: torch.device) -> Choice | None:
        try:
            content = read_object(self.path(device)) or {}
            if content.get("machine") != self.machine(device):
                return None
            date, times = content["date"], dict(map(self._parsed, content["shapes"]))
            return Choice(date, times) if isinstance(date, str) and times else None
        # A RuntimeError is a driver that does not answer, as a computation on the card will find too.
        except (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError):
            return None

    def _parsed(self, entry: dict[str, Any]) -> tuple[Shape, dict[str, float]]:
        """Return a shape and the time of each way. Raises ValueError, TypeError or KeyError for a wrong entry."""
        shape, times = tuple(entry[name] for name in self.fields), entry["milliseconds"]
        if not (all(map(is_size, shape[:2])) and isinstance(times, dict)):
            raise ValueError("no shape with times")
        if not all(way in self.ways and is_milliseconds(time) for way, time in times.items()):
            raise ValueError("no times")
        return shape, times
