"""The formats in which files hold a diffusion model: a table with an entry for each.

Quantized by comfy-kitchen or by plain arithmetic here, and never by this pack. The table needs no ComfyUI, so that
tests can be named after its entries.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from support.tensors import rotation_matrix

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class File:
    """What is in a file, and the float32 tensors that it stands for."""

    tensors: Tensors
    values: Tensors
    metadata: dict[str, str] = field(default_factory=dict)


Format = Callable[[Mapping[str, torch.Tensor], Collection[str]], File]
"""(float32 tensors of a model, names of the linears to quantize) -> its file."""


def encoded(config: object) -> torch.Tensor:
    """What a file says of a layer, as a tensor: the bytes of JSON."""
    return torch.tensor(list(json.dumps(config).encode()), dtype=torch.uint8)


def config_in(tensor: torch.Tensor) -> dict:
    """What such a tensor says."""
    return json.loads(bytes(tensor.tolist()))


def configs_in(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict]:
    """What a file's tensors say of each layer."""
    end = ".comfy_quant"
    return {key.removesuffix(end): config_in(tensor) for key, tensor in tensors.items() if key.endswith(end)}


def in_metadata(configs: Mapping[str, object]) -> dict[str, str]:
    """The metadata that say this of layers, in the place of tensors."""
    return {"_quantization_metadata": json.dumps({"layers": configs})}


def _rotation_group(channels: int) -> int | None:
    """ConvRot's own 256 where it divides, and otherwise the next that does; None if none."""
    return next((group for group in (256, 64, 16) if channels % group == 0), None)


def unrotated(weight: torch.Tensor, group: int) -> torch.Tensor:
    """The same weight [N, K] rotated, or not any more: the rotation is its own inverse."""
    return (weight.double().unflatten(1, (-1, group)) @ rotation_matrix(group).cpu()).flatten(1).float()


def int8(tensors, layers, per_channel=True, rotate=False, smooth=False, act16=False) -> File:
    """Marked as ComfyUI does it; with smoothing factors or 16-bit activations as this pack does. `rotate` may be the
    size of the groups."""
    from comfy.quant_ops import TensorWiseINT8Layout

    made, values = dict(tensors), dict(tensors)
    for layer in layers:
        weight = made[f"{layer}.weight"]
        channels = weight.shape[1]
        mark, options = {"format": "int8_tensorwise"}, {}
        factors = torch.linspace(0.5, 2.0, channels) if smooth else torch.ones(channels)
        if smooth:
            mark["format"] = "int8_smoothquant"
            made[f"{layer}.weight_smooth"] = factors
        if act16:
            mark = {"format": "int8_act16"} | ({"smoothed": True} if smooth else {})
        if rotate and (group := _rotation_group(channels) if rotate is True else rotate):
            options = {"convrot": True, "convrot_groupsize": group}
        q, parameters = TensorWiseINT8Layout.quantize(weight * factors, per_channel=per_channel, **options)
        made[f"{layer}.weight"], made[f"{layer}.weight_scale"] = q, parameters.scale
        made[f"{layer}.comfy_quant"] = encoded(mark | options)
        dequantized = q * parameters.scale
        values[f"{layer}.weight"] = (unrotated(dequantized, group) if options else dequantized) / factors
    return File(made, values)


def in_codes(weight: torch.Tensor, bits: int, group: int = 16) -> dict[str, torch.Tensor]:
    """A rotated weight [N, K] in codes of 4 or 6 bits, by the names of their parts: uniform levels, scaled by the
    largest of each group. comfy-kitchen's own quantizer, which chooses both by the error, is not everywhere."""
    most, (rows, channels) = 2 ** (bits - 1) - 1, weight.shape
    grouped = weight.unflatten(1, (-1, group))
    s_channel = weight.abs().amax(dim=1) / 127
    s_rel = (grouped.abs().amax(dim=2) / most / s_channel[:, None]).to(torch.float8_e4m3fn)
    steps = grouped / (s_rel.float() * s_channel[:, None])[..., None]
    codes = (steps.round().clamp(-most, most) + most + 1).view(rows, channels).to(torch.uint8)
    packed = [codes[:, 0::2] & 15 | codes[:, 1::2] << 4]
    if bits == 6:
        packed.append(sum((codes[:, j::4] >> 4) << 2 * j for j in range(4)))
    return {"": torch.cat(packed, dim=1).view(torch.int8), "_s_rel": s_rel, "_s_channel": s_channel}


def decoded(parts: Mapping[str, torch.Tensor], bits: int, group: int = 16) -> torch.Tensor:
    """The rotated INT8 weight times its scale that codes stand for, float32 [N, K]."""
    packed = parts[""].view(torch.uint8)
    channels = parts["_s_rel"].shape[1] * group
    low = packed[:, : channels // 2]
    codes = torch.stack([low & 15, low >> 4], dim=2).flatten(1).int()
    if bits == 6:
        high = packed[:, channels // 2 :]
        codes += torch.stack([high >> 2 * j & 3 for j in range(4)], dim=2).flatten(1).int() << 4
    levels = parts["_codebook"][codes] if "_codebook" in parts else codes.float() - 2 ** (bits - 1)
    whole = (levels.unflatten(1, (-1, group)) * parts["_s_rel"].float()[..., None]).round().clamp(-127, 127)
    return whole.flatten(1) * parts["_s_channel"][:, None]


def _grouped(tensors, layers, bits) -> File:
    """In ComfyUI's formats of INT8 in 4 or 6 bits; a layer that they cannot hold stays native INT8."""
    fit = [layer for layer in layers if tensors[f"{layer}.weight"].shape[1] % 32 == 0]
    file = int8(tensors, [layer for layer in layers if layer not in fit])
    made, values = dict(file.tensors), dict(file.values)
    for layer in fit:
        weight = tensors[f"{layer}.weight"].float()
        rotation = _rotation_group(weight.shape[1]) or 16
        parts = in_codes(unrotated(weight, rotation), bits)
        made |= {f"{layer}.weight{part}": tensor for part, tensor in parts.items()}
        config = {"format": GROUPED[bits], "group_size": 16, "convrot_groupsize": rotation}
        made[f"{layer}.comfy_quant"] = encoded(config)
        values[f"{layer}.weight"] = unrotated(decoded(parts, bits), rotation)
    return File(made, values)


GROUPED = {4: "asym_w4a8_int8", 6: "w6a8_int8"}


def _marked_in_metadata(tensors, layers) -> File:
    file = int8(tensors, layers)
    marks = {layer: config_in(file.tensors.pop(f"{layer}.comfy_quant")) for layer in layers}
    return replace(file, metadata=in_metadata(marks))


def _unmarked(tensors, layers, scale) -> File:
    file = int8(tensors, layers)
    for layer in layers:
        del file.tensors[f"{layer}.comfy_quant"]
        file.tensors[f"{layer}.{scale}"] = file.tensors.pop(f"{layer}.weight_scale")
    return file


def fp8_scaled(tensors: Mapping[str, torch.Tensor], layers: Collection[str], marked: bool = True) -> Tensors:
    """A file's tensors with some linears in FP8 with a scalar float32 scale each, marked as ComfyUI does now or once
    for the file as it did first."""
    made = dict(tensors)
    for layer in layers:
        weight = made[f"{layer}.weight"].float()
        scale = weight.abs().max() / 448
        made[f"{layer}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
        made[f"{layer}.{'weight_scale' if marked else 'scale_weight'}"] = scale
        if marked:
            made[f"{layer}.comfy_quant"] = encoded({"format": "float8_e4m3fn"})
    if not marked:
        made["scaled_fp8"] = torch.zeros(0, dtype=torch.float8_e4m3fn)
    return made


def _fp8(tensors, layers, marked=True) -> File:
    made, values = fp8_scaled(tensors, layers, marked), dict(tensors)
    for layer in layers:
        scale = made[f"{layer}.{'weight_scale' if marked else 'scale_weight'}"]
        values[f"{layer}.weight"] = made[f"{layer}.weight"].float() * scale
    return File(made, values)


def _unscaled_fp8(tensors, layers) -> File:
    made = dict(tensors) | {f"{layer}.weight": tensors[f"{layer}.weight"].to(torch.float8_e4m3fn) for layer in layers}
    return File(made, {name: tensor.float() for name, tensor in made.items()})


def _float(tensors, layers, dtype) -> File:
    made = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    return File(made, {name: tensor.float() for name, tensor in made.items()})


def _checkpoint(tensors, layers, made_by: Format) -> File:
    """Beside a text encoder and a VAE."""
    file = made_by(tensors, layers)
    made = {f"model.diffusion_model.{name}": tensor for name, tensor in file.tensors.items()}
    made["first_stage_model.decoder.conv_in.weight"] = torch.zeros(1)
    made["text_encoders.t5.layer.weight"] = torch.zeros(8, 8, dtype=torch.bfloat16)
    return replace(file, tensors=made)


FORMATS: dict[str, Format] = {
    "native": int8,
    "native, scalar scale": partial(int8, per_channel=False),
    "native, marks in metadata": _marked_in_metadata,
    "native, ConvRot": partial(int8, rotate=True),
    "smoothed": partial(int8, smooth=True),
    "smoothed, ConvRot": partial(int8, smooth=True, rotate=True),
    "16-bit activations": partial(int8, act16=True),
    "16-bit activations, smoothed, ConvRot": partial(int8, act16=True, smooth=True, rotate=True),
    "W4A8": partial(_grouped, bits=4),
    "W6A8": partial(_grouped, bits=6),
    "unmarked, weight_scale": partial(_unmarked, scale="weight_scale"),
    "unmarked, scale_weight": partial(_unmarked, scale="scale_weight"),
    "FP8 scaled": _fp8,
    "FP8 scaled, old": partial(_fp8, marked=False),
    "FP8": _unscaled_fp8,
    "bf16": partial(_float, dtype=torch.bfloat16),
    "fp16": partial(_float, dtype=torch.float16),
    "fp32": partial(_float, dtype=torch.float32),
    "checkpoint, native": partial(_checkpoint, made_by=int8),
    "checkpoint, bf16": partial(_checkpoint, made_by=partial(_float, dtype=torch.bfloat16)),
}
