"""What files say of the layers' attention: each layer may name what it prefers to be computed with."""

import json
from collections.abc import Mapping
from contextlib import suppress

import torch

CONFIG = ".comfy_attention.config"
"""The end of a choice's name: uint8, the UTF-8 of a JSON object, or of a list of which the first available counts."""


def choices_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the choices among a checkpoint's tensors."""
    return {key: tensor for key, tensor in tensors.items() if key.endswith(CONFIG)}


def check_choices(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError naming the first choice of a checkpoint that is none. Which method it names does not matter."""
    for key, tensor in choices_in(tensors).items():
        config = None
        with suppress(RecursionError, ValueError):
            config = json.loads(tensor.numpy().tobytes()) if tensor.dtype == torch.uint8 and tensor.ndim == 1 else None
        wishes = config if isinstance(config, list) else [config]
        if not wishes or not all(isinstance(wish, dict) for wish in wishes):
            raise ValueError(
                f"{key} is neither a JSON object nor a list of them, as a layer's choice of attention is; download or "
                "copy the file again"
            )
