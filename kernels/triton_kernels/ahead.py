"""What a model's linears will launch, compiled before its weights are there."""

import functools
from collections.abc import Iterable

import torch

from ..internals.triton_runtime import COMPILES_ALONE, compile_launcher_of
from ..reference.linear import LinearForm
from . import gates, norms, rope
from .activations import launch_quantize_activations
from .background import beside_loading
from .gemm import GemmLaunch, likely_config
from .gemm_kernel import Operands
from .launching import StandIn

# What images of 1024, 768 and 512 pixels have with their text, and texts themselves; and of the first of each that the
# launch knows no divisor of.
_TOKENS = (4096, 2560, 1024, 512)
# In the order of their use. Which of their forms a model wants shows in its forward only, so that only what launches
# them can be made, for which the number of their parameters is enough.
_LAUNCHERS = (norms.NORM_QUANTIZE, rope.NORM_ROPE, norms.GATED_RESIDUAL, gates.ACTIVATE_QUANTIZE)


@functools.cache
def _compile_launchers() -> None:
    for launcher in _LAUNCHERS:
        beside_loading.submit(1, functools.partial(compile_launcher_of, launcher.kernel))


def compile_for(forms: Iterable[LinearForm], dtype: torch.dtype, device: torch.device) -> None:
    """Have other threads compile what linears of these forms launch on a GPU with inputs of a dtype.

    It returns at once. A call that comes first compiles for itself, or waits for the thread that has begun to.
    """
    if not COMPILES_ALONE:
        return
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    _compile_launchers()
    for form in dict.fromkeys(forms):
        if form.k % 16:  # rows of others are copied into wider ones
            continue
        width = form.k * form.activation_bits // 8
        smooth = StandIn((form.k,), torch.float32, device) if form.has_factors else None
        for rank, tokens in enumerate(_TOKENS):
            x, q = StandIn((tokens, form.k), dtype, device), StandIn((tokens, width), torch.int8, device)
            scale = StandIn((tokens,), torch.float32, device)
            if not rank:
                layout = launch_quantize_activations((x, smooth), form.rotation_group, form.activation_bits)
                if layout is not None:
                    layout.compile_by(beside_loading, 0, (x, smooth), (q, scale))
            weight = StandIn((form.n, form.k), torch.int8, device)
            weight_scale = StandIn((1 if form.has_one_scale else form.n,), torch.float32, device)
            bias = StandIn((form.n,), dtype, device) if form.has_bias else None
            operands = Operands(q, weight, scale, weight_scale, bias, StandIn((tokens, form.n), dtype, device))
            GemmLaunch(likely_config(operands), operands).is_compiled(operands, 2 * rank, beside_loading)
