"""The benchmark's figures: their measurement, and tables, notes and JSON of them."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch

from ..card.device import BF16
from ..card.timing import CallSeries, GraphPool, sustained_milliseconds
from ..error_text import first_line
from ..interruption import interruptible
from ..linear.int8_linear import settle

ERROR_ROWS = 256
_UNSTEADY = 0.1
_WRONG = 0.15  # Q4_K has 0.08


class Unavailable(Exception):
    """A method that does not exist on this machine or for this shape; the message says why."""


def sampled_rows(count: int, device: torch.device) -> torch.Tensor:
    """Return the indices of the rows, of so many, that errors are measured on."""
    return torch.arange(0, count, max(1, count // ERROR_ROWS), device=device)


@dataclass(kw_only=True)
class Times:
    """The times of the methods that compute one thing."""

    reference: ClassVar[str]  # the method that others are compared with
    rounds: dict[str, list[float]] = field(default_factory=dict)  # milliseconds per round
    # ||method - float64|| / ||float64|| on a sample of rows of this random data.
    relative_errors: dict[str, float] = field(default_factory=dict)
    looped: list[str] = field(default_factory=list)  # methods that no CUDA graph could capture
    absent: dict[str, str] = field(default_factory=dict)  # why a method did not run

    @property
    def name(self) -> str:
        """The thing that is computed, for the user."""
        raise NotImplementedError

    def place(self) -> str:
        """Return its sizes."""
        raise NotImplementedError

    def measure(
        self,
        methods: Iterable[Any],
        operands: Any,
        rounds: int = 3,
        check: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Time `methods` on their operands; `check` runs between them and may raise to stop.

        A method that this machine does not have, or has no memory for, is left out. A GPU must be the current one.
        `say` gets "work: method" of each that is prepared. Small ones come first.
        """
        exact, device = operands.exact(), operands.device
        pool = GraphPool() if device.type == "cuda" else None
        series = {}
        for method in sorted(methods, key=lambda method: not method.small):
            check()
            say(f"{self.name}: {method.name}")
            try:
                with interruptible(check):
                    call = method.call(operands)
                    if not method.foreign:
                        settle(partial(call, 0), device)
                    output = operands.sample(call(0)).double()
                self.relative_errors[method.name] = ((output - exact).norm() / exact.norm()).item()
                series[method.name] = CallSeries(call, operands.copies, device, pool)
            except Unavailable as reason:
                self.absent[method.name] = str(reason)
            except torch.cuda.OutOfMemoryError:
                self.absent[method.name] = "not enough memory"
            except Exception as error:
                if not method.foreign:  # the code of others may raise anything
                    raise
                self.absent[method.name] = first_line(error)
        ran = {method.name: series[method.name] for method in methods if method.name in series}
        self.rounds = sustained_milliseconds(ran, rounds, check)
        self.looped = [name for name, calls in ran.items() if calls.looped]

    @property
    def milliseconds(self) -> dict[str, float]:
        """The median over the rounds, of each method that ran."""
        return {name: statistics.median(times) for name, times in self.rounds.items()}

    def speedup(self, method: str, reference: str | None = None) -> float | None:
        """Return how many times faster than `reference` a method is, or None where either did not run."""
        times, reference = self.milliseconds, reference or self.reference
        return times[reference] / times[method] if method in times and reference in times else None

    def same_within_noise(self, first: str, second: str) -> bool:
        """Whether the rounds of two methods overlap, so that neither is the faster one."""
        one, other = self.rounds[first], self.rounds[second]
        return min(one) <= max(other) and min(other) <= max(one)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return headings and a row for each method that ran."""
        rows = []
        for method, rounds in self.rounds.items():
            median, speedup = statistics.median(rounds), self.speedup(method)
            star = "\\*" if method in self.looped else ""
            spread = f"± {50 * (max(rounds) - min(rounds)) / median:.1f} %"  # half the range
            ratio = "-" if speedup is None else f"{speedup:.2f}"
            rows.append([method, f"{median:.3f}{star}", spread, ratio, f"{self.relative_errors[method]:.4f}"])
        return ["", "ms", "spread", f"x {self.reference}", "error"], rows

    def as_json(self) -> dict:
        """Return all figures in JSON's types, medians included; an error that is no number is null."""
        errors = {name: e if math.isfinite(e) else None for name, e in self.relative_errors.items()}
        return asdict(self) | {"relative_errors": errors, "milliseconds": self.milliseconds}


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of N output and K input channels; `tokens` overrides the run's M for a layer with its own."""

    name: str
    n: int
    k: int
    tokens: int | None = None


IDEOGRAM4_SHAPES = (
    LinearShape("qkv", 13824, 4608),
    LinearShape("attention out", 4608, 4608),
    LinearShape("ffn up", 12288, 4608),
    LinearShape("ffn down", 4608, 12288),
    LinearShape("llm projection", 4608, 53248, tokens=512),
)
"""Of a block of Ideogram 4, and the one in front of its blocks."""


@dataclass
class ShapeResult(Times):
    """The times at [M, K] x [N, K]."""

    reference: ClassVar[str] = BF16
    shape: LinearShape
    m: int
    copies: int = 1  # copies of the weight that the calls rotated over
    weight_bytes: dict[str, float] = field(default_factory=dict)  # what the method's form of the weight takes

    @property
    def name(self) -> str:
        return self.shape.name

    def place(self) -> str:
        """Return M x N x K."""
        return f"{self.m} x {self.shape.n} x {self.shape.k}"

    def teraflops(self, method: str) -> float:
        """Return the rate of a method that ran in 10^12 operations per second, two per multiply-add."""
        return 2 * self.m * self.shape.n * self.shape.k / self.milliseconds[method] / 1e9

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return the same with rates and the sizes of weights."""
        (*first, ratio, error), rows = super().table()
        for row in rows:
            row[3:] = f"{self.teraflops(row[0]):.3g}", *row[3:], f"{self.weight_bytes[row[0]] / 1e6:.1f}"
        return [*first, "TOPS", ratio, error, "weight MB"], rows


def notes(results: Sequence[Times]) -> list[str]:
    """Return a line for each method that was left out or timed another way, and for each doubt in the figures."""
    lines = []
    if any(result.looped for result in results):
        lines.append("\\* not captured in a CUDA graph: a loop of calls, the host's launches included.")
    reasons: dict[str, dict[str, list[str]]] = {}
    for result in results:
        for method, reason in result.absent.items():
            reasons.setdefault(reason, {}).setdefault(method, []).append(result.place())
    for reason, places in reasons.items():
        methods = [m if len(at) == len(results) else f"{m} ({', '.join(at)})" for m, at in places.items()]
        lines.append(f"Left out ({reason}): {'; '.join(methods)}.")
    for result in results:
        for method, error in result.relative_errors.items():
            if not error < _WRONG:
                lines.append(f"{method} at {result.place()} computes something else: relative error {error:.3g}.")
    most = max((max(times) / min(times) - 1 for r in results if (times := r.rounds.get(BF16))), default=0.0)
    if most > _UNSTEADY:
        lines.append(f"The rounds of bf16 differ by up to {most:.0%}: this machine was not steady, measure again.")
    return lines


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return the table as GitHub markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
