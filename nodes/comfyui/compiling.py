"""MODELs under torch.compile, and one eager call before the first compiled one: blocks are compared there."""

import weakref
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from comfy.patcher_extension import get_all_wrappers, get_wrappers_with_key

from .patcher import ModelPatcher, WrappersMP

try:
    from comfy_api.torch_helpers.torch_compile import COMPILE_KEY
except ImportError:
    COMPILE_KEY = "torch.compile"

_KEY = "int8_dit.before_compiling"


def is_compiled(model: ModelPatcher) -> bool:
    """Whether a MODEL runs compiled layers in place of its own (torch.compile)."""
    return bool(model.wrappers.get(WrappersMP.APPLY_MODEL, {}).get(COMPILE_KEY))


def compare_before_compiling(model: ModelPatcher) -> None:
    """Let a MODEL whose calls are compiled be called once as it is."""
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, _KEY)
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, partial(_call_once_as_it_is, weakref.WeakSet()))


def _call_once_as_it_is(
    called: weakref.WeakSet[torch.nn.Module],
    executor: Any,
    x,
    t,
    c_concat=None,
    c_crossattn=None,
    control=None,
    transformer_options=MappingProxyType({}),
    **named,
) -> Any:
    """A wrapper around BaseModel's apply_model; `called` are the diffusion models that were called."""
    arguments = (x, t, c_concat, c_crossattn, control, transformer_options)
    diffusion_model, later = executor.class_obj.diffusion_model, executor.wrappers[executor.idx + 1 :]
    compilers = get_wrappers_with_key(WrappersMP.APPLY_MODEL, COMPILE_KEY, transformer_options)
    # What counts calls, such as a cache of steps, or takes its arguments apart, must see one call a step.
    once = control is None and not get_all_wrappers(WrappersMP.DIFFUSION_MODEL, transformer_options)
    if once and any(wrapper in later for wrapper in compilers) and diffusion_model not in called:
        called.add(diffusion_model)
        with suppress(torch.OutOfMemoryError):  # the compiled call may need less
            executor.original(*arguments, **named)
    return executor(*arguments, **named)
