"""The benchmark's figures and what is computed from them: tables, notes and JSON."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from .methods import BF16, Method
from .shapes import LinearShape

LOOPED_NOTE = "\\* not captured in a CUDA graph: a loop of calls, the host's launches included."
_UNSTEADY = 0.1
_WRONG = 0.15  # Q4_K has 0.08


@dataclass(kw_only=True)
class Times:
    """Milliseconds per method and round of one thing that is computed; `absent` says why a method did not run."""

    rounds: dict[str, list[float]] = field(default_factory=dict)
    relative_errors: dict[str, float] = field(default_factory=dict)
    """||method - float64|| / ||float64|| on a sample of rows of this random data."""
    looped: list[str] = field(default_factory=list)
    """Methods that no CUDA graph could be made of."""
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def milliseconds(self) -> dict[str, float]:
        """Median over the rounds per method that ran."""
        return medians(self.rounds)

    @property
    def name(self) -> str:
        """What is computed, for the user."""
        raise NotImplementedError

    def place(self) -> str:
        """Its sizes."""
        raise NotImplementedError

    def as_json(self) -> dict:
        """All figures in JSON's types, the medians with them; an error that is no number is null."""
        errors = {name: e if math.isfinite(e) else None for name, e in self.relative_errors.items()}
        return asdict(self) | {"relative_errors": errors, "milliseconds": self.milliseconds}


@dataclass
class ShapeResult(Times):
    """The times at [M, K] x [N, K]."""

    shape: LinearShape
    m: int
    copies: int = 1
    """Copies of the weight that the calls rotated over."""
    weight_bytes: dict[str, float] = field(default_factory=dict)
    """What the method's form of the weight takes."""

    @property
    def name(self) -> str:
        return self.shape.name

    def time_ratio(self, method: str, reference: str) -> float | None:
        """The time of `method` over that of `reference`, or None where either did not run."""
        if method not in self.rounds or reference not in self.rounds:
            return None
        return statistics.median(self.rounds[method]) / statistics.median(self.rounds[reference])

    def speedup(self, method: str, reference: str = BF16) -> float | None:
        """How many times faster than `reference`, or None where either did not run."""
        ratio = self.time_ratio(method, reference)
        return None if ratio is None else 1 / ratio

    def teraflops(self, method: str) -> float | None:
        """Achieved rate in 10^12 operations per second, two per multiply-add, or None where the method did not run."""
        if method not in self.rounds:
            return None
        return 2 * self.m * self.shape.n * self.shape.k / statistics.median(self.rounds[method]) / 1e9

    def place(self) -> str:
        """M x N x K."""
        return f"{self.m} x {self.shape.n} x {self.shape.k}"


@dataclass
class Report:
    """Everything one run of the benchmark found out."""

    environment: dict[str, str]
    shapes: list[ShapeResult] = field(default_factory=list)
    health: str = ""
    """What the gate in front of the run found."""

    def as_json(self) -> dict:
        """All figures in JSON's types. Two more keys are those of `tests/studies/linears.py`, whose files are read
        alike."""
        return {
            "environment": dict(self.environment),
            "shapes": [result.as_json() for result in self.shapes],
            "quantizations": [],
            "copy_gigabytes_per_second": None,
            "health": self.health,
        }


def medians(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median per name."""
    return {name: statistics.median(times) for name, times in rounds.items()}


def method_table(result: ShapeResult, methods: Sequence[Method]) -> tuple[list[str], list[list[str]]]:
    """Column headings and a row for each method that ran on a shape."""
    columns = ["", "ms", "spread", "TOPS", f"x {BF16}", "error", "weight MB"]
    rows = []
    for method in (method for method in methods if method.name in result.rounds):
        times = result.rounds[method.name]
        rows.append(
            [
                method.name,
                _milliseconds(result, method.name),
                spread(times),
                _number(result.teraflops(method.name), ".3g"),
                _number(result.speedup(method.name), ".2f"),
                _number(result.relative_errors.get(method.name), ".4f"),
                _number(result.weight_bytes[method.name] / 1e6, ".1f"),
            ]
        )
    return columns, rows


def same_within_noise(result: ShapeResult, first: str, second: str) -> bool:
    """Whether the rounds of two methods overlap, so that neither is the faster one."""
    one, other = result.rounds[first], result.rounds[second]
    return min(one) <= max(other) and min(other) <= max(one)


def notes(results: Sequence[Times]) -> list[str]:
    """One line each: what was left out and why, what is timed another way, and what makes the figures doubtful."""
    lines = []
    if any(result.looped for result in results):
        lines.append(LOOPED_NOTE)
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


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def spread(times: Sequence[float]) -> str:
    """Half the range of some times, in percent of their median."""
    return f"± {50 * (max(times) - min(times)) / statistics.median(times):.1f} %"


def _milliseconds(result: Times, method: str) -> str:
    return _number(result.milliseconds.get(method), ".3f") + ("\\*" if method in result.looped else "")
