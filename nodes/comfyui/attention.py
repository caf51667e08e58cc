"""Attention: who computes it in a MODEL, and what its layers prefer."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import comfy.ldm.modules.attention
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from .patcher import DIFFUSION_MODEL

OVERRIDE = "optimized_attention_override"
"""The entry of a MODEL's transformer_options that computes its attention in the place of ComfyUI's function."""

_core: Any = comfy.ldm.modules.attention  # what it has is asked for at run time

Attention = Callable[..., torch.Tensor]
"""A function with the arguments of ComfyUI's attention functions: q, k, v, heads, mask=None and others."""


def comfyuis_attention(
    q: Any, k: Any, v: Any, heads: int, mask: torch.Tensor | None = None, *args: Any, **kwargs: Any
) -> torch.Tensor:
    """Attention as ComfyUI computes it where nothing else was chosen."""
    return _default(mask)(q, k, v, heads, mask, *args, **kwargs)


def _default(mask: torch.Tensor | None) -> Attention:
    return _core.optimized_attention if mask is None else _core.optimized_attention_masked


def pytorch_attentions() -> tuple[Attention, ...]:
    """ComfyUI's function for PyTorch's attention, as models call it and as overrides get it; none where it is gone."""
    own = getattr(_core, "attention_pytorch", None)
    return () if own is None else (own, getattr(own, "__wrapped__", own))


def is_pytorchs(function: Attention, mask: torch.Tensor | None, known: tuple[Attention, ...]) -> bool:
    """Whether an attention function that would be called is PyTorch's attention, which is exact: then neither a launch
    flag nor another pack has chosen. `known` are `pytorch_attentions()`."""
    return (_default(mask) if function is comfyuis_attention else function) in known


def is_attention_choice(part: Any) -> bool:
    """Whether a part of a diffusion model, or what a LoRA puts in its place, is a layer's choice of its attention.

    It computes nothing by itself. ComfyUI has it from 0.36 on. Its `config` is parsed JSON or None, its `function`
    what the layer calls, or None for what ComfyUI computes with anyway.
    """
    kind = getattr(_core, "ComfyAttention", None)
    return kind is not None and isinstance(part, kind)


def attention_choices(model: ModelPatcher) -> dict[str, Any]:
    """The parts of a MODEL that are layers' choices, its LoRAs' in place of the file's, by path in the MODEL."""
    parts = model.model.diffusion_model.named_modules(prefix=DIFFUSION_MODEL.rstrip("."))
    return {name: model.get_model_object(name) for name, part in parts if is_attention_choice(part)}


def chosen_layers(model: ModelPatcher) -> tuple[int, int, bool]:
    """How many layers of a MODEL choose their attention, below what `put_before_choices` put before them: those whose
    choice runs here, and those whose choice cannot; and whether a LoRA chose for one."""
    parts = [part for part in attention_choices(model).values() if part.config is not None]
    runs = sum(_own(part).function is not None for part in parts)
    patches = model.object_patches.values()
    by_lora = any(is_attention_choice(patch) and not isinstance(patch, _Before) for patch in patches)
    return runs, len(parts) - runs, by_lora


class _Before:
    """What an object of ComfyUI's class for a layer's choice is too, where something was put before the choice."""

    own: Any  # the layer's
    attend: Callable[..., torch.Tensor]

    def with_config(self, config: Any) -> Any:
        """ComfyUI's: another one, for what a LoRA chooses."""
        return _before(self.own.with_config(config), self.attend)


def _before(choice: Any, attend: Callable[..., torch.Tensor]) -> Any:
    before = copy.deepcopy(choice)
    before.__class__ = type("Before", (_Before, type(choice)), {})
    vars(before).update(own=choice, attend=attend)  # not as parts of a module
    before.function = partial(attend, choice.function or comfyuis_attention)
    return before


def _own(part: Any) -> Any:
    return part.own if isinstance(part, _Before) else part


def put_before_choices(model: ModelPatcher, attend: Callable[..., torch.Tensor]) -> tuple[str, ...]:
    """Let the layers of a MODEL that may choose call `attend`, which takes what they would call as its first argument.

    It is called where nothing overrides attention. Returns the paths of the layers' choices in the MODEL.
    """
    choices = attention_choices(model)
    for name, choice in choices.items():
        model.add_object_patch(name, _before(_own(choice), attend))
    return tuple(choices)


def beside_choices(override: object, paths: Iterable[str], executor: Any, args: tuple, kwargs: dict) -> Any:
    """Call a MODEL, as a wrapper around its calls does; without this override in its transformer_options where one of
    these parts is a choice that runs here, below what was put before it."""
    if any(_own(comfy.utils.get_attr(executor.class_obj, path)).function is not None for path in paths):
        args = tuple(_without(argument, override) for argument in args)
        kwargs = {name: _without(argument, override) for name, argument in kwargs.items()}
    return executor(*args, **kwargs)


def _without(argument: Any, override: object) -> Any:
    if not isinstance(argument, dict) or argument.get(OVERRIDE) is not override:
        return argument
    return {name: value for name, value in argument.items() if name != OVERRIDE}


def state_dict_of(model: ModelPatcher) -> dict[str, torch.Tensor]:
    """The state dict of a MODEL's diffusion model, with the weights as they lie there and the MODEL's own choices.

    Its modules may have the choices of whichever clone was loaded last.
    """
    tensors = model.model.diffusion_model.state_dict()
    for name, choice in attention_choices(model).items():
        prefix = f"{name.removeprefix(DIFFUSION_MODEL)}."
        tensors.pop(f"{prefix}config", None)
        tensors.update(choice.state_dict(prefix=prefix))
    return tensors
