"""MODELs under torch.compile."""

from collections.abc import Mapping
from typing import Any

import torch
from comfy.patcher_extension import get_wrappers_with_key

from .patcher import ModelPatcher, WrappersMP

try:
    from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
except ImportError:
    COMPILE_KEY = "torch.compile"


def is_compiled(model: ModelPatcher) -> bool:
    """Whether a MODEL runs compiled layers in place of its own (torch.compile)."""
    return bool(model.wrappers.get(WrappersMP.APPLY_MODEL, {}).get(COMPILE_KEY))


def compiles(options: Mapping[str, Any]) -> bool:
    """Whether a call of a MODEL with these transformer_options runs compiled layers."""
    return bool(get_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, options))


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether another node has put a compiled module, or a compiled call of one, into a model."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
