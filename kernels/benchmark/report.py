"""The benchmark's figures and what is computed from them: tables, notes and JSON."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import ClassVar

from ..card.device import BF16
from .operands import LinearShape

_UNSTEADY = 0.1
_WRONG = 0.15  # Q4_K has 0.08


@dataclass(kw_only=True)
class Times:
    """Milliseconds per method and round of one thing that is computed; `absent` says why a method did not run."""

    reference: ClassVar[str]
    """The method that others are compared with."""
    rounds: dict[str, list[float]] = field(default_factory=dict)
    relative_errors: dict[str, float] = field(default_factory=dict)
    """||method - float64|| / ||float64|| on a sample of rows of this random data."""
    looped: list[str] = field(default_factory=list)
    """Methods that no CUDA graph could be made of."""
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What is computed, for the user."""
        raise NotImplementedError

    def place(self) -> str:
        """Its sizes."""
        raise NotImplementedError

    @property
    def milliseconds(self) -> dict[str, float]:
        """Median over the rounds per method that ran."""
        return {name: statistics.median(times) for name, times in self.rounds.items()}

    def speedup(self, method: str, reference: str | None = None) -> float | None:
        """How many times faster than `reference`, or None where either did not run."""
        times, reference = self.milliseconds, reference or self.reference
        return times[reference] / times[method] if method in times and reference in times else None

    def same_within_noise(self, first: str, second: str) -> bool:
        """Whether the rounds of two methods overlap, so that neither is the faster one."""
        one, other = self.rounds[first], self.rounds[second]
        return min(one) <= max(other) and min(other) <= max(one)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column headings and a row for each method that ran."""
        rows = []
        for method, rounds in self.rounds.items():
            median, speedup = statistics.median(rounds), self.speedup(method)
            star = "\\*" if method in self.looped else ""
            spread = f"± {50 * (max(rounds) - min(rounds)) / median:.1f} %"  # half the range
            ratio = "-" if speedup is None else f"{speedup:.2f}"
            rows.append([method, f"{median:.3f}{star}", spread, ratio, f"{self.relative_errors[method]:.4f}"])
        return ["", "ms", "spread", f"x {self.reference}", "error"], rows

    def as_json(self) -> dict:
        """All figures in JSON's types, the medians with them; an error that is no number is null."""
        errors = {name: e if math.isfinite(e) else None for name, e in self.relative_errors.items()}
        return asdict(self) | {"relative_errors": errors, "milliseconds": self.milliseconds}


@dataclass
class ShapeResult(Times):
    """The times at [M, K] x [N, K]."""

    reference: ClassVar[str] = BF16
    shape: LinearShape
    m: int
    copies: int = 1
    """Copies of the weight that the calls rotated over."""
    weight_bytes: dict[str, float] = field(default_factory=dict)
    """What the method's form of the weight takes."""

    @property
    def name(self) -> str:
        return self.shape.name

    def place(self) -> str:
        """M x N x K."""
        return f"{self.m} x {self.shape.n} x {self.shape.k}"

    def teraflops(self, method: str) -> float:
        """Achieved rate of a method that ran in 10^12 operations per second, two per multiply-add."""
        return 2 * self.m * self.shape.n * self.shape.k / self.milliseconds[method] / 1e9

    def table(self) -> tuple[list[str], list[list[str]]]:
        """The same, with rates and the sizes of weights."""
        (*first, ratio, error), rows = super().table()
        rows = [
            [*row[:3], f"{self.teraflops(row[0]):.3g}", *row[3:], f"{self.weight_bytes[row[0]] / 1e6:.1f}"]
            for row in rows
        ]
        return [*first, "TOPS", ratio, error, "weight MB"], rows


def notes(results: Sequence[Times]) -> list[str]:
    """One line each: what was left out and why, what is timed another way, and what makes the figures doubtful."""
    lines = []
    if any(result.looped for result in results):
        lines.append("\\* not captured in a CUDA graph: a loop of calls, the host's launches included.")
    reasons: dict[str, dict[str, list[str]]] = {}
    for result in results:
        for method, reason in result.absent.items():
            reasons.setdefault(reason, {}).setdefault(method, []).append(result.place())
    for reason, places in reasons.items():
        methods = [m if len(at) == len(results) else f"{m} at {', '.join(at)}" for m, at in places.items()]
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
    """The table as GitHub markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])
