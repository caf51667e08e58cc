"""comfy-kitchen's INT8 linear and the backends that it has of it."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch


def kitchen_linear(backend: str | None = None) -> Callable[..., torch.Tensor]:
    """Its `int8_linear`, which chooses among its backends, or that of one backend, "cuda" or "triton".

    The function takes x, weight, scale, bias and the dtype of the result. Raises LookupError where comfy-kitchen is not
    installed, or has none here; the function itself may still raise.
    """
    if backend is None:
        return _module("comfy_kitchen").int8_linear
    return _asked(lambda registry: registry.get_implementation("int8_linear", backend=backend))


def kitchen_attention(device: torch.device) -> Callable[..., torch.Tensor]:
    """Its `int8_attention`, which takes q, k, v [B, H, T, D] and attn_mask.

    Raises LookupError where comfy-kitchen is not installed, or has none that runs on a device.
    """
    library = _module("comfy_kitchen")
    runs = getattr(library, "int8_attention_is_available", None)
    if runs is None or not runs(device):
        raise LookupError("comfy-kitchen has no INT8 attention here")
    return library.int8_attention


def backend_for(x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor) -> str:
    """Which backend it chooses for a linear. Raises LookupError where it is not installed, or has none here."""
    options = {"bias": None, "out_dtype": x.dtype, "convrot": False, "convrot_groupsize": 256}
    arguments = {"x": x, "weight": weight, "weight_scale": scale, **options}
    return _asked(lambda registry: registry.get_capable_backend("int8_linear", arguments))


def _module(name: str) -> Any:
    if importlib.util.find_spec("comfy_kitchen") is None:
        raise LookupError("comfy-kitchen is not installed")
    return importlib.import_module(name)


def _asked(question: Callable[[Any], Any]) -> Any:
    registry = _module("comfy_kitchen.registry").registry
    try:
        return question(registry)
    except Exception as error:
        raise LookupError(str(error).strip().partition("\n")[0] or type(error).__name__) from error
