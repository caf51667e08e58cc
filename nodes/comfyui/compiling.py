"""MODELs under torch.compile, and memory beside ComfyUI's own plan of it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP, get_wrappers_with_key

try:
    from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
except ImportError:
    COMPILE_KEY = "torch.compile"

try:
    from comfy.model_prefetch import pause_malloc_graph
except ImportError:  # this ComfyUI plans no memory
    pause_malloc_graph = nullcontext

outside_memory_plan: Callable[[], AbstractContextManager[Any]] = pause_malloc_graph
"""A context. Memory allocated inside may outlive a block's call."""


def is_compiled(model: ModelPatcher) -> bool:
    """Whether a MODEL runs compiled layers in place of its own (torch.compile)."""
    return bool(model.wrappers.get(WrappersMP.APPLY_MODEL, {}).get(COMPILE_KEY))


def has_compiled_parts(model: ModelPatcher) -> bool:
    """Whether any layer of a loaded MODEL is compiled: all by ComfyUI's node, or some in place by another one."""
    return is_compiled(model) or any(map(is_compiled_module, model.model.diffusion_model.modules()))


def compiles(options: Mapping[str, Any]) -> bool:
    """Whether a call of a MODEL with these transformer_options runs compiled layers."""
    return bool(get_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, options))


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Whether a module is compiled, or its call is."""
    return hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
