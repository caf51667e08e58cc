"""How an INT8 layer is marked in a file: the JSON that ComfyUI keeps per layer under `X.comfy_quant`.

A layer of name X is `X.weight` (int8 [N, K]), `X.weight_scale` (float32) and `X.comfy_quant` (the bytes of the JSON). A
layer that nothing has to be divided for carries ComfyUI's own format name, so stock loaders run it. A layer with
smoothing factors `X.weight_smooth` (float32 [K]) would come out wrong where they are unknown: it carries a name of its
own, which stock loaders refuse. So does a layer that needs activations of 16 bits; its quant config says whether it has
factors (`smoothed`), so that lost ones are missed. Stock ComfyUI prints such a name and nothing else, so the name says
what to do.

A native layer that is marked `full_precision_matrix_mult` needs 16 bits too, and says so in ComfyUI's own words. W4A8
and W6A8 (holding.py) are ComfyUI's formats of an INT8 weight in 4 or 6 bits. What else a quant config says is
kept.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from ...kernels import UNCHANGED, ChannelTransform
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
# What the pack itself says of an INT8 layer, and of one in codes.
_SAID = {"format", "convrot", "convrot_groupsize", SMOOTHED}
_SAID_OF_CODES = {*_SAID, "group_size"}

_SEEN = {"per_row"}  # whether there is a scale for each row of the weight

MOST_BYTES = 4096  # quant configs have up to about 150
_METADATA = "int8_dit_marks"
MOST_METADATA = 1 << 22  # characters; a thousand layers have about 100,000


def format_name(transform: ChannelTransform, activation_bits: int, others: Mapping[str, Any] = {}) -> str:
    """The format that an INT8 layer is marked with; `others` are the `other_options` of its quant config."""
    if activation_bits == 16 and not (transform.smooth is None and others.get(FULL_PRECISION)):
        return ACT16_FORMAT
    return NATIVE_FORMAT if transform.smooth is None else SMOOTHED_FORMAT


def activation_bits(config: dict) -> int:
    """The bits of a layer's activations by its decoded quant config; 8 for a layer that is not INT8."""
    if config.get("format") not in (*INT8_FORMATS, *GROUPED_FORMATS):
        return 8
    return 16 if config["format"] == ACT16_FORMAT or config.get(FULL_PRECISION) else 8


def other_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a decoded quant config says beside all that the pack says of an INT8 layer: to be said again when it is
    saved."""
    said = _SAID_OF_CODES if config.get("format") in GROUPED_FORMATS else _SAID
    others = {key: value for key, value in config.items() if key not in said}
    if isinstance(others.get("params"), dict):
        others["params"] = {key: value for key, value in others["params"].items() if key not in said}
        if not others["params"]:
            del others["params"]
    return others


def encode_config(
    transform: ChannelTransform = UNCHANGED, activation_bits: int = 8, others: Mapping[str, Any] = {}
) -> torch.Tensor:
    """The quant config of an INT8 layer as uint8 bytes; `others` are the `other_options` of the one that it had."""
    config: dict[str, object] = {"format": format_name(transform, activation_bits, others)}
    if config["format"] == ACT16_FORMAT and transform.smooth is not None:
        config[SMOOTHED] = True
    if transform.rotation_group is not None:
        config.update(convrot=True, convrot_groupsize=transform.rotation_group)
    return encoded({**config, **others})


def encoded(config: Mapping[str, Any]) -> torch.Tensor:
    """A quant config as uint8 bytes."""
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def decode_config(config: torch.Tensor) -> dict:
    """The JSON object of a quant config, its format by its present name. Raises ValueError where it is none."""
    if config.dtype != torch.uint8 or config.ndim != 1:
        raise ValueError(f"not the bytes of a JSON object (it is {config.dtype} of shape {tuple(config.shape)})")
    if config.numel() > MOST_BYTES:  # before they are copied
        raise ValueError(f"not a mark: it has {config.numel()} bytes, and at most {MOST_BYTES} are expected")
    return with_present_name(json_object(config.cpu().numpy().tobytes(), MOST_BYTES))


def with_present_name(config: dict) -> dict:
    """A decoded quant config with the format's present name where it has an earlier one, and options as this pack
    writes them where others write the same otherwise."""
    name, nested = config.get("format"), config.get("params")
    config = {option: _READ.get(option, lambda said: said)(said) for option, said in config.items()}
    if isinstance(nested, dict):
        config["params"] = {option: _READ.get(option, lambda said: said)(said) for option, said in nested.items()}
    if config.get(FULL_PRECISION, False) is None:
        del config[FULL_PRECISION]
    return {**config, "format": _EARLIER_NAMES[name]} if isinstance(name, str) and name in _EARLIER_NAMES else config


def _as_bool(said: Any) -> Any:
    return bool(said) if type(said) is int and said in (0, 1) else said


def _as_number(said: Any) -> Any:
    return int(said) if isinstance(said, str) and said.isascii() and said.isdecimal() else said


_READ = {"convrot": _as_bool, "convrot_groupsize": _as_number}


def computed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What a decoded quant config says of the result: all but what can be seen in the layer's tensors anyway."""
    return {option: said for option, said in config.items() if option not in _SEEN and said is not None}


def of_layer(state_dict: Mapping[str, Any], prefix: str) -> dict:
    """The decoded quant config of a layer whose tensors' names begin with `prefix`; empty where it has none."""
    config = state_dict.get(f"{prefix}{QUANT_CONFIG}")
    return {} if config is None else decode_config(config)


def marked_layers(tensors: Iterable[str]) -> list[str]:
    """The layers that have a quant config, by the names of a state dict's tensors."""
    suffix = f".{QUANT_CONFIG}"
    return [key.removesuffix(suffix) for key in tensors if key.endswith(suffix)]


def configs_in(tensors: Mapping[str, Any]) -> dict[str, dict]:
    """The decoded quant configs of a state dict, by layer. Raises ValueError naming one that is none."""
    configs = {}
    for layer in marked_layers(tensors):
        try:
            configs[layer] = decode_config(tensors[f"{layer}.{QUANT_CONFIG}"])
        except ValueError as error:
            raise ValueError(f"{layer}.{QUANT_CONFIG} is {error}") from error
    return configs


def configured_layers(tensors: Mapping[str, Any], format: str) -> list[str]:
    """The layers of a state dict whose quant config names this format."""
    return [layer for layer, config in configs_in(tensors).items() if config.get("format") == format]


def rotation_group(config: dict) -> int | None:
    """Channels per Hadamard group of a decoded quant config, or None. Older files keep the options under "params".

    Raises ValueError for options that do not say it clearly.
    """
    options = quant_config_options(config)
    rotated = options.get("convrot")
    if rotated is None and "convrot_groupsize" in options:
        raise ValueError("its mark names a convrot_groupsize and not whether it is rotated (convrot)")
    if not isinstance(rotated, bool | None):
        raise ValueError(f"its mark has convrot = {rotated!r}, which is neither true nor false")
    return group_size(config) if rotated else None


def quant_config_options(config: dict) -> dict:
    """The options of a decoded quant config; older files keep them under "params"."""
    nested = config.get("params")
    return {**(nested if isinstance(nested, dict) else {}), **config}


def group_size(config: dict, name: str = "convrot_groupsize", default: int = 256) -> int:
    """The rotation group that a quant config names, or what else it names in channels. Raises ValueError where it is no
    whole number."""
    number = quant_config_options(config).get(name, default)
    if type(number) is not int:
        raise ValueError(f"its mark has {name} = {number!r}, which is no whole number")
    return number


def as_metadata(tensors: Mapping[str, Any]) -> dict[str, str]:
    """The metadata entry for a state dict that is about to be written: its layers' quant configs, by name.

    A quant config that lost its rotation still is one: files in which some layers are rotated and others are not are as
    legitimate as those in which all are. So a file says at its end what each layer was when it was written.
    """
    return {_METADATA: json.dumps(configs_in(tensors))}


def check_as_written(tensors: Mapping[str, Any], metadata: Mapping[str, str]) -> None:
    """Raise ValueError naming the first quant config that is not what the file's own metadata, if any, says of it."""
    if _METADATA not in metadata:
        return
    try:
        written = json_object(metadata[_METADATA], MOST_METADATA)
    except ValueError as error:
        raise ValueError(f"the metadata entry {_METADATA} is {error}; it was damaged after it was saved") from error
    written = {k: with_present_name(v) if isinstance(v, dict) else v for k, v in written.items()}
    configs = configs_in(tensors)
    for layer in sorted({*written, *configs}):
        both = configs.get(layer), written.get(layer)
        if both[0] != both[1]:
            now, before = ("missing" if config is None else json.dumps(config)[:200] for config in both)
            raise ValueError(
                f"{layer}.{QUANT_CONFIG} is {now}, but was {before} when the file was saved; download or copy it again"
            )
