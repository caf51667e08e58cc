"""Reading checkpoints: one file in, a state dict in ComfyUI's own conventions out, or one clear error."""

import os

import comfy.model_detection
import comfy.utils
import safetensors
import torch
from comfy.quant_ops import QUANT_ALGOS

from ...kernels import ChannelTransform
from . import int8_mark


def read_checkpoint(path: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """The tensors and metadata of a diffusion model file, with plain module names and a mark on every quantized layer.

    Raises ValueError naming the file, and the tensor where there is one, for anything that cannot be loaded.
    """
    name = os.path.basename(path)
    if not path.lower().endswith((".safetensors", ".sft")):
        raise ValueError(f"{name} is not a safetensors file; other formats can run code when loaded and are not read")
    try:
        with safetensors.safe_open(path, framework="pt"):
            pass
    except safetensors.SafetensorError as error:
        raise ValueError(f"{name} is damaged or incomplete ({error}); download or copy it again") from error

    state_dict, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    metadata = metadata or {}
    try:
        # Once before and once after the prefix is gone, since the metadata may name layers either way.
        state_dict, metadata = comfy.utils.convert_old_quants(state_dict, "", metadata=metadata)
        prefix = comfy.model_detection.unet_prefix_from_state_dict(state_dict)
        without_prefix = comfy.utils.state_dict_prefix_replace(dict(state_dict), {prefix: ""}, filter_keys=True)
        if without_prefix:
            in_file = set(without_prefix)
            state_dict, metadata = comfy.utils.convert_old_quants(without_prefix, "", metadata=metadata)
            state_dict = {k: t for k, t in state_dict.items() if k in in_file or _layer_is_here(k, state_dict)}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name}: the quantization metadata cannot be read ({error!r})") from error
    _mark_unmarked_int8(state_dict, name)
    _check_marks(state_dict, name)
    return state_dict, metadata


def _layer_is_here(key: str, state_dict: dict[str, torch.Tensor]) -> bool:
    """False for the mark of a layer that the metadata names but that lies in another part of the checkpoint."""
    suffix = f".{int8_mark.MARK}"
    return not key.endswith(suffix) or f"{key.removesuffix(suffix)}.weight" in state_dict


def holds_int8(state_dict: dict[str, torch.Tensor]) -> bool:
    """Whether any layer is INT8 already."""
    marks = (tensor for key, tensor in state_dict.items() if key.endswith(f".{int8_mark.MARK}"))
    return any(int8_mark.decode_mark(mark).get("format") in int8_mark.INT8_FORMATS for mark in marks)


def _mark_unmarked_int8(state_dict: dict[str, torch.Tensor], name: str) -> None:
    """Older node packs wrote int8 weights and a scale with no mark."""
    for key in [key for key, tensor in state_dict.items() if key.endswith(".weight") and tensor.dtype == torch.int8]:
        layer = key.removesuffix(".weight")
        if f"{layer}.{int8_mark.MARK}" in state_dict:
            continue
        scale = state_dict.pop(f"{layer}.scale_weight", None)
        if scale is not None:
            state_dict.setdefault(f"{layer}.{int8_mark.SCALE}", scale)
        if f"{layer}.{int8_mark.SCALE}" not in state_dict:
            raise ValueError(f"{name}: the int8 weight {key} has no scale ({layer}.{int8_mark.SCALE} is missing)")
        state_dict[f"{layer}.{int8_mark.MARK}"] = int8_mark.encode_mark()


def _check_marks(state_dict: dict[str, torch.Tensor], name: str) -> None:
    known = {*QUANT_ALGOS, *int8_mark.INT8_FORMATS}
    for key in [key for key in state_dict if key.endswith(f".{int8_mark.MARK}")]:
        try:
            mark = int8_mark.decode_mark(state_dict[key])
        except ValueError as error:
            raise ValueError(f"{name}: {key} is {error}") from error
        if not isinstance(mark.get("format"), str) or mark["format"] not in known:
            raise ValueError(f"{name}: {key} names the quantization format {mark.get('format')!r}, which is unknown")
        if mark["format"] in int8_mark.INT8_FORMATS:
            _check_int8_layer(state_dict, key.removesuffix(f".{int8_mark.MARK}"), mark, name)


def _check_int8_layer(state_dict: dict[str, torch.Tensor], layer: str, mark: dict, name: str) -> None:
    weight = state_dict.get(f"{layer}.weight")
    scale = state_dict.get(f"{layer}.{int8_mark.SCALE}")
    smooth = state_dict.get(f"{layer}.{int8_mark.SMOOTH}")
    if weight is None:
        raise ValueError(f"{name}: {layer}.weight is missing although {layer} is marked as INT8")
    if weight.dtype != torch.int8:
        raise ValueError(f"{name}: {layer}.weight is {weight.dtype} although {layer} is marked as INT8")
    if scale is None:
        raise ValueError(f"{name}: {layer}.{int8_mark.SCALE} is missing")
    if weight.ndim != 2:
        return  # a bank of expert weights, which ComfyUI's own layers load
    channels, inputs = weight.shape
    if not scale.is_floating_point() or (scale.numel() != 1 and tuple(scale.shape) not in ((channels,), (channels, 1))):
        raise ValueError(
            f"{name}: {layer}.{int8_mark.SCALE} must hold 1 or {channels} floating point values, one per output "
            f"channel; it is {scale.dtype} of shape {tuple(scale.shape)}"
        )
    if (mark["format"] == int8_mark.SMOOTHED_FORMAT) != (smooth is not None):
        state = "missing" if smooth is None else "there although the layer is not marked as smoothed"
        raise ValueError(f"{name}: {layer}.{int8_mark.SMOOTH} is {state}")
    if smooth is not None and (not smooth.is_floating_point() or smooth.shape != (inputs,)):
        raise ValueError(
            f"{name}: {layer}.{int8_mark.SMOOTH} must hold {inputs} floating point values, one per input channel; "
            f"it is {smooth.dtype} of shape {tuple(smooth.shape)}"
        )
    for tensor_name, tensor in ((int8_mark.SCALE, scale), (int8_mark.SMOOTH, smooth)):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"{name}: {layer}.{tensor_name} holds a NaN or Inf")
    if smooth is not None and not bool((smooth > 0).all()):
        raise ValueError(f"{name}: {layer}.{int8_mark.SMOOTH} holds a value that is not positive")
    try:
        ChannelTransform(None, int8_mark.rotation_group(mark)).check(inputs)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {layer}: {error}") from error
