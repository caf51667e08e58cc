"""ComfyUI's attention functions, and where a MODEL names another one."""

from collections.abc import Callable
from typing import Any

import comfy.ldm.modules.attention
import torch

OVERRIDE = "optimized_attention_override"
"""The entry of a MODEL's transformer_options that computes its attention in the place of ComfyUI's function."""

_core: Any = comfy.ldm.modules.attention  # what it has is asked for at run time

Attention = Callable[..., torch.Tensor]
"""A function with the arguments of ComfyUI's attention functions: q, k, v, heads, mask=None and others."""


def comfyuis_attention(
    q: Any, k: Any, v: Any, heads: int, mask: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Compute attention as ComfyUI does where nothing else was chosen."""
    return _default(mask)(q, k, v, heads, mask, *args, **kwargs)


def _default(mask: torch.Tensor | None) -> Attention:
    return _core.optimized_attention if mask is None else _core.optimized_attention_masked


def pytorch_attentions() -> tuple[Attention, ...]:
    """ComfyUI's function for PyTorch's attention, as models call it and as overrides get it; none where it is gone."""
    own = getattr(_core, "attention_pytorch", None)
    return () if own is None else (own, getattr(own, "__wrapped__", own))


def is_pytorch_attention(function: Attention, mask: torch.Tensor | None, known: tuple[Attention, ...]) -> bool:
    """Whether an attention function is PyTorch's, which is exact: no launch flag and no other pack has chosen another.
    `known` are `pytorch_attentions()`."""
    return (_default(mask) if function is comfyuis_attention else function) in known
