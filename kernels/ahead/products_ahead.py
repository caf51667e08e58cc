"""What a model will launch, compiled by other threads before its weights are there.

A call that comes first compiles for itself, or waits for the thread that has begun to.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from ..internals.triton_runtime import COMPILES_ALONE
from ..launching.background import Background, beside_calls, beside_loading
from ..launching.launching import StandIn
from ..linear.gemm import GemmLaunch, likely_config
from ..linear.gemm_kernel import Operands
from ..linear.linear_reference import LinearForm

New = Callable[..., Any]
"""A tensor that is not there: of a shape and, if it is not the inputs', a dtype."""
# Those of images of 1024 pixels and of texts; then, by one thread, those of images of 768 and 512 pixels: so many
# seconds later, since weights load and first steps begin meanwhile, which would wait for Python's lock.
_TOKENS, _LATER_TOKENS, _SECONDS_LATER = (4096, 512), (2560, 1024), 5.0


def compile_for(
    forms: Iterable[LinearForm],
    calls: Callable[[New], Iterable[tuple[Any, Sequence[Any]]]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Have compiled what products of these forms launch on a GPU, and calls of operators; inputs are of a dtype.

    It returns at once. What converts weights, of rank 0, comes before all this.

    Args:
        calls: gives operators and their arguments.
        device: with its index.
    """
    if not COMPILES_ALONE:
        return

    def new(*shape: int, dtype: torch.dtype = dtype) -> Any:
        return StandIn(shape, dtype, device)

    for op, arguments in calls(new):
        op.compile_by(beside_loading, 1, *arguments)
    products = partial(_compile_products, tuple(dict.fromkeys(forms)), new)
    products(_TOKENS, beside_loading)
    later = partial(beside_calls.submit_later, _SECONDS_LATER, 1, partial(products, _LATER_TOKENS, beside_calls))
    beside_loading.submit(1 + len(_TOKENS), later)  # when nothing else waits there


def _compile_products(forms: Iterable[LinearForm], new: New, numbers: Sequence[int], threads: Background) -> None:
    """Have compiled what products of these forms launch with each of these numbers of tokens."""
    for form in forms:
        if form.k % 16:  # rows of others are copied into wider ones
            continue
        width, scales = form.k * form.activation_bits // 8, 1 if form.has_one_scale else form.n
        weight, weight_scale = new(form.n, form.k, dtype=torch.int8), new(scales, dtype=torch.float32)
        bias = new(form.n) if form.has_bias else None
        for rank, tokens in enumerate(numbers, 1):
            q, scale = new(tokens, width, dtype=torch.int8), new(tokens, dtype=torch.float32)
            operands = Operands(q, weight, scale, weight_scale, bias, new(tokens, form.n))
            GemmLaunch(likely_config(operands), operands).is_compiled(operands, rank, threads)
