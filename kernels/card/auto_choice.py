"""What a card's own benchmark found to be fastest per shape of a linear, kept for `auto`.

A choice counts only for the card, the driver, the versions and the kernels that it was measured with.
"""

import contextlib
import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .kept_files import is_milliseconds, is_size, path_for, read_of_machine, write_of_machine
from .kernel_sources import kernel_source_hash
from .machine import describe_machine, native_backend

FUSED, NATIVE, BF16 = "fused int8", "native int8", "bf16"
WAYS = (FUSED, NATIVE, BF16)
"""What a linear can compute with: this pack's kernel, ComfyUI's own INT8, a weight in bf16."""

# Another way than the fused kernel has to be so much faster: less is noise, and blocks of fused linears save more.
_MARGIN = 0.03

Shape = tuple[int, int]
"""N and K of a linear."""


@dataclass(frozen=True)
class AutoChoice:
    """What was measured on a healthy card.

    Attributes:
        date: when, as ISO 8601.
        milliseconds: per shape, of which there is one at least, the time of each way that ran.
    """

    date: str
    milliseconds: Mapping[Shape, Mapping[str, float]]

    def fastest(self, shape: Shape, ways: Collection[str] = WAYS) -> str | None:
        """The fastest of `ways` for a shape, the fused kernel where no other is clearly faster; None where none ran.

        A shape that was not measured is judged by the nearest that was, in factors of N and K.
        """
        return fastest({way: time for way, time in self.milliseconds[self.nearest(shape)].items() if way in ways})

    def nearest(self, shape: Shape) -> Shape:
        """The measured shape that stands for `shape`."""
        return min(
            self.milliseconds,
            key=lambda other: sum(abs(math.log(a / b)) for a, b in zip(shape, other, strict=True)),
        )


def fastest(times: Mapping[str, float]) -> str | None:
    """The way with the least time, the fused kernel where no other is clearly faster; None of none."""
    best = min(times, key=times.__getitem__, default=None)
    return FUSED if best is not None and times.get(FUSED, math.inf) <= (1 + _MARGIN) * times[best] else best


def stored_auto_choice(device: torch.device) -> AutoChoice | None:
    """The choice that counts for a GPU, or None where none was stored, or with others of what it is bound to."""
    return _stored(device)


@functools.cache
def _stored(device: torch.device) -> AutoChoice | None:
    try:
        content = read_of_machine(_path(device), _machine_of(device))
        date, times = content["date"], dict(map(_of_shape, content["shapes"]))
        return AutoChoice(date, times) if isinstance(date, str) and times else None
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        return None
    except RuntimeError:  # a driver that does not answer, which whoever computes on the card will hear too
        return None


def store_auto_choice(device: torch.device, choice: AutoChoice) -> Path:
    """Keep a choice for a GPU in place of an earlier one, whole or not at all; the file. Raises OSError."""
    path = _path(device)
    entries = [{"n": n, "k": k, "milliseconds": dict(times)} for (n, k), times in choice.milliseconds.items()]
    try:
        write_of_machine(path, _machine_of(device), {"date": choice.date, "shapes": entries})
    finally:
        _stored.cache_clear()
    return path


def clear_auto_choice(device: torch.device) -> None:
    """Forget the choice of a GPU. Raises OSError."""
    with contextlib.suppress(ImportError):  # without Triton there is none
        _path(device).unlink(missing_ok=True)
    _stored.cache_clear()


@functools.cache
def _machine_of(device: torch.device) -> dict[str, str]:
    """What a choice is bound to."""
    found = describe_machine(device)
    machine = {name: found.get(name, "") for name in ("card", "driver", "torch", "triton", "comfy-kitchen")}
    try:
        backend = native_backend(device)
    except LookupError:
        backend = ""
    return machine | {"native backend": backend, "kernels": kernel_source_hash()}


def _path(device: torch.device) -> Path:
    return path_for("auto", _machine_of(device))


def _of_shape(entry: dict[str, Any]) -> tuple[Shape, dict[str, float]]:
    """A shape and what each way took for it. Raises ValueError, TypeError or KeyError for what no choice says."""
    n, k, times = entry["n"], entry["k"], entry["milliseconds"]
    if not (is_size(n) and is_size(k) and isinstance(times, dict)):
        raise ValueError("no shape with times")
    if not all(way in WAYS and is_milliseconds(time) for way, time in times.items()):
        raise ValueError("no times")
    return (n, k), times
