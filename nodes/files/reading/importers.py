"""How files of different origin hold a diffusion model: a table, an entry a importer.

ComfyUI's own conventions are what the rest of the pack reads: plain module names, and for a quantized layer X a weight,
a scale and a quant config `X.comfy_quant` (int8_mark.py). Each entry brings one importer to them. A file can speak
several.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ...comfyui.architecture import prefix_in
from ...comfyui.loading import with_quant_configs, without_prefix
from .. import quant_config
from ..errors import naming_file
from ..json_texts import json_object
from . import transformer_lab
from .contents import Checkpoint
from .diffusers_names import is_named_by_diffusers, with_native_names

_MOST_METADATA = 1 << 22  # characters; a thousand layers have about 100,000


@dataclass(frozen=True)
class Importer:
    """One way to hold a model.

    Attributes:
        speaks: whether a checkpoint does.
        translate: the checkpoint in ComfyUI's own conventions, as far as this importer goes. Raises ValueError naming
            the file, and the tensor where there is one.
    """

    speaks: Callable[[Checkpoint], bool]
    translate: Callable[[Checkpoint], Checkpoint]


def translated(checkpoint: Checkpoint, dialects: dict[str, Importer]) -> Checkpoint:
    """A checkpoint with these importer brought to ComfyUI's own conventions.

    Raises ValueError naming the file, and the tensor where there is one.
    """
    for dialect in dialects.values():
        if dialect.speaks(checkpoint):
            checkpoint = dialect.translate(checkpoint)
    return checkpoint


def _marked_by_comfyui(checkpoint: Checkpoint) -> Checkpoint:
    """With the quant configs that ComfyUI itself makes of what its older files have in their metadata or in other
    tensors."""
    try:
        told = json_object(checkpoint.metadata.get("_quantization_metadata", "{}"), _MOST_METADATA)
        keys = [f"{layer}.{quant_config.QUANT_CONFIG}" for layer in told.get("layers", {})]
        configs = {key: checkpoint.tensors[key] for key in keys if key in checkpoint.tensors}
        tensors, metadata = with_quant_configs(checkpoint.tensors, checkpoint.metadata)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint.name}: the quantization metadata cannot be read ({error!r})") from error
    with naming_file(checkpoint.name):
        for key, config in configs.items():
            _check_equal(key, config, tensors[key])
    return replace(checkpoint, tensors=tensors, metadata=metadata)


def _check_equal(key: str, config: torch.Tensor, told: torch.Tensor) -> None:
    """Raise ValueError where a quant config that lies in the file is not the one that ComfyUI made of the metadata."""
    try:
        own, other = quant_config.decode_config(config), quant_config.decode_config(told)
    except ValueError as error:
        raise ValueError(f"{key} is {error}") from error
    if own != other:
        raise ValueError(
            f"{key} is {str(own)[:200]}, but the metadata entry _quantization_metadata says {str(other)[:200]}; "
            "download the file again or use another"
        )


def _without_prefix(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors in a file that holds other models too; empty where none has the prefix."""
    return without_prefix(checkpoint.tensors, prefix_in(checkpoint.tensors))


def _diffusion_model(checkpoint: Checkpoint) -> Checkpoint:
    tensors = _without_prefix(checkpoint)
    in_file = set(tensors)
    # Again without the prefix, since the metadata may name layers either way.
    checkpoint = _marked_by_comfyui(replace(checkpoint, tensors=tensors))
    marked = {k: t for k, t in checkpoint.tensors.items() if k in in_file or _layer_is_here(k, checkpoint.tensors)}
    return replace(checkpoint, tensors=marked)


def _layer_is_here(key: str, tensors: dict[str, torch.Tensor]) -> bool:
    """False for the quant config of a layer that the metadata names but that lies in another part of the checkpoint."""
    suffix = f".{quant_config.QUANT_CONFIG}"
    return not key.endswith(suffix) or f"{key.removesuffix(suffix)}.weight" in tensors


def _unmarked_int8(checkpoint: Checkpoint) -> list[str]:
    """The layers with an int8 weight in a file that quant configs none: where one is marked, another lost its quant
    config."""
    if any(key.endswith(f".{quant_config.QUANT_CONFIG}") for key in checkpoint.tensors):
        return []
    weights = (key for key, tensor in checkpoint.tensors.items() if tensor.dtype == torch.int8)
    return [key.removesuffix(".weight") for key in weights if key.endswith(".weight")]


def _marked(checkpoint: Checkpoint) -> Checkpoint:
    tensors = dict(checkpoint.tensors)
    for layer in _unmarked_int8(checkpoint):
        scale = tensors.pop(f"{layer}.scale_weight", None)
        if scale is not None:
            tensors.setdefault(f"{layer}.{quant_config.SCALE}", scale)
        if f"{layer}.{quant_config.SCALE}" not in tensors:
            raise ValueError(
                f"{checkpoint.name}: the int8 weight {layer}.weight has no scale ({layer}.{quant_config.SCALE} is "
                "missing)"
            )
        tensors[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config()
    return replace(checkpoint, tensors=tensors)


def _is_named_by_diffusers(checkpoint: Checkpoint) -> bool:
    with naming_file(checkpoint.name):
        return is_named_by_diffusers(checkpoint.tensors, checkpoint.metadata)


def _named_by_diffusers(checkpoint: Checkpoint) -> Checkpoint:
    with naming_file(checkpoint.name):
        return replace(checkpoint, tensors=with_native_names(checkpoint.tensors))


IMPORTERS = {
    "both models of Ideogram 4 in one file": Importer(transformer_lab.holds_branches, transformer_lab.one_branch),
    "marks in the metadata": Importer(
        lambda checkpoint: True, _marked_by_comfyui
    ),  # ComfyUI knows whether there are any
    "all models in one file": Importer(lambda checkpoint: bool(_without_prefix(checkpoint)), _diffusion_model),
    "int8 without marks, of older node packs": Importer(lambda checkpoint: bool(_unmarked_int8(checkpoint)), _marked),
}
"""How layers are stored, in the order in which they are translated."""

NAMINGS = {"diffusers": Importer(_is_named_by_diffusers, _named_by_diffusers)}
"""How layers are named: translated once the layers, which may be joined by it, were checked."""
