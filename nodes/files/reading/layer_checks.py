"""Checks of a checkpoint's quantized layers: a table with an entry for each format.

A loader that trusts a damaged layer draws another image and says nothing. All that quant configs, shapes, dtypes and
small tensors tell is checked here, whatever computes afterwards; large weights when something else has to read them.

Formats that this pack computes are checked for all that they consist of. Of ComfyUI's others only the parts are looked
at that make an image wrong: what else a layer has, and how it is packed, ComfyUI knows.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
from comfy.quant_ops import QUANT_ALGOS

from ....kernels import FLOAT_DTYPES, ChannelTransform
from .. import quant_config
from ..attention_choices import check_choices
from ..block_lists import AGAIN
from ..holding import codes_in, is_gguf
from .values import LARGEST, WEIGHT_DTYPES, check_factors, check_finite, check_group_scales, check_scale, largest_in

_Tensors = Mapping[str, torch.Tensor]
_Shapes = Callable[[int, int], tuple[tuple[int, ...], ...]]


class _Part(NamedTuple):
    """What a tensor of a layer may be, beside weight, bias and quant config."""

    # (name, tensor, weight) raises ValueError for values that no quantizer writes.
    check: Callable[[str, torch.Tensor, torch.Tensor], None]
    shapes: _Shapes | None = None  # by the two sizes of the weight as it is stored; None where something else looks
    dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES  # uint8 stands for the first
    needed: bool = True  # whether each layer of the format has it


_SMALL = 1 << 20  # elements that are looked at for a NaN


def _scale(largest_code: float, shapes: _Shapes, dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES) -> _Part:
    return _Part(partial(check_scale, most=LARGEST / largest_code), shapes, dtypes)


def _block_scales(columns: int, dtype: torch.dtype) -> _Part:
    """Scales of so many columns each, in NVIDIA's layout: padded to 128 rows and 4 blocks, of any shape."""

    def check(key: str, scales: torch.Tensor, weight: torch.Tensor) -> None:
        n, k = weight.shape[-2:]
        rows, blocks = -(-n // 128) * 128, -(-(k // columns) // 4) * 4
        if weight.ndim == 2 and scales.numel() != rows * blocks:
            raise ValueError(f"{key} has shape {list(scales.shape)}, but the model needs {[rows, blocks]}")
        check_group_scales(key, scales, weight)

    return _Part(check, None, (dtype, torch.uint8))


_ONE = ((), (1,), (1, 1))
_FP8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_INPUT_SCALE = {"input_scale": _Part(check_factors, lambda n, k: _ONE, needed=False)}
# Activations are scaled as they come, so the scale of an older pack's calibration says nothing.
_INT8 = {quant_config.SCALE: _scale(127, lambda n, k: (*_ONE, (n,), (n, 1), (1, n), (n, 1, 1))), "input_scale": None}
_SMOOTHED_INT8 = {**_INT8, quant_config.SMOOTH: _Part(check_factors, lambda n, k: ((k,),))}
_CODES = {
    quant_config.GROUP_SCALE: _Part(check_group_scales, None, (_FP8, torch.uint8, *FLOAT_DTYPES)),
    quant_config.CHANNEL_SCALE: _scale(127, lambda n, k: ((n,),), (torch.float32,)),
    quant_config.CODEBOOK: _Part(lambda key, levels, _: check_finite(key, levels), None, (torch.float32,), False),
}
_NVFP4 = {
    "weight_scale": _block_scales(8, _FP8),  # of 16 weights of 4 bits
    "weight_scale_2": _scale(448 * 6, lambda n, k: _ONE),
    "pre_quant_scale": _Part(check_factors, lambda n, k: tuple((2 * k - i,) for i in range(16)), needed=False),
}

FORMATS: dict[str, tuple[torch.dtype, Mapping[str, _Part | None]]] = {
    quant_config.NATIVE_FORMAT: (torch.int8, _INT8),
    quant_config.SMOOTHED_FORMAT: (torch.int8, _SMOOTHED_INT8),
    **dict.fromkeys(quant_config.GROUPED_FORMATS, (torch.int8, _CODES)),
    **{
        name: (dtype, {"weight_scale": _scale(torch.finfo(dtype).max, lambda n, k: _ONE), **_INPUT_SCALE})
        for name, dtype in (("float8_e4m3fn", _FP8), ("float8_e5m2", torch.float8_e5m2))
    },
    "mxfp8": (_FP8, {"weight_scale": _block_scales(32, _E8M0), **_INPUT_SCALE}),
    "nvfp4": (torch.uint8, {**_NVFP4, **_INPUT_SCALE}),
    quant_config.W4A4: (torch.int8, {"weight_scale": _scale(7, lambda n, k: ((n,),))}),
}
"""By format the weight's dtype, and its layers' other tensors by the ends of their names; None for one that is not
read. Layers of formats that only ComfyUI computes may have others too."""

_COMPUTED_HERE = (*quant_config.INT8_FORMATS, *quant_config.GROUPED_FORMATS)
_OWN = {*_CODES, quant_config.SMOOTH}  # of no other format
# What belongs to a quantized form, wherever it stands.
_PARTS = {part for _, parts in FORMATS.values() for part in parts}
_PARTS |= {"weight_scale_inv", "scale_weight", "scale_input", "weight_zero_point", "weight_correction"}


def check_layers(tensors: _Tensors) -> None:
    """Raise ValueError naming the first tensor with which something is wrong. Called after the importers."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        layer, _, part = key.rpartition(".")
        if part in _PARTS:
            parts.setdefault(layer, {})[part] = tensor
        if tensor.ndim > 1 and tensor.numel() == 0:  # ComfyUI would make a model of that size
            raise ValueError(f"{key} holds nothing: its shape is {tuple(tensor.shape)}")
    configs = quant_config.configs_in(tensors)
    for layer in sorted(configs):
        _check_marked(layer, configs[layer], tensors.get(f"{layer}.weight"), parts.get(layer, {}))
    scaled = {torch.float8_e4m3fn, torch.float8_e5m2} & {tensors[f"{layer}.weight"].dtype for layer in configs}
    for layer in parts.keys() - configs.keys():
        state = "not marked as quantized" if f"{layer}.weight" in tensors else "not there"
        raise ValueError(f"{layer}.{next(iter(parts[layer]))} belongs to {layer}.weight, which is {state}")
    check_choices(tensors)
    for key, tensor in tensors.items():
        layer, _, part = key.rpartition(".")
        # Of GGUF, it is decoded, and looked at, when the layer is loaded.
        if is_gguf(tensor) or not (part == "bias" or (part == "weight" and layer not in configs)):
            continue
        if tensor.dtype not in WEIGHT_DTYPES:
            raise ValueError(
                f"{key} is {tensor.dtype} and nothing marks how it is quantized; its mark was lost, or the file is in "
                "a format that cannot be read"
            )
        if tensor.numel() <= _SMALL:
            check_finite(key, tensor)
        if tensor.dtype in scaled and largest_in(tensor) == torch.finfo(tensor.dtype).max:
            raise ValueError(
                f"{layer}.weight_scale is missing: {key} fills the range of {tensor.dtype}, as weights of other "
                f"layers do that have a scale; {AGAIN}"
            )


def _check_marked(name: str, config: dict, weight: torch.Tensor | None, parts: _Tensors) -> None:
    kind = config.get("format")
    if not isinstance(kind, str) or kind not in (*QUANT_ALGOS, *_COMPUTED_HERE):
        raise ValueError(
            f"{name}.{quant_config.QUANT_CONFIG} names the quantization format {kind!r}, which neither INT8 DiT nor "
            "this ComfyUI reads. Update ComfyUI, or take a file of the model in bf16, fp16, FP8, INT8, W4A8 or GGUF"
        )
    title = "INT8" if kind in quant_config.INT8_FORMATS else kind
    if weight is None:
        raise ValueError(f"{name}.weight is missing although {name} is marked as {title}")
    if kind == quant_config.ACT16_FORMAT:  # with smoothing factors or without, as its quant config says
        kind = quant_config.SMOOTHED_FORMAT if config.get(quant_config.SMOOTHED) else quant_config.NATIVE_FORMAT
    if kind not in FORMATS:
        return  # of a newer ComfyUI
    own, in_codes = kind in _COMPUTED_HERE, kind in quant_config.GROUPED_FORMATS
    if in_codes and weight.ndim != 2:
        raise ValueError(
            f"{name}.weight is a bank of experts in {kind}, which INT8 DiT does not read. Load the model with "
            "ComfyUI's own loader, or take a file of it in another format"
        )
    for option in (quant_config.FULL_PRECISION, quant_config.SMOOTHED) if own else ():
        if not isinstance(said := config.get(option, False), bool):
            raise ValueError(f"{name}: its mark has {option} = {said!r}, which is neither true nor false")
    dtype, expected = FORMATS[kind]
    if weight.dtype != dtype:
        raise ValueError(f"{name}.weight is {weight.dtype} although {name} is marked as {title}")
    for part in sorted((parts.keys() if own else parts.keys() & _OWN) - expected.keys()):
        raise ValueError(f"{name}.{part} is there, which a layer marked as {title} does not have")
    for part, read in expected.items():
        if part in parts and read is not None:
            _check_part(f"{name}.{part}", parts[part], read, weight)
        elif read is not None and read.needed:
            raise ValueError(f"{name}.{part} is missing")
    if weight.is_floating_point() and weight.numel() <= _SMALL:
        check_finite(f"{name}.weight", weight)
    if own and weight.ndim == 2:  # else a bank of expert weights, which ComfyUI's own layers load
        try:
            if in_codes:
                codes = codes_in({**parts, "weight": weight}, config)
                codes.check()
                group, channels = quant_config.group_size(config), codes.shape[1]
            else:
                group, channels = quant_config.rotation_group(config), weight.shape[1]
            ChannelTransform(None, group).check(channels)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{name}: {error}") from error


def _check_part(key: str, tensor: torch.Tensor, expected: _Part, weight: torch.Tensor) -> None:
    if tensor.dtype not in expected.dtypes:
        known = " / ".join(str(dtype).removeprefix("torch.") for dtype in expected.dtypes)
        raise ValueError(f"{key} is {tensor.dtype}, not {known}")
    shapes = expected.shapes(*weight.shape) if expected.shapes and weight.ndim == 2 else ()
    if (shapes and tuple(tensor.shape) not in shapes) or tensor.numel() == 0:
        needed = " / ".join(str(list(shape)) for shape in shapes)
        raise ValueError(f"{key} has shape {list(tensor.shape)}, but the model needs {needed}")
    expected.check(key, tensor.view(expected.dtypes[0]) if tensor.dtype == torch.uint8 else tensor, weight)
