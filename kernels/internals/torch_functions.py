"""PyTorch's private functions. Where one is gone, its callers fail and nothing else does."""

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

# The number of active dispatch modes. Where PyTorch does not say, one might be.
dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", lambda: 1)
# The current GPU, in a process that has used one. PyTorch's public function checks that first.
current_device = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)


# int8 [M, K] x int8 [K, N] -> int32 [M, N] on a GPU, by cuBLASLt.
int_mm: Any = getattr(torch, "_int_mm", None)


def scaled_mm(q: torch.Tensor, q_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """FP8 [M, K] x FP8 [K, N], their scales float32 0-dim -> bf16 [M, N], by cuBLASLt with its fast sums."""
    function = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return function(q, weight, q_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


_order_lock = threading.Lock()
_orders: dict[object, list[int]] = {}  # those of the calls that run, behind the one that was there before


def with_backend_order(
    order: Sequence[SDPBackend], attend: Callable[..., torch.Tensor], *args: object, **kwargs: object
) -> torch.Tensor:
    """Return `attend(*args, **kwargs)` with these backends of PyTorch's attention first, in their order.

    The order is the process's. A call within this one gets its own, and then this one's comes back. A call of another
    thread may find this one's, if both begin at once. The last to end puts back what was there before the first.

    Backends that the process has switched off stay off. PyTorch's own context manager switches them on and takes the
    host 40 us, this about one. It serves where a compiler traces, and where PyTorch lacks the functions.
    """
    get = None if torch.compiler.is_compiling() else getattr(torch._C, "_get_sdp_priority_order", None)
    put = None if get is None else getattr(torch._C, "_set_sdp_priority_order", None)
    if get is None or put is None:
        with sdpa_kernel(list(order), set_priority=True):
            return attend(*args, **kwargs)
    call, first = object(), [backend.value for backend in order]
    with _order_lock:
        before = get()
        own = [*first, *(number for number in before if number not in first)]
        put(own)
        _orders.setdefault(None, before)
        _orders[call] = own
    try:
        return attend(*args, **kwargs)
    finally:
        with _order_lock:
            del _orders[call]
            put(_orders[next(reversed(_orders))])
            if len(_orders) == 1:
                _orders.clear()
