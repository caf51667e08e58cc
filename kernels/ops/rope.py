"""Norms of queries and keys and their rotary positions."""

from typing import Literal

import torch

from ..checks import check_float_rows
from ..operators import Operation, operator
from .norms import Norm, normalized

Pair = tuple[torch.Tensor, torch.Tensor]


@operator(kernel="rope")
def norm_rope(
    q: torch.Tensor,
    k: torch.Tensor,
    q_norm: Norm | None,
    k_norm: Norm | None,
    freqs: torch.Tensor,
    pairs: Literal["neighbours", "halves"],
    out: Pair | None = None,
) -> Operation[Pair]:
    """The norms of queries and keys and their rotary positions; float32 in between.

    Args:
        q, k: [B, T, H, D] bf16, fp16 or fp32, of any strides.
        q_norm, k_norm: "rms" norms over the head (weight [D]) or over all heads (weight [H D]), or None.
        freqs: floats [..., T, D / 2, 2, 2] for all heads, or [..., T, H, D / 2, 2, 2] for each of as many in q and k,
            axes of size 1 before T: the matrix by which each pair of elements is multiplied.
        pairs: which elements of a head are a pair: 2i and 2i + 1, or i and i + D / 2.
        out: two tensors like q and k to write into, such as slices of a longer sequence; new ones when None.

    Returns:
        Both results, [B, T, H, D].

    Raises TypeError or ValueError for a wrong dtype, shape or device.
    """
    if pairs not in ("neighbours", "halves"):
        raise ValueError(f"pairs must be neighbours or halves, got {pairs!r}")
    for name, x, norm in (("q", q, q_norm), ("k", k, k_norm)):
        check_float_rows(name, x)
        if x.ndim != 4 or x.shape[3] % 2 or (x.shape[:2], x.shape[3]) != (q.shape[:2], q.shape[3]):
            shapes = f"{tuple(q.shape)} and {tuple(k.shape)}"
            raise ValueError(f"q and k must be [B, T, H, D] of the same B, T and even D, got {shapes}")
        if norm is not None and (norm.kind != "rms" or norm.bias is not None):
            raise ValueError(f"the norm of {name} must be an rms norm without bias")
        weight = None if norm is None else norm.weight
        if weight is not None and weight.shape not in ((x.shape[3],), (x.shape[2] * x.shape[3],)):
            sizes = f"({x.shape[3]},) or ({x.shape[2] * x.shape[3]},)"
            raise ValueError(f"the weight of the norm of {name} must have shape {sizes}, got {tuple(weight.shape)}")
    of_all = q.shape[1] * q.shape[3] * 2
    of_each = of_all * q.shape[2] if q.shape[2] == k.shape[2] else of_all
    if not freqs.is_floating_point() or freqs.shape[-2:] != (2, 2) or freqs.numel() not in (of_all, of_each):
        wanted = f"[..., {q.shape[1]}, {q.shape[3] // 2}, 2, 2], or as many for each head of q and k,"
        raise ValueError(f"freqs must be floating point {wanted}, got {freqs.dtype} {tuple(freqs.shape)}")
    for name, target, x in zip(("q", "k"), out or (), (q, k), strict=False):
        if target.shape != x.shape:
            raise ValueError(f"the output of {name} must have shape {tuple(x.shape)}, got {tuple(target.shape)}")
    yield [(q.shape, q.dtype), (k.shape, k.dtype)]
    results = (_norm_rope(q, q_norm, freqs, pairs), _norm_rope(k, k_norm, freqs, pairs))
    yield results if out is None else (out[0].copy_(results[0]), out[1].copy_(results[1]))


def _norm_rope(x: torch.Tensor, norm: Norm | None, freqs: torch.Tensor, pairs: str) -> torch.Tensor:
    heads, width = x.shape[-2:]
    values = x.float()
    if norm is not None and norm.weight is not None and norm.weight.numel() == heads * width != width:
        values = normalized(values.flatten(-2), norm).unflatten(-1, (heads, width))
    elif norm is not None:
        values = normalized(values, norm)
    # [T, 1 or H, D / 2, 2, 2]: the same for all samples
    tokens = x.shape[-3]
    of_each = 1 if freqs.numel() == tokens * width * 2 else heads
    matrix = freqs.reshape(tokens, of_each, width // 2, 2, 2).float()
    if pairs == "halves":
        first, second = values.chunk(2, dim=-1)
    else:
        first, second = values[..., ::2], values[..., 1::2]
    rotated = [matrix[..., row, 0] * first + matrix[..., row, 1] * second for row in (0, 1)]
    result = torch.cat(rotated, dim=-1) if pairs == "halves" else torch.stack(rotated, dim=-1).flatten(-2)
    return result.to(x.dtype)
