"""Timing methods side by side on one shape or on all of them, and the command line.

`python -m kernels.benchmark` prints the tables for the card at hand, with comfy-kitchen in them where it is installed.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ..interruption import interruptible
from ..linear import quantize_activations
from ..machine import describe_machine
from ..timing import CallSeries, GraphPool, sustained_milliseconds
from ..transform import ChannelTransform
from .methods import METHODS, Method, bytes_per_copy
from .operands import ROTATION_GROUP, Operands, Unavailable, first_line
from .report import COPY, QUANTIZE, QUANTIZE_ROTATION, QUANTIZE_SMOOTHING, QuantizationResult, Report, ShapeResult
from .shapes import TOKENS, LinearShape, planned_shapes

_MOST_COPIES = 64
_ERROR_ROWS = 256
_ERROR_COLUMNS = 1024  # of a float64 weight at a time
# What a CPU does in a fraction of a second, so that a run there ends and can be cancelled.
_MOST_WEIGHTS_ON_CPU = 32 << 20
_MOST_TOKENS_ON_CPU = 64
_LARGE_COPY_BYTES = 1 << 30
_LARGE_COPY_BYTES_ON_CPU = 1 << 24


def working_memory(shape: LinearShape, tokens: int) -> int:
    """Bytes that `benchmark_shape` needs at its peak with one copy of the weight, rounded up.

    The slowest method's float32 intermediates count twice: once in a first call, once in the memory of the CUDA graphs.
    """
    m = shape.tokens or tokens
    return 16 * shape.n * shape.k + 24 * m * shape.n + 16 * m * shape.k


def weight_copies(weight_bytes: int, cache_bytes: int, bytes_per_copy: int, free_bytes: int) -> int:
    """How many copies of a weight to rotate over: together more than twice the cache, at least two where half of the
    free memory holds them."""
    wanted = max(2, 2 * cache_bytes // weight_bytes + 1)
    affordable = free_bytes // 2 // bytes_per_copy
    return max(1, min(wanted, affordable, _MOST_COPIES))


def hopeless(shape: LinearShape, device: torch.device) -> str | None:
    """Why a shape is not worth the wait on this device, or None where it is."""
    if device.type != "cpu" or shape.n * shape.k <= _MOST_WEIGHTS_ON_CPU:
        return None
    return f"{shape.n} x {shape.k} weights are too many for a CPU"


def feasible_tokens(tokens: int, device: torch.device) -> int:
    """How many tokens are timed where `tokens` are asked for: fewer on a CPU."""
    return min(tokens, _MOST_TOKENS_ON_CPU) if device.type == "cpu" else tokens


def benchmark_shape(
    shape: LinearShape,
    tokens: int,
    device: torch.device,
    methods: Sequence[Method] = METHODS,
    rounds: int = 3,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda method: None,
) -> ShapeResult:
    """Time `methods` on one shape with random bf16 data; `check` runs between them and may raise to stop.

    The quantization of the activations is part of every INT8 and FP8 method's time except of those called "GEMM alone".
    What this machine does not have, or has no memory for, is left out. A GPU must be the current one. `say` gets the
    name of each method that is prepared.
    """
    m = shape.tokens or tokens
    on_gpu = device.type == "cuda"
    operands = Operands(m, shape.n, shape.k, _copies(shape, device, methods) if on_gpu else 1, device)
    result = ShapeResult(shape, m, operands.copies)
    rows = torch.arange(0, m, max(1, m // _ERROR_ROWS), device=device)
    expected = _exact_product(operands, rows)
    pool = GraphPool() if on_gpu else None
    series = {}
    for method in sorted(methods, key=lambda method: method.large):
        check()
        say(method.name)
        try:
            with interruptible(check):
                call = method.call(operands)
                output = call(0)[rows].double()
            exact = expected + operands.bias.double() if method.with_bias else expected
            result.relative_errors[method.name] = ((output - exact).norm() / exact.norm()).item()
            result.weight_bytes[method.name] = method.form.bytes_per_weight * shape.n * shape.k
            series[method.name] = CallSeries(call, operands.copies, device, pool)
        except Unavailable as reason:
            result.absent[method.name] = str(reason)
        except torch.cuda.OutOfMemoryError:
            result.absent[method.name] = "not enough memory"
        except Exception as error:
            if not method.foreign:
                raise
            result.absent[method.name] = first_line(error)
    result.rounds = sustained_milliseconds(series, rounds, check)
    result.looped = [name for name, calls in series.items() if calls.looped]
    del series, operands
    if on_gpu:
        torch.cuda.empty_cache()
    return result


def _exact_product(operands: Operands, rows: torch.Tensor) -> torch.Tensor:
    """Some rows of x . weight^T in float64."""
    x = operands.x[rows].double()
    return torch.cat([x @ part.double().t() for part in operands.weight.split(_ERROR_COLUMNS)], 1)


def _copies(shape: LinearShape, device: torch.device, methods: Sequence[Method]) -> int:
    weights = shape.n * shape.k
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return weight_copies(weights, cache_bytes, int(bytes_per_copy(methods) * weights), _free_bytes(device))


def _free_bytes(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def benchmark_quantization(m: int, k: int, device: torch.device, rounds: int = 3) -> QuantizationResult:
    """Time the quantization of bf16 activations [M, K] alone, and for comparison a copy of them."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(m, k, device=device, generator=generator).bfloat16()
    smoothing = ChannelTransform(torch.rand(k, device=device, generator=generator) + 0.5)
    target = torch.empty_like(x)
    runs = {
        COPY: lambda _: target.copy_(x),
        QUANTIZE: lambda _: quantize_activations(x),
        QUANTIZE_SMOOTHING: lambda _: quantize_activations(x, smoothing),
    }
    if k % ROTATION_GROUP == 0:
        rotation = ChannelTransform(None, ROTATION_GROUP)
        runs[QUANTIZE_ROTATION] = lambda _: quantize_activations(x, rotation)
    for run in runs.values():
        run(0)
    times = sustained_milliseconds({name: CallSeries(run, 1, device) for name, run in runs.items()}, rounds)
    return QuantizationResult(m, k, x.element_size(), times)


def copy_bandwidth(device: torch.device, rounds: int = 3) -> float:
    """GB/s, read and written, of a copy that no cache holds any of."""
    on_gpu = device.type == "cuda"
    size = min(_LARGE_COPY_BYTES, _free_bytes(device) // 4) if on_gpu else _LARGE_COPY_BYTES_ON_CPU
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    times = sustained_milliseconds({COPY: CallSeries(lambda _: target.copy_(source), 1, device)}, rounds)
    return 2 * size / statistics.median(times[COPY]) / 1e6


def run_benchmark(plan: Sequence[tuple[LinearShape, int]], device: torch.device, rounds: int) -> Report:
    """Time everything on the planned shapes, with a line of progress to stderr for each."""
    report = Report(describe_machine(device))
    report.copy_gigabytes_per_second = copy_bandwidth(device, rounds)
    for number, (shape, m) in enumerate(plan, 1):
        result = benchmark_shape(shape, m, device, rounds=rounds)
        report.shapes.append(result)
        print(f"{number}/{len(plan)} {shape.name}, {result.place()}", file=sys.stderr)
    for m, k in dict.fromkeys((m, shape.k) for shape, m in plan):
        report.quantizations.append(benchmark_quantization(m, k, device, rounds))
    return report


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.benchmark", description="Times linears in bf16, FP8 and INT8 on this machine."
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=TOKENS,
        metavar="M",
        help="rows of the activations for Ideogram 4's block shapes (default: 2560 4352; 4352 is 1024 px)",
    )
    parser.add_argument("--tall", action="store_true", help="a video model's shape too (about 20 GB of GPU memory)")
    parser.add_argument("--models", action="store_true", help="shapes of Flux, Qwen-Image, Z-Image and Wan too")
    parser.add_argument("--rounds", type=int, default=3, help="timings of each method, of which the median counts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures to this file")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="also write the tables to this file")
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report = run_benchmark(planned_shapes(options.tokens, options.tall, options.models), device, options.rounds)
    text = report.as_markdown()
    print(text)
    if options.markdown:
        options.markdown.write_text(text + "\n", encoding="utf-8")
    if options.json:
        options.json.write_text(json.dumps(report.as_json(), indent=1, allow_nan=False), encoding="utf-8")
