"""Whether the quantized layers of a checkpoint are whole: a table, an entry a format.

A loader that trusts a damaged layer draws another image and says nothing. All that can be told from quant configs,
shapes, dtypes and small tensors is told here, whatever computes afterwards. Large weights are not read: their values
count when something else has to read them.

The formats that this pack computes are checked for all that they consist of. Of ComfyUI's other formats the parts are
looked at that make an image wrong: what else a layer has, and how it is packed, ComfyUI knows.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from ....kernels import ChannelTransform, GroupedCodes
from ...comfyui.quantized import known_formats
from .. import quant_config
from ..attention_choices import check_choices
from ..block_lists import AGAIN
from ..holding.gguf_weight import is_gguf
from .values import LARGEST, WEIGHT_DTYPES, check_factors, check_finite, check_scale, check_single, largest_in

CheckedTensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True)
class _Layer:
    """A layer that a quant config names: its weight [N, K], packed in some formats, and the tensors of _PARTS that it
    has."""

    name: str
    weight: torch.Tensor
    config: dict
    parts: CheckedTensors

    def needed(self, part: str) -> torch.Tensor:
        if part not in self.parts:
            raise ValueError(f"{self.name}.{part} is missing")
        return self.parts[part]


@dataclass(frozen=True)
class _Format:
    """How a layer of one format looks.

    Attributes:
        dtype: of the weight.
        parts: the tensors that it may have, beside weight, bias and quant config; None for a format that only ComfyUI
        computes.
        check: raises ValueError naming the tensor for a layer that is not whole.
    """

    dtype: torch.dtype
    parts: frozenset[str] | None
    check: Callable[[_Layer], None]


# What belongs to a quantized form, wherever it stands.
_SCALES = {"weight_scale", "weight_scale_2", "weight_scale_inv", "scale_weight", "input_scale", "scale_input"}
_CODES = frozenset({quant_config.GROUP_SCALE, quant_config.CHANNEL_SCALE, quant_config.CODEBOOK})
_PARTS = frozenset({*_SCALES, *_CODES, "pre_quant_scale", "weight_smooth", "weight_zero_point", "weight_correction"})
_OWN = frozenset({*_CODES, quant_config.SMOOTH})  # of no other format
_FP8 = frozenset((torch.float8_e4m3fn, torch.float8_e5m2))
_MOST_JSON = 1 << 16  # bytes
_SMALL = 1 << 20  # elements that are looked at for a NaN


def check_layers(tensors: CheckedTensors) -> None:
    """Raise ValueError naming the first tensor with which something is wrong, after translation of the importer."""
    suffix = f".{quant_config.QUANT_CONFIG}"
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        layer, _, part = key.rpartition(".")
        if part in _PARTS:
            parts.setdefault(layer, {})[part] = tensor
        if tensor.ndim > 1 and tensor.numel() == 0:  # ComfyUI would make a model of that size
            raise ValueError(f"{key} holds nothing: its shape is {tuple(tensor.shape)}")
    marked = {key.removesuffix(suffix) for key in tensors if key.endswith(suffix)}
    for layer in sorted(marked):
        _check_marked(layer, tensors, parts.get(layer, {}))
    scaled = _FP8.intersection(tensors[f"{layer}.weight"].dtype for layer in marked)
    for layer in parts.keys() - marked:
        state = "not marked as quantized" if f"{layer}.weight" in tensors else "not there"
        raise ValueError(f"{layer}.{next(iter(parts[layer]))} belongs to {layer}.weight, which is {state}")
    check_choices(tensors)
    for key, tensor in tensors.items():
        layer, _, part = key.rpartition(".")
        if part == "bias" or (part == "weight" and layer not in marked):
            _check_plain(key, tensor)
            if tensor.dtype in scaled and largest_in(tensor) == torch.finfo(tensor.dtype).max:
                raise ValueError(
                    f"{layer}.weight_scale is missing: {key} fills the range of {tensor.dtype}, as weights of other "
                    f"layers do that have a scale; {AGAIN}"
                )


def unexplained(tensors: CheckedTensors) -> dict[str, torch.dtype]:
    """The dtypes of those tensors of a checkpoint whose dtype no weight has, and which no quant config explains."""
    suffix = f".{quant_config.QUANT_CONFIG}"
    marked = {key.removesuffix(suffix) for key in tensors if key.endswith(suffix)}

    def explained(key: str, tensor: torch.Tensor) -> bool:
        return tensor.dtype in WEIGHT_DTYPES or is_gguf(tensor) or key.rpartition(".")[0] in marked or _is_json(tensor)

    return {key: tensor.dtype for key, tensor in tensors.items() if not explained(key, tensor)}


def _is_json(tensor: torch.Tensor) -> bool:
    """Whether this is an option of a module, which newer ComfyUIs have in files."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or tensor.numel() > _MOST_JSON:
        return False
    try:
        json.loads(tensor.numpy().tobytes())
    except (RecursionError, ValueError):
        return False
    return True


def _check_marked(name: str, tensors: CheckedTensors, parts: CheckedTensors) -> None:
    key = f"{name}.{quant_config.QUANT_CONFIG}"
    try:
        config = quant_config.decode_config(tensors[key])
    except ValueError as error:
        raise ValueError(f"{key} is {error}") from error
    kind, known = config.get("format"), {*known_formats(), *quant_config.INT8_FORMATS, *quant_config.GROUPED_FORMATS}
    if not isinstance(kind, str) or kind not in known:
        raise ValueError(
            f"{key} names the quantization format {kind!r}, which neither INT8 DiT nor this ComfyUI reads. Update "
            "ComfyUI, or take a file of the model in bf16, fp16, FP8, INT8, W4A8 or GGUF"
        )
    title = "INT8" if kind in quant_config.INT8_FORMATS else kind
    weight = tensors.get(f"{name}.weight")
    if weight is None:
        raise ValueError(f"{name}.weight is missing although {name} is marked as {title}")
    form = FORMATS.get(kind)
    if form is None:
        return  # of a newer ComfyUI
    if kind in quant_config.GROUPED_FORMATS and weight.ndim != 2:
        raise ValueError(
            f"{name}.weight is a bank of experts in {kind}, which INT8 DiT does not read. Load the model with "
            "ComfyUI's own loader, or take a file of it in another format"
        )
    if weight.dtype != form.dtype:
        raise ValueError(f"{name}.weight is {weight.dtype} although {name} is marked as {title}")
    for part in sorted(parts.keys() & _OWN if form.parts is None else parts.keys() - form.parts):
        if part == quant_config.SMOOTH:
            raise ValueError(f"{name}.{part} is there although the layer is not marked as smoothed")
        raise ValueError(f"{name}.{part} is there, which a layer marked as {title} does not have")
    if form.parts is not None and not isinstance(config.get(quant_config.FULL_PRECISION, False), bool):
        said = config[quant_config.FULL_PRECISION]
        raise ValueError(
            f"{name}: its mark has {quant_config.FULL_PRECISION} = {said!r}, which is neither true nor false"
        )
    try:
        form.check(_Layer(name, weight, config, parts))
    except TypeError as error:
        raise ValueError(f"{name}: {error}") from error


def _check_plain(key: str, tensor: torch.Tensor) -> None:
    if is_gguf(tensor):
        return  # decoded, and looked at, when the layer is loaded
    if tensor.dtype not in WEIGHT_DTYPES:
        raise ValueError(
            f"{key} is {tensor.dtype} and nothing marks how it is quantized; its mark was lost, or the file is in a "
            "format that cannot be read"
        )
    if tensor.numel() <= _SMALL:
        check_finite(key, tensor)


def _check_int8(layer: _Layer) -> None:
    scale = layer.needed(quant_config.SCALE)
    key = f"{layer.name}.{quant_config.SCALE}"
    if layer.weight.ndim != 2:  # a bank of expert weights, which ComfyUI's own layers load
        return check_scale(key, scale, None, LARGEST / 127)
    channels, inputs = layer.weight.shape
    if not scale.is_floating_point() or (scale.numel() != 1 and tuple(scale.shape) not in ((channels,), (channels, 1))):
        raise ValueError(
            f"{key} must hold 1 or {channels} floating point values, one per output channel; it is {scale.dtype} of "
            f"shape {tuple(scale.shape)}"
        )
    check_scale(key, scale, layer.weight, LARGEST / 127)
    _check_rotation(layer.name, quant_config.rotation_group, layer.config, inputs)


def _check_smoothed(layer: _Layer) -> None:
    smooth = layer.needed(quant_config.SMOOTH)
    inputs = layer.weight.shape[-1]
    if not smooth.is_floating_point() or smooth.shape != (inputs,):
        raise ValueError(
            f"{layer.name}.{quant_config.SMOOTH} must hold {inputs} floating point values, one per input channel; it "
            f"is {smooth.dtype} of shape {tuple(smooth.shape)}"
        )
    check_factors(f"{layer.name}.{quant_config.SMOOTH}", smooth)
    _check_int8(layer)


def _check_act16(layer: _Layer) -> None:
    """With smoothing factors or without, as its quant config says."""
    smoothed = layer.config.get(quant_config.SMOOTHED, False)
    if not isinstance(smoothed, bool):
        raise ValueError(f"{layer.name}: its mark has smoothed = {smoothed!r}, which is neither true nor false")
    if not smoothed and quant_config.SMOOTH in layer.parts:
        raise ValueError(f"{layer.name}.{quant_config.SMOOTH} is there although the layer is not marked as smoothed")
    (_check_smoothed if smoothed else _check_int8)(layer)


def _check_rotation(name: str, group_of: Callable[[dict], int | None], config: dict, inputs: int) -> None:
    try:
        ChannelTransform(None, group_of(config)).check(inputs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {error}") from error


def _check_grouped(layer: _Layer) -> None:
    """A weight in codes: as the kernel reads it, with positive scales."""
    group_scale, channels = layer.needed(quant_config.GROUP_SCALE), layer.needed(quant_config.CHANNEL_SCALE)
    codebook, key = layer.parts.get(quant_config.CODEBOOK), f"{layer.name}.{quant_config.GROUP_SCALE}"
    options = quant_config.quant_config_options(layer.config)
    if group_scale.dtype == torch.uint8:
        group_scale = group_scale.view(torch.float8_e4m3fn)
    try:
        codes = GroupedCodes(layer.weight, group_scale, codebook, quant_config.code_group(options))
        codes.check()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{layer.name}: {error}") from error
    rows, inputs = codes.shape
    _check_rotation(layer.name, quant_config.group_size, options, inputs)
    if group_scale.dtype == torch.float8_e4m3fn:
        _check_positive_fp8(key, group_scale)
    else:
        check_scale(key, group_scale, None, LARGEST)
    key = f"{layer.name}.{quant_config.CHANNEL_SCALE}"
    if channels.dtype != torch.float32 or channels.shape != (rows,):
        raise ValueError(
            f"{key} must hold {rows} float32 values, one per output channel; it is {channels.dtype} of shape "
            f"{tuple(channels.shape)}"
        )
    check_scale(key, channels, layer.weight, LARGEST / 127)
    if codebook is not None:
        check_finite(f"{layer.name}.{quant_config.CODEBOOK}", codebook)


def _check_positive_fp8(key: str, scales: torch.Tensor) -> None:
    """There are many of them: one pass, which the largest positive number ends."""
    codes = scales.view(torch.uint8)
    if _largest(codes) > 0x7E and bool(((codes > 0x7E) & (codes != 0x80)).any()):
        raise ValueError(f"{key} holds a NaN, or a value that is negative")


def _check_fp8(layer: _Layer) -> None:
    scale, key = layer.needed("weight_scale"), f"{layer.name}.weight_scale"
    # By one of three axes ComfyUI would make a weight of three.
    if layer.weight.ndim == 2 and (not scale.is_floating_point() or scale.numel() != 1 or scale.ndim > 2):
        raise ValueError(f"{key} must be 1 floating point value; it is {scale.dtype} of shape {tuple(scale.shape)}")
    check_scale(key, scale, layer.weight if scale.numel() == 1 else None, LARGEST / torch.finfo(layer.weight.dtype).max)
    _check_fp8_values(layer)
    _check_input_scale(layer)


def _check_fp8_values(layer: _Layer) -> None:
    if layer.weight.numel() <= _SMALL:
        check_finite(f"{layer.name}.weight", layer.weight)


def _check_input_scale(layer: _Layer) -> None:
    if "input_scale" in layer.parts:
        check_single(f"{layer.name}.input_scale", layer.parts["input_scale"])


def _check_blocks(layer: _Layer, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """The bytes of the block scales, which NVIDIA's layout pads to 128 rows and 4 columns."""
    scale, key = layer.needed("weight_scale"), f"{layer.name}.weight_scale"
    padded = -(-rows // 128) * 128 * -(-columns // 4) * 4
    if scale.dtype not in (dtype, torch.uint8):
        raise ValueError(f"{key} is {scale.dtype}, not {dtype}")
    if layer.weight.ndim == 2 and scale.numel() != padded:
        raise ValueError(f"{key} must hold {padded} values for this weight; its shape is {tuple(scale.shape)}")
    return scale.view(torch.uint8)


def _largest(codes: torch.Tensor) -> int:
    return int(codes.numpy().max()) if codes.numel() else 0  # NumPy's is ten times as fast as PyTorch's


def _check_nvfp4(layer: _Layer) -> None:
    rows, packed = layer.weight.shape[-2:]
    blocks = _check_blocks(layer, rows, packed // 8, torch.float8_e4m3fn)
    _check_positive_fp8(f"{layer.name}.weight_scale", blocks)
    scale, key = layer.needed("weight_scale_2"), f"{layer.name}.weight_scale_2"
    if layer.weight.ndim == 2 and scale.numel() != 1:
        raise ValueError(f"{key} must be 1 value; its shape is {tuple(scale.shape)}")
    check_scale(key, scale, layer.weight if scale.numel() == 1 else None, LARGEST / (448 * 6))
    if "pre_quant_scale" in layer.parts:
        factors, key = layer.parts["pre_quant_scale"], f"{layer.name}.pre_quant_scale"
        if factors.ndim != 1 or not 0 <= 2 * packed - len(factors) < 16:
            raise ValueError(f"{key} must hold one value per input channel; its shape is {tuple(factors.shape)}")
        check_factors(key, factors)
    _check_input_scale(layer)


def _check_mxfp8(layer: _Layer) -> None:
    rows, columns = layer.weight.shape[-2:]
    blocks = _check_blocks(layer, rows, columns // 32, torch.float8_e8m0fnu)
    if _largest(blocks) == 0xFF:
        raise ValueError(f"{layer.name}.weight_scale holds a NaN or Inf")
    _check_fp8_values(layer)
    _check_input_scale(layer)


def _check_w4a4(layer: _Layer) -> None:
    scale, key = layer.needed("weight_scale"), f"{layer.name}.weight_scale"
    rows = layer.weight.shape[-2]
    if layer.weight.ndim == 2 and tuple(scale.shape) != (rows,):
        raise ValueError(f"{key} must hold {rows} values, one per output channel; its shape is {tuple(scale.shape)}")
    check_scale(key, scale, layer.weight if layer.weight.ndim == 2 else None, LARGEST / 7)


# Activations are scaled as they come, so the scale of an older pack's calibration says nothing.
_INT8_PARTS = frozenset(("weight_scale", "input_scale"))

FORMATS: dict[str, _Format] = {
    quant_config.NATIVE_FORMAT: _Format(torch.int8, _INT8_PARTS, _check_int8),
    quant_config.SMOOTHED_FORMAT: _Format(torch.int8, _INT8_PARTS | {quant_config.SMOOTH}, _check_smoothed),
    quant_config.ACT16_FORMAT: _Format(torch.int8, _INT8_PARTS | {quant_config.SMOOTH}, _check_act16),
    **{name: _Format(torch.int8, _CODES, _check_grouped) for name in quant_config.GROUPED_FORMATS},
    "float8_e4m3fn": _Format(torch.float8_e4m3fn, None, _check_fp8),
    "float8_e5m2": _Format(torch.float8_e5m2, None, _check_fp8),
    "mxfp8": _Format(torch.float8_e4m3fn, None, _check_mxfp8),
    "nvfp4": _Format(torch.uint8, None, _check_nvfp4),
    "convrot_w4a4": _Format(torch.int8, None, _check_w4a4),
}
