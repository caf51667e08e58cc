"""Calls of attention functions, and an attention that computes in floats, in the place of one that needs a card."""

from __future__ import annotations

from collections.abc import Callable

import torch

OVERRIDE = "optimized_attention_override"


def random_qkv(
    heads: tuple[int, int],
    tokens: tuple[int, int],
    width: int,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
    by_head: bool = False,
    device: torch.device | str = "cpu",
) -> list[torch.Tensor]:
    """q, k, v as models give them: [b, n, heads * width], or by head [b, heads, n, width]. Heads and tokens are those
    of queries and of keys."""
    generator, made = torch.Generator(device).manual_seed(0), []
    for place in (0, 1, 1):
        tensor = torch.randn(batch, tokens[place], heads[place], width, generator=generator, device=device).to(dtype)
        made.append(tensor.transpose(1, 2) if by_head else tensor.flatten(2))
    return made


def overridden(function: Callable, override: Callable, qkv: list, heads: int, **options: object) -> torch.Tensor:
    """A call of one of ComfyUI's attention functions of a MODEL with an override."""
    return function(*qkv, heads, transformer_options={OVERRIDE: override}, **options)


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
