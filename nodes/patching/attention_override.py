"""Attention in the place of ComfyUI's, by its own contract for that: other overrides, and layers, keep their say."""

import functools
import logging
from contextvars import ContextVar
from typing import Any

import torch

from ..comfyui.attention import (
    Attention,
    any_chooses,
    comfyuis_attention,
    in_containers,
    put_before_choices,
    without_override,
)
from ..comfyui.patcher import ModelPatcher
from ..host import notices
from .attention_call import AttentionCall, read_call
from .attention_kinds import AttentionKind, Way

logger = logging.getLogger(__name__)

# What the attention calls of the model call that runs now did: a reason for each kind that the first way did not take,
# None for those that it took.
_notes: ContextVar[set[str | None] | None] = ContextVar("int8_dit_attention_notes", default=None)


@torch.compiler.assume_constant_result
def _note(misfit: str | None) -> bool:
    """Note what an attention call does; in a compiled model only while that is traced."""
    notes = _notes.get()
    if notes is not None:
        notes.add(misfit)
    return True


class AttentionOverride:
    """An attention override of ComfyUI's: each call goes to the first way that takes it, else to ComfyUI's function.

    Args:
        kind: what the user chose.
        device: where the MODEL runs.
        outer: the override that was there before. It is called as ComfyUI calls it, with this one in place of
            ComfyUI's function: so what it does to its inputs is still done.

    Attributes:
        kind, outer: as given.
    """

    def __init__(self, kind: AttentionKind, device: torch.device, outer: Attention | None = None) -> None:
        self.kind, self.outer = kind, outer
        self._ways = kind.ways(device)
        self._before: tuple[str, ...] = ()
        self._noted: set[str | None] = set()
        if outer is None:  # else ComfyUI takes the tensors out of their containers, for the other override
            self.container_function = functools.partial(self._attend, comfyuis_attention)

    def __call__(self, func: Attention, *args, **kwargs) -> torch.Tensor:
        if self.outer is None:
            return self._attend(func, *args, **kwargs)
        return self.outer(functools.wraps(func)(functools.partial(self._attend, func)), *args, **kwargs)

    def put_before_choices(self, model: ModelPatcher) -> None:
        """Let the layers of a MODEL that may choose their attention have this one, and decline to their choice.

        ComfyUI does not tell an override which layer calls. Where a layer has a choice, this object therefore stands
        aside as an override, for calls of the MODEL that no other override is before.
        """
        if self.outer is None:
            self._before = put_before_choices(model, self._attend)

    def _attend(self, otherwise: Attention, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        """The arguments are those of ComfyUI's attention functions, q, k and v in containers or not. `otherwise` takes
        the same."""
        call = read_call(otherwise, q, k, v, heads, *args, **kwargs)
        way = self._way_of(call)
        if way is None:
            return otherwise(q, k, v, heads, *args, **kwargs)
        contained, flat_output = in_containers(q), call.flat_output
        for container in (q, k, v) if contained else ():
            container.take()
        if contained and way.halves is not None and not torch.compiler.is_compiling():
            quantized = way.halves.quantize(call)
            del call  # the last that holds the tensors
            output = way.halves.attend(quantized)
        else:
            output = way.attend(call)
        return output.transpose(1, 2).flatten(2) if flat_output else output

    def _way_of(self, call: AttentionCall) -> Way | None:
        first = None
        for way in self._ways:
            misfit = way.misfit(call)
            first = first or misfit
            if misfit is None:
                _note(first)
                return way
        _note(first)
        return None

    def watch(self, executor: Any, *args, **kwargs) -> Any:
        """A wrapper of ComfyUI's around each call of the model, which says where INT8 attention did not run.

        Where a layer has a choice of its own, the model is called without the override.
        """
        if self._before and any_chooses(executor, self._before):
            args = tuple(without_override(argument, self) for argument in args)
            kwargs = {name: without_override(argument, self) for name, argument in kwargs.items()}
        if not self.kind.in_int8:
            return executor(*args, **kwargs)
        notes: set[str | None] = set()
        token = _notes.set(notes)
        try:
            output = executor(*args, **kwargs)
        finally:
            _notes.reset(token)
        if None in notes and len(notes) > 1 and notes != self._noted:
            logger.info("INT8 attention runs, and another for the calls that do not fit: %s", _reasons(notes))
        # A compiled model that is not traced any more does what it did then.
        self._noted = notes or self._noted
        if None not in self._noted:
            why = _reasons(self._noted) or "no call reached it: the model, or another node's override, bypasses it"
            notices.warn("attention", "INT8 attention did not run", f"a call of the model ran without it: {why}.")
        return output


def _reasons(notes: set[str | None]) -> str:
    return "; ".join(sorted(note for note in notes if note is not None))
