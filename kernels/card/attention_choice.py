"""What a card's own benchmark found of the exact ways to compute attention, kept for the fastest of them.

A choice counts only for the card, the driver, the PyTorch, the Triton and the cuDNN that it was measured with.
"""

import contextlib
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .kept_files import is_milliseconds, is_size, path_for, read_of_machine, write_of_machine
from .machine import describe_machine

FLASH, CUDNN, EFFICIENT, TRITON, PYTORCH = "flash", "cuDNN", "efficient", "Triton", "PyTorch's choice"
EXACT_WAY_NAMES = (FLASH, CUDNN, EFFICIENT, TRITON, PYTORCH)
"""What computes exact attention: PyTorch's backends by their names, this pack's kernel, whichever PyTorch chooses."""

# Another way than the one that runs anyway has to be so much faster: less is noise.
_MARGIN = 0.03


class AttentionShape(NamedTuple):
    """What the time of an attention call depends on most: the heads' width, tokens of q and of k, and a mask."""

    head_dim: int
    tokens: int
    keys: int
    masked: bool


@dataclass(frozen=True)
class AttentionChoice:
    """What was measured on a healthy card.

    Attributes:
        date: when, as ISO 8601.
        milliseconds: per shape, of which there is one at least, the time of each exact way that ran.
    """

    date: str
    milliseconds: Mapping[AttentionShape, Mapping[str, float]]

    def fastest(self, shape: AttentionShape, ways: Collection[str], usual: str) -> str | None:
        """The fastest of `ways` for a shape, `usual` where no other is clearly faster.

        A shape that was not measured is judged by the nearest in factors of its tokens, among those of its head width
        with a mask as it has. None where there is none, or where none of `ways` ran for it.
        """
        alike = [s for s in self.milliseconds if (s.head_dim, s.masked) == (shape.head_dim, shape.masked)]
        if not alike:
            return None
        nearest = min(
            alike, key=lambda other: _distance(other.tokens, shape.tokens) + _distance(other.keys, shape.keys)
        )
        times = {way: time for way, time in self.milliseconds[nearest].items() if way in ways}
        best = min(times, key=times.__getitem__, default=None)
        return usual if best is not None and times.get(usual, math.inf) <= (1 + _MARGIN) * times[best] else best


def _distance(a: int, b: int) -> float:
    return abs(math.log(a / b))


def stored_attention_choice(device: torch.device) -> AttentionChoice | None:
    """The choice that counts for a GPU, or None where none was stored, or with others of what it is bound to."""
    return _stored(device)


@functools.cache
def _stored(device: torch.device) -> AttentionChoice | None:
    try:
        content = read_of_machine(_path(device), _machine_of(device))
        date, times = content["date"], dict(map(_of_shape, content["shapes"]))
        return AttentionChoice(date, times) if isinstance(date, str) and times else None
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None
    except RuntimeError:  # a driver that does not answer, which whoever computes on the card will hear too
        return None


def store_attention_choice(device: torch.device, choice: AttentionChoice) -> Path:
    """Keep a choice for a GPU in place of an earlier one, whole or not at all; the file. Raises OSError."""
    path = _path(device)
    entries = [shape._asdict() | {"milliseconds": dict(times)} for shape, times in choice.milliseconds.items()]
    try:
        write_of_machine(path, _machine_of(device), {"date": choice.date, "shapes": entries})
    finally:
        _stored.cache_clear()
    return path


def clear_attention_choice(device: torch.device) -> None:
    """Forget the choice of a GPU. Raises OSError."""
    with contextlib.suppress(ImportError):  # without Triton there is no folder
        _path(device).unlink(missing_ok=True)
    _stored.cache_clear()


@functools.cache
def _machine_of(device: torch.device) -> dict[str, str]:
    """What a choice is bound to."""
    found = describe_machine(device)
    return {name: found.get(name, "") for name in ("card", "driver", "torch", "triton")} | {
        "cudnn": str(torch.backends.cudnn.version())
    }


def _path(device: torch.device) -> Path:
    return path_for("attention", _machine_of(device))


def _of_shape(entry: dict[str, Any]) -> tuple[AttentionShape, dict[str, float]]:
    """A shape and what each way took for it. Raises ValueError, TypeError or KeyError for what no choice says."""
    shape = AttentionShape(*(entry[name] for name in AttentionShape._fields))
    times = entry["milliseconds"]
    if not (all(map(is_size, shape[:3])) and isinstance(shape.masked, bool) and isinstance(times, dict)):
        raise ValueError("no shape with times")
    if not all(way in EXACT_WAY_NAMES and is_milliseconds(time) for way, time in times.items()):
        raise ValueError("no times")
    return shape, times
