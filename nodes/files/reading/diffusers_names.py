"""Diffusion transformers under the names that the diffusers library gives their tensors.

ComfyUI renames them, joins what it holds in one tensor (q, k and v) and swaps the halves of some. Of a quantized layer
it would keep the weight and lose the scale, so the scales take the same way here as the rows that they belong to. Rows
of GGUF's blocks take it as bytes.
"""

from typing import Any

import torch

from ....kernels import ChannelTransform, expand_codes
from ...comfyui.architecture import architecture_of, diffusers_unet_of, renamed_from_diffusers
from ...comfyui.quantized import QuantizedTensor, params, stored
from .. import quant_config
from ..block_lists import AGAIN, check_lists
from ..holding.gguf_weight import is_gguf, with_gguf_bytes
from ..holding.grouped_weight import channel_scale, grouped_codes, is_grouped, quant_config_in


def is_named_by_diffusers(tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> bool:
    """Whether ComfyUI has to rename these tensors before it knows their model."""
    return architecture_of(tensors, metadata) is None


def with_native_names(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of a diffusion transformer under ComfyUI's own names; of anything else, as they are.

    Raises ValueError naming a layer whose quantization cannot follow.
    """
    tensors = _with_int8_for_codes(tensors)
    _check_whole(tensors)
    suffix = f".{quant_config.QUANT_CONFIG}"
    configs = {
        key.removesuffix(suffix): quant_config.decode_config(t) for key, t in tensors.items() if key.endswith(suffix)
    }
    for layer, config in configs.items():
        if config.get("format") != quant_config.NATIVE_FORMAT:
            raise ValueError(
                f"{layer} is quantized ({config.get('format')}) under the name that diffusers gives it, which can be "
                "read of INT8 only; convert the file to ComfyUI's names"
            )
    said = list(configs.values())
    quantization = {
        f"{layer}.weight": (tensors.get(f"{layer}.{quant_config.SCALE}"), config, number)
        for number, (layer, config) in enumerate(configs.items())
    }
    pieces = {f"{layer}.{piece}" for layer in configs for piece in (quant_config.QUANT_CONFIG, quant_config.SCALE)}
    plain = {key: tensor for key, tensor in tensors.items() if key not in pieces}
    packed = {key: tensor for key, tensor in plain.items() if is_gguf(tensor)}
    if packed:
        return _with_native_rows(plain, packed)
    # Columns in place of each tensor: what every row of it is scaled by, in what groups it is rotated, and its quant
    # config.
    columns = {
        key: _columns(tensor, *quantization.get(key, (None, {}, 0))) for key, tensor in plain.items() if tensor.ndim
    }

    renamed = renamed_from_diffusers(plain)
    if renamed is None:
        if configs and diffusers_unet_of(tensors) is not None:
            raise ValueError("this is a quantized UNet under the names of diffusers; convert it to ComfyUI's names")
        return tensors
    if configs:
        for key, rows in (renamed_from_diffusers(columns) or {}).items():
            scale, group, numbers = rows.unbind(1)
            if scale.isnan().all():
                continue
            layer = key.removesuffix(".weight")
            if scale.isnan().any() or group.unique().numel() > 1:
                raise ValueError(
                    f"{layer} is made of several layers of the file that are not quantized alike; convert the file to "
                    "ComfyUI's names"
                )
            renamed[f"{layer}.{quant_config.SCALE}"] = scale[:, None].contiguous()
            others = _joined([quant_config.other_options(said[int(number)]) for number in numbers.unique()])
            rotation, bits = (
                ChannelTransform(None, int(group[0]) or None),
                16 if quant_config.FULL_PRECISION in others else 8,
            )
            renamed[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(rotation, bits, others)
    return renamed


def _check_whole(tensors: dict[str, torch.Tensor]) -> None:
    """Raise ValueError where ComfyUI would join what is not all there, or leave blocks behind a missing one away."""
    places, rows = {}, 0
    for key, tensor in tensors.items():
        if tensor.ndim:
            # In place of each tensor one column: a number for each row, from 1.
            places[key] = torch.arange(rows + 1, rows + len(tensor) + 1, dtype=torch.float64)[:, None]
            rows += len(tensor)
    joined = renamed_from_diffusers(places)
    if joined is None:
        return
    # The rows of a missing part are whatever lay in memory: no number, or that of another row.
    seen = torch.zeros(rows + 1, dtype=torch.bool)
    for name, column in joined.items():
        numbers = column.flatten()
        numbers = torch.where((numbers >= 1) & (numbers <= rows), numbers, 0).long()
        if not bool(numbers.all()) or bool(seen[numbers].any()) or len(numbers.unique()) < len(numbers):
            raise ValueError(f"a part of {name} is missing, which has several under the names of diffusers; {AGAIN}")
        seen[numbers] = True
    check_lists([key for key, column in places.items() if len(column) and not seen[int(column[0])]], tensors)


def _joined(options: list[dict[str, Any]]) -> dict[str, Any]:
    """What the quant configs of layers that become one say alike; full precision where any asks for it."""
    alike = {key: value for key, value in options[0].items() if all(other.get(key) == value for other in options)}
    alike.pop(quant_config.FULL_PRECISION, None)
    return alike | (
        {quant_config.FULL_PRECISION: True} if any(o.get(quant_config.FULL_PRECISION) for o in options) else {}
    )


def _with_int8_for_codes(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors with the INT8 weight in place of each in codes of 4 or 6 bits: what is joined may have several
    codebooks."""
    native = dict(tensors)
    for key, weight in tensors.items():
        if is_grouped(weight):
            layer = key.removesuffix(".weight")
            native[key], native[f"{layer}.{quant_config.SCALE}"] = (
                expand_codes(grouped_codes(weight)),
                channel_scale(weight),
            )
            rotation = ChannelTransform(None, params(weight).convrot_groupsize)
            others = quant_config.other_options(quant_config_in(weight))
            native[f"{layer}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(
                rotation, params(weight).activation_bits, others
            )
    return native


def _columns(tensor: torch.Tensor, scale: torch.Tensor | None, config: dict, number: int) -> torch.Tensor:
    """[N, 3] for a tensor of N rows: the scale, the rotation group (or 0) and the quant config's number; NaN where it
    is not quantized."""
    columns = torch.full((tensor.shape[0], 3), torch.nan)
    if scale is not None:
        columns[:, 0] = scale.float().flatten()
        columns[:, 1] = quant_config.rotation_group(config) or 0
        columns[:, 2] = number
    return columns


def _with_native_rows(tensors: dict[str, torch.Tensor], packed: dict[str, QuantizedTensor]) -> dict[str, torch.Tensor]:
    """The tensors of a file with GGUF's blocks under ComfyUI's own names.

    Rows that come together in one tensor stay blocks where all are in one format; else they become float32.
    """
    keys = list(packed)
    numbers = {key: number for number, key in enumerate(keys)}
    # In place of each tensor one column: which of the packed ones its rows are of.
    sources = {
        key: torch.full((len(tensor), 1), numbers.get(key, -1)) for key, tensor in tensors.items() if tensor.ndim
    }
    joined = renamed_from_diffusers(sources)
    if joined is None:
        return tensors
    forms: dict[str, QuantizedTensor] = {}
    mixed: set[str] = set()
    for key, column in joined.items():
        names = [keys[number] if number >= 0 else None for number in column.unique().tolist()]
        weights = [packed[name] for name in names if name is not None]
        if len(weights) == len(names) and len({params(w).gguf_format for w in weights}) == 1:
            forms[key] = weights[0]
        else:
            mixed |= {name for name in names if name is not None}
    rows = dict(tensors)
    for key, weight in packed.items():
        rows[key] = weight.dequantize() if key in mixed else stored(weight)
    renamed = renamed_from_diffusers(rows) or {}
    # A tensor that goes to several places, of which one is mixed, is floats in all of them.
    return {
        key: with_gguf_bytes(forms[key], tensor) if key in forms and tensor.dtype == torch.uint8 else tensor
        for key, tensor in renamed.items()
    }
