"""What a model's linears will launch, compiled before its weights are there."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..internals.triton_runtime import COMPILES_ALONE, compile_launcher_of
from ..reference.linear import LinearForm
from . import fused, rope
from .background import beside_loading
from .gemm import GemmLaunch, likely_config
from .gemm_kernel import Operands
from .launching import StandIn
from .quantizer import launch_quantize_activations

# Those of images of 1024, 768 and 512 pixels, and of texts.
_TOKENS = (4096, 2560, 1024, 512)
# In the order of their use. Which of their forms a model wants shows in its forward only, so that only what launches
# them can be made, for which the number of their parameters is enough.
_LAUNCHERS = (fused.NORM_QUANTIZE, rope.NORM_ROPE, fused.GATED_RESIDUAL, fused.ACTIVATE_QUANTIZE)


@functools.cache
def _compile_launchers() -> None:
    for launcher in _LAUNCHERS:
        beside_loading.submit(0, functools.partial(compile_launcher_of, launcher.kernel))


def compile_calls(
    calls: Callable[[Callable[..., Any]], Iterable[tuple[Any, Sequence[Any]]]], dtype: torch.dtype, device: torch.device
) -> None:
    """Have other threads compile what calls of operators launch, as `compile_for` does.

    Args:
        calls: gives operators and their arguments, made of what makes a tensor of a shape and, if not the one here, a
            dtype.
    """

    def new(*shape: int, dtype: torch.dtype = dtype) -> Any:
        return StandIn(shape, dtype, _indexed(device))

    if COMPILES_ALONE:
        for op, arguments in calls(new):
            op.compile_by(beside_loading, 1, *arguments)


def _indexed(device: torch.device) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)


def compile_for(forms: Iterable[LinearForm], dtype: torch.dtype, device: torch.device) -> None:
    """Have other threads compile what linears of these forms launch on a GPU with inputs of a dtype.

    It returns at once. A call that comes first compiles for itself, or waits for the thread that has begun to.
    """
    if not COMPILES_ALONE:
        return
    device = _indexed(device)
    _compile_launchers()

    def stand_in(dtype: torch.dtype, *shape: int) -> Any:
        return StandIn(shape, dtype, device)

    for form in dict.fromkeys(forms):
        if form.k % 16:  # rows of others are copied into wider ones
            continue
        width, scales = form.k * form.activation_bits // 8, 1 if form.has_one_scale else form.n
        smooth = stand_in(torch.float32, form.k) if form.has_factors else None
        weight, weight_scale = stand_in(torch.int8, form.n, form.k), stand_in(torch.float32, scales)
        bias = stand_in(dtype, form.n) if form.has_bias else None
        for rank, tokens in enumerate(_TOKENS):
            q, scale = stand_in(torch.int8, tokens, width), stand_in(torch.float32, tokens)
            if not rank:
                x = stand_in(dtype, tokens, form.k)
                layout = launch_quantize_activations((x, smooth), form.rotation_group, form.activation_bits)
                if layout is not None:
                    layout.compile_by(beside_loading, 0, (x, smooth), (q, scale))
            operands = Operands(q, weight, scale, weight_scale, bias, stand_in(dtype, tokens, form.n))
            GemmLaunch(likely_config(operands), operands).is_compiled(operands, 2 * rank, beside_loading)
