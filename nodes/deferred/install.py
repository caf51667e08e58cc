"""Wrappers that let work be deferred: around the calls of a MODEL, of a text encoder, and of single modules."""

import weakref
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...kernels import foreground
from ..comfyui.attention import OVERRIDE
from ..comfyui.compiling import compiles, is_compiled_module
from ..host import notices
from . import arithmetic, rotary, views  # noqa: F401  # pyright: ignore[reportUnusedImport]  # the mode's handlers
from .mode import Deferring
from .notes import as_tracked
from .second_call import repeatable

KEY = "int8_dit_deferred"
"""The key of the wrapper in a MODEL."""

_MOST_SAID = 120  # characters of an error, which may be a page


def defer(model: ModelPatcher) -> None:
    """Wrap the forward of a MODEL, so that the work between its linears is deferred."""
    calls = _Calls()
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, KEY)
    model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, KEY, calls.call)
    model.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, KEY)
    # Other nodes may have compiled parts of the model since the last run.
    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, KEY, lambda _: calls.compiled.clear())


def deferring_class(own: Any, computes_on: torch.device) -> type:
    """Return a subclass of a module's class, such as a text encoder's, whose forward defers work on a device."""
    calls = _Calls()

    class DeferringModule(own):
        def forward(self, *args, **kwargs):
            given = (*args, *kwargs.values())
            # Not that of the weights, which may be offloaded. A text encoder's inputs may be lists of tokens.
            device = next((value.device for value in given if isinstance(value, torch.Tensor)), computes_on)
            own_call = partial(super().forward, *args, **kwargs)
            return calls.run(self, own_call, device, (*_form_of(given), *kwargs), given)

    for name in ("__name__", "__qualname__", "__module__"):
        setattr(DeferringModule, name, getattr(own, name))
    return DeferringModule


def deferred_call(call: Callable[[], Any]) -> Any:
    """Call a forward in which work is deferred, without comparisons."""
    with Deferring() as forward:
        output = call()
    return forward.finish(output)


class _Calls:
    """The wrapper of a MODEL and its clones, or of a module. It compares the first call under each condition."""

    def __init__(self) -> None:
        # By root module and conditions: whether deferred calls agree with the module's own.
        self._agreed: weakref.WeakKeyDictionary[torch.nn.Module, dict[tuple, bool]] = weakref.WeakKeyDictionary()
        self.compiled: weakref.WeakKeyDictionary[torch.nn.Module, bool] = weakref.WeakKeyDictionary()

    def call(
        self, executor, x, t, c_concat=None, c_crossattn=None, control=None, transformer_options: Mapping = {}, **named
    ) -> Any:
        """Wrap BaseModel's apply_model, whose arguments these are."""
        if compiles(transformer_options):
            return executor(x, t, c_concat, c_crossattn, control, transformer_options, **named)
        given = (x, t, c_concat, c_crossattn, control, *named.values())
        conditions = (*_form_of(given), _options_of(transformer_options), *named)

        def run() -> Any:
            return executor(as_tracked(x), t, c_concat, as_tracked(c_crossattn), control, transformer_options, **named)

        return self.run(executor.class_obj.diffusion_model, run, x.device, conditions, (transformer_options, *given))

    @foreground.computing()
    def run(
        self, root: torch.nn.Module, call: Callable[[], Any], device: torch.device, conditions: tuple, given: tuple
    ) -> Any:
        """Call a module's forward, deferred where its linears run fused and deferred calls agree with its own. Neither
        times nor which kernels are compiled decide: one seed gives one picture. `given` are arguments of the forward,
        which may change what they hold."""
        if torch.is_grad_enabled() or comfy.model_management.in_training or torch.compiler.is_compiling():
            return call()
        if root not in self.compiled:
            self.compiled[root] = any(map(is_compiled_module, root.modules()))
        if self.compiled[root] or not any(_is_fused(part, device) for part in root.modules()):
            return call()
        agreed = self._agreed.setdefault(root, {})
        if agreed.get(conditions):
            return deferred_call(call)
        if conditions in agreed or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return call()
        called: list[torch.nn.Module] = []  # a cache of whole steps, such as ComfyUI's EasyCache, leaves out all
        with ExitStack() as undo:
            for part in root.modules():
                if _is_fused(part, device):
                    undo.enter_context(part.register_forward_pre_hook(lambda part, _: called.append(part)))
            output, found = _compared(root, repeatable(call, given), called)
        if found is not None:
            agreed[conditions] = found
        return output


def _compared(root: torch.nn.Module, call: Callable[[], Any], called: Collection) -> tuple[Any, bool | None]:
    """Return the output, deferred if that agrees with the module's own, and whether it does; None if nothing tells, as
    where no linear is added to those that were `called`."""
    try:
        with Deferring(checking=True) as forward:
            output = call()
        if not called:
            return forward.finish(output), None
        output, found = forward.finish(output), forward.agreed()
        why = "its fused form does not do the same here"
    except comfy.model_management.InterruptProcessingException:
        raise
    except Exception as error:  # of any other kind: the model's own forward runs instead
        if isinstance(error, MemoryError) or comfy.model_management.is_oom(error):
            raise
        said = str(error).strip().partition("\n")[0]
        found, why = False, f"its fused form failed ({type(error).__name__}: {said[:_MOST_SAID]})"
    if found:
        return output, True
    if found is False:
        notices.warn(
            "unfused",
            "The model runs unfused",
            f"{type(root).__name__} runs without the fusion between its linears, which is slower: {why}.",
        )
    return call(), found


def _is_fused(part: Any, device: torch.device) -> bool:
    """Whether a module is a linear that runs fused on a device."""
    return hasattr(part, "is_fused_on") and part.is_fused_on(device)


def _form_of(values: Any) -> tuple:
    """Return the dtypes and axes of tensors, and the types of other values."""
    return tuple([(value.dtype, value.ndim) if isinstance(value, torch.Tensor) else type(value) for value in values])


def _options_of(options: Mapping[str, Any]) -> tuple:
    """Return what of a MODEL's options changes its forward: names, flags, types, kinds of patches."""
    kinds = [
        kind for name in ("patches", "patches_replace") for kind, found in (options.get(name) or {}).items() if found
    ]
    choices = [(name, value if isinstance(value, bool) else type(value)) for name, value in options.items()]
    return (*kinds, *choices, getattr(options.get(OVERRIDE), "__qualname__", None))
