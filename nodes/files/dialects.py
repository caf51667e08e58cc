"""How files of different origin hold a diffusion model: a table, an entry a dialect.

ComfyUI's own conventions are what the rest of the pack reads: plain module names, and for a quantized layer X a weight,
a scale and a mark `X.comfy_quant` (int8_mark.py). Each entry brings one dialect to them. A file can speak several.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import comfy.model_detection
import comfy.utils
import torch

from . import int8_mark, transformer_lab
from .contents import Checkpoint
from .diffusers_names import is_named_by_diffusers, with_native_names


@dataclass(frozen=True)
class Dialect:
    """One way to hold a model.

    Attributes:
        speaks: whether a checkpoint does.
        translate: the checkpoint in ComfyUI's own conventions, as far as this dialect goes. Raises ValueError naming
            the file, and the tensor where there is one.
    """

    speaks: Callable[[Checkpoint], bool]
    translate: Callable[[Checkpoint], Checkpoint]


def translated(checkpoint: Checkpoint) -> Checkpoint:
    """A checkpoint in ComfyUI's own conventions.

    Raises ValueError naming the file, and the tensor where there is one.
    """
    for dialect in DIALECTS.values():
        if dialect.speaks(checkpoint):
            checkpoint = dialect.translate(checkpoint)
    return checkpoint


def _marked_by_comfyui(checkpoint: Checkpoint) -> Checkpoint:
    """With the marks that ComfyUI itself makes of what its older files have in their metadata or in other tensors."""
    try:
        tensors, metadata = comfy.utils.convert_old_quants(checkpoint.tensors, "", metadata=checkpoint.metadata)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{checkpoint.name}: the quantization metadata cannot be read ({error!r})") from error
    return replace(checkpoint, tensors=tensors, metadata=metadata)


def _without_prefix(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors in a file that holds other models too; empty where none has the prefix."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(checkpoint.tensors)
    return comfy.utils.state_dict_prefix_replace(dict(checkpoint.tensors), {prefix: ""}, filter_keys=True)


def _diffusion_model(checkpoint: Checkpoint) -> Checkpoint:
    tensors = _without_prefix(checkpoint)
    in_file = set(tensors)
    # Again without the prefix, since the metadata may name layers either way.
    checkpoint = _marked_by_comfyui(replace(checkpoint, tensors=tensors))
    marked = {k: t for k, t in checkpoint.tensors.items() if k in in_file or _layer_is_here(k, checkpoint.tensors)}
    return replace(checkpoint, tensors=marked)


def _layer_is_here(key: str, tensors: dict[str, torch.Tensor]) -> bool:
    """False for the mark of a layer that the metadata names but that lies in another part of the checkpoint."""
    suffix = f".{int8_mark.MARK}"
    return not key.endswith(suffix) or f"{key.removesuffix(suffix)}.weight" in tensors


def _unmarked_int8(checkpoint: Checkpoint) -> list[str]:
    """The layers with an int8 weight and no mark."""
    weights = (key for key, tensor in checkpoint.tensors.items() if tensor.dtype == torch.int8)
    layers = (key.removesuffix(".weight") for key in weights if key.endswith(".weight"))
    return [layer for layer in layers if f"{layer}.{int8_mark.MARK}" not in checkpoint.tensors]


def _marked(checkpoint: Checkpoint) -> Checkpoint:
    tensors = dict(checkpoint.tensors)
    for layer in _unmarked_int8(checkpoint):
        scale = tensors.pop(f"{layer}.scale_weight", None)
        if scale is not None:
            tensors.setdefault(f"{layer}.{int8_mark.SCALE}", scale)
        if f"{layer}.{int8_mark.SCALE}" not in tensors:
            raise ValueError(
                f"{checkpoint.name}: the int8 weight {layer}.weight has no scale ({layer}.{int8_mark.SCALE} is missing)"
            )
        tensors[f"{layer}.{int8_mark.MARK}"] = int8_mark.encode_mark()
    return replace(checkpoint, tensors=tensors)


def _named_by_diffusers(checkpoint: Checkpoint) -> Checkpoint:
    try:
        return replace(checkpoint, tensors=with_native_names(checkpoint.tensors))
    except ValueError as error:
        raise ValueError(f"{checkpoint.name}: {error}") from error


DIALECTS = {
    "both models of Ideogram 4 in one file": Dialect(transformer_lab.holds_branches, transformer_lab.one_branch),
    "marks in the metadata": Dialect(
        lambda checkpoint: True, _marked_by_comfyui
    ),  # ComfyUI knows whether there are any
    "all models in one file": Dialect(lambda checkpoint: bool(_without_prefix(checkpoint)), _diffusion_model),
    "int8 without marks, of older node packs": Dialect(lambda checkpoint: bool(_unmarked_int8(checkpoint)), _marked),
    "diffusers": Dialect(lambda it: is_named_by_diffusers(it.tensors, it.metadata), _named_by_diffusers),
}
"""In the order in which they are translated."""
