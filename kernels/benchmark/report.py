"""The benchmark's figures and what is computed from them: tables, the summary, and JSON."""

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field

from ..machine import title
from .methods import BF16, FUSED, METHODS, UNFUSED, VARIANTS, Method
from .shapes import LinearShape

QUANTIZE = "plain"
QUANTIZE_SMOOTHING = "smoothing"
QUANTIZE_ROTATION = "rotation"
COPY = "copy"
QUANTIZATIONS = (QUANTIZE, QUANTIZE_SMOOTHING, QUANTIZE_ROTATION)

LOOPED_NOTE = "\\* not captured in a CUDA graph: a loop of calls, the host's launches included."
_UNSTEADY = 0.1
_WRONG = 0.15  # Q4_K has 0.08


@dataclass
class ShapeResult:
    """Milliseconds per method and round at [M, K] x [N, K]; `absent` says why a method did not run."""

    shape: LinearShape
    m: int
    copies: int = 1
    """Copies of the weight that the calls rotated over."""
    rounds: dict[str, list[float]] = field(default_factory=dict)
    relative_errors: dict[str, float] = field(default_factory=dict)
    """||method - float64|| / ||float64|| on a sample of rows of this random data."""
    weight_bytes: dict[str, float] = field(default_factory=dict)
    """What the method's form of the weight takes."""
    looped: list[str] = field(default_factory=list)
    """Methods that no CUDA graph could be made of."""
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def milliseconds(self) -> dict[str, float]:
        """Median over the rounds per method that ran."""
        return medians(self.rounds)

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
class QuantizationResult:
    """Milliseconds per round of the quantization of activations [M, K] alone, and of a copy of as many bytes as x."""

    m: int
    k: int
    element_size: int
    """Bytes per element of x."""
    rounds: dict[str, list[float]] = field(default_factory=dict)

    @property
    def milliseconds(self) -> dict[str, float]:
        """Median over the rounds."""
        return medians(self.rounds)

    def gigabytes_per_second(self, name: str) -> float:
        """Bytes read and written (x; q and a float32 scale per row, or x again) per second, in 10^9."""
        written = self.element_size * self.k if name == COPY else self.k + 4
        return self.m * (self.element_size * self.k + written) / self.milliseconds[name] / 1e6


@dataclass
class Report:
    """Everything one run of the benchmark found out."""

    environment: dict[str, str]
    shapes: list[ShapeResult] = field(default_factory=list)
    quantizations: list[QuantizationResult] = field(default_factory=list)
    copy_gigabytes_per_second: float | None = None
    """Bytes read and written by a copy far larger than any cache."""
    health: str = ""
    """What the gate in front of the run found."""

    def as_json(self) -> dict:
        """All figures in JSON's types, the medians with them; an error that is no number is null."""
        content = asdict(self)
        for entry in content["shapes"]:
            errors = entry["relative_errors"]
            entry["relative_errors"] = {name: e if math.isfinite(e) else None for name, e in errors.items()}
        for entries, results in ((content["shapes"], self.shapes), (content["quantizations"], self.quantizations)):
            for entry, result in zip(entries, results, strict=True):
                entry["milliseconds"] = result.milliseconds
        return content

    def as_markdown(self) -> str:
        """All tables and notes."""
        parts = [
            f"**{title(self.environment)}**",
            markdown(*table(self.shapes, [method for method in METHODS if not method.variant])),
        ]
        if any(variant.name in result.rounds for result in self.shapes for variant in VARIANTS):
            parts += [
                "Fused linear with bias, smoothing, rotation (group 256); in brackets what it costs:",
                markdown(*variant_table(self.shapes)),
            ]
        if self.quantizations:
            parts += ["Quantization of the activations alone:", markdown(*quantization_table(self.quantizations))]
        if self.copy_gigabytes_per_second is not None:
            parts.append(f"Copy of a large tensor: {self.copy_gigabytes_per_second:.0f} GB/s read and written.")
        columns, rows = summary(self.shapes)
        if rows:
            parts += ["Summary of the block shapes:", markdown(columns, rows)]
        return "\n\n".join(parts + notes(self.shapes))


def medians(rounds: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Median per name."""
    return {name: statistics.median(times) for name, times in rounds.items()}


def geometric_mean(values: Collection[float]) -> float:
    """The geometric mean of positive numbers."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def table(results: Sequence[ShapeResult], methods: Sequence[Method]) -> tuple[list[str], list[list[str]]]:
    """Column headings and rows of text: milliseconds per method, the fused linear's speed, bf16's rate, the error.

    A method that ran on no shape has no column. The error is the fused linear's, or unfused INT8's where that one is
    missing.
    """
    shown = [method for method in methods if any(method.name in result.rounds for result in results)]
    ran = [method.name for method in shown]
    references = [method.name for method in shown if method.in_tables and FUSED in ran]
    columns = ["linear", "M x N x K", *(f"{method} ms" for method in ran)]
    columns += [*(f"fused vs {reference}" for reference in references), "bf16 TFLOPS", "rel. error"]
    rows = []
    for result in results:
        error = result.relative_errors.get(FUSED, result.relative_errors.get(UNFUSED))
        rows.append(
            [
                result.shape.name,
                result.place(),
                *(_milliseconds(result, method) for method in ran),
                *(_number(result.speedup(FUSED, reference), ".2f", " x") for reference in references),
                _number(result.teraflops(BF16), ".3g"),
                _number(error, ".4f"),
            ]
        )
    return columns, rows


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
                f"± {50 * (max(times) - min(times)) / statistics.median(times):.1f} %",
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


def variant_table(results: Iterable[ShapeResult]) -> tuple[list[str], list[list[str]]]:
    """Column headings and rows: milliseconds of the fused linear, then with each extra, and its cost in percent."""
    columns = [
        "linear",
        "M x N x K",
        f"{FUSED} ms",
        *(f"{variant.name.removeprefix('fused ')} ms" for variant in VARIANTS),
    ]
    rows = []
    for result in results:
        cells = []
        for variant in VARIANTS:
            ratio = result.time_ratio(variant.name, FUSED)
            cost = "" if ratio is None else f" ({_percent(ratio)})"
            cells.append(_milliseconds(result, variant.name) + cost)
        rows.append([result.shape.name, result.place(), _milliseconds(result, FUSED), *cells])
    return columns, rows


def quantization_table(results: Iterable[QuantizationResult]) -> tuple[list[str], list[list[str]]]:
    """Column headings and rows: milliseconds and achieved GB/s of the quantization, GB/s of the copy of x."""
    columns = ["M x K", *(f"{name} ms (GB/s)" for name in QUANTIZATIONS), "copy of x GB/s"]
    rows = []
    for result in results:
        times = result.milliseconds
        cells = [
            f"{times[name]:.4f} ({result.gigabytes_per_second(name):.0f})" if name in times else "-"
            for name in QUANTIZATIONS
        ]
        rows.append([f"{result.m} x {result.k}", *cells, f"{result.gigabytes_per_second(COPY):.0f}"])
    return columns, rows


def summary(results: Iterable[ShapeResult]) -> tuple[list[str], list[list[str]]]:
    """Geometric mean and worst case over the shapes that take the benchmark's M: speeds, then what the extras cost."""
    blocks = [result for result in results if result.shape.tokens is None]
    rows = []
    compared = [(own.name, other.name) for own in METHODS for other in METHODS if own.name in other.compared]
    for method, reference in compared:
        speeds = {r: speed for r in range(len(blocks)) if (speed := blocks[r].speedup(method, reference)) is not None}
        if speeds:
            worst = min(speeds, key=speeds.__getitem__)
            mean = f"{geometric_mean(speeds.values()):.3f} x"
            rows.append([f"{method} vs {reference}", mean, f"{speeds[worst]:.3f} x", _where(blocks[worst])])
    for variant in VARIANTS:
        costs = ((r, blocks[r].time_ratio(variant.name, FUSED)) for r in range(len(blocks)))
        ratios = {r: ratio for r, ratio in costs if ratio is not None}
        if ratios:
            worst = max(ratios, key=ratios.__getitem__)
            mean = _percent(geometric_mean(ratios.values()))
            rows.append(
                [
                    f"cost of {variant.name.removeprefix('fused + ')}",
                    mean,
                    _percent(ratios[worst]),
                    _where(blocks[worst]),
                ]
            )
    return ["", "geometric mean", "worst", "at"], rows


def notes(results: Sequence[ShapeResult]) -> list[str]:
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
    spread = max((max(times) / min(times) - 1 for r in results if (times := r.rounds.get(BF16))), default=0.0)
    if spread > _UNSTEADY:
        lines.append(f"The rounds of bf16 differ by up to {spread:.0%}: this machine was not steady, measure again.")
    return lines


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """The table as GitHub markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _milliseconds(result: ShapeResult, method: str) -> str:
    return _number(result.milliseconds.get(method), ".3f") + ("\\*" if method in result.looped else "")


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def _where(result: ShapeResult) -> str:
    return f"{result.shape.name}, M = {result.m}"
