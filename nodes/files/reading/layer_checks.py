"""Whether the quantized layers of a checkpoint are whole: a table with an entry for each format.

A loader that trusts a damaged layer draws another image and says nothing. All that can be told from quant configs,
shapes, dtypes and small tensors is told here, whatever computes afterwards. Large weights are not read: their values
count when something else has to read them.

The formats that this pack computes are checked for all that they consist of. Of ComfyUI's other formats the parts are
looked at that make an image wrong: what else a layer has, and how it is packed, ComfyUI knows.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from comfy.quant_ops import QUANT_ALGOS

from ....kernels import FLOAT_DTYPES, ChannelTransform
from .. import quant_config
from ..attention_choices import check_choices
from ..block_lists import AGAIN
from ..holding import codes_in, is_gguf
from .values import LARGEST, WEIGHT_DTYPES, check_block_scales, check_factors, check_finite, check_scale, largest_in

CheckedTensors = Mapping[str, torch.Tensor]
_Check = Callable[[str, torch.Tensor, torch.Tensor], None]
_Shapes = Callable[[int, int], tuple[tuple[int, ...], ...]]


@dataclass(frozen=True)
class _Part:
    """A tensor of a layer, beside weight, bias and quant config.

    Attributes:
        check: (name, tensor, weight); raises ValueError for values that no quantizer writes.
        shapes: those that it may have, by the two sizes of the weight as it is stored; None where something else looks.
        dtypes: those that it may have. uint8 stands for the first.
        needed: whether each layer of the format has it.
    """

    check: _Check
    shapes: _Shapes | None = None
    dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES
    needed: bool = True


@dataclass(frozen=True)
class _Format:
    """How a layer of one format looks.

    Attributes:
        dtype: of the weight.
        parts: the tensors that it may have, by the ends of their names; None for one that counts for nothing.
        options: (weight [N, K], parts, quant config); raises TypeError or ValueError where the options do not fit. None
            for a format that only ComfyUI computes, whose layers may have other parts too.
    """

    dtype: torch.dtype
    parts: Mapping[str, _Part | None]
    options: Callable[[torch.Tensor, CheckedTensors, dict], None] | None = None


_SMALL = 1 << 20  # elements that are looked at for a NaN


def _rotation_fits(weight: torch.Tensor, parts: CheckedTensors, config: dict) -> None:
    ChannelTransform(None, quant_config.rotation_group(config)).check(weight.shape[1])


def _codes_fit(weight: torch.Tensor, parts: CheckedTensors, config: dict) -> None:
    codes = codes_in({**parts, "weight": weight}, config)
    codes.check()
    ChannelTransform(None, quant_config.group_size(config)).check(codes.shape[1])


def _check_group_scales(key: str, scales: torch.Tensor, weight: torch.Tensor) -> None:
    check = check_block_scales if scales.dtype == torch.float8_e4m3fn else partial(check_scale, most=LARGEST)
    check(key, scales, weight)


def _scale(largest_code: float, shapes: _Shapes, dtypes: tuple[torch.dtype, ...] = WEIGHT_DTYPES) -> _Part:
    return _Part(partial(check_scale, most=LARGEST / largest_code), shapes, dtypes)


def _block_scales(columns: int, dtype: torch.dtype) -> _Part:
    """A scale for so many columns of the weight, in NVIDIA's layout: padded to 128 rows and 4 blocks, of any shape."""

    def check(key: str, scales: torch.Tensor, weight: torch.Tensor) -> None:
        n, k = weight.shape[-2:]
        rows, blocks = -(-n // 128) * 128, -(-(k // columns) // 4) * 4
        if weight.ndim == 2 and scales.numel() != rows * blocks:
            raise ValueError(f"{key} has shape {list(scales.shape)}, but the model needs {[rows, blocks]}")
        check_block_scales(key, scales, weight)

    return _Part(check, None, (dtype, torch.uint8))


_ONE = ((), (1,), (1, 1))
_FP8, _E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu
_INPUT_SCALE = {"input_scale": _Part(check_factors, lambda n, k: _ONE, needed=False)}
# Activations are scaled as they come, so the scale of an older pack's calibration says nothing.
_INT8 = {quant_config.SCALE: _scale(127, lambda n, k: (*_ONE, (n,), (n, 1), (1, n), (n, 1, 1))), "input_scale": None}
_SMOOTHED_INT8 = {**_INT8, quant_config.SMOOTH: _Part(check_factors, lambda n, k: ((k,),))}
_CODES = {
    quant_config.GROUP_SCALE: _Part(_check_group_scales, None, (_FP8, torch.uint8, *FLOAT_DTYPES)),
    quant_config.CHANNEL_SCALE: _scale(127, lambda n, k: ((n,),), (torch.float32,)),
    quant_config.CODEBOOK: _Part(lambda key, levels, _: check_finite(key, levels), None, (torch.float32,), False),
}
_NVFP4 = {
    "weight_scale": _block_scales(8, _FP8),  # of 16 weights of 4 bits
    "weight_scale_2": _scale(448 * 6, lambda n, k: _ONE),
    "pre_quant_scale": _Part(check_factors, lambda n, k: tuple((2 * k - i,) for i in range(16)), needed=False),
}

FORMATS: dict[str, _Format] = {
    quant_config.NATIVE_FORMAT: _Format(torch.int8, _INT8, _rotation_fits),
    quant_config.SMOOTHED_FORMAT: _Format(torch.int8, _SMOOTHED_INT8, _rotation_fits),
    **{name: _Format(torch.int8, _CODES, _codes_fit) for name in quant_config.GROUPED_FORMATS},
    **{
        name: _Format(dtype, {"weight_scale": _scale(torch.finfo(dtype).max, lambda n, k: _ONE), **_INPUT_SCALE})
        for name, dtype in (("float8_e4m3fn", _FP8), ("float8_e5m2", torch.float8_e5m2))
    },
    "mxfp8": _Format(_FP8, {"weight_scale": _block_scales(32, _E8M0), **_INPUT_SCALE}),
    "nvfp4": _Format(torch.uint8, {**_NVFP4, **_INPUT_SCALE}),
    quant_config.W4A4: _Format(torch.int8, {"weight_scale": _scale(7, lambda n, k: ((n,),))}),
}

_OWN = {*_CODES, quant_config.SMOOTH}  # of no other format
# What belongs to a quantized form, wherever it stands.
_PARTS = {part for form in FORMATS.values() for part in form.parts}
_PARTS |= {"weight_scale_inv", "scale_weight", "scale_input", "weight_zero_point", "weight_correction"}


def check_layers(tensors: CheckedTensors) -> None:
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


def _check_marked(name: str, config: dict, weight: torch.Tensor | None, parts: CheckedTensors) -> None:
    kind, known = config.get("format"), {*QUANT_ALGOS, *quant_config.INT8_FORMATS, *quant_config.GROUPED_FORMATS}
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"{name}.{quant_config.QUANT_CONFIG} names the quantization format {kind!r}, which neither INT8 DiT nor "
            "this ComfyUI reads. Update ComfyUI, or take a file of the model in bf16, fp16, FP8, INT8, W4A8 or GGUF"
        )
    title = "INT8" if kind in quant_config.INT8_FORMATS else kind
    if weight is None:
        raise ValueError(f"{name}.weight is missing although {name} is marked as {title}")
    if kind == quant_config.ACT16_FORMAT:  # with smoothing factors or without, as its quant config says
        kind = quant_config.SMOOTHED_FORMAT if config.get(quant_config.SMOOTHED) else quant_config.NATIVE_FORMAT
    form = FORMATS.get(kind)
    if form is None:
        return  # of a newer ComfyUI
    if kind in quant_config.GROUPED_FORMATS and weight.ndim != 2:
        raise ValueError(
            f"{name}.weight is a bank of experts in {kind}, which INT8 DiT does not read. Load the model with "
            "ComfyUI's own loader, or take a file of it in another format"
        )
    for option in (quant_config.FULL_PRECISION, quant_config.SMOOTHED) if form.options else ():
        if not isinstance(said := config.get(option, False), bool):
            raise ValueError(f"{name}: its mark has {option} = {said!r}, which is neither true nor false")
    if weight.dtype != form.dtype:
        raise ValueError(f"{name}.weight is {weight.dtype} although {name} is marked as {title}")
    for part in sorted(parts.keys() & _OWN - form.parts.keys() if form.options is None else parts.keys() - form.parts):
        raise ValueError(f"{name}.{part} is there, which a layer marked as {title} does not have")
    for part, expected in form.parts.items():
        if part in parts and expected is not None:
            _check_part(f"{name}.{part}", parts[part], expected, weight)
        elif expected is not None and expected.needed:
            raise ValueError(f"{name}.{part} is missing")
    if weight.is_floating_point() and weight.numel() <= _SMALL:
        check_finite(f"{name}.weight", weight)
    if form.options is not None and weight.ndim == 2:  # else a bank of expert weights, which ComfyUI's own layers load
        try:
            form.options(weight, parts, config)
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
