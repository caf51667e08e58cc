"""An attention call of ComfyUI's, whatever the form it comes in, as kernels take it."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch

from ..comfyui.attention import in_containers


class AttentionCall(NamedTuple):
    """An attention call.

    Attributes:
        q: [batch, heads, tokens, width].
        k, v: the same, perhaps of fewer heads and of other tokens. A call whose tensors have no such form has other
            axes in them.
        heads: as many as q has.
        mask: of four axes, or None.
        flat_output: whether its output is [batch, tokens, heads * width].
        attn_precision: what the layer asks the logits to be computed in, or None.
        keywords: the other named arguments of the call.
        otherwise: what computes it where nothing else does; a function with the arguments of ComfyUI's.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    heads: int
    mask: torch.Tensor | None
    flat_output: bool
    attn_precision: torch.dtype | None
    keywords: Mapping[str, Any]
    otherwise: Callable[..., torch.Tensor]


def read_call(
    otherwise: Callable[..., torch.Tensor],
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **keywords: Any,
) -> AttentionCall:
    """The call that ComfyUI's arguments make. q, k and v may be in containers, where they stay."""
    tensors = [tensor.peek() for tensor in (q, k, v)] if in_containers(q) else [q, k, v]
    q4, k4, v4 = (_by_head(tensor, tensors[0], heads, skip_reshape) for tensor in tensors)
    full_mask = mask if mask is None or mask.ndim > 3 else mask[(None,) * (3 - mask.ndim)].unsqueeze(1)
    return AttentionCall(q4, k4, v4, heads, full_mask, not skip_output_reshape, attn_precision, keywords, otherwise)


def _by_head(tensor: torch.Tensor, q: torch.Tensor, heads: int, skip_reshape: bool) -> torch.Tensor:
    """[b, heads, n, width] of what ComfyUI's attention takes: that already (`skip_reshape`), [b, n, heads * width] or
    (keys and values) [b, n, heads, width]; anything else unchanged."""
    if skip_reshape:
        return tensor
    width = q.shape[-1] // heads
    if tensor.ndim == 3 and width > 0 and tensor.shape[-1] % width == 0:
        tensor = tensor.unflatten(-1, (-1, width))
    return tensor.transpose(1, 2) if tensor.ndim == 4 else tensor
