"""Attention of this pack's kernels: with queries and keys in INT8, and exact for wide heads; from Ampere on."""

from collections.abc import Callable
from functools import partial

import torch

from ..card.device import fused_obstacle
from ..checks import FLOAT_DTYPES
from ..operators import Operation, Result, operator
from .attention_reference import WIDEST_HEAD, int8_attention_reference


def int8_attention_obstacle(device: torch.device) -> str | None:
    """Return why `int8_attention` cannot run on a device, and what to do; None where it runs, as on any CPU."""
    return fused_obstacle(device) if device.type == "cuda" else None


def int8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T scale + mask) v with q and k in INT8, rotated by a Hadamard matrix, with a scale per token.

    On Ampere and Ada cards, without a mask, 8 or 16 keys have a scale in common. The softmax and its sums are in
    float32. Probabilities and values are multiplied in the dtype of `v`; on GeForce cards in fp16, with a scale per
    channel of `v` and fp16 sums over a tile of keys.
    The mean of up to 64 keys of a head is subtracted from all before they are rounded. That changes no probability
    (softmax is the same for logits less a constant), and without their mean the keys round finer (SageAttention, arXiv
    2410.02367).

    Args:
        q: [B, H, TQ, D] bf16, fp16 or fp32, D up to WIDEST_HEAD on a card, of any strides.
        k, v: [B, HK, TK, D] of the dtype of `q`, HK a divisor of H.
        mask: bool, True where a key counts, or a float that is added to the logits; broadcastable to [B, H, TQ, TK].
        scale: of the logits; None for 1 / sqrt(D).

    Returns:
        [B, H, TQ, D] of the dtype of `q`, a token's heads side by side in memory. Rows that may see no key are zeros. A
        row of `q` with a NaN or Inf is NaN.

    Raises TypeError or ValueError for a wrong dtype, shape or device, RuntimeError where a gradient would pass the
    rounding.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _int8_attention(q, k, v, mask, factor).transpose(1, 2)


def _checked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None) -> list[Result]:
    """Return the output's shape and dtype; raise TypeError or ValueError for tensors that do not fit together."""
    if q.dtype not in FLOAT_DTYPES or not q.dtype == k.dtype == v.dtype:
        kinds = f"{q.dtype}, {k.dtype} and {v.dtype}"
        raise TypeError(f"q, k and v must all be bfloat16, float16 or float32, got {kinds}")
    shapes = f"{tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if q.ndim != 4 or k.ndim != 4 or k.shape != v.shape or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"q must be [B, H, TQ, D] and k and v [B, HK, TK, D], got {shapes}")
    if not k.shape[1] or q.shape[1] % k.shape[1]:
        raise ValueError(f"the heads of k must divide those of q, got {shapes}")
    if mask is not None:
        full = (*q.shape[:3], k.shape[2])
        if mask.dtype != torch.bool and mask.dtype not in FLOAT_DTYPES:
            raise TypeError(f"mask must be bool, bfloat16, float16 or float32, got {mask.dtype}")
        given = (1,) * (4 - mask.ndim) + tuple(mask.shape)
        if len(given) != 4 or any(size not in (1, whole) for size, whole in zip(given, full, strict=True)):
            raise ValueError(f"mask must be broadcastable to {full}, got {tuple(mask.shape)}")
    return [((q.shape[0], q.shape[2], q.shape[1], q.shape[3]), q.dtype)]


def _by_reference(
    attend: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """Return what `attend` computes with the mask as [B, H, TQ, TK], as [B, TQ, H, D]; zeros without keys."""
    out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], q.shape[3]))
    if not out.numel() or not k.numel():
        return out
    return out.copy_(attend(q, k, v, None if mask is None else mask.expand(*q.shape[:3], k.shape[2])).transpose(1, 2))


@operator(kernel="attention.attention_launch", rounds=("q", "k", "v"))
def _int8_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> Operation[torch.Tensor]:
    """[B, TQ, H, D]."""
    yield _checked(q, k, v, mask)
    yield _by_reference(partial(int8_attention_reference, scale=scale), q, k, v, mask)


def takes_float_attention(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `float_attention` has a kernel for such tensors: heads of more than 128 channels, in fp16 or bf16."""
    in_half = q.is_cuda and q.dtype in (torch.float16, torch.bfloat16)
    return in_half and 128 < q.shape[-1] == v.shape[-1] <= WIDEST_HEAD and int8_attention_obstacle(q.device) is None


def float_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """Return softmax(q k^T scale + mask) v in the dtype of its inputs, with float32 sums: [B, H, TQ, D].

    For cards and systems where PyTorch has no quick kernel for heads of 256: on Ampere cuDNN stops at 128, and PyTorch
    for Windows has no FlashAttention. Arguments and result are those of `int8_attention`, but q, k and v must be bf16
    or fp16, and 128 < D <= WIDEST_HEAD. Raises TypeError or ValueError for a wrong dtype, shape or device.
    """
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    return _float_attention(q, k, v, mask, factor).transpose(1, 2)


@operator(kernel="attention.attention_launch")
def _float_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> Operation[torch.Tensor]:
    """[B, TQ, H, D]."""
    results = _checked(q, k, v, mask)
    if q.dtype == torch.float32 or not 128 < q.shape[-1] <= WIDEST_HEAD:
        raise ValueError(f"float_attention takes fp16 and bf16 heads of 129 to {WIDEST_HEAD}, got {tuple(q.shape)}")
    yield results
    exact = partial(torch.nn.functional.scaled_dot_product_attention, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    yield _by_reference(exact, q, k, v, mask)
