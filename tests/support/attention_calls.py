"""An attention that computes in floats and counts its calls, in the place of one that needs a card."""

from __future__ import annotations

import torch


class FloatAttention:
    """INT8 attention of comfy-kitchen, or the fastest exact attention of a card: `fastest` is its name."""

    def __init__(self) -> None:
        self.calls, self.masked, self.fastest = 0, 0, "cuDNN"

    def __call__(self, q, k, v, mask=None, scale=None, enable_gqa=False, *, attn_mask=None) -> torch.Tensor:
        assert enable_gqa or q.shape[1] == k.shape[1]
        mask = attn_mask if mask is None else mask
        self.calls += 1
        self.masked += mask is not None
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=enable_gqa)
