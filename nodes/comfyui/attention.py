"""Attention: who computes it in a MODEL, what its layers prefer, and comfy-kitchen's in INT8."""

import importlib.metadata
from collections.abc import Callable
from typing import Any

import comfy.ldm.modules.attention
import comfy_kitchen
import torch

from .patcher import DIFFUSION_MODEL, ModelPatcher

OVERRIDE = "optimized_attention_override"
"""The entry of a MODEL's transformer_options that computes its attention in the place of ComfyUI's function."""

_core: Any = comfy.ldm.modules.attention  # what they have is asked for at run time
_kitchen: Any = comfy_kitchen


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


def kitchen_attention() -> Callable[..., torch.Tensor] | None:
    """comfy-kitchen's INT8 attention, (q, k, v, scale=) over [batch, heads, tokens, width]; None where it has none."""
    return getattr(_kitchen, "int8_attention", None)


def kitchen_attention_runs(device: torch.device) -> bool:
    """Whether comfy-kitchen has code for it that runs on a device."""
    return _kitchen.int8_attention_is_available(device)


def kitchen_version() -> str:
    """The version of comfy-kitchen that is installed."""
    return importlib.metadata.version("comfy-kitchen")
