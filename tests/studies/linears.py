"""Single linears: the rows of the node Kernel Benchmark and more of them, on Ideogram 4's shapes and those of others.

    python tests/studies/linears.py --tall --markdown FILE --json FILE

It prints the tables for the card at hand, with comfy-kitchen in them where it is installed: each GEMM alone,
comfy-kitchen's other kernels, the fused linear with bias, smoothing, rotation and 16-bit activations and what these
cost, and the quantization of the activations alone beside a copy.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[2]))

from kernels.benchmark import describe_machine, markdown, title
from kernels.benchmark.methods import BENCHMARK_METHODS as SHOWN
from kernels.benchmark.methods import (
    BF16,
    COMFYUI_INT8,
    E4M3,
    FP16_SUMS,
    FUSED,
    PLAIN,
    UNFUSED,
    Call,
    Method,
    Operands,
    Prepare,
    WeightForm,
    benchmark_shape,
    free_bytes,
    kitchen,
    quantize_fp8,
    require_fp8,
    require_fused,
)
from kernels.benchmark.shape_results import IDEOGRAM4_SHAPES, LinearShape, ShapeResult, Unavailable, notes
from kernels.card.timing import CallSeries, sustained_milliseconds
from kernels.internals.torch_functions import scaled_mm
from kernels.linear.channel_transform import ChannelTransform
from kernels.linear.int8_linear import int8_gemm, int8_linear, quantize_activations
from kernels.weights.weight_reference import quantize_weight

ROTATION_GROUP = 256
FP8, KITCHEN_CUDA = "fp8 _scaled_mm", "comfy-kitchen cuda"
FUSED_GEMM, ROTATION = "fused GEMM alone", "fused + rotation"


def transform(operands: Operands, smooth: bool = False, rotate: bool = False) -> ChannelTransform:
    """What a variant of the INT8 linear does to the channels. Raises Unavailable where K cannot be rotated."""
    k, device = operands.x.shape[1], operands.device
    if rotate and k % ROTATION_GROUP:
        raise Unavailable(f"K is not a multiple of {ROTATION_GROUP}")
    factors = torch.rand(k, device=device, generator=torch.Generator(device).manual_seed(0)) + 0.5
    return ChannelTransform(factors if smooth else None, ROTATION_GROUP if rotate else None)


def form(smooth: bool = False, rotate: bool = False) -> WeightForm:
    return WeightForm(1, lambda operands: quantize_weight(operands.weight, transform(operands, smooth, rotate)))


ROTATED = form(rotate=True)


def fp8_gemm(operands: Operands, scale: torch.Tensor) -> Call:
    q, q_scale = quantize_fp8(operands.x)
    return lambda weight: scaled_mm(q, q_scale, weight.t(), scale)


def fused_gemm(operands: Operands, scale: torch.Tensor) -> Call:
    q, q_scale = quantize_activations(operands.x)
    return lambda weight: int8_gemm(q, q_scale, weight, scale)


def fused(bias: bool = False, smooth: bool = False, rotate: bool = False, activation_bits: int = 8) -> Prepare:
    def prepare(operands: Operands, scale: torch.Tensor) -> Call:
        # It takes as long as any other bias, and the product is still that of the other rows.
        added = torch.zeros_like(operands.weight[:, 0]) if bias else None
        options = {"transform": transform(operands, smooth, rotate), "activation_bits": activation_bits}
        return lambda weight: int8_linear(operands.x, weight, scale, added, **options)

    return prepare


_kitchen = partial(Method, foreign=True)
_fused = partial(Method, require=require_fused)
VARIANTS = (
    _fused("fused + bias", PLAIN, fused(bias=True)),
    _fused("fused + smoothing", form(smooth=True), fused(smooth=True)),
    _fused(ROTATION, ROTATED, fused(rotate=True)),
    _fused("fused + smoothing + rotation", form(smooth=True, rotate=True), fused(smooth=True, rotate=True)),
    _fused("fused + 16-bit activations", PLAIN, fused(activation_bits=16)),
)
"""The fused linear with something more; the summary says what that costs."""

_BEHIND = {
    FP16_SUMS: [Method("fp8 _scaled_mm GEMM alone", E4M3, fp8_gemm, require_fp8, foreign=True)],
    KITCHEN_CUDA: [
        _kitchen(
            "comfy-kitchen cuda ConvRot",
            ROTATED,
            kitchen("cuda", convrot=True, convrot_groupsize=ROTATION_GROUP),
        ),
        _kitchen("comfy-kitchen triton", PLAIN, kitchen("triton")),
    ],
    UNFUSED: [_fused(FUSED_GEMM, PLAIN, fused_gemm)],
    FUSED: VARIANTS,
}
METHODS = [each for method in SHOWN for each in (method, *_BEHIND.get(method.name, ()))]
"""In the order of the columns: those of the node, and behind some of them others."""

COMPARED = {
    BF16: (FUSED_GEMM, FUSED),
    "comfy-kitchen cuda ConvRot": (ROTATION,),
    **dict.fromkeys(
        (FP16_SUMS, FP8, "fp8 dequantized", COMFYUI_INT8, KITCHEN_CUDA, "comfy-kitchen triton", UNFUSED), (FUSED,)
    ),
}
"""Whose speed the summary gives relative to which methods: the names of those, by the name of each of these."""
IN_TABLES = (BF16, FP16_SUMS, KITCHEN_CUDA)
"""Relative to which each shape's row gives the fused linear's speed."""

*BLOCK_SHAPES, LLM_SHAPE = IDEOGRAM4_SHAPES
FEW_TOKENS = 77
TALL_SHAPE = LinearShape("video", 21504, 5376, tokens=80661)
TOKENS = (2560, 4352)  # the second is 1024 px
ROUNDS = 3


def planned_shapes(tall: bool) -> list[tuple[LinearShape, int]]:
    """The shapes of one run, each with the M it is timed at."""
    blocks = [(shape, m) for m in TOKENS for shape in BLOCK_SHAPES]
    few = [replace(shape, tokens=FEW_TOKENS) for shape in BLOCK_SHAPES]
    others = [LLM_SHAPE, *few, *([TALL_SHAPE] if tall else [])]
    return blocks + [(shape, shape.tokens) for shape in others if shape.tokens is not None]


QUANTIZE = "plain"
QUANTIZE_SMOOTHING = "smoothing"
QUANTIZE_ROTATION = "rotation"
COPY = "copy"
QUANTIZATIONS = (QUANTIZE, QUANTIZE_SMOOTHING, QUANTIZE_ROTATION)
_LARGE_COPY_BYTES = 1 << 30
_LARGE_COPY_BYTES_ON_CPU = 1 << 24


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
        return {name: statistics.median(times) for name, times in self.rounds.items()}

    def gigabytes_per_second(self, name: str) -> float:
        """Bytes read and written (x; q and a float32 scale per row, or x again) per second, in 10^9."""
        written = self.element_size * self.k if name == COPY else self.k + 4
        return self.m * (self.element_size * self.k + written) / self.milliseconds[name] / 1e6


def benchmark_quantization(m: int, k: int, device: torch.device) -> QuantizationResult:
    """Time the quantization of bf16 activations [M, K] alone, and for comparison a copy of them."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, k, device=device, generator=generator).bfloat16()
    smoothing = ChannelTransform(torch.rand(k, device=device, generator=generator) + 0.5)
    target = torch.empty_like(x)
    runs: dict[str, Callable[[int], object]] = {
        COPY: lambda _: target.copy_(x),
        QUANTIZE: lambda _: quantize_activations(x),
        QUANTIZE_SMOOTHING: lambda _: quantize_activations(x, smoothing),
    }
    if k % ROTATION_GROUP == 0:
        rotation = ChannelTransform(None, ROTATION_GROUP)
        runs[QUANTIZE_ROTATION] = lambda _: quantize_activations(x, rotation)
    for run in runs.values():
        run(0)
    times = sustained_milliseconds({name: CallSeries(run, 1, device) for name, run in runs.items()}, ROUNDS)
    return QuantizationResult(m, k, x.element_size(), times)


def copy_bandwidth(device: torch.device) -> float:
    """GB/s, read and written, of a copy that no cache holds any of."""
    on_gpu = device.type == "cuda"
    size = min(_LARGE_COPY_BYTES, free_bytes(device) // 4) if on_gpu else _LARGE_COPY_BYTES_ON_CPU
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    times = sustained_milliseconds({COPY: CallSeries(lambda _: target.copy_(source), 1, device)}, ROUNDS)
    return 2 * size / statistics.median(times[COPY]) / 1e6


def table(results: Sequence[ShapeResult]) -> tuple[list[str], list[list[str]]]:
    """Column headings and rows of text: milliseconds per method, the fused linear's speed, bf16's rate, the error.

    A method that ran on no shape has no column. The error is the fused linear's, or unfused INT8's where that one is
    missing.
    """
    shown = [method for method in METHODS if any(method.name in result.rounds for result in results)]
    ran = [method.name for method in shown]
    references = [method.name for method in shown if method.name in IN_TABLES and FUSED in ran]
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
                _number(result.teraflops(BF16) if BF16 in result.rounds else None, ".3g"),
                _number(error, ".4f"),
            ]
        )
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
    names = [method.name for method in METHODS]
    compared = [(f"{own} vs {other}", own, other) for own in names for other in names if own in COMPARED.get(other, ())]
    compared += [(f"cost of {each.name.removeprefix('fused + ')}", FUSED, each.name) for each in VARIANTS]
    rows = []
    for what, method, reference in compared:
        is_cost = what.startswith("cost")
        ratios = [(ratio, each) for each in blocks if (ratio := each.speedup(method, reference)) is not None]
        if ratios:
            worst, where = (max if is_cost else min)(ratios, key=lambda pair: pair[0])
            mean = statistics.geometric_mean(ratio for ratio, _ in ratios)
            shown = (f"{100 * (each - 1):+.1f} %" if is_cost else f"{each:.3f} x" for each in (mean, worst))
            rows.append([what, *shown, f"{where.shape.name}, M = {where.m}"])
    return ["", "geometric mean", "worst", "at"], rows


def _number(value: float | None, form: str, unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _milliseconds(result: ShapeResult, method: str) -> str:
    return _number(result.milliseconds.get(method), ".3f") + ("\\*" if method in result.looped else "")


def document(
    environment: dict[str, str],
    shapes: Sequence[ShapeResult],
    quantizations: Sequence[QuantizationResult],
    copy_rate: float,
) -> str:
    """All tables and notes."""
    parts = [f"**{title(environment)}**", markdown(*table(shapes))]
    parts += ["Quantization of the activations alone:", markdown(*quantization_table(quantizations))]
    parts.append(f"Copy of a large tensor: {copy_rate:.0f} GB/s read and written.")
    columns, rows = summary(shapes)
    if rows:
        parts += ["Summary of the block shapes:", markdown(columns, rows)]
    return "\n\n".join(parts + notes(shapes))


def main() -> None:
    parser = argparse.ArgumentParser(description="Times linears in bf16, FP8 and INT8 on this machine.")
    parser.add_argument("--tall", action="store_true", help="a video model's shape too (about 20 GB of GPU memory)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to this file")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = planned_shapes(options.tall)
    environment, shapes, copy_rate = describe_machine(device), [], copy_bandwidth(device)
    for number, (shape, m) in enumerate(plan, 1):
        shapes.append(benchmark_shape(shape, m, device, METHODS, rounds=ROUNDS))
        print(f"{number}/{len(plan)} {shape.name}, {shapes[-1].place()}", file=sys.stderr)
    distinct = dict.fromkeys((m, shape.k) for shape, m in plan)
    quantizations = [benchmark_quantization(m, k, device) for m, k in distinct]
    text = document(environment, shapes, quantizations, copy_rate)
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    if options.json:
        figures = {
            "environment": environment,
            "shapes": [result.as_json() for result in shapes],
            "quantizations": [asdict(result) | {"milliseconds": result.milliseconds} for result in quantizations],
            "copy_gigabytes_per_second": copy_rate,
        }
        options.json.write_text(json.dumps(figures, indent=1, allow_nan=False), encoding="utf-8")


if __name__ == "__main__":
    main()
