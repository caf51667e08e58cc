"""Comparing INT8 attention with the exact one while a MODEL samples, block by block."""

from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ...kernels import AttentionError, unplanned_memory
from ..comfyui.attention import (
    OVERRIDE,
    Attention,
    attention_choices,
    beside_choices,
    comfyuis_attention,
)
from ..patching.attention import AttentionOverride
from ..patching.attention_kinds import ATTENTION_KINDS, INT8, int8_way, read_call

_KEY = "int8_dit_attention_observer"

AttentionErrors = dict[str, AttentionError]
"""What INT8 attention costs, by the path of the block in the diffusion model."""

# The block that computes now in this thread, and where to note what it shows.
_block: ContextVar[tuple[str, AttentionErrors] | None] = ContextVar("int8_dit_observed_block", default=None)


def observe_block(block: torch.nn.Module, name: str, errors: AttentionErrors) -> list[Any]:
    """Note what the attention calls of a block show, until the handles are removed: those that reach an observer."""
    return [
        block.register_forward_pre_hook(lambda *_: _block.set((name, errors)) and None),
        block.register_forward_hook(lambda *_: _block.set(None) and None, always_call=True),
    ]


class AttentionObserver:
    """An attention override of ComfyUI's in a MODEL, put there in place, that compares, and lets those compute who did
    before."""

    def __init__(self, model: ModelPatcher) -> None:
        options, device = model.model_options["transformer_options"], model.load_device
        self.outer, self._choices = options.get(OVERRIDE), tuple(attention_choices(model))
        self._way = int8_way(device) if ATTENTION_KINDS[INT8].obstacle(device) is None else None
        inner = comfyuis_attention if self.outer is None else getattr(self.outer, "container_function", None)
        if inner is not None:
            self.container_function = partial(self._attend, inner)
        options[OVERRIDE] = self
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, self._stand_aside)

    def __call__(self, func: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._attend(func if self.outer is None else partial(self.outer, func), *args, **kwargs)

    def _attend(self, attend: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        observed = _block.get()
        if observed is not None and self._way is not None:
            call = read_call(attend, *args, **kwargs)
            if self._way.misfit(call) is None:
                name, errors = observed
                with unplanned_memory():
                    errors.setdefault(name, AttentionError()).offer(call.q, call.k, call.v, call.mask, call.scale)
            del call  # who computes may free q, k and v
        return attend(*args, **kwargs)

    def _stand_aside(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """A wrapper of ComfyUI's around each call of the model: where layers have chosen their attention, and no other
        pack's override is before them, nothing is observed. Any override would come before them too."""
        own = self.outer is None or (isinstance(self.outer, AttentionOverride) and self.outer.outer is None)
        return beside_choices(self, self._choices if own else (), executor, args, kwargs)


def take_observer(model: ModelPatcher) -> None:
    """Take the observer out of a MODEL, in place. An override that another node put around it stays, and observes
    nothing."""
    options = model.model_options["transformer_options"]
    observer = options.get(OVERRIDE)
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, _KEY)
    if isinstance(observer, AttentionObserver):
        options[OVERRIDE] = observer.outer
        if observer.outer is None:
            del options[OVERRIDE]
