"""PyTorch's private functions, each asked for when it is called: one that is gone ends only what needs it."""

import torch
from torch.nn.modules import module as _modules

# How many dispatch modes are active. Where PyTorch does not say, one might be.
dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)


def int_mm(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int8 [M, K] x int8 [K, N] -> int32 [M, N] on a GPU, by cuBLASLt."""
    function = torch._int_mm  # pyright: ignore[reportPrivateImportUsage]
    return function(q, weight)


def scaled_mm(q: torch.Tensor, q_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """FP8 [M, K] x FP8 [K, N], their scales float32 0-dim -> bf16 [M, N], by cuBLASLt with its fast sums."""
    function = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return function(q, weight, q_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def all_modules_hooked() -> bool:
    """Whether someone has hooks around the forwards of all modules of the process."""
    return any(getattr(_modules, name, None) for name in ("_global_forward_hooks", "_global_forward_pre_hooks"))
