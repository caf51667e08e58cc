"""Attention: who computes it in a MODEL, and comfy-kitchen's in INT8."""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import comfy_kitchen
import torch

OVERRIDE = "optimized_attention_override"
"""The entry of a MODEL's transformer_options that computes its attention in the place of ComfyUI's function."""

_kitchen: Any = comfy_kitchen  # what it has is asked for at run time


def kitchen_attention() -> Callable[..., torch.Tensor] | None:
    """comfy-kitchen's INT8 attention, (q, k, v, scale=) over [batch, heads, tokens, width]; None where it has none."""
    return getattr(_kitchen, "int8_attention", None)


def kitchen_attention_runs(device: torch.device) -> bool:
    """Whether comfy-kitchen has code for it that runs on a device."""
    return _kitchen.int8_attention_is_available(device)


def kitchen_version() -> str:
    """The version of comfy-kitchen that is installed."""
    return importlib.metadata.version("comfy-kitchen")
