"""Timing methods side by side, on a linear or on an attention call."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..card.timing import CallSeries, GraphPool, sustained_milliseconds
from ..interruption import interruptible
from .attention import (
    ATTENTION_METHODS,
    AttentionMethod,
    AttentionOperands,
    AttentionResult,
    AttentionWork,
    feasible_call,
)
from .methods import BENCHMARK_METHODS, Method, bytes_per_copy
from .operands import LinearShape, Operands, leaving_out
from .report import ShapeResult, Times

_MOST_COPIES = 64
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


def benchmark_shape(
    shape: LinearShape, tokens: int, device: torch.device, methods: Sequence[Method] = BENCHMARK_METHODS, **how: Any
) -> ShapeResult:
    """Time `methods` on one shape with random bf16 data, as `time_methods` does, whose keywords these are.

    The quantization of the activations is part of every INT8 and FP8 method's time. `tokens` count where the shape has
    none of its own; on a CPU they are fewer.
    """
    m = shape.tokens or (min(tokens, _MOST_TOKENS_ON_CPU) if device.type == "cpu" else tokens)
    weights = shape.n * shape.k
    copies = 1
    if device.type == "cuda":
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        copies = weight_copies(weights, cache_bytes, int(bytes_per_copy(methods) * weights), free_bytes(device))
    result = ShapeResult(shape, m, copies)
    time_methods(result, methods, Operands(m, shape.n, shape.k, copies, device), **how)
    ran = [method for method in methods if method.name in result.rounds]
    result.weight_bytes = {method.name: method.form.bytes_per_weight * weights for method in ran}
    torch.cuda.empty_cache()
    return result


def benchmark_attention(
    call: AttentionWork, device: torch.device, methods: Sequence[AttentionMethod] = ATTENTION_METHODS, **how: Any
) -> AttentionResult:
    """The same for one call of attention; on a CPU for fewer tokens."""
    result = AttentionResult(feasible_call(call, device))
    time_methods(result, methods, AttentionOperands(result.call, device), **how)
    torch.cuda.empty_cache()
    return result


def time_methods(
    result: Times,
    methods: Sequence[Method] | Sequence[AttentionMethod],
    operands: Any,
    rounds: int = 3,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda method: None,
) -> None:
    """Time `methods` on their operands, for a result; `check` runs between them and may raise to stop.

    What this machine does not have, or has no memory for, is left out. A GPU must be the current one. `say` gets the
    name of each method that is prepared. What the user can switch off is prepared last: it may take the memory.
    """
    exact, device = operands.exact(), operands.device
    pool = GraphPool() if device.type == "cuda" else None
    series = {}
    for method in sorted(methods, key=lambda method: method.tick != ""):
        check()
        say(method.name)
        with leaving_out(method.name, method.foreign, result.absent):
            with interruptible(check):
                call = method.call(operands)
                output = operands.sample(call(0)).double()
            result.relative_errors[method.name] = ((output - exact).norm() / exact.norm()).item()
            series[method.name] = CallSeries(call, operands.copies, device, pool)
    ran = {method.name: series[method.name] for method in methods if method.name in series}
    result.rounds = sustained_milliseconds(ran, rounds, check)
    result.looped = [name for name, calls in ran.items() if calls.looped]


def free_bytes(device: torch.device) -> int:
    """Memory of a GPU that is to be had."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
