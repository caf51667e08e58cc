"""Attention of this pack's kernels: with queries and keys in INT8, and exact for wide heads; from Ampere on."""

import math

import torch

from ..card.device import fused_obstacle, uses_triton
from ..checks import FLOAT_DTYPES, check_same_device
from ..compilers import NAMESPACE, define_operators, watched

WIDEST_HEAD = 256
"""Channels of a head that the kernel has room for. The reference takes any."""
_MOST_LOGITS = 1 << 24  # of the reference at a time


def int8_attention_obstacle(device: torch.device) -> str | None:
    """Why `int8_attention` has no kernel on a device, in words and with what to do, or None where it runs.

    It runs on a CPU too: there the reference computes it.
    """
    return fused_obstacle(device) if device.type == "cuda" else None


def int8_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
    key_mean: torch.Tensor | None = None,
) -> torch.Tensor:
    """softmax(q k^T scale + mask) v with q and k in INT8, a scale per token, rotated by a Hadamard matrix.

    The softmax and its sums are in float32. Probabilities and values are multiplied in the dtype of `v`; on GeForce
    cards in fp16, with a scale per channel of `v` and fp16 sums over a tile of keys.
    From all keys of a head one vector is taken before they are rounded. That changes no probability (softmax is the
    same for logits less a constant), and without their mean the keys round finer (SageAttention, arXiv 2410.02367).

    Args:
        q: [B, H, TQ, D] bf16, fp16 or fp32, D up to WIDEST_HEAD on a card, of any strides.
        k, v: [B, HK, TK, D] of the dtype of `q`, HK a divisor of H.
        mask: bool, True where a key counts, or a float that is added to the logits; broadcastable to [B, H, TQ, TK].
        scale: of the logits; None for 1 / sqrt(D).
        key_mean: what is taken from the keys, [HK, D] or [B or 1, HK, D]; None for the mean of up to 512 of them.

    Returns:
        [B, H, TQ, D] of the dtype of `q`, a token's heads side by side in memory. Rows that may see no key are zeros. A
        row of `q` with a NaN or Inf is NaN.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
        RuntimeError: a gradient is asked to pass the rounding.
    """
    _check(q, k, v, mask, key_mean)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError("int8_attention has no gradient, as it rounds: run it under torch.no_grad()")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    compute = _OPERATOR if watched(q) else _attend
    return compute(q, k, v, mask, factor, key_mean).transpose(1, 2)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, key_mean: torch.Tensor | None
) -> None:
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
    if key_mean is not None:
        given, full = (1,) * (3 - key_mean.ndim) + tuple(key_mean.shape), (k.shape[0], k.shape[1], k.shape[3])
        if not key_mean.is_floating_point() or given[1:] != full[1:] or given[0] not in (1, full[0]):
            raise ValueError(f"key_mean must be floating point {full[1:]} or {full}, got {tuple(key_mean.shape)}")
    check_same_device(q=q, k=k, v=v, mask=mask, key_mean=key_mean)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    key_mean: torch.Tensor | None,
) -> torch.Tensor:
    """Checked tensors -> [B, TQ, H, D]."""
    out = _new_output(q)
    if not out.numel() or not k.numel():
        return out.zero_()
    full = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    if uses_triton(q) and q.shape[-1] <= WIDEST_HEAD:
        from ..triton_kernels.attention import launch_int8_attention

        launch_int8_attention(q, k, v, full, scale, key_mean, out.transpose(1, 2))
    else:
        out.copy_(int8_attention_reference(q, k, v, full, scale, key_mean).transpose(1, 2))
    return out


def _new_output(
    q: torch.Tensor,
    k: object = None,
    v: object = None,
    mask: object = None,
    scale: float = 1.0,
    key_mean: object = None,
) -> torch.Tensor:
    batch, heads, tokens, width = q.shape
    return q.new_empty((batch, tokens, heads, width))


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Rows of D channels, padded to a power of two with zeros and times the Hadamard matrix of 1 and -1."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, max(32, 1 << (width - 1).bit_length()) - width))
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < padded.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return padded @ matrix


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [..., D] as whole numbers in float32 and their scales [..., 1], NaN for a row that is not finite."""
    absmax = x.abs().amax(-1, keepdim=True)
    finite = absmax.isfinite()
    steps = (x * (127 / torch.where(absmax > 0, absmax, 1.0)).clamp_max(torch.finfo(torch.float32).max)).round()
    return torch.where(finite, steps, 0.0), torch.where(finite, absmax / 127, math.nan)


def int8_attention_reference(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    key_mean: torch.Tensor | None,
) -> torch.Tensor:
    """`int8_attention` in plain PyTorch operations, on checked tensors and a mask [B, H, TQ, TK]; values in float32."""
    keys = k.float()
    keys = _rotated(keys - (keys.mean(2) if key_mean is None else key_mean.float()).unsqueeze(-2))
    (q_steps, q_scale), (k_steps, k_scale) = _quantized(_rotated(q.float())), _quantized(keys)
    # The rotation multiplies both by the root of the channels.
    q_scale, group = q_scale * (scale / keys.shape[-1]), q.shape[1] // k.shape[1]
    k_steps, k_scale, values = (x.repeat_interleave(group, 1) for x in (k_steps.mT, k_scale.mT, v.float()))
    parts = []
    rows = max(1, _MOST_LOGITS // (q.shape[0] * q.shape[1] * k.shape[2]))
    for first in range(0, q.shape[2], rows):
        some = slice(first, first + rows)
        logits = q_steps[:, :, some] @ k_steps * q_scale[:, :, some] * k_scale
        if mask is not None:
            seen = mask[:, :, some]
            logits = logits.masked_fill(~seen, -math.inf) if seen.dtype == torch.bool else logits + seen
        blind = (logits == -math.inf).all(-1, keepdim=True)
        parts.append(torch.softmax(logits, -1).masked_fill(blind, 0.0) @ values)
    return torch.cat(parts, 2)


def takes_float_attention(q: torch.Tensor, v: torch.Tensor) -> bool:
    """Whether `float_attention` has a kernel for such tensors: heads of more than 128 channels, in fp16 or bf16."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or not 128 < q.shape[-1] <= WIDEST_HEAD:
        return False
    return q.shape[-1] == v.shape[-1] and int8_attention_obstacle(q.device) is None


def float_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(q k^T scale + mask) v in the dtype of its inputs, with float32 sums.

    For cards and systems where PyTorch has no quick kernel for heads of 256: on Ampere cuDNN stops at 128, and PyTorch
    for Windows has no FlashAttention.

    Args:
        q: [B, H, TQ, D] bf16 or fp16, 128 < D <= WIDEST_HEAD.
        k, v: [B, HK, TK, D] of the dtype of `q`, HK a divisor of H.
        mask: bool, True where a key counts, or a float that is added to the logits; broadcastable to [B, H, TQ, TK].
        scale: of the logits; None for 1 / sqrt(D).

    Returns:
        [B, H, TQ, D], a token's heads side by side in memory. Rows that may see no key are zeros.

    Raises TypeError or ValueError for a wrong dtype, shape or device.
    """
    _check(q, k, v, mask, None)
    if q.dtype == torch.float32 or not 128 < q.shape[-1] <= WIDEST_HEAD:
        raise ValueError(f"float_attention takes fp16 and bf16 heads of 129 to {WIDEST_HEAD}, got {tuple(q.shape)}")
    factor = q.shape[-1] ** -0.5 if scale is None else float(scale)
    compute = _FLOAT_OPERATOR if watched(q) else _attend_exactly
    return compute(q, k, v, mask, factor).transpose(1, 2)


def _attend_exactly(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """Checked tensors -> [B, TQ, H, D]."""
    out = _new_output(q)
    if not out.numel() or not k.numel():
        return out.zero_()
    full = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    if uses_triton(q):
        from ..triton_kernels.float_attention import launch_float_attention

        launch_float_attention(q, k, v, full, scale, out.transpose(1, 2))
    else:
        grouped = q.shape[1] != k.shape[1]
        exact = torch.nn.functional.scaled_dot_product_attention
        out.copy_(exact(q, k, v, attn_mask=full, scale=scale, enable_gqa=grouped).transpose(1, 2))
    return out


define_operators(
    {
        "float_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale) -> Tensor": (
            _attend_exactly,
            _new_output,
        ),
        "int8_attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, Tensor? key_mean) -> Tensor": (
            _attend,
            _new_output,
        ),
    }
)
_OPERATOR = getattr(torch.ops, NAMESPACE).int8_attention.default
_FLOAT_OPERATOR = getattr(torch.ops, NAMESPACE).float_attention.default
