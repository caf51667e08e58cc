"""Layers that choose what their attention computes with, by their file or by a LoRA. ComfyUI has them from 0.36 on."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import comfy.ldm.modules.attention
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from .attention import OVERRIDE, comfyuis_attention
from .lazy_tensors import whole_state_dict
from .patcher import DIFFUSION_MODEL


def is_attention_choice(part: Any) -> bool:
    """Whether a part of a diffusion model, or an object patch, is a layer's choice of its attention.

    It computes nothing. Its `config` is parsed JSON or None, its `function` what the layer calls, None for ComfyUI's.
    """
    kind = getattr(comfy.ldm.modules.attention, "ComfyAttention", None)
    return kind is not None and isinstance(part, kind)


def attention_choices(model: ModelPatcher) -> dict[str, Any]:
    """The layers' choices of a MODEL, its LoRAs' in place of the file's, by path in the MODEL."""
    parts = model.model.diffusion_model.named_modules(prefix=DIFFUSION_MODEL.rstrip("."))
    return {name: model.get_model_object(name) for name, part in parts if is_attention_choice(part)}


def chosen_layers(model: ModelPatcher) -> tuple[int, int, bool]:
    """Return how many layers' choices run here, how many cannot, and whether a LoRA made one; what `wrap_choices`
    put before them does not count."""
    parts = [part for part in attention_choices(model).values() if part.config is not None]
    runs = sum(_own(part).function is not None for part in parts)
    patches = model.object_patches.values()
    by_lora = any(is_attention_choice(patch) and not isinstance(patch, _Before) for patch in patches)
    return runs, len(parts) - runs, by_lora


class _Before:
    """Base class of a choice that something was put before, beside ComfyUI's class."""

    own: Any  # the layer's
    attend: Callable[..., torch.Tensor]

    def with_config(self, config: Any) -> Any:
        """ComfyUI's method: return the choice of a LoRA."""
        return _before(self.own.with_config(config), self.attend)


def _before(choice: Any, attend: Callable[..., torch.Tensor]) -> Any:
    before = copy.deepcopy(choice)
    before.__class__ = type("Before", (_Before, type(choice)), {})
    vars(before).update(own=choice, attend=attend)  # not as parts of a module
    before.function = partial(attend, choice.function or comfyuis_attention)
    return before


def _own(part: Any) -> Any:
    return part.own if isinstance(part, _Before) else part


def wrap_choices(model: ModelPatcher, attend: Callable[..., torch.Tensor]) -> tuple[str, ...]:
    """Let the layers of a MODEL that may choose call `attend`, where nothing overrides attention. Its first argument is
    what they would call. Return the paths of their choices in the MODEL."""
    choices = attention_choices(model)
    for name, choice in choices.items():
        model.add_object_patch(name, _before(_own(choice), attend))
    return tuple(choices)


def call_beside_choices(override: object, paths: Iterable[str], executor: Any, args: tuple, kwargs: dict) -> Any:
    """Call a MODEL from a wrapper, without this override in its transformer_options if one of the choices at `paths`
    runs here, below what was put before it."""
    if any(_own(comfy.utils.get_attr(executor.class_obj, path)).function is not None for path in paths):
        args = tuple(_without(argument, override) for argument in args)
        kwargs = {name: _without(argument, override) for name, argument in kwargs.items()}
    return executor(*args, **kwargs)


def _without(argument: Any, override: object) -> Any:
    if not isinstance(argument, dict) or argument.get(OVERRIDE) is not override:
        return argument
    return {name: value for name, value in argument.items() if name != OVERRIDE}


def state_dict_of(model: ModelPatcher) -> dict[str, torch.Tensor]:
    """The state dict of a MODEL's diffusion model, weights as they lie there, with the MODEL's own choices: its modules
    may hold those of the clone that was loaded last."""
    tensors = whole_state_dict(model.model.diffusion_model)
    for name, choice in attention_choices(model).items():
        prefix = f"{name.removeprefix(DIFFUSION_MODEL)}."
        tensors.pop(f"{prefix}config", None)
        tensors.update(choice.state_dict(prefix=prefix))
    return tensors
