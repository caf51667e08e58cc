"""Exact attention by the fastest of the ways there are: PyTorch's flash, cuDNN, efficient, and this pack's kernel.

Which one runs follows from a rule known of the card, and from what Kernel Benchmark has measured on it. What a way
takes (head width, dtype, mask, grouped queries) is asked of PyTorch, and what it refuses goes to the next.
"""

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.backends.cuda import (
    SDPAParams,
    can_use_cudnn_attention,
    can_use_efficient_attention,
    can_use_flash_attention,
)
from torch.nn.attention import SDPBackend

from ..call_cache import CACHE, store
from ..card.choices import Choices
from ..card.machine import describe_machine, kernel_source_hash
from ..internals.torch_functions import with_backend_order
from .int8_attention import float_attention, takes_float_attention

FLASH, CUDNN, EFFICIENT, TRITON, PYTORCH = "flash", "cuDNN", "efficient", "Triton", "PyTorch's choice"
EXACT_WAYS = {
    FLASH: can_use_flash_attention,
    CUDNN: can_use_cudnn_attention,
    EFFICIENT: can_use_efficient_attention,
    TRITON: lambda call: takes_float_attention(call.query, call.value),
    PYTORCH: lambda call: True,
}
"""Whether a way computes a call here, by name, in the order in which ComfyUI asks them; PyTorch's own choice last."""

_BACKENDS = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
COMFYUI_ORDER = (*_BACKENDS, SDPBackend.MATH)
"""In which ComfyUI lets PyTorch ask its backends (comfy.ops.SDPA_BACKEND_PRIORITY)."""
_ORDERS = {
    way: tuple(dict.fromkeys((own, *COMFYUI_ORDER)))
    for way, own in zip((FLASH, CUDNN, EFFICIENT), _BACKENDS, strict=True)
}

# From Hopper on cuDNN's kernels are twice as fast as FlashAttention 2, and have heads of 256.
_CUDNN_FIRST = (9, 0)
# Of fewer elements in q the host's time counts most, and cuDNN takes more of it; ComfyUI has the same bound.
_SMALL = 1 << 17
_MANY_TOKENS = 1 << 20


class AttentionShape(NamedTuple):
    """What the time of an attention call depends on most: tokens of q and of k, the heads' width, a mask."""

    tokens: int
    keys: int
    head_dim: int
    masked: bool


@functools.cache
def _machine_of(device: torch.device) -> dict[str, str]:
    """Return what a choice for attention is bound to: card, versions and kernels."""
    found = describe_machine(device)
    machine = {name: found.get(name, "") for name in ("card", "driver", "torch", "triton")}
    return machine | {"cudnn": str(torch.backends.cudnn.version()), "kernels": kernel_source_hash("attention")}


ATTENTION_CHOICES = Choices("attention", AttentionShape._fields, EXACT_WAYS, _machine_of)
"""What Kernel Benchmark found of exact attention."""
ATTENTION_CHOICES.after_change.append(CACHE.clear)

_Plan = tuple[str | None, bool]
"""How calls of one layout are computed: by which way, None for PyTorch by itself; and whether each head of q gets keys
of its own first."""


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Return softmax(q kᵀ · scale + mask) v, computed by `fastest_way`; where that is None, by PyTorch itself.

    q is [B, H, T, D], k and v are [B, H, S, D], of fewer heads with `enable_gqa`. All arguments are as PyTorch's
    scaled_dot_product_attention takes them, and so is the result [B, H, T, D], also for rows that are wholly masked and
    for NaN. Raises PyTorch's RuntimeError for shapes that do not fit.
    """
    if not _may_choose(q, k, v):
        return attend_by(PYTORCH, q, k, v, mask, scale, enable_gqa)
    grouped = enable_gqa and q.shape[1] != k.shape[1]
    mask = _with_axes(mask)
    if torch.compiler.is_compiling():
        way, repeats = _plan_for_compiler(q, mask, grouped)
        return attend_by(way, q, k, v, mask, scale, grouped, repeats)
    key = _layout(q, k, v, mask, grouped)
    known = CACHE.get(key)
    if known is not None:
        way, repeats = known
        return attend_by(way, q, k, v, mask, scale, grouped, repeats)
    for way, repeats in _candidates(q, k, v, mask, grouped):
        try:
            result = attend_by(way, q, k, v, mask, scale, grouped, repeats)
            store(key, (way, repeats))
            return result
        except RuntimeError as error:  # a way that promised too much
            if way is None or isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error):
                raise
    raise AssertionError("the last candidate returns or raises")


def fastest_way(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """Return the way of EXACT_WAYS by which `exact_attention`, whose arguments these are, computes such a call.

    None where neither a rule nor a measurement says anything: on a CPU, on AMD, for few tokens, for what needs a
    gradient, and on a card older than Hopper that Kernel Benchmark has not measured. It launches nothing, and a
    compiler traces it.
    """
    if not _may_choose(q, k, v):
        return None
    grouped = enable_gqa and q.shape[1] != k.shape[1]
    mask = _with_axes(mask)
    if torch.compiler.is_compiling():
        return _plan_for_compiler(q, mask, grouped)[0]
    return (CACHE.get(_layout(q, k, v, mask, grouped)) or next(_candidates(q, k, v, mask, grouped)))[0]


def exact_ways(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, enable_gqa: bool = False
) -> tuple[str, ...]:
    """Return the ways of EXACT_WAYS that compute such a call here; only PyTorch's own choice where there is no GPU."""
    if q.device.type != "cuda":
        return (PYTORCH,)
    call = SDPAParams(q, k, v, _with_axes(mask), 0.0, False, enable_gqa)
    return tuple(way for way, takes in EXACT_WAYS.items() if takes(call))


def _may_choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether there is anything to choose; calls that need a gradient are PyTorch's."""
    if q.device.type != "cuda" or torch.version.hip is not None or q.ndim != 4 or q.numel() < _SMALL:
        return False
    return not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


def _layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, grouped: bool) -> tuple:
    """The key of a cached plan: all that PyTorch's answers depend on."""
    masked = None if mask is None else (mask.shape, mask.stride(), mask.dtype)
    strides = (q.stride(), k.stride(), v.stride())
    return (exact_attention, q.shape, k.shape, v.shape, *strides, q.dtype, q.device, grouped, masked)


def _candidates(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, grouped: bool
) -> Iterator[_Plan]:
    """Yield the fastest way, then those that are left should it fail; at the end PyTorch by itself."""
    takes, repeats = exact_ways(q, k, v, mask, grouped), False
    if grouped and takes == (PYTORCH,):  # it would compute that in plain steps, with all logits in memory
        takes, repeats = exact_ways(q, *_repeated(q, k, v), mask), True
    shape = AttentionShape(q.shape[-2], k.shape[-2], q.shape[-1], mask is not None)
    way = choose_exact_way(q.device, shape, takes)
    if way is not None:
        yield from ((each, repeats) for each in dict.fromkeys((way, *takes)))
    yield None, False


def choose_exact_way(device: torch.device, shape: AttentionShape, takes: tuple[str, ...]) -> str | None:
    """Return the way of a shape on a GPU among those that take it, in the order of EXACT_WAYS.

    That is the fastest by the card's own benchmark, else cuDNN from Hopper on; None where neither says anything.
    """
    rule = CUDNN if torch.cuda.get_device_capability(device) >= _CUDNN_FIRST and CUDNN in takes else None
    choice = ATTENTION_CHOICES.stored(device)
    measured = None if choice is None else choice.fastest(shape, takes, rule or takes[0])
    return rule if measured is None else measured


def _plan_for_compiler(q: torch.Tensor, mask: torch.Tensor | None, grouped: bool) -> _Plan:
    """Return a plan made in a trace, of what does not change with the number of tokens."""
    way = _way_for_compiler(q.device, q.dtype, q.shape[-1], mask is not None)
    # Whether a way takes grouped queries with a mask cannot be asked in a trace.
    return way, way is not None and grouped and mask is not None


@torch.compiler.assume_constant_result
def _way_for_compiler(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
    """Return the way of the longest sequences that were measured, or else the card's rule."""
    takes = tuple(EXACT_WAYS) if dtype in (torch.float16, torch.bfloat16) else (EFFICIENT, PYTORCH)
    return choose_exact_way(device, AttentionShape(_MANY_TOKENS, _MANY_TOKENS, head_dim, masked), takes)


def attend_by(
    way: str | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    repeats: bool = False,
) -> torch.Tensor:
    """Compute exact attention by one of `exact_ways`, None being PyTorch by itself; else as `exact_attention`.

    `repeats` gives each head of q keys of its own first. What the way refuses after all goes to the next. Raises
    RuntimeError where it promised too much.
    """
    if repeats:
        (k, v), enable_gqa = _repeated(q, k, v), False
    if way is None or way == PYTORCH:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    if way == TRITON:
        return float_attention(q, k, v, _with_axes(mask), scale)
    return with_backend_order(_ORDERS[way], attend_by, PYTORCH, q, k, v, mask, scale, enable_gqa)


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values with a head for each of q's."""
    times = q.shape[1] // k.shape[1]
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _with_axes(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a mask with all four axes: PyTorch's fused kernels take none of three."""
    return mask if mask is None or mask.ndim >= 4 else mask[(None,) * (4 - mask.ndim)]
