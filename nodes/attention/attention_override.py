"""What a MODEL's attention computes with: ComfyUI's own, the fastest exact way, or INT8 where that applies.

It is an override by ComfyUI's own contract: other overrides keep their say, and where layers have preferences, a call
that INT8 attention does not take is left to them.

INT8 attention leaves the first steps of a sampling exact. A small error there moves what is drawn, and later steps
carry it on. On the word model with outlier channels the first sixth of the steps makes 54 % of what INT8 attention
moves in a latent (squares of geometric means over 24 texts), and the last half 17 %.
"""

import functools
import logging
import math
import weakref
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any

import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP, WrappersMP

from ...kernels import unplanned_memory
from ..comfyui.attention import OVERRIDE, Attention, comfyuis_attention
from ..comfyui.layer_choices import attention_choices, call_beside_choices, wrap_choices
from ..comfyui.patcher import DIFFUSION_MODEL
from ..deferred.notes import hidden_calls, tracking, values_of
from ..host import notices
from ..linears.file_notes import exact_attention_of
from ..linears.layer_selection import keeps_exact
from .attention_kinds import AS_COMFYUI, ATTENTION_KINDS, KEEPS_EXACT, AttentionCall, AttentionKind, read_call

logger = logging.getLogger(__name__)

_KEY = "int8_dit_attention"
_EXACT_STEP_IN = 6  # INT8 attention leaves the first of so many steps of a sampling exact


def check_attention(choice: str, device: torch.device) -> None:
    """Raise ValueError for a choice that is none of ATTENTION_KINDS, RuntimeError where the device cannot have it."""
    if choice not in ATTENTION_KINDS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTION_KINDS)}; got {choice!r}")
    obstacle = ATTENTION_KINDS[choice].obstacle(device)
    if obstacle is not None:
        raise RuntimeError(
            f"attention is set to {choice}, but {obstacle}. The alternative is attention set to {AS_COMFYUI}"
        )


def set_attention(model: ModelPatcher, choice: str) -> None:
    """Let a MODEL's attention compute as the choice says.

    ComfyUI's own leaves the MODEL as it is, and so does an exact one where an earlier node has chosen. Another node's
    override stays: this attention then replaces the function that the override calls. INT8 attention leaves out the
    blocks that a calibration keeps exact. Raises as `check_attention`.
    """
    device = model.load_device
    check_attention(choice, device)
    kind, there = ATTENTION_KINDS[choice], model.model_options["transformer_options"].get(OVERRIDE)
    own = there if isinstance(there, AttentionOverride) else None
    if kind.ways(device) and (own is None or (kind.in_int8 and own.kind is not kind)):
        own = AttentionOverride(kind, device, there if own is None else own.outer)
        own.put_into(model)
    # These blocks, and no others, say in their attention calls that they stay exact.
    blocks = exact_attention_of(model) if own is not None and own.kind.in_int8 else ()
    classes: dict[type, type] = {}
    for name, _ in model.model.diffusion_model.named_modules():
        patch = f"{DIFFUSION_MODEL}{name}.__class__"
        now: Any = model.get_model_object(patch) if name in blocks else model.object_patches.get(patch)
        if now is None or (name in blocks) == keeps_exact(now):
            continue
        # ComfyUI puts a class in place with the MODEL and takes it away with it; a compiler tells classes apart.
        other = now.own_class if keeps_exact(now) else classes.get(now) or classes.setdefault(now, _exact_class(now))
        model.add_object_patch(patch, other)


def _exact_class(own: Any) -> type:
    """Return a class of blocks like `own` that tells its attention calls to stay exact."""

    class ExactAttentionBlock(own):
        keeps_exact_attention, own_class = True, own

        @functools.wraps(own.forward)
        def forward(self, *args, **kwargs):
            args = tuple({**x, KEEPS_EXACT: True} if isinstance(x, dict) and OVERRIDE in x else x for x in args)
            if isinstance(options := kwargs.get("transformer_options"), dict):
                kwargs = {**kwargs, "transformer_options": {**options, KEEPS_EXACT: True}}
            return super().forward(*args, **kwargs)

    # What asks for a block's class by name finds it.
    for name in ("__name__", "__qualname__", "__module__"):
        setattr(ExactAttentionBlock, name, getattr(own, name))
    return ExactAttentionBlock


# Of the model call that runs now: whether it is one of the first steps of a sampling, and for its attention calls a
# reason for each kind that the first way did not take, None for those that it took.
_model_call: ContextVar[tuple[bool, set[str | None]]] = ContextVar("int8_dit_model_call", default=(False, set()))


@torch.compiler.assume_constant_result
def _note(misfit: str | None) -> bool:
    """Note whether the first way took an attention call; in a compiled model only while that is traced."""
    _model_call.get()[1].add(misfit)
    return True


class _Schedule:
    """The noise of a sampling, and whether its first steps are over."""

    def __init__(self) -> None:
        self._least = math.inf  # steps with more noise are the first
        self.begin()

    def begin(self, model: ModelPatcher | None = None) -> None:
        """Another sampling begins with a MODEL, perhaps with the same noise."""
        self._sigmas: Callable[[], torch.Tensor | None] = lambda: None

    def begins_with(self, options: Mapping[str, Any]) -> bool:
        """Whether a call with these transformer_options is one of the first steps. Calls outside of a sampling are not.

        The first steps and the one behind them wait for the device, to read their noise.
        """
        sigmas, now = options.get("sample_sigmas"), options.get("sigmas")
        if not isinstance(sigmas, torch.Tensor) or not isinstance(now, torch.Tensor):
            return False
        if self._sigmas() is not sigmas:
            noise, first = sigmas.tolist(), (len(sigmas) - 1) // _EXACT_STEP_IN
            falls = first > 0 and noise[0] > noise[-1]  # else the schedule is short, or adds noise
            self._sigmas = weakref.ref(sigmas)
            self._least = (noise[first - 1] + noise[first]) / 2 if falls else math.inf
        is_first = self._least < math.inf and float(now.max()) > self._least
        if not is_first:
            self._least = math.inf
        return is_first


class AttentionOverride:
    """An attention override of ComfyUI's: each call goes to the first way that takes it, else to ComfyUI's function.

    `outer` is the override that was there before. It is called as ComfyUI calls it, with this one in place of ComfyUI's
    function, so that it still changes its inputs.
    """

    def __init__(self, kind: AttentionKind, device: torch.device, outer: Attention | None = None) -> None:
        self.kind, self.outer = kind, outer
        self._ways = kind.ways(device)
        self._before: tuple[str, ...] = ()
        self._noted: set[str | None] = set()
        self._schedule = _Schedule()
        if outer is None:  # else ComfyUI takes the tensors out of their containers, for the other override
            self.container_function = functools.partial(self._attend, comfyuis_attention)

    def __call__(self, func: Attention, *args, **kwargs) -> torch.Tensor:
        if self.outer is None:
            return self._attend(func, *args, **kwargs)
        return self.outer(functools.wraps(func)(functools.partial(self._attend, func)), *args, **kwargs)

    def put_into(self, model: ModelPatcher) -> None:
        """Let the attention calls of a MODEL come here, in place.

        ComfyUI does not tell an override which layer calls. Layers that may choose their attention therefore have this
        one by themselves, and decline to their choice. Where one has a choice, this object stands aside as an override
        in calls of the MODEL, unless another override is before it.
        """
        model.model_options["transformer_options"][OVERRIDE] = self
        if self.outer is None:
            self._before = wrap_choices(model, self._attend)
        model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, _KEY)
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, self._wrap)
        model.remove_callbacks_with_key(CallbacksMP.ON_PRE_RUN, _KEY)
        model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, _KEY, self._schedule.begin)

    def _attend(self, otherwise: Attention, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        """Compute a call, whose arguments are those of ComfyUI's attention functions and of `otherwise`.

        q, k and v may be in containers.
        """
        if not self.kind.in_int8 or torch.compiler.is_compiling():
            return self._computed(otherwise, q, k, v, heads, *args, **kwargs)
        with unplanned_memory():  # the first steps ask for other memory than later ones
            return self._computed(otherwise, q, k, v, heads, *args, **kwargs)

    def _computed(self, otherwise: Attention, q: Any, k: Any, v: Any, heads: int, *args: Any, **kwargs: Any) -> Any:
        call = read_call(otherwise, q, k, v, heads, *args, **kwargs)
        first = None
        # A compiled model does in each step what it did when it was traced.
        exact = not torch.compiler.is_compiling() and _model_call.get()[0]
        for way in self._ways[1:] if exact else self._ways:
            misfit = way.misfit(call)
            first = first or misfit
            if misfit is None:
                break
        else:
            way = None
        _note(first)
        if way is None:
            return otherwise(q, k, v, heads, *args, **kwargs)
        contained, flat_output = not isinstance(q, torch.Tensor), call.flat_output
        for container in (q, k, v) if contained else ():
            container.take()
        if contained and way.halves is not None and not torch.compiler.is_compiling():
            quantize, attend = way.halves
            quantized = _unseen(quantize, call)
            del call  # the last that holds the tensors
            output = _unseen(attend, quantized)
        else:
            output = _unseen(way.attend, call)
        return output.transpose(1, 2).flatten(2) if flat_output else output

    def _wrap(self, executor: Any, *args, **kwargs) -> Any:
        """Find out whether a call of the model is one of the first steps, and warn where INT8 attention did not run.

        It is a wrapper of ComfyUI's around each call of the model.
        """
        if not self.kind.in_int8:
            return call_beside_choices(self, self._before, executor, args, kwargs)
        notes: set[str | None] = set()
        options = (given for given in (*args, *kwargs.values()) if isinstance(given, dict) and "sample_sigmas" in given)
        is_first = self._schedule.begins_with(next(options, {}))
        token = _model_call.set((is_first, notes))
        try:
            output = call_beside_choices(self, self._before, executor, args, kwargs)
        finally:
            _model_call.reset(token)
        if is_first:
            return output
        if None in notes and len(notes) > 1 and notes != self._noted:
            logger.info("INT8 attention runs, and another for the calls that do not fit: %s", _reasons(notes))
        # A compiled model that is not traced any more does what it did then.
        self._noted = notes or self._noted
        if None not in self._noted:
            why = _reasons(self._noted) or "no call reached it: the model, or another node's override, bypasses it"
            notices.warn("attention", "INT8 attention did not run", f"a call of the model ran without it: {why}.")
        return output


class AttentionObserver:
    """An attention override that sees calls and lets compute what did before; it puts itself into the MODEL.

    `attend(otherwise, q, k, v, heads, ...)` computes a call, whose other arguments are those of ComfyUI's attention
    functions and of `otherwise`; q, k and v may be in containers. It sees nothing where layers have chosen their
    attention, unless another pack's override comes before their choices, as any override does.
    """

    def __init__(self, model: ModelPatcher, key: str, attend: Callable[..., Any]) -> None:
        options = model.model_options["transformer_options"]
        self.outer, self._attend, self._choices = options.get(OVERRIDE), attend, tuple(attention_choices(model))
        inner = comfyuis_attention if self.outer is None else getattr(self.outer, "container_function", None)
        if inner is not None:
            self.container_function = functools.partial(attend, inner)
        options[OVERRIDE] = self
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, key, self._stand_aside)

    def __call__(self, func: Attention, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self._attend(func if self.outer is None else functools.partial(self.outer, func), *args, **kwargs)

    def _stand_aside(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        own = self.outer is None or (isinstance(self.outer, AttentionOverride) and self.outer.outer is None)
        return call_beside_choices(self, self._choices if own else (), executor, args, kwargs)


def _unseen(function: Callable[[Any], Any], given: Any) -> Any:
    """Call a function of a way, hidden from a forward in which work is deferred.

    Kernels are launched on addresses, and whoever asks for one may write there.
    """
    if torch.compiler.is_compiling() or tracking.forward is None:
        return function(given)
    with hidden_calls():
        if isinstance(given, AttentionCall):
            given = given._replace(**{name: values_of(getattr(given, name)) for name in ("q", "k", "v", "mask")})
        return function(given)


def _reasons(notes: set[str | None]) -> str:
    return "; ".join(sorted(note for note in notes if note is not None))
