"""INT8 attention in plain PyTorch operations: what runs on a CPU, and what the kernels share with it."""

import math

import torch

from ..linear.linear_reference import quantize_activations_reference

WIDEST_HEAD = 256
"""Channels of a head that the kernels have room for. The reference takes any."""
_MOST_LOGITS = 1 << 24  # at a time


def padded_width(width: int) -> int:
    """Return the channels in int8 of a head of so many: the next power of two, 32 at least."""
    return max(32, 1 << (width - 1).bit_length())


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Pad rows of D channels to a power of two with zeros, and multiply by the Hadamard matrix of 1 and -1."""
    width = x.shape[-1]
    padded = torch.nn.functional.pad(x, (0, padded_width(width) - width))
    matrix = torch.ones(1, 1, device=x.device)
    while len(matrix) < padded.shape[-1]:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return padded @ matrix


def _quantized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows [..., D]: whole numbers in float32 and scales [..., 1], NaN for a row that is not finite."""
    steps, scale = quantize_activations_reference(x.flatten(0, -2))
    return steps.float().view(x.shape), scale.view(*x.shape[:-1], 1)


def int8_attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> torch.Tensor:
    """`int8_attention` in plain PyTorch, on checked tensors and a mask [B, H, TQ, TK]; values in float32."""
    keys = k.float()
    keys = _rotated(keys - keys.mean(2, keepdim=True))
    q_steps, q_scale = _quantized(_rotated(q.float()))
    k_steps, k_scale = _quantized(keys)
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
