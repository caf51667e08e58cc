"""Quant configs: the JSON that files keep of each quantized layer X, as bytes under `X.comfy_quant`.

An INT8 layer is `X.weight` (int8 [N, K]), `X.weight_scale` (float32) and the quant config. One whose input is not
divided has ComfyUI's own format name, so stock loaders run it. With smoothing factors `X.weight_smooth` (float32 [K])
it would come out wrong where they are unknown: its format has another name, which stock loaders refuse. So has that
of a layer with activations of 16 bits, which says in `smoothed` whether it has factors: lost ones are missed. Stock
ComfyUI prints such a name and nothing else, so the name says what to do.

A native layer with `full_precision_matrix_mult` needs 16 bits too, in ComfyUI's own words. W4A8 and W6A8 (holding.py)
are ComfyUI's formats of an INT8 weight in 4 or 6 bits. What else a quant config says is kept.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...kernels import UNCHANGED, ChannelTransform, saying
from ..comfyui.quantized import NATIVE_FORMAT
from .errors import json_object

SMOOTHED_FORMAT = "int8_smoothquant (needs the node pack ComfyUI-INT8-DiT)"
ACT16_FORMAT = "int8_act16 (needs the node pack ComfyUI-INT8-DiT)"
_EARLIER_NAMES = {"int8_smoothquant": SMOOTHED_FORMAT, "int8_act16": ACT16_FORMAT}
W4A4 = "convrot_w4a4"
INT8_FORMATS = (NATIVE_FORMAT, SMOOTHED_FORMAT, ACT16_FORMAT)
GROUPED_FORMATS = ("asym_w4a8_int8", "w6a8_int8")

QUANT_CONFIG = "comfy_quant"
SCALE = "weight_scale"
SMOOTH = "weight_smooth"
SMOOTHED = "smoothed"
GROUP_SCALE, CHANNEL_SCALE, CODEBOOK = "weight_s_rel", "weight_s_channel", "weight_codebook"
FLOAT32_PARTS = (SCALE, SMOOTH, CHANNEL_SCALE, CODEBOOK)
FULL_PRECISION = "full_precision_matrix_mult"
_SAID = {"format", "convrot", "convrot_groupsize", SMOOTHED}  # by this pack, of an INT8 layer

MOST_BYTES = 4096  # quant configs have up to about 150
_METADATA = "int8_dit_marks"
MOST_METADATA = 1 << 22  # characters; a thousand layers have about 100,000


def format_name(transform: ChannelTransform, activation_bits: int, others: Mapping[str, Any] = {}) -> str:
    """Return the format name of an INT8 layer; `others` are the `other_options` of its quant config."""
    if activation_bits == 16 and not (transform.smooth is None and others.get(FULL_PRECISION)):
        return ACT16_FORMAT
    return NATIVE_FORMAT if transform.smooth is None else SMOOTHED_FORMAT


def activation_bits(config: dict) -> int:
    """Return the bits of a layer's activations by its decoded quant config; 8 for a layer that is not INT8."""
    if config.get("format") not in (*INT8_FORMATS, *GROUPED_FORMATS):
        return 8
    return 16 if config["format"] == ACT16_FORMAT or config.get(FULL_PRECISION) else 8


def other_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the pack itself does not say of an INT8 layer, from a decoded quant config, to save it again."""
    said = {*_SAID, "group_size"} if config.get("format") in GROUPED_FORMATS else _SAID
    others = {key: value for key, value in config.items() if key not in said}
    if isinstance(nested := others.get("params"), dict):
        others["params"] = {key: value for key, value in nested.items() if key not in said}
        if not others["params"]:
            del others["params"]
    return others


def encode_config(
    transform: ChannelTransform = UNCHANGED, activation_bits: int = 8, others: Mapping[str, Any] = {}
) -> torch.Tensor:
    """Return the quant config of an INT8 layer as bytes; `others` are the `other_options` of the one that it had."""
    config: dict[str, object] = {"format": format_name(transform, activation_bits, others)}
    if config["format"] == ACT16_FORMAT and transform.smooth is not None:
        config[SMOOTHED] = True
    if transform.rotation_group is not None:
        config.update(convrot=True, convrot_groupsize=transform.rotation_group)
    return encoded({**config, **others})


def encoded(config: Mapping[str, Any]) -> torch.Tensor:
    """Return a quant config as uint8 bytes."""
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def decode_config(config: torch.Tensor) -> dict:
    """Return the JSON object of a quant config `as_written_here`. Raises ValueError where it is none."""
    if config.dtype != torch.uint8 or config.ndim != 1:
        raise ValueError(f"not the bytes of a JSON object (it is {config.dtype} of shape {tuple(config.shape)})")
    if config.numel() > MOST_BYTES:  # before they are copied
        raise ValueError(f"not a mark: it has {config.numel()} bytes, and at most {MOST_BYTES} are expected")
    return as_written_here(json_object(config.cpu().numpy().tobytes(), MOST_BYTES))


def as_written_here(config: dict) -> dict:
    """Return a decoded quant config with the format's present name, and options of others in this pack's spelling."""
    config = _options_as_written_here(config)
    if isinstance(name := config.get("format"), str):
        config["format"] = _EARLIER_NAMES.get(name, name)
    if isinstance(nested := config.get("params"), dict):
        config["params"] = _options_as_written_here(nested)
    if config.get(FULL_PRECISION, False) is None:
        del config[FULL_PRECISION]
    return config


def _options_as_written_here(options: dict) -> dict:
    options = dict(options)
    if type(rotated := options.get("convrot")) is int and rotated in (0, 1):
        options["convrot"] = bool(rotated)
    if isinstance(size := options.get("convrot_groupsize"), str) and size.isascii() and size.isdecimal():
        options["convrot_groupsize"] = int(size)
    return options


def marked_layers(tensors: Iterable[str]) -> list[str]:
    """Return the layers that have a quant config, by the names of a state dict's tensors."""
    suffix = f".{QUANT_CONFIG}"
    return [key.removesuffix(suffix) for key in tensors if key.endswith(suffix)]


def configs_in(tensors: Mapping[str, Any]) -> dict[str, dict]:
    """Return the decoded quant configs of a state dict, by layer. Raises ValueError naming one that is none."""
    configs = {}
    for layer in marked_layers(tensors):
        with saying(f"{layer}.{QUANT_CONFIG} is "):
            configs[layer] = decode_config(tensors[f"{layer}.{QUANT_CONFIG}"])
    return configs


def configured_layers(tensors: Mapping[str, Any], format: str) -> list[str]:
    """Return the layers of a state dict whose quant config names this format."""
    return [layer for layer, config in configs_in(tensors).items() if config.get("format") == format]


def rotation_group(config: dict) -> int | None:
    """Return channels per Hadamard group, or None. Raises ValueError for options that do not say it clearly."""
    options = _options(config)
    rotated = options.get("convrot")
    if rotated is None and "convrot_groupsize" in options:
        raise ValueError("its mark names a convrot_groupsize and not whether it is rotated (convrot)")
    if not isinstance(rotated, bool | None):
        raise ValueError(f"its mark has convrot = {rotated!r}, which is neither true nor false")
    return group_size(config) if rotated else None


def _options(config: dict) -> dict:
    nested = config.get("params")  # where older files keep them
    return {**nested, **config} if isinstance(nested, dict) else config


def group_size(config: dict, name: str = "convrot_groupsize", default: int = 256) -> int:
    """Return a size in channels that a decoded quant config names. Raises ValueError where it is no whole number."""
    number = _options(config).get(name, default)
    if type(number) is not int:
        raise ValueError(f"its mark has {name} = {number!r}, which is no whole number")
    return number


def as_metadata(tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return the metadata entry of a state dict that is about to be written: the quant configs of all its layers.

    A quant config that lost its rotation is still a legitimate one, since a file may rotate some layers and not others.
    """
    return {_METADATA: json.dumps(configs_in(tensors))}


def check_as_written(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Raise ValueError naming the first quant config that differs from what the file's own metadata, if any, say."""
    if _METADATA not in metadata:
        return
    with saying(f"the metadata entry {_METADATA} is ", "; it was damaged after it was saved"):
        written = json_object(metadata[_METADATA], MOST_METADATA)
    written = {k: as_written_here(v) if isinstance(v, dict) else v for k, v in written.items()}
    configs = configs_in(tensors)
    for layer in sorted({*written, *configs}):
        both = configs.get(layer), written.get(layer)
        if both[0] != both[1]:
            now, before = ("missing" if config is None else json.dumps(config)[:200] for config in both)
            raise ValueError(
                f"{layer}.{QUANT_CONFIG} is {now}, but was {before} when the file was saved; download or copy it again"
            )
