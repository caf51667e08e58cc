"""Times the ways to compute a linear layer side by side: bf16, FP8, the INT8 detours, comfy-kitchen, the fused kernel.

`python -m kernels.benchmark` prints the tables for the card at hand, with comfy-kitchen in them where it is installed.
"""

import argparse
import datetime
import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F

from ..device import fused_obstacle, triton_available
from ..linear import int8_gemm, int8_linear, quantize_activations
from ..numerics.weights import quantize_weight
from ..reference import int8_accumulate_reference
from ..timing import CallSeries, GraphPool, sustained_milliseconds
from ..transform import ChannelTransform
from . import peers
from .report import (
    BF16,
    BIAS,
    COPY,
    FAKE_QUANT,
    FP8,
    FP8_GEMM,
    FUSED,
    FUSED_GEMM,
    KITCHEN_CONVROT,
    KITCHEN_CUDA,
    KITCHEN_TRITON,
    METHODS,
    QUANTIZE,
    QUANTIZE_ROTATION,
    QUANTIZE_SMOOTHING,
    ROTATION,
    SMOOTHING,
    SMOOTHING_ROTATION,
    UNFUSED,
    VARIANTS,
    LinearShape,
    QuantizationResult,
    Report,
    ShapeResult,
)

BLOCK_SHAPES = (
    LinearShape("qkv", 13824, 4608),
    LinearShape("attention out", 4608, 4608),
    LinearShape("ffn up", 12288, 4608),
    LinearShape("ffn down", 4608, 12288),
)
LLM_SHAPE = LinearShape("llm projection", 4608, 53248, tokens=512)
IDEOGRAM4_SHAPES = (*BLOCK_SHAPES, LLM_SHAPE)
FEW_TOKENS = 77
TALL_SHAPE = LinearShape("video", 21504, 5376, tokens=80661)
MODEL_SHAPES = (
    LinearShape("Flux, Qwen-Image attention out", 3072, 3072, tokens=4608),
    LinearShape("Flux, Qwen-Image ffn up", 12288, 3072, tokens=4608),
    LinearShape("Flux, Qwen-Image ffn down", 3072, 12288, tokens=4608),
    LinearShape("Z-Image ffn up", 10240, 3840, tokens=4608),
    LinearShape("Z-Image ffn down", 3840, 10240, tokens=4608),
    LinearShape("Wan attention out", 5120, 5120, tokens=32760),
    LinearShape("Wan ffn up", 13824, 5120, tokens=32760),
    LinearShape("Wan ffn down", 5120, 13824, tokens=32760),
)
TOKENS = (2560, 4352)

_ROTATION_GROUP = 256
# Of a copy of the weight: bf16, e4m3, and INT8 four times, plain, smoothed, rotated and both.
_BYTES_PER_WEIGHT = 2 + 1 + 4
_MOST_COPIES = 64
_ERROR_ROWS = 256
_LARGE_COPY_BYTES = 1 << 30
_LARGE_COPY_BYTES_ON_CPU = 1 << 24


class Operands:
    """What the methods compute with: random x [M, K], bias [N], smoothing factors [K], copies of weights [N, K]."""

    def __init__(self, m: int, n: int, k: int, copies: int, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)
        self.device = device
        self.copies = copies
        self.x = torch.randn(m, k, device=device, generator=generator).bfloat16()
        self.bias = torch.randn(n, device=device, generator=generator).bfloat16()
        self.smooth = torch.rand(k, device=device, generator=generator) + 0.5
        w = torch.randn(n, k, device=device, generator=generator).bfloat16() / k**0.5
        self.float_weights = self._copied(w)
        self._int8_weights: dict[tuple[bool, bool], tuple[list[torch.Tensor], torch.Tensor]] = {}

    def transform(self, smooth: bool, rotate: bool) -> ChannelTransform:
        """What a variant of the linear does to the channels."""
        return ChannelTransform(self.smooth if smooth else None, _ROTATION_GROUP if rotate else None)

    def int8_weights(self, smooth: bool = False, rotate: bool = False) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Copies of the int8 weight [N, K], made at the first request, and their float32 scale [N]."""
        if (smooth, rotate) not in self._int8_weights:
            if rotate and self.x.shape[1] % _ROTATION_GROUP:
                raise peers.Unavailable(f"K is not a multiple of {_ROTATION_GROUP}")
            weight, scale = quantize_weight(self.float_weights[0], self.transform(smooth, rotate))
            self._int8_weights[smooth, rotate] = self._copied(weight), scale
        return self._int8_weights[smooth, rotate]

    def fp8_weights(self) -> tuple[list[torch.Tensor], torch.Tensor]:
        """Copies of the e4m3 weight [N, K] and their scale (0-dim). Raises Unavailable without FP8 tensor cores."""
        peers.require_fp8(self.device)
        weight, scale = peers.quantize_fp8(self.float_weights[0])
        return self._copied(weight), scale

    def _copied(self, weight: torch.Tensor) -> list[torch.Tensor]:
        return [weight, *(weight.clone() for _ in range(self.copies - 1))]


Method = Callable[[int], torch.Tensor]
"""One call of a method with the copy of the weight at this index: [M, N] in bf16."""


def _bf16(operands: Operands) -> Method:
    return lambda copy: F.linear(operands.x, operands.float_weights[copy])


def _fp8_gemm(operands: Operands) -> Method:
    weights, scale = operands.fp8_weights()
    q, q_scale = peers.quantize_fp8(operands.x)
    return lambda copy: peers.fp8_gemm(q, q_scale, weights[copy], scale)


def _fp8(operands: Operands) -> Method:
    weights, scale = operands.fp8_weights()
    return lambda copy: peers.fp8_gemm(*peers.quantize_fp8(operands.x), weights[copy], scale)


def _kitchen(backend: str, rotate: bool = False) -> Callable[[Operands], Method]:
    options = {"convrot": True, "convrot_groupsize": _ROTATION_GROUP} if rotate else {}

    def prepare(operands: Operands) -> Method:
        linear = peers.kitchen_int8_linear(backend, operands.device)
        weights, scale = operands.int8_weights(rotate=rotate)
        return lambda copy: linear(operands.x, weights[copy], scale, out_dtype=torch.bfloat16, **options)

    return prepare


def _fake_quant(operands: Operands) -> Method:
    weights, scale = operands.int8_weights()
    scale_column = scale[:, None].bfloat16()

    def run(copy: int) -> torch.Tensor:
        q, q_scale = quantize_activations(operands.x)
        return F.linear(q.bfloat16() * q_scale[:, None].bfloat16(), weights[copy].bfloat16() * scale_column)

    return run


def _unfused(operands: Operands) -> Method:
    weights, scale = operands.int8_weights()

    def run(copy: int) -> torch.Tensor:
        q, q_scale = quantize_activations(operands.x)
        return (int8_accumulate_reference(q, weights[copy]).float() * q_scale[:, None] * scale).bfloat16()

    return run


def _require_fused(device: torch.device) -> None:
    obstacle = "no GPU" if device.type != "cuda" else fused_obstacle(device)
    if obstacle is not None:
        raise peers.Unavailable(obstacle)


def _fused_gemm(operands: Operands) -> Method:
    _require_fused(operands.device)
    weights, scale = operands.int8_weights()
    q, q_scale = quantize_activations(operands.x)
    return lambda copy: int8_gemm(q, q_scale, weights[copy], scale)


def _fused(bias: bool = False, smooth: bool = False, rotate: bool = False) -> Callable[[Operands], Method]:
    def prepare(operands: Operands) -> Method:
        _require_fused(operands.device)
        weights, scale = operands.int8_weights(smooth, rotate)
        added = operands.bias if bias else None
        transform = operands.transform(smooth, rotate)
        return lambda copy: int8_linear(operands.x, weights[copy], scale, added, transform)

    return prepare


# In the order in which they are prepared: those that need most memory come when all else is in place.
_PREPARE: dict[str, Callable[[Operands], Method]] = {
    BF16: _bf16,
    FP8_GEMM: _fp8_gemm,
    FP8: _fp8,
    FUSED_GEMM: _fused_gemm,
    FUSED: _fused(),
    BIAS: _fused(bias=True),
    SMOOTHING: _fused(smooth=True),
    ROTATION: _fused(rotate=True),
    SMOOTHING_ROTATION: _fused(smooth=True, rotate=True),
    KITCHEN_CUDA: _kitchen("cuda"),
    KITCHEN_CONVROT: _kitchen("cuda", rotate=True),
    KITCHEN_TRITON: _kitchen("triton"),
    FAKE_QUANT: _fake_quant,
    UNFUSED: _unfused,
}
_PEERS = (FP8_GEMM, FP8, KITCHEN_CUDA, KITCHEN_CONVROT, KITCHEN_TRITON)


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


def benchmark_shape(
    shape: LinearShape,
    tokens: int,
    device: torch.device,
    methods: Sequence[str] = (*METHODS, *VARIANTS),
    rounds: int = 3,
    check: Callable[[], None] = lambda: None,
) -> ShapeResult:
    """Time `methods` on one shape with random bf16 data; `check` runs between them and may raise to stop.

    The quantization of the activations is part of every INT8 and FP8 method's time except of those called "GEMM alone".
    What this machine does not have, or has no memory for, is left out.
    """
    m = shape.tokens or tokens
    on_gpu = device.type == "cuda"
    operands = Operands(m, shape.n, shape.k, _copies(shape, device) if on_gpu else 1, device)
    result = ShapeResult(shape, m, operands.copies)
    rows = torch.arange(0, m, max(1, m // _ERROR_ROWS), device=device)
    expected = F.linear(operands.x[rows].float(), operands.float_weights[0].float())
    pool = GraphPool() if on_gpu else None
    series = {}
    for name in (name for name in _PREPARE if name in methods):
        check()
        try:
            run = _PREPARE[name](operands)
            exact = expected + operands.bias.float() if name == BIAS else expected
            result.relative_errors[name] = ((run(0)[rows].float() - exact).norm() / exact.norm()).item()
            series[name] = CallSeries(run, operands.copies, device, pool)
        except peers.Unavailable as reason:
            result.absent[name] = str(reason)
        except torch.cuda.OutOfMemoryError:
            result.absent[name] = "not enough memory"
        except Exception as error:
            if name not in _PEERS:
                raise
            result.absent[name] = peers.first_line(error)
    result.rounds = sustained_milliseconds(series, rounds, check)
    result.looped = [name for name, calls in series.items() if calls.looped]
    del series, operands
    if on_gpu:
        torch.cuda.empty_cache()
    return result


def _copies(shape: LinearShape, device: torch.device) -> int:
    weights = shape.n * shape.k
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return weight_copies(weights, cache_bytes, _BYTES_PER_WEIGHT * weights, _free_bytes(device))


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
    if k % _ROTATION_GROUP == 0:
        rotation = ChannelTransform(None, _ROTATION_GROUP)
        runs[QUANTIZE_ROTATION] = lambda _: quantize_activations(x, rotation)
    for run in runs.values():
        run(0)
    times = sustained_milliseconds({name: CallSeries(run, 1, device) for name, run in runs.items()}, rounds)
    return QuantizationResult(m, k, x.element_size(), times)


def copy_bandwidth(device: torch.device, rounds: int = 3) -> float:
    """GB/s, read and written, of a copy that no cache holds any of."""
    if device.type == "cuda":
        size = min(_LARGE_COPY_BYTES, _free_bytes(device) // 4)
    else:
        size = _LARGE_COPY_BYTES_ON_CPU
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    times = sustained_milliseconds({COPY: CallSeries(lambda _: target.copy_(source), 1, device)}, rounds)
    return 2 * size / statistics.median(times[COPY]) / 1e6


def environment(device: torch.device) -> dict[str, str]:
    """Card, driver, versions and date, without which a figure means nothing; what is not there is left out."""
    found = {"card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}
    found |= _driver(device) if device.type == "cuda" else {}
    found["torch"] = str(torch.__version__)
    if triton_available():
        import triton

        found["triton"] = triton.__version__
    kitchen = peers.kitchen_version()
    if kitchen is not None:
        found["comfy-kitchen"] = kitchen
    return found | {"date": datetime.date.today().isoformat()}


def _driver(device: torch.device) -> dict[str, str]:
    """The driver's version and the card's power limit as nvidia-smi gives them; empty where it does not."""
    program = shutil.which("nvidia-smi")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if program is None or uuid is None:
        return {}
    command = [program, f"--id=GPU-{uuid}", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(("driver", "power limit"), (value.strip() for value in answer.split(",")), strict=False))


def planned_shapes(tokens: Sequence[int], tall: bool, models: bool) -> list[tuple[LinearShape, int]]:
    """The shapes of one run, each with the M it is timed at."""
    blocks = [(shape, m) for m in tokens for shape in BLOCK_SHAPES]
    few = [replace(shape, tokens=FEW_TOKENS) for shape in BLOCK_SHAPES]
    others = [LLM_SHAPE, *few, *([TALL_SHAPE] if tall else []), *(MODEL_SHAPES if models else [])]
    return blocks + [(shape, shape.tokens) for shape in others]


def run_benchmark(plan: Sequence[tuple[LinearShape, int]], device: torch.device, rounds: int) -> Report:
    """Time everything on the planned shapes, with a line of progress to stderr for each."""
    report = Report(environment(device))
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
