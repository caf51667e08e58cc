"""A prompt without a text encoder, to measure a forward: random features of the widths that a MODEL's layers read."""

from collections.abc import Callable
from typing import Any

import comfy.samplers
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ..deferred.install import KEY as DEFERRED
from ..host.sampling import sample

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, ArithmeticError)
"""What a model raises without the inputs that it needs."""

_TOKENS = 256
_WIDTHS = {"text": 7, "pooled": 11}  # to begin with: of no model's features
_TRIES = 5


class _Width(Exception):
    """A layer got features of a width of `_WIDTHS`, and reads another one."""


def made_up_prompt(model: ModelPatcher, latent: dict, check: Callable[[], object]) -> list | None:
    """Return a CONDITIONING with which a MODEL can be sampled from a LATENT, None if none is found: 256 tokens, pooled
    features and perhaps an attention mask.

    The MODEL is sampled with features of odd widths. The first layer that reads another width stops it, and says which.
    `check` is called between the tries, and raises on cancel.
    """
    model = model.clone()
    model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, DEFERRED)  # it would take the stop for its own failure
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 1)
    euler, generator = comfy.samplers.sampler_object("euler"), torch.Generator().manual_seed(0)

    def stop(module: Any, args: tuple) -> None:
        needed = getattr(module, "in_features", None) or module.normalized_shape[-1]
        for kind, width in widths.items():
            if args and isinstance(args[0], torch.Tensor) and args[0].shape[-1] == width != needed:
                raise _Width(kind, needed)

    layers = [m for m in model.model.diffusion_model.modules() if hasattr(m, "in_features") or _is_norm(m)]
    hooks = [layer.register_forward_pre_hook(stop) for layer in layers]
    try:
        for beside in ({}, {"attention_mask": torch.ones(1, _TOKENS, dtype=torch.int64)}):
            widths = dict(_WIDTHS)
            for _ in range(_TRIES):
                check()
                text = torch.randn(1, _TOKENS, widths["text"], generator=generator)
                pooled = torch.randn(1, widths["pooled"], generator=generator)
                prompt = [[text, {"pooled_output": pooled, **beside}]]
                try:
                    sample(model, prompt, None, 1.0, euler, sigmas, latent, 0, lambda *_: None)
                except _Width as found:
                    kind, needed = found.args
                    widths[kind] = needed
                except FAILURES:
                    break
                else:
                    return prompt
    finally:
        for hook in hooks:
            hook.remove()
    return None


def _is_norm(module: torch.nn.Module) -> bool:
    return bool(getattr(module, "normalized_shape", None))
