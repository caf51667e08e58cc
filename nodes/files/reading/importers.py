"""How files of different origin hold a diffusion model: a table of what brings each to ComfyUI's own conventions.

These are what the rest of the pack reads: plain module names, and for a quantized layer X a weight, a scale and a quant
config `X.comfy_quant` (quant_config.py). A file can be of several origins.
"""

from dataclasses import replace

import comfy.model_detection
import comfy.utils
import torch

from .. import quant_config
from ..json_texts import json_object
from .contents import Checkpoint
from .transformer_lab import one_branch


def _with_configs_of_metadata(checkpoint: Checkpoint) -> Checkpoint:
    """With the quant configs that ComfyUI itself makes of what its older files have in their metadata or in other
    tensors."""
    try:
        told = json_object(checkpoint.metadata.get("_quantization_metadata", "{}"), quant_config.MOST_METADATA)
        keys = [f"{layer}.{quant_config.QUANT_CONFIG}" for layer in told.get("layers", {})]
        configs = {key: checkpoint.tensors[key] for key in keys if key in checkpoint.tensors}
        tensors, metadata = comfy.utils.convert_old_quants(checkpoint.tensors, "", metadata=checkpoint.metadata)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the quantization metadata cannot be read ({error!r})") from error
    others = quant_config.configs_in({key: tensors[key] for key in configs})
    for layer, own in quant_config.configs_in(configs).items():
        if own != (other := others[layer]):
            key = f"{layer}.{quant_config.QUANT_CONFIG}"
            raise ValueError(
                f"{key} is {str(own)[:200]}, but the metadata entry _quantization_metadata says {str(other)[:200]}; "
                "download the file again or use another"
            )
    return replace(checkpoint, tensors=tensors, metadata=metadata)


def _of_diffusion_model(checkpoint: Checkpoint) -> Checkpoint:
    """Without the other models of the file, and without the prefix of those that hold some."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(checkpoint.tensors)
    tensors = comfy.utils.state_dict_prefix_replace(dict(checkpoint.tensors), {prefix: ""}, filter_keys=True)
    if not tensors:
        return checkpoint
    # Again without the prefix, since the metadata may name layers either way.
    made = _with_configs_of_metadata(replace(checkpoint, tensors=dict(tensors)))
    # The metadata may name layers of the other models too.
    elsewhere = {layer for layer in quant_config.marked_layers(made.tensors) if f"{layer}.weight" not in made.tensors}
    dropped = {f"{layer}.{quant_config.QUANT_CONFIG}" for layer in elsewhere} - tensors.keys()
    return replace(made, tensors={key: tensor for key, tensor in made.tensors.items() if key not in dropped})


def _with_configs_of_int8(checkpoint: Checkpoint) -> Checkpoint:
    """With a quant config for each int8 weight in a file that has none, as older node packs wrote it. Where one is
    marked, another lost its quant config."""
    tensors = dict(checkpoint.tensors)
    if quant_config.marked_layers(tensors):
        return checkpoint
    for key, tensor in checkpoint.tensors.items():
        layer = key.removesuffix(".weight")
        if tensor.dtype != torch.int8 or layer == key:
            continue
        scale = tensors.pop(f"{layer}.scale_weight", None)
        if scale is not None:
            tensors.setdefault(f"{layer}.{quant_config.SCALE}", scale)
        tensors[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config()
    return replace(checkpoint, tensors=tensors)


IMPORTERS = {
    "both models of Ideogram 4 in one file": one_branch,
    "quant configs in the metadata": _with_configs_of_metadata,
    "all models in one file": _of_diffusion_model,
    "int8 without quant configs, of older node packs": _with_configs_of_int8,
}
"""How layers are stored, in the order in which each brings a checkpoint to ComfyUI's conventions or leaves it as it is;
raises ValueError naming the tensor where there is one."""
