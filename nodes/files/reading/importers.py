"""Checkpoints of different origin, and a table of what brings each to ComfyUI's own conventions.

These are what the rest of the pack reads: plain module names, and for a quantized layer X a weight, a scale and a quant
config `X.comfy_quant` (quant_config.py). A file can be of several origins.
"""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

import comfy.model_detection
import comfy.ops
import comfy.supported_models
import comfy.utils
import torch

from ....kernels import ChannelTransform, saying
from ...comfyui.quantized import NATIVE_FORMAT
from .. import quant_config
from ..errors import json_object
from ..holding import holdable
from .gguf_package import INT8_CONFIG

BRANCHES = ("conditional", "unconditional")
_LAB_PARTS = ("wq", "ws", "smooth")


class Checkpoint(NamedTuple):
    """The content of a file, in ComfyUI's conventions as soon as all importers ran."""

    name: str  # of the file, for messages
    tensors: dict[str, torch.Tensor]  # by name; nobody else holds this dict
    metadata: dict[str, str]
    branch: str = BRANCHES[0]  # which model is wanted. Only a file that holds both has a choice.
    base: "Callable[[], Checkpoint] | None" = None  # reads what completes a part of a model; ValueError names its file
    architecture: Any = None  # the class of models that ComfyUI takes the tensors for; None until all of it is read


def _one_branch(checkpoint: Checkpoint) -> Checkpoint:
    """Take the chosen model of Transformer Lab's INT8 file of Ideogram 4, completed by the base checkpoint.

    The file has the linears of two models, and nothing else. Behind `conditional.` or `unconditional.` a linear X is
    `X.wq` (int8 [N, K]), `X.ws` (float, one scale per output channel), and perhaps `X.smooth` (float [K]), which
    divides its input, and `X.bias`. A protected one is `X.weight`.
    """
    prefixes = tuple(f"{branch}." for branch in BRANCHES)
    if not any(key.startswith(prefixes) and key.endswith(".wq") for key in checkpoint.tensors):
        return checkpoint
    from comfy.ldm.ideogram4.model import Ideogram4Transformer2DModel

    branch, linears = checkpoint.branch, _linears(checkpoint)
    model = Ideogram4Transformer2DModel(
        num_layers=comfy.model_detection.count_blocks(list(linears), "layers.{}."),
        **comfy.supported_models.Ideogram4.unet_extra_config,
        device="meta",
        operations=comfy.ops.disable_weight_init,
    )
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    _check_shapes(f"{branch}.", linears, shapes)
    missing = [key for key in shapes if key not in linears]
    if not missing:
        return checkpoint._replace(tensors=linears)
    if checkpoint.base is None:
        raise ValueError(
            f"{checkpoint.name} is a Transformer Lab INT8 file, which holds only linear layers of Ideogram 4: "
            f"{len(missing)} tensors of its {branch} model are missing, the first is {missing[0]}. Set base_checkpoint "
            f"to a file with the whole {branch} model (bf16, FP8 or INT8)"
        )

    base = checkpoint.base()
    lacking = [key for key in missing if key not in base.tensors]
    if lacking:
        raise ValueError(
            f"base_checkpoint {base.name} lacks {len(lacking)} of the tensors that {checkpoint.name} needs, the first "
            f"is {lacking[0]}. Name a file with the whole {branch} model of Ideogram 4"
        )
    others = {key: tensor for key, tensor in base.tensors.items() if key not in linears}
    _check_shapes(f"base_checkpoint {base.name}: ", others, shapes)
    _check_branch(checkpoint, base)
    # With a quantized weight its quant config and its scales are taken.
    layers = {key.removesuffix(".weight") for key in missing if key.endswith(".weight")}
    taken = {key: t for key, t in others.items() if key in missing or key.rpartition(".")[0] in layers}
    return checkpoint._replace(tensors=taken | linears)


def _linears(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    prefix = f"{checkpoint.branch}."
    stored = {key.removeprefix(prefix): t for key, t in checkpoint.tensors.items() if key.startswith(prefix)}
    if not stored:
        raise ValueError(f"{checkpoint.name} holds no {checkpoint.branch} model. Set branch to the other one")
    linears = {key: tensor for key, tensor in stored.items() if key.rpartition(".")[2] not in _LAB_PARTS}
    for layer in sorted({key.rpartition(".")[0] for key in stored.keys() - linears.keys()}):
        if f"{layer}.weight" in stored:
            continue  # protected
        weight, scale, smooth = (stored.get(f"{layer}.{part}") for part in _LAB_PARTS)
        if weight is None or scale is None:
            raise ValueError(f"{prefix}{layer}.{'wq' if weight is None else 'ws'} is missing")
        linears[f"{layer}.weight"] = weight
        linears[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(ChannelTransform(smooth, None))
        for part, values in ((quant_config.SCALE, scale), (quant_config.SMOOTH, smooth)):
            if values is not None:  # of integers, it is refused where all layers are checked
                linears[f"{layer}.{part}"] = values.float() if values.is_floating_point() else values
    return linears


def _check_shapes(before: str, tensors: dict[str, torch.Tensor], shapes: dict[str, torch.Size]) -> None:
    for key, tensor in tensors.items():
        if key.endswith(".weight") and key not in shapes:
            raise ValueError(f"{before}{key} is no layer of this Ideogram 4")
        # Of the formats that pack several values into one byte, the shape says nothing.
        if key in shapes and tensor.dtype != torch.uint8 and tensor.shape != shapes[key]:
            raise ValueError(f"{before}{key} has shape {list(tensor.shape)}, but the model needs {list(shapes[key])}")


def _check_branch(checkpoint: Checkpoint, base: Checkpoint) -> None:
    """Raise ValueError where the base has the other model's biases: in names and shapes both models are alike."""
    distance: dict[str, float] = dict.fromkeys(BRANCHES, 0.0)
    for key, bias in base.tensors.items():
        own = [checkpoint.tensors.get(f"{branch}.{key}", torch.empty(0)) for branch in BRANCHES]
        if key.endswith(".bias") and all(other.shape == bias.shape for other in own):
            for branch, other in zip(BRANCHES, own, strict=True):
                distance[branch] += float((other.float() - bias.float()).square().sum())
    nearest = min(BRANCHES, key=lambda branch: distance[branch])
    if distance[nearest] < distance[checkpoint.branch]:
        raise ValueError(
            f"base_checkpoint {base.name} is the {nearest} model, by its biases. Name the file of the "
            f"{checkpoint.branch} one, or set branch to {nearest}"
        )


def _with_configs_of_gguf(checkpoint: Checkpoint) -> Checkpoint:
    """Add quant configs of what molbal's ComfyUI-GGUF says in its files' metadata: Q8_CR is native INT8, Q4_CR W4A4.

    ComfyUI writes into such weights, so they become holdable.
    """
    tensors = dict(checkpoint.tensors)
    for key, text in checkpoint.metadata.items():
        if not key.startswith(INT8_CONFIG):
            continue
        name = key.removeprefix(INT8_CONFIG)
        layer = name.removesuffix(".weight")
        with saying(f"the metadata entry {key} is ", "; download the file again or use another"):
            config = json_object(text, quant_config.MOST_BYTES)
        if layer == name:
            raise ValueError(f"{name} is in Q8_CR and no weight of a layer, which INT8 DiT does not read")
        if config.get("format") == "int4_cr":
            if config.get("backing") != "w4a4" or config.get("quant_group_size", 64) != 64:
                raise ValueError(
                    f"{name} is in a form of Q4_CR that neither INT8 DiT nor ComfyUI reads; convert the model again "
                    "with the newest ComfyUI-GGUF, or use a file in Q8_CR or Q8_0"
                )
            config = {option: value for option, value in config.items() if option == "convrot_groupsize"}
            config["format"] = quant_config.W4A4
        elif config.pop("weight_rotated", False) is not True:  # as its maker reads it
            config = {option: value for option, value in config.items() if not option.startswith("convrot")}
        config.pop("per_row", None)
        tensors[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encoded(config)
        for part in (name, f"{layer}.{quant_config.SCALE}"):
            if part in tensors:
                tensors[part] = holdable(tensors[part])
    return checkpoint._replace(tensors=tensors)


_TOLD = "_quantization_metadata"
_PREFIXES = ("model.diffusion_model.", "diffusion_model.", "model.model.", "net.", "model.", "")


def _with_configs_of_metadata(checkpoint: Checkpoint) -> Checkpoint:
    """Add the quant configs that ComfyUI makes of its older files' metadata or other tensors."""
    metadata, named = dict(checkpoint.metadata), {}
    try:
        if _TOLD in metadata:
            told = json_object(metadata[_TOLD], quant_config.MOST_METADATA)
            for said, config in told["layers"].items():
                # It may name a layer with another prefix than the file has, or without.
                bare = said.removeprefix(next(prefix for prefix in _PREFIXES if said.startswith(prefix)))
                names = (said, *(f"{prefix}{bare}" for prefix in _PREFIXES))
                layer = next((name for name in names if f"{name}.weight" in checkpoint.tensors), said)
                if named.setdefault(layer, config) != config:
                    raise ValueError(f"{layer} is marked twice, differently")
            metadata[_TOLD] = json.dumps({**told, "layers": named})
        keys = [f"{layer}.{quant_config.QUANT_CONFIG}" for layer in named]
        configs = {key: checkpoint.tensors[key] for key in keys if key in checkpoint.tensors}
        tensors, metadata = comfy.utils.convert_old_quants(checkpoint.tensors, "", metadata=metadata)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"the quantization metadata cannot be read ({error!r})") from error
    others = quant_config.configs_in({key: tensors[key] for key in configs})
    for layer, own in quant_config.configs_in(configs).items():
        other = others[layer]
        # Whether there is a scale for each row, the tensors show.
        if any(own.get(option) != other.get(option) for option in {*own, *other} - {"per_row"}):
            key = f"{layer}.{quant_config.QUANT_CONFIG}"
            raise ValueError(
                f"{key} is {str(own)[:200]}, but the metadata entry {_TOLD} says {str(other)[:200]}; "
                "download the file again or use another"
            )
    return checkpoint._replace(tensors=tensors, metadata=metadata)


def _of_diffusion_model(checkpoint: Checkpoint) -> Checkpoint:
    """Leave away the other models of a file that holds several, and the diffusion model's prefix."""
    prefix = comfy.model_detection.unet_prefix_from_state_dict(checkpoint.tensors)
    tensors = comfy.utils.state_dict_prefix_replace(dict(checkpoint.tensors), {prefix: ""}, filter_keys=True)
    if not tensors:
        return checkpoint
    # Again without the prefix, since the metadata may name layers either way, and those of the other models too.
    made = _with_configs_of_metadata(checkpoint._replace(tensors=dict(tensors)))
    elsewhere = {layer for layer in quant_config.marked_layers(made.tensors) if f"{layer}.weight" not in made.tensors}
    dropped = {f"{layer}.{quant_config.QUANT_CONFIG}" for layer in elsewhere} - tensors.keys()
    return made._replace(tensors={key: tensor for key, tensor in made.tensors.items() if key not in dropped})


# What ComfyUI-INT8-Fast said of a layer before it named the format: rotated or not, in groups of 256 without a size.
_SAID_WITHOUT_FORMAT = {"convrot", "convrot_groupsize", "per_row"}


def _with_configs_of_int8(checkpoint: Checkpoint) -> Checkpoint:
    """Add a quant config for each int8 weight of a file that has none, and the format to those that name none: older
    node packs wrote such files. Where one layer has a quant config, another lost its own."""
    tensors, configs = dict(checkpoint.tensors), quant_config.configs_in(checkpoint.tensors)
    for layer, config in configs.items():
        weight = tensors.get(f"{layer}.weight")
        if config and config.keys() <= _SAID_WITHOUT_FORMAT and weight is not None and weight.dtype == torch.int8:
            named = quant_config.encoded({"format": NATIVE_FORMAT, **config})
            tensors[f"{layer}.{quant_config.QUANT_CONFIG}"] = named
    if configs:
        return checkpoint._replace(tensors=tensors)
    for key, tensor in checkpoint.tensors.items():
        layer = key.removesuffix(".weight")
        if tensor.dtype != torch.int8 or layer == key:
            continue
        if checkpoint.metadata.get(_TOLD):
            raise ValueError(f"{key} is INT8, and of no layer that the metadata entry {_TOLD} names; use another file")
        if (scale := tensors.pop(f"{layer}.scale_weight", None)) is not None:
            tensors.setdefault(f"{layer}.{quant_config.SCALE}", scale)
        tensors[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config()
    return checkpoint._replace(tensors=tensors)


IMPORTERS = {
    "INT8 and W4A4 in GGUF (Q8_CR, Q4_CR)": _with_configs_of_gguf,
    "both models of Ideogram 4 in one file": _one_branch,
    "quant configs in the metadata": _with_configs_of_metadata,
    "all models in one file": _of_diffusion_model,
    "int8 without quant configs, or with those that name no format, of older node packs": _with_configs_of_int8,
}
"""By how layers are stored, in this order: each brings a checkpoint to ComfyUI's conventions or leaves it as it is.
Raises ValueError naming what is wrong: a tensor, an entry of the metadata, the base file or a widget."""
