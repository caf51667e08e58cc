"""Which form of a model's weights to load on this machine: the time and the memory of each, predicted from what the
benchmark measured."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..card.device import FUSED
from ..card.timing import Stopwatch
from .forward_split import ForwardSplit
from .methods import CODES, FUSED_CODES, FUSED_GGUF, GGUF, PLAIN
from .shape_results import ShapeResult

STEPS = 20
"""Of the image whose seconds are told."""
LOADED_FORMS = {
    "INT8": (FUSED, PLAIN),
    "W4A8 as stored": (FUSED_CODES, CODES),
    "GGUF Q4_K as stored": (FUSED_GGUF, GGUF["Q4_K"]),
}
"""Ways to load a model, the most exact first, each with the row of its linears in the benchmark and their form."""
COPIED_BYTES = 1 << 28
"""That bus_rate takes of the card, and of pinned memory."""

_WORTH_LESS_EXACT = 0.9  # of the time: what is less than this faster is not worth a larger error
_COPIES = 5


class LoadedSizes(NamedTuple):
    """The weights of one step."""

    models: int  # how many it runs
    linears: int  # how many weights the linears have that become INT8, in all models
    others: int  # bytes of everything else


class Room(NamedTuple):
    """The bytes that a machine has for a model, and bytes a second."""

    card: int  # for weights, beside a step
    host: int  # in host memory
    step: int  # what a forward takes beside its weights
    bus: float  # the rate from pinned host memory to the card


class LoadedForm(NamedTuple):
    """A way to load a model, and what follows on one machine."""

    name: str
    weights: int  # bytes of all weights of a step
    streamed: int  # bytes that each step fetches from host memory
    milliseconds: float  # of a step
    peak: int  # bytes of the card
    fits: bool  # whether the host can hold one model, and what is streamed

    @property
    def seconds(self) -> float:
        """Of an image of STEPS steps."""
        return STEPS * self.milliseconds / 1000


def bus_rate(device: torch.device) -> float:
    """Return how many bytes a second go from pinned host memory to a GPU. Raises RuntimeError where none can be had."""
    host = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    card, watch = torch.empty_like(host, device=device), Stopwatch(device)
    return 1000 * COPIED_BYTES / min(watch.mean(lambda: card.copy_(host, non_blocking=True)) for _ in range(_COPIES))


def step_milliseconds(computed: float, weights: int, streamed: int, bus: float) -> float:
    """Return the time of a step that takes `computed` milliseconds where all bytes of `weights` are on the card, and
    that fetches the `streamed` ones of them at `bus` bytes a second.

    ComfyUI keeps as many weights on the card as fit, and computes with them as if all did. Each of the others comes
    over the bus while the one before it is computed with: their part takes as long as the slower of the two.
    """
    share = streamed / weights
    return (1 - share) * computed + max(share * computed, 1000 * streamed / bus)


def loaded_forms(
    split: ForwardSplit, results: Sequence[ShapeResult], sizes: LoadedSizes, room: Room
) -> list[LoadedForm]:
    """Return every way to load the model whose forward was split, without those whose linears were not all timed.

    The forward is predicted in INT8; other forms add to each linear what its row takes longer. A forward that waits for
    Python takes as long in any form.
    """
    waits = split.waits_for_python
    in_int8 = split.total if waits else split.predicted_blocks() or split.predicted(results, FUSED)
    if in_int8 is None:
        return []
    found = []
    for name, (method, form) in LOADED_FORMS.items():
        if not all({FUSED, method} <= set(each.milliseconds) for each in results):
            continue
        times = ((split.linears[each.shape].count, each.milliseconds) for each in results)
        longer = 0.0 if waits else sum(count * (ms[method] - ms[FUSED]) for count, ms in times)
        weights = round(sizes.linears * form.bytes_per_weight) + sizes.others
        streamed = max(0, weights - room.card)
        milliseconds = step_milliseconds(sizes.models * (in_int8 + longer), weights, streamed, room.bus)
        fits = max(weights // sizes.models, streamed) <= room.host
        found.append(LoadedForm(name, weights, streamed, milliseconds, weights - streamed + room.step, fits))
    return found


def best_form(forms: Sequence[LoadedForm]) -> LoadedForm | None:
    """Return the most exact form that takes nearly as little time as the fastest, of those that the host can hold."""
    fitting = [each for each in forms if each.fits]
    fastest = min((each.milliseconds for each in fitting), default=0.0)
    return next((each for each in fitting if _WORTH_LESS_EXACT * each.milliseconds <= fastest), None)


def answer(forms: Sequence[LoadedForm]) -> str | None:
    """Return in a sentence what to load, None where nothing was predicted or nothing fits."""
    if (best := best_form(forms)) is None:
        return None
    return f"Load {best.name} here: {best.seconds:.0f} s for {STEPS} steps, {best.peak / 1e9:.1f} GB of the card"


def loading_table(forms: Sequence[LoadedForm]) -> tuple[list[str], list[list[str]]]:
    """Return headings and a row for each way to load the model."""
    columns = ["load as", f"s for {STEPS} steps", "peak on the card, GB", "weights, GB", "over the bus each step, GB"]
    rows = []
    for each in forms:
        seconds = f"{each.seconds:.1f}" if each.fits else "does not fit the host's memory"
        rows.append([each.name, seconds, *(f"{size / 1e9:.1f}" for size in (each.peak, each.weights, each.streamed))])
    return columns, rows
