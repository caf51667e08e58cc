"""One forward of a model in its parts, and the time of it with other linears.

Predictions apply Amdahl's law to the parts. G. M. Amdahl, 1967: a part with a share p of the time, made s times as
fast, leaves 1 - p + p / s of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from ..card.device import BF16
from .attention_rows import AttentionSizes
from .methods import METHOD_OF_WAY
from .shape_results import LinearShape, ShapeResult

T = TypeVar("T")
_WORTH_TIMING = 0.98
# The most times as long that clocks at each linear make a forward. It is more only where the card waits for Python.
_MOST_WATCHED = 1.15
_MOST_SHAPES = 8
# The least times as long that products take in a model whose weights come over the bus for each.
_STREAMING = 2


@dataclass(frozen=True)
class Calls:
    """Calls of a forward: how many there are, and the milliseconds that they take together."""

    count: int
    milliseconds: float


@dataclass(frozen=True)
class BlockCalls(Calls):
    """The calls of the blocks of one list of a model, which is named by its module path."""

    name: str
    speedup: float | None  # of a copy of one block on the fused kernels; None where none could be made


class ForwardSplit(NamedTuple):
    """One forward of a model in milliseconds."""

    total: float  # of the whole, undisturbed
    watched: float  # the same with a clock at each block, linear and attention
    # Those that INT8 takes over: calls of the same product, named after the first such linear.
    linears: Mapping[LinearShape, Calls]
    attention: float  # without the linears around it
    in_bf16: bool = False  # whether the model as it is computes all linears in floats
    blocks: Sequence[BlockCalls] = ()  # the repeated blocks, which hold nearly all linears
    attention_calls: Sequence[AttentionSizes] = ()  # those that together take nearly all of its time, the longest first
    working_bytes: int = 0  # the most that it takes of the card beside its weights

    @property
    def waits_for_python(self) -> bool:
        """Whether the clocks took so long that the times of the parts are of no use."""
        return self.watched > _MOST_WATCHED * self.total

    def shapes(self) -> list[LinearShape]:
        """Return the products that are worth timing, the largest first."""
        return longest({shape: calls.milliseconds for shape, calls in self.linears.items()}, _MOST_SHAPES)

    def predicted(self, results: Sequence[ShapeResult], way: str) -> float | None:
        """Return the time of the forward with the timed products computed another way; None where one has no such time.

        A product alone and one in a model meet different clocks. So only the ratio of two products alone counts, where
        the way that the model computes now was timed. It does not where products of the model wait for their weights.
        """
        saved = 0.0
        for result in results:
            calls, times = self.linears[result.shape], result.milliseconds
            if METHOD_OF_WAY[way] not in times:
                return None
            other = times[METHOD_OF_WAY[way]]
            alone = calls.count * times.get(BF16, 0.0)
            by_ratio = self.in_bf16 and calls.milliseconds < _STREAMING * alone
            saved += calls.milliseconds - (calls.milliseconds / times[BF16] if by_ratio else calls.count) * other
        return self.total * (1 - saved / self.watched)

    def predicted_blocks(self) -> float | None:
        """Return the time of the forward with all blocks on the fused kernels, work between the linears included; None
        where that speed is not known."""
        saved = 0.0
        for blocks in self.blocks:
            if blocks.speedup is None:
                return None
            saved += blocks.milliseconds * (1 - 1 / blocks.speedup)
        return self.total * (1 - saved / self.watched) if self.blocks else None


def longest(times: Mapping[T, float], most: int) -> list[T]:
    """Return at most so many of the longest, which together take nearly all of the time, the longest first."""
    chosen, covered = [], 0.0
    for each in sorted(times, key=lambda each: -times[each])[:most]:
        if covered < _WORTH_TIMING * sum(times.values()):
            chosen.append(each)
        covered += times[each]
    return chosen
