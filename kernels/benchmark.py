"""Times the ways to compute one linear layer side by side: bf16, the two usual INT8 detours, and the fused kernel.

`python -m kernels.benchmark` prints the table for the shapes of Ideogram 4 on the card at hand.
"""

import argparse
import datetime
import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F

from .device import fused_obstacle, triton_available
from .linear import int8_gemm, int8_linear, quantize_activations
from .reference import int8_accumulate_reference
from .timing import median_milliseconds
from .weights import quantize_weight


@dataclass(frozen=True)
class LinearShape:
    """A linear layer of N output and K input channels; `tokens` overrides the benchmark's M where a layer has its own."""

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

BF16 = "bf16"
FAKE_QUANT = "fake-quant"
UNFUSED = "unfused _int_mm"
FUSED_GEMM = "fused GEMM"
FUSED = "fused int8"
METHODS = (BF16, FAKE_QUANT, UNFUSED, FUSED_GEMM, FUSED)


@dataclass
class ShapeResult:
    """Median milliseconds per method at [M, K] x [N, K]; a method that cannot run here is absent."""

    shape: LinearShape
    m: int
    milliseconds: dict[str, float] = field(default_factory=dict)
    relative_error: float = math.nan
    """||fused - bf16|| / ||bf16||: what INT8 costs on this random data."""

    def speedup(self, method: str) -> float | None:
        """bf16 time over the method's time, or None where the method did not run."""
        time_of_method = self.milliseconds.get(method)
        return None if time_of_method is None else self.milliseconds[BF16] / time_of_method

    def teraflops(self, method: str) -> float:
        """Achieved rate in 10^12 operations per second, two per multiply-add."""
        return 2 * self.m * self.shape.n * self.shape.k / self.milliseconds[method] / 1e9


def working_memory(shape: LinearShape, tokens: int) -> int:
    """Bytes that `benchmark_shape` needs at its peak, rounded up: float32 intermediates of the slowest method included."""
    m = shape.tokens or tokens
    return 12 * shape.n * shape.k + 16 * m * shape.n + 16 * m * shape.k


def benchmark_shape(
    shape: LinearShape,
    tokens: int,
    device: torch.device,
    repetitions: int = 21,
    check: Callable[[], None] = lambda: None,
) -> ShapeResult:
    """Time all methods on one shape with random bf16 data; `check` runs between methods and may raise to stop.

    Activation quantization is part of every INT8 method's time except "fused GEMM", which is the GEMM alone. On a CPU
    and on cards it cannot run on the fused kernel does not exist and both its entries stay absent.
    """
    m = shape.tokens or tokens
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, shape.k, device=device, generator=generator).bfloat16()
    w = torch.randn(shape.n, shape.k, device=device, generator=generator).bfloat16() / shape.k**0.5
    weight, weight_scale = quantize_weight(w)
    weight_scale_column = weight_scale[:, None].bfloat16()

    def fake_quant():
        q, q_scale = quantize_activations(x)
        return F.linear(q.bfloat16() * q_scale[:, None].bfloat16(), weight.bfloat16() * weight_scale_column)

    def unfused():
        q, q_scale = quantize_activations(x)
        return (int8_accumulate_reference(q, weight).float() * q_scale[:, None] * weight_scale).bfloat16()

    methods = {BF16: lambda: F.linear(x, w), FAKE_QUANT: fake_quant, UNFUSED: unfused}
    if device.type == "cuda" and fused_obstacle(device) is None:
        q, q_scale = quantize_activations(x)
        methods[FUSED_GEMM] = lambda: int8_gemm(q, q_scale, weight, weight_scale)
        methods[FUSED] = lambda: int8_linear(x, weight, weight_scale)

    result = ShapeResult(shape, m)
    for name, run in methods.items():
        check()
        result.milliseconds[name] = median_milliseconds(run, device, repetitions)
    expected = F.linear(x, w).float()
    int8_output = methods.get(FUSED, unfused)().float()
    result.relative_error = ((int8_output - expected).norm() / expected.norm()).item()
    return result


def table(results: Iterable[ShapeResult]) -> tuple[list[str], list[list[str]]]:
    """Column headings and rows of text: milliseconds per method, speed against bf16, rates, error."""
    columns = [
        "linear",
        "M x N x K",
        *(f"{method} ms" for method in METHODS),
        "fused vs bf16",
        "bf16 TFLOPS",
        "rel. error",
    ]
    rows = []
    for result in results:
        times = [f"{result.milliseconds[m]:.3f}" if m in result.milliseconds else "-" for m in METHODS]
        speedup = result.speedup(FUSED)
        rows.append(
            [
                result.shape.name,
                f"{result.m} x {result.shape.n} x {result.shape.k}",
                *times,
                "-" if speedup is None else f"{speedup:.2f} x",
                f"{result.teraflops(BF16):.3g}",
                f"{result.relative_error:.4f}",
            ]
        )
    return columns, rows


def markdown(columns: list[str], rows: list[list[str]]) -> str:
    """The table as GitHub markdown."""
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def environment(device: torch.device) -> str:
    """Card, versions and date, without which a figure means nothing."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    triton_version = "none"
    if triton_available():
        import triton

        triton_version = triton.__version__
    return f"{name}, torch {torch.__version__}, triton {triton_version}, {datetime.date.today().isoformat()}"


def main() -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(description="Times INT8 linears of Ideogram 4 against bf16 on this machine.")
    parser.add_argument("--tokens", type=int, default=4352, help="rows M of the activations (default: 4352, 1024 px)")
    parser.add_argument("--repetitions", type=int, default=21)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = [benchmark_shape(shape, arguments.tokens, device, arguments.repetitions) for shape in IDEOGRAM4_SHAPES]
    print(environment(device), "\n")
    print(markdown(*table(results)))
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:
            json.dump(
                {"environment": environment(device), "results": [asdict(result) for result in results]}, file, indent=1
            )


if __name__ == "__main__":
    main()
