"""Timing methods side by side on one shape."""

from collections.abc import Callable, Sequence

import torch

from ..card.timing import CallSeries, GraphPool, sustained_milliseconds
from ..interruption import interruptible
from .methods import BENCHMARK_METHODS, Method, bytes_per_copy
from .operands import Operands, leaving_out
from .report import ShapeResult
from .shapes import LinearShape

_MOST_COPIES = 64
_ERROR_ROWS = 256
_ERROR_COLUMNS = 1024  # of a float64 weight at a time
# What a CPU does in a fraction of a second, so that a run there ends and can be cancelled.
_MOST_WEIGHTS_ON_CPU = 32 << 20
_MOST_TOKENS_ON_CPU = 64


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
    methods: Sequence[Method] = BENCHMARK_METHODS,
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
        with leaving_out(method.name, method.foreign, result.absent):
            with interruptible(check):
                call = method.call(operands)
                output = call(0)[rows].double()
            exact = expected + operands.bias.double() if method.with_bias else expected
            result.relative_errors[method.name] = ((output - exact).norm() / exact.norm()).item()
            result.weight_bytes[method.name] = method.form.bytes_per_weight * shape.n * shape.k
            series[method.name] = CallSeries(call, operands.copies, device, pool)
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
