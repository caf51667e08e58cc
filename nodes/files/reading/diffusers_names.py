"""Diffusion transformers under the names that the diffusers library gives their tensors.

ComfyUI renames them, joins what it holds in one tensor (q, k and v) and swaps the halves of some. Of a quantized layer
it would keep the weight and lose the scale, so the scales take the same way here as the rows that they belong to. Rows
of GGUF's blocks take it as bytes.
"""

from typing import Any

import comfy.model_detection
import torch

from ....kernels import ChannelTransform, expand_codes
from ...comfyui.quantized import stored
from .. import quant_config
from ..block_lists import AGAIN, check_lists
from ..holding import channel_scale, grouped_codes, is_gguf, is_grouped, quant_config_in, read_gguf_weight


def with_native_names(
    tensors: dict[str, torch.Tensor], metadata: dict[str, str]
) -> tuple[dict[str, torch.Tensor], Any]:
    """Return the tensors, those of a diffusion transformer under ComfyUI's own names; and the class of models that
    ComfyUI takes them for, also of a UNet under the names of diffusers, or None.

    Rows of GGUF's blocks that come together in one tensor stay blocks where all are in one format; else they become
    float32. Raises ValueError naming a layer whose quantization cannot follow, or of which a part is missing.
    """
    architecture = comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)
    if architecture is not None:
        return tensors, architecture
    tensors = _with_int8_for_codes(tensors)
    configs = quant_config.configs_in(tensors)
    pieces = {f"{layer}.{piece}" for layer in configs for piece in (quant_config.QUANT_CONFIG, quant_config.SCALE)}
    plain = {key: tensor for key, tensor in tensors.items() if key not in pieces}
    sizes = {key: len(tensor) for key, tensor in plain.items() if tensor.ndim}
    origins = _origins(sizes)
    if origins is None:
        architecture = comfy.model_detection.model_config_from_diffusers_unet(tensors)
        if configs and architecture is not None:
            raise ValueError("this is a quantized UNet under the names of diffusers; convert it to ComfyUI's names")
        return tensors, architecture
    keys, owner = [*sizes], torch.arange(len(sizes)).repeat_interleave(torch.tensor([*sizes.values()]))
    numbers = dict(zip(sizes, torch.arange(len(owner)).split([*sizes.values()]), strict=True))
    place, native = torch.empty_like(owner), {}
    for name, rows in origins.items():
        parts = [keys[index] for index in dict.fromkeys(owner[rows].unique_consecutive().tolist())]
        there = torch.cat([numbers[key] for key in parts])
        place[there] = torch.arange(len(there))
        layers = [key.removesuffix(".weight") for key in parts]
        if not configs.keys().isdisjoint(layers):
            layer = name.removesuffix(".weight")
            native[f"{layer}.{quant_config.QUANT_CONFIG}"] = _joined(layer, layers, configs)
            scales = [tensors[f"{part}.{quant_config.SCALE}"].float().flatten() for part in layers]
            scales = [scale.expand(sizes[key]) for scale, key in zip(scales, parts, strict=True)]
            native[f"{layer}.{quant_config.SCALE}"] = torch.cat(scales)[place[rows]][:, None]
        weights = [plain[key] for key in parts]
        in_blocks = {(w.params.gguf_format, w.shape[1]) if is_gguf(w) else None for w in weights}
        if len(in_blocks) > 1:
            weights = [weight.dequantize() if is_gguf(weight) else weight for weight in weights]
        widest = max((weight.dtype for weight in weights), key=lambda dtype: dtype.itemsize)
        values = [stored(weight) if is_gguf(weight) else weight.to(widest) for weight in weights]
        together = values[0] if len(values) == 1 else torch.cat(values)
        if not torch.equal(there, rows):
            together = together[place[rows]]
        form = in_blocks.pop() if len(in_blocks) == 1 else None
        native[name] = together if form is None else read_gguf_weight(together, form[0], (len(together), form[1]))
    return native, comfy.model_detection.model_config_from_unet(native, "", metadata=metadata)


def _origins(sizes: dict[str, int]) -> dict[str, torch.Tensor] | None:
    """Return the rows that make each tensor under ComfyUI's names, numbered through all tensors of so many rows; None
    where it renames nothing.

    Raises ValueError where ComfyUI would join what is not all there, or leave blocks behind a missing one away.
    """
    count = sum(sizes.values())  # ComfyUI gets columns: a number for each row, from 1
    columns = torch.arange(1, count + 1, dtype=torch.float64)[:, None].split([*sizes.values()])
    joined = comfy.model_detection.convert_diffusers_mmdit(dict(zip(sizes, columns, strict=True)), "")
    if joined is None:
        return None
    # The rows of a missing part are whatever lay in memory: no number, or that of another row.
    origins, seen = {}, torch.zeros(count + 1, dtype=torch.bool)
    for name, column in joined.items():
        numbers = torch.where((column >= 1) & (column <= count), column, 0).long().flatten()
        if not bool(numbers.all()) or bool(seen[numbers].any()) or len(numbers.unique()) < len(numbers):
            raise ValueError(f"a part of {name} is missing, which has several under the names of diffusers; {AGAIN}")
        seen[numbers], origins[name] = True, numbers - 1
    taken = zip(sizes, seen[1:].split([*sizes.values()]), strict=True)
    check_lists([key for key, rows in taken if not rows.all()], sizes)
    return origins


def _joined(name: str, layers: list[str], configs: dict[str, dict]) -> torch.Tensor:
    """Return the quant config of a layer made of these: full precision where any asks for it, else what all say."""
    said = [configs.get(layer, {}) for layer in layers]
    for layer, config in zip(layers, said, strict=True):
        if config and config.get("format") != quant_config.NATIVE_FORMAT:
            raise ValueError(
                f"{layer} is quantized ({config.get('format')}) under the name that diffusers gives it, which can be "
                "read of INT8 only; convert the file to ComfyUI's names"
            )
    groups = set(map(quant_config.rotation_group, said))
    if not all(said) or len(groups) > 1:
        raise ValueError(
            f"{name} is made of several layers of the file that are not quantized alike; convert the file to "
            "ComfyUI's names"
        )
    first, *others = map(quant_config.other_options, said)
    alike = {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}
    bits = max(map(quant_config.activation_bits, said))
    full = {quant_config.FULL_PRECISION: True} if bits == 16 else {}
    alike.pop(quant_config.FULL_PRECISION, None)
    return quant_config.encode_config(ChannelTransform(None, groups.pop()), bits, alike | full)


def _with_int8_for_codes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Put INT8 weights in place of codes of 4 or 6 bits: what is joined may have several codebooks."""
    native = dict(tensors)
    for key, weight in tensors.items():
        if is_grouped(weight):
            layer, others = key.removesuffix(".weight"), quant_config.other_options(quant_config_in(weight))
            rotation = ChannelTransform(None, weight.params.convrot_groupsize)
            config = quant_config.encode_config(rotation, weight.params.activation_bits, others)
            native[key], native[f"{layer}.{quant_config.QUANT_CONFIG}"] = expand_codes(grouped_codes(weight)), config
            native[f"{layer}.{quant_config.SCALE}"] = channel_scale(weight)
    return native
