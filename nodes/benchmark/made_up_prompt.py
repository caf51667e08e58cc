"""A prompt without a text encoder, to measure a forward: random features of the widths that a MODEL's layers read."""

import re
from contextlib import ExitStack
from typing import Any

import torch
from comfy.model_management import throw_exception_if_processing_interrupted as check_cancelled
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import WrappersMP

from ..comfyui.patcher import passing
from ..deferred.install import KEY as DEFERRED
from ..host.sampling import sample_euler

FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError, ArithmeticError)
"""What a model raises without the inputs that it needs."""

_TOKENS = 256
_WIDTHS = {"text": 7, "pooled": 11}  # to begin with: of no model's features
_TRIES = 6
_WIDEST = 1 << 17  # of features; larger numbers in an error are bytes
_BESIDE: tuple[dict[str, torch.Tensor], ...] = ({}, {"attention_mask": torch.ones(1, _TOKENS, dtype=torch.int64)})


class _Width(Exception):
    """A layer got features of a width of `_WIDTHS`, and reads another one."""


def made_up_prompt(model: ModelPatcher, latent: dict) -> list | None:
    """Return a CONDITIONING with which a MODEL can be sampled from a LATENT, None if none is found: 256 tokens, pooled
    features and perhaps an attention mask.

    The MODEL is sampled with features of odd widths. The first layer that reads another width stops it, and says which;
    of features that were split into parts it reads one. A model that fails before any layer often names the width: the
    largest number in its error is tried. Raises ComfyUI's interrupt on cancel.
    """
    widths, generator = {}, torch.Generator()

    def stop(module: Any, args: tuple) -> None:
        for kind, width in widths.items():
            given, read = args[0].shape[-1] if args and isinstance(args[0], torch.Tensor) else 0, _width_of(module)
            if given and given != read and (given == width or (kind == "text" and width % given == 0 and given > 1)):
                raise _Width(kind, read * (width // given))

    with passing(model.clone()) as clone, ExitStack() as hooks:
        clone.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, DEFERRED)  # it would take the stop for its own failure
        for layer in filter(_width_of, clone.model.diffusion_model.modules()):
            hooks.enter_context(layer.register_forward_pre_hook(stop))
        for beside in _BESIDE:
            widths |= _WIDTHS
            generator.manual_seed(0)
            for _ in range(_TRIES):
                check_cancelled()
                text = torch.randn(1, _TOKENS, widths["text"], generator=generator)
                pooled = torch.randn(1, widths["pooled"], generator=generator)
                prompt = [[text, {"pooled_output": pooled, **beside}]]
                try:
                    sample_euler(clone, prompt, latent, 1, lambda *_: None)
                except _Width as found:
                    widths |= [found.args]
                except FAILURES as error:
                    named = [int(n) for n in re.findall(r"\d+", str(error)) if _WIDTHS["text"] < int(n) <= _WIDEST]
                    if not named or widths["text"] == max(named):
                        break
                    widths["text"] = max(named)
                else:
                    return prompt
    return None


def _width_of(module: torch.nn.Module) -> int | None:
    """Return how wide the input of a linear or norm is; None of any other module."""
    shape: Any = getattr(module, "normalized_shape", None)
    return getattr(module, "in_features", None) or (shape[-1] if shape else None)
