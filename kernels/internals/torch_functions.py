"""PyTorch's private functions, each asked for when it is called: one that is gone ends only what needs it."""

from collections.abc import Callable, Sequence

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# How many dispatch modes are active. Where PyTorch does not say, one might be.
dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
# The current GPU of a process that has used one. PyTorch's own function first asks whether it has.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


def int_mm(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] x int8 [K, N] -> int32 [M, N] on a GPU, by cuBLASLt."""
    function = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
    return function(q, weight)


def scaled_mm(q: torch.Tensor, q_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """FP8 [M, K] x FP8 [K, N], their scales float32 0-dim -> bf16 [M, N], by cuBLASLt with its fast sums."""
    function = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return function(q, weight, q_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def in_attention_order(
    order: Sequence[SDPBackend], attend: Callable[..., torch.Tensor], *args: object, **kwargs: object
) -> torch.Tensor:
    """`attend(*args, **kwargs)`, where PyTorch asks these backends of its attention first, in their order.

    What the process has switched off stays off. PyTorch's own context manager takes the host 40 us, this less than one.
    It does the same where PyTorch has the functions no more, and where a compiler traces, and switches the backends on.
    """
    get = None if torch.compiler.is_compiling() else getattr(torch._C, "_get_sdp_priority_order", None)
    put = None if get is None else getattr(torch._C, "_set_sdp_priority_order", None)
    if get is None or put is None:
        with sdpa_kernel(list(order), set_priority=True):
            return attend(*args, **kwargs)
    before = get()
    first = [backend.value for backend in order]
    put([*first, *(number for number in before if number not in first)])
    try:
        return attend(*args, **kwargs)
    finally:
        put(before)
