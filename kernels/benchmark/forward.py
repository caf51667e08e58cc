"""What a faster linear is worth for a whole model: one forward split into its parts, and Amdahl's law on them.

G. M. Amdahl, 1967: what takes a share p of the time, made s times as fast, leaves 1 - p + p / s of it.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..card.choices import Shape, fastest
from ..card.device import BF16, FUSED, NATIVE
from .attention import AttentionCall
from .methods import COMFYUI_INT8 as NATIVE_METHOD
from .report import ShapeResult, same_within_noise
from .shapes import LinearShape

METHOD_OF_WAY = {BF16: BF16, FUSED: FUSED, NATIVE: NATIVE_METHOD}
"""The benchmark's row that stands for each way to compute a linear."""

_WORTH_TIMING = 0.98
# A forward with a clock at each linear takes so many times as long at most; where the card waits for Python it is more.
_MOST_WATCHED = 1.15
_MOST_SHAPES = 8


class Product(NamedTuple):
    """A product [m, k] x [n, k] of a linear."""

    m: int
    n: int
    k: int


@dataclass(frozen=True)
class Calls:
    """The calls of the linears that compute one product.

    Attributes:
        name: of the first such linear.
        count: how many calls a forward has.
        milliseconds: what they take together.
    """

    name: str
    count: int
    milliseconds: float


@dataclass(frozen=True)
class BlockCalls:
    """The calls of the blocks of one list of a model.

    Attributes:
        name: module path of the list.
        count: how many calls a forward has.
        milliseconds: what they take together.
        speedup: how many times as fast a copy of one of them is on the fused kernels; None where none could be made.
    """

    name: str
    count: int
    milliseconds: float
    speedup: float | None


@dataclass(frozen=True)
class ForwardSplit:
    """One forward of a model in milliseconds.

    Attributes:
        total: the whole, with nothing in its way.
        watched: the same with a clock at each linear and attention.
        linears: the linears that INT8 takes over, by product.
        attention: the attention, without the linears around it.
        now: the way that all linears compute with as the model is; None where it is none of the benchmark's.
        block_watched: the same as `watched`, with a clock at each block only.
        blocks: the repeated blocks, which hold nearly all linears.
        attention_calls: those that together take nearly all of its time, the longest first.
    """

    total: float
    watched: float
    linears: Mapping[Product, Calls]
    attention: float
    now: str | None = None
    block_watched: float = math.nan
    blocks: Sequence[BlockCalls] = ()
    attention_calls: Sequence[AttentionCall] = ()

    @property
    def waits_for_python(self) -> bool:
        """Whether the clocks themselves took so long that what they say of the parts is of no use."""
        return self.watched > _MOST_WATCHED * self.total

    @property
    def linear_milliseconds(self) -> float:
        """All linears together."""
        return sum(calls.milliseconds for calls in self.linears.values())

    def shapes(self) -> list[LinearShape]:
        """The products that are worth timing, the largest first: together nearly all of the linears' time."""
        ordered = sorted(self.linears.items(), key=lambda item: -item[1].milliseconds)
        chosen, covered = [], 0.0
        for product, calls in ordered[:_MOST_SHAPES]:
            if covered >= _WORTH_TIMING * self.linear_milliseconds:
                break
            chosen.append(LinearShape(calls.name, product.n, product.k, product.m))
            covered += calls.milliseconds
        return chosen

    def predicted(self, results: Sequence[ShapeResult], way: str) -> float | None:
        """The forward with the timed products computed another way; None where one of them has no such time.

        Everything else stays what it was. A product alone and one in a model meet different clocks, so that only the
        ratio of two products alone counts, where the way that the model computes now was timed.
        """
        before = sum(self.calls_of(result).milliseconds for result in results)
        after = self._timed_linears(results, way)
        return None if after is None else self.total * (1 - (before - after) / self.watched)

    def share(self, results: Sequence[ShapeResult], way: str) -> float | None:
        """What the timed products are of the forward in which they are computed that way; None as in `predicted`."""
        whole, linears = self.predicted(results, way), self._timed_linears(results, way)
        return None if whole is None or linears is None else linears * self.total / self.watched / whole

    def _timed_linears(self, results: Sequence[ShapeResult], way: str) -> float | None:
        total = 0.0
        for result in results:
            calls, times = self.calls_of(result), result.milliseconds
            other = times.get(METHOD_OF_WAY[way])
            if other is None:
                return None
            now = None if self.now is None else times.get(METHOD_OF_WAY[self.now])
            total += calls.count * other if now is None else calls.milliseconds * other / now
        return total

    def calls_of(self, result: ShapeResult) -> Calls:
        """The calls that a timed product stands for."""
        return self.linears[Product(result.m, result.shape.n, result.shape.k)]

    def predicted_blocks(self) -> float | None:
        """The forward with all blocks on the fused kernels, norms and activations between the linears included; None
        where that speed is not known."""
        saved = 0.0
        for blocks in self.blocks:
            if blocks.speedup is None:
                return None
            saved += blocks.milliseconds * (1 - 1 / blocks.speedup)
        return self.total * (1 - saved / self.block_watched) if self.blocks else None


def forward_table(split: ForwardSplit, results: Sequence[ShapeResult]) -> tuple[list[str], list[list[str]]]:
    """Column headings and rows: the parts of the forward, then what it would take with all linears computed one way.

    Of a forward that waits for Python only the whole is known.
    """
    if split.waits_for_python:
        return ["", "ms"], [["one forward, as the model is", f"{split.total:.1f}"]]
    rest = split.watched - split.linear_milliseconds - split.attention
    parts = {"linears": split.linear_milliseconds, "attention": split.attention, "the rest": rest}
    rows = [[name, f"{value:.1f}", f"{value / split.watched:.0%}"] for name, value in parts.items()]
    rows.append(["one forward, as the model is", f"{split.total:.1f}", ""])
    reference = split.predicted(results, BF16)
    predictions = {f"linears in {METHOD_OF_WAY[way]}": split.predicted(results, way) for way in METHOD_OF_WAY}
    for name, predicted in (predictions | {"whole blocks on the fused kernels": split.predicted_blocks()}).items():
        if predicted is not None:
            ratio = "" if reference is None else f"{reference / predicted:.2f} x bf16"
            rows.append([f"predicted, {name}", f"{predicted:.1f}", ratio])
    return ["", "ms", "share"], rows


def auto_choice_sentence(split: ForwardSplit, results: Sequence[ShapeResult]) -> str:
    """What the fused kernel makes of an image of this model, in words."""
    if split.waits_for_python:
        return (
            "No prediction for an image: the card waits for Python. A clock at each linear makes a forward of "
            f"{split.total:.0f} ms one of {split.watched:.0f}."
        )
    reference, fused = split.predicted(results, BF16), split.predicted(results, FUSED)
    if reference is None or fused is None:
        return "No prediction for an image: the fused kernel or bf16 was not timed for all of its linears."
    if all(same_within_noise(result, FUSED, BF16) for result in results):
        return "On this card the fused kernel and bf16 differ by no more than noise: an image takes the same time."
    before, after = split.share(results, BF16), split.share(results, FUSED)
    assert before is not None and after is not None  # or there were no predictions
    speed = before * reference / (after * fused)
    sentence = f"In bf16 the linears are {before:.0%} of a step, and the fused kernel is {speed:.1f} x as fast."
    blocks = split.predicted_blocks()
    if blocks is None:
        return f"{sentence} So an image takes {fused / reference:.2f} of the time ({_instead(fused, reference)})."
    return (
        f"{sentence} That alone leaves {fused / reference:.2f} of the time. With what stands around them fused too, an "
        f"image takes {blocks / reference:.2f} of it ({_instead(blocks, reference)})."
    )


def relative_times(results: Sequence[ShapeResult], split: ForwardSplit | None) -> dict[str, float]:
    """What all linears together take by method, relative to bf16, the fastest first: of the methods that ran for all.

    A linear counts as often as a forward calls it, where one was split. Empty where bf16 did not run.
    """
    methods = set.intersection(*(set(result.rounds) for result in results)) if results else set()
    counts = [1 if split is None else split.calls_of(result).count for result in results]
    times = [result.milliseconds for result in results]
    totals = {name: sum(n * each[name] for n, each in zip(counts, times, strict=True)) for name in methods}
    return {name: totals[name] / totals[BF16] for name in sorted(totals, key=totals.__getitem__) if BF16 in totals}


def headline(results: Sequence[ShapeResult], split: ForwardSplit | None) -> str:
    """What INT8 is worth on this card, in one sentence: for an image where that is predicted, else for the linears."""
    linears = relative_times(results, split).get(FUSED)
    if linears is None:
        why = {result.absent[FUSED] for result in results if FUSED in result.absent}
        return f"INT8 was not timed beside bf16 here{f': {why.pop()}' if why else ''}"
    if all(same_within_noise(result, FUSED, BF16) for result in results):
        return "On this card INT8 and bf16 are equally fast, within noise"
    if split is not None and not split.waits_for_python:
        reference, fused = split.predicted(results, BF16), split.predicted_blocks() or split.predicted(results, FUSED)
        assert reference is not None and fused is not None  # all linears were timed in both
        return f"{_worth(fused / reference)}; your image takes {fused / reference:.2f} of the time"
    return f"{_worth(linears)} in the linears"


def _worth(ratio: float) -> str:
    return f"On this card INT8 is {'only ' if ratio > 1 else ''}{1 / ratio:.2f} × bf16"


def _instead(milliseconds: float, reference: float) -> str:
    return f"{milliseconds:.0f} ms a forward instead of {reference:.0f}"


def times_by_way(result: ShapeResult) -> dict[str, float]:
    """Milliseconds of each way that `auto` can choose, of those that ran."""
    found = result.milliseconds
    return {way: found[method] for way, method in METHOD_OF_WAY.items() if method in found}


def totals_by_shape(results: Sequence[ShapeResult], split: ForwardSplit | None) -> dict[Shape, dict[str, float]]:
    """Per N and K the milliseconds of each way: those of all products of a forward, where one was split.

    A way counts for a shape where it ran for all of its products.
    """
    totals: dict[Shape, dict[str, float]] = {}
    for result in results:
        times, shape = times_by_way(result), (result.shape.n, result.shape.k)
        count = 1 if split is None else split.calls_of(result).count
        before = totals.get(shape, dict.fromkeys(times, 0.0))
        totals[shape] = {way: before[way] + count * times[way] for way in before if way in times}
    return {shape: times for shape, times in totals.items() if times}


def deployment_table(results: Sequence[ShapeResult]) -> tuple[list[str], list[list[str]]]:
    """Column headings and a row for each shape: what the ways of `auto` take, and which of them is the fastest."""
    columns = ["linear", "M x N x K", *(f"{method} ms" for method in METHOD_OF_WAY.values()), "fastest"]
    rows = []
    for result in results:
        times = times_by_way(result)
        best = fastest(times, FUSED)
        cells = [f"{times[way]:.3f}" if way in times else "-" for way in METHOD_OF_WAY]
        rows.append([result.shape.name, result.place(), *cells, "-" if best is None else _winner(result, best)])
    return columns, rows


def _winner(result: ShapeResult, best: str) -> str:
    """The fastest way, and those that differ from it by noise only."""
    own, others = METHOD_OF_WAY[best], [METHOD_OF_WAY[way] for way in times_by_way(result) if way != best]
    noise = [other for other in others if same_within_noise(result, own, other)]
    return own + (f" (noise: {', '.join(noise)})" if noise else "")
