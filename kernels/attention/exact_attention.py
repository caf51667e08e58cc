"""Exact attention by the fastest of the ways there are: PyTorch's flash, cuDNN, efficient, and this pack's kernel.

Which one runs follows from a rule known of the card, and from what Kernel Benchmark has measured on it. What a way
takes (head width, dtype, mask, grouped queries) is asked of PyTorch, and what it refuses goes to the next.
"""

import functools
from collections.abc import Callable, Iterator
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

from ..card.choices import Choices
from ..card.machine import describe_machine, kernel_source_hash
from ..internals.torch_functions import in_attention_order
from ..kept import KEPT, keep
from .int8_attention import float_attention, takes_float_attention

FLASH, CUDNN, EFFICIENT, TRITON, PYTORCH = "flash", "cuDNN", "efficient", "Triton", "PyTorch's choice"


class ExactWay(NamedTuple):
    """A way to compute exact attention.

    Attributes:
        backends: which PyTorch may choose from; none leaves that to PyTorch.
        takes: whether it computes such a call here, by what PyTorch says of its backends.
        compute: q, k, v, mask, scale -> the result, for one that PyTorch does not have.
    """

    backends: tuple[SDPBackend, ...]
    takes: Callable[[SDPAParams], bool]
    compute: Callable[..., torch.Tensor] | None = None


EXACT_WAYS = {
    FLASH: ExactWay((SDPBackend.FLASH_ATTENTION,), can_use_flash_attention),
    CUDNN: ExactWay((SDPBackend.CUDNN_ATTENTION,), can_use_cudnn_attention),
    EFFICIENT: ExactWay((SDPBackend.EFFICIENT_ATTENTION,), can_use_efficient_attention),
    TRITON: ExactWay((), lambda call: takes_float_attention(call.query, call.value), float_attention),
    PYTORCH: ExactWay((), lambda call: True),
}
"""By name, in the order in which ComfyUI asks them; PyTorch's own choice last."""

COMFYUI_ORDER = (*(backend for way in EXACT_WAYS.values() for backend in way.backends), SDPBackend.MATH)
"""In which ComfyUI lets PyTorch ask its backends (comfy.ops.SDPA_BACKEND_PRIORITY)."""
_ORDERS = {name: (*dict.fromkeys([*way.backends, *COMFYUI_ORDER]),) for name, way in EXACT_WAYS.items()}

# From Hopper on cuDNN's kernels are twice as fast as FlashAttention 2, and have heads of 256.
_CUDNN_FIRST = (9, 0)
# Of fewer elements in q the host's time counts most, and cuDNN takes more of it; ComfyUI has the same bound.
_SMALL = 1 << 17
_MANY_TOKENS = 1 << 20


class AttentionShape(NamedTuple):
    """What the time of an attention call depends on most: tokens of q and of k, the heads' width, and a mask."""

    tokens: int
    keys: int
    head_dim: int
    masked: bool


@functools.cache
def _machine_of(device: torch.device) -> dict[str, str]:
    """What a choice for attention is bound to."""
    found = describe_machine(device)
    machine = {name: found.get(name, "") for name in ("card", "driver", "torch", "triton")}
    return machine | {"cudnn": str(torch.backends.cudnn.version()), "kernels": kernel_source_hash("attention")}


ATTENTION_CHOICES = Choices("attention", AttentionShape._fields, EXACT_WAYS, _machine_of)
"""What Kernel Benchmark found of exact attention."""


class _Plan(NamedTuple):
    """How calls of one layout are computed: by this way, the keys of a group of heads repeated for each if need be.
    None is what PyTorch does by itself."""

    way: str | None
    repeats: bool = False


ATTENTION_CHOICES.after_change.append(KEPT.clear)


def exact_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """softmax(q kᵀ · scale + mask) v by `fastest_way`, or as PyTorch itself computes it where that says None.

    Args:
        q: [B, H, T, D] in any dtype that PyTorch's scaled_dot_product_attention takes.
        k: [B, H, S, D], of fewer heads with `enable_gqa`.
        v: [B, H, S, D], as k.
        mask: boolean, where True takes part, or added to the logits; broadcastable to [B, H, T, S].
        scale: None is 1 / sqrt(D).
        enable_gqa: a head of k and v may serve several of q.

    Returns:
        [B, H, T, D] in q's dtype. What PyTorch says of rows that are wholly masked, and of NaN, holds here.

    Raises:
        RuntimeError: of PyTorch, for shapes that do not fit.
    """
    if not _may_choose(q, k, v):
        return attend_by(PYTORCH, q, k, v, mask, scale, enable_gqa)
    grouped = enable_gqa and q.shape[1] != k.shape[1]
    mask = _with_axes(mask)
    if torch.compiler.is_compiling():
        plan = _plan_for_compiler(q, mask, grouped)
        return attend_by(plan.way, q, k, v, mask, scale, grouped, plan.repeats)
    key = _layout(q, k, v, mask, grouped)
    plan = KEPT.get(key)
    if plan is not None:
        return attend_by(plan.way, q, k, v, mask, scale, grouped, plan.repeats)
    for plan in _candidates(q, k, v, mask, grouped):
        try:
            result = attend_by(plan.way, q, k, v, mask, scale, grouped, plan.repeats)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:  # a way that promised too much
            if plan.way is None:
                raise
            continue
        keep(key, plan)
        return result
    raise AssertionError("the last candidate returns or raises")


def fastest_way(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    enable_gqa: bool = False,
) -> str | None:
    """The way of EXACT_WAYS that `exact_attention` computes such a call with.

    None where neither a rule nor a measurement says anything: on a CPU, on AMD, for few tokens, for what needs a
    gradient, and on a card older than Hopper that Kernel Benchmark has not measured. Arguments as `exact_attention` has
    them. It launches nothing, and a compiler traces it.
    """
    if not _may_choose(q, k, v):
        return None
    grouped = enable_gqa and q.shape[1] != k.shape[1]
    mask = _with_axes(mask)
    if torch.compiler.is_compiling():
        plan = _plan_for_compiler(q, mask, grouped)
    else:
        plan = KEPT.get(_layout(q, k, v, mask, grouped)) or next(_candidates(q, k, v, mask, grouped))
    return plan.way


def exact_ways(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, enable_gqa: bool = False
) -> tuple[str, ...]:
    """The ways of EXACT_WAYS that PyTorch says compute such a call here; only its own choice where there is no GPU."""
    if q.device.type != "cuda":
        return (PYTORCH,)
    call = SDPAParams(q, k, v, _with_axes(mask), 0.0, False, enable_gqa)
    return tuple(name for name, way in EXACT_WAYS.items() if way.takes(call))


def _may_choose(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether there is anything to choose; a gradient is PyTorch's matter."""
    if q.device.type != "cuda" or torch.version.hip is not None or q.ndim != 4 or q.numel() < _SMALL:
        return False
    return not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad))


def _layout(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, grouped: bool) -> tuple:
    """All that PyTorch's answers depend on, as a key of what is kept."""
    masked = None if mask is None else (mask.shape, mask.stride(), mask.dtype)
    strides = (q.stride(), k.stride(), v.stride())
    return (exact_attention, q.shape, k.shape, v.shape, *strides, q.dtype, q.device, grouped, masked)


def _candidates(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, grouped: bool
) -> Iterator[_Plan]:
    """The fastest way, then what is left should it fail; at the end what PyTorch does by itself."""
    takes, repeats = exact_ways(q, k, v, mask, grouped), False
    if grouped and takes == (PYTORCH,):  # it would compute that in plain steps, with all logits in memory
        repeats = True
        takes = exact_ways(q, *_repeated(q, k, v), mask)
    shape = AttentionShape(q.shape[-2], k.shape[-2], q.shape[-1], mask is not None)
    way = choose_exact_way(q.device, shape, takes)
    if way is not None:
        yield from (_Plan(name, repeats) for name in dict.fromkeys((way, *takes)))
    yield _Plan(None)


def choose_exact_way(device: torch.device, shape: AttentionShape, takes: tuple[str, ...]) -> str | None:
    """The way of a shape on a GPU among those that take it, in the order of EXACT_WAYS: the fastest by the card's own
    benchmark, else cuDNN from Hopper on; None where neither says anything."""
    rule = CUDNN if torch.cuda.get_device_capability(device) >= _CUDNN_FIRST and CUDNN in takes else None
    choice = ATTENTION_CHOICES.stored(device)
    measured = None if choice is None else choice.fastest(shape, takes, rule or takes[0])
    return rule if measured is None else measured


def _plan_for_compiler(q: torch.Tensor, mask: torch.Tensor | None, grouped: bool) -> _Plan:
    """A plan that a trace makes of what does not change with the number of tokens."""
    way = _way_for_compiler(q.device, q.dtype, q.shape[-1], mask is not None)
    # Whether a way takes grouped queries with a mask cannot be asked in a trace.
    return _Plan(way, way is not None and grouped and mask is not None)


@torch.compiler.assume_constant_result
def _way_for_compiler(device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
    """The way of the longest sequences that were measured, or else the card's rule."""
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
    """Exact attention by one of `exact_ways`, with the arguments of `exact_attention`; None is PyTorch by itself.

    `repeats` gives each head of q keys of its own first. What the way refuses after all goes to the next. Raises
    RuntimeError where it promised too much.
    """
    if repeats:
        k, v = _repeated(q, k, v)
        enable_gqa = False
    if way is None or way == PYTORCH:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    compute = EXACT_WAYS[way].compute
    if compute is not None:
        return compute(q, k, v, _with_axes(mask), scale)
    return in_attention_order(_ORDERS[way], attend_by, PYTORCH, q, k, v, mask, scale, enable_gqa)


def _repeated(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values with a head for each of q's."""
    times = q.shape[1] // k.shape[1]
    return k.repeat_interleave(times, 1), v.repeat_interleave(times, 1)


def _with_axes(mask: torch.Tensor | None) -> torch.Tensor | None:
    """A mask with all four axes: PyTorch's fused kernels know none of three."""
    return mask if mask is None or mask.ndim >= 4 else mask[(None,) * (4 - mask.ndim)]
