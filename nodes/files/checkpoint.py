"""Reading checkpoints: one file in, tensors in ComfyUI's own conventions out, or one clear error."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import comfy.utils
import safetensors
import torch
from comfy.quant_ops import QUANT_ALGOS

from ...kernels import ChannelTransform
from . import int8_mark
from .contents import BRANCHES, Checkpoint
from .dialects import translated


def read_checkpoint(path: str, branch: str = BRANCHES[0], base: Callable[[], Checkpoint] | None = None) -> Checkpoint:
    """A diffusion model file with plain module names and a mark on every quantized layer.

    `branch` and `base` are Checkpoint's, for files that hold two models or a part of one.

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

    tensors, metadata = comfy.utils.load_torch_file(path, return_metadata=True)
    checkpoint = translated(Checkpoint(name, tensors, metadata or {}, branch, base))
    _check_marks(checkpoint)
    return checkpoint


def holds_int8(tensors: Mapping[str, Any]) -> bool:
    """Whether any layer is INT8 already. Of the tensors only the marks are looked at."""
    marks = (tensor for key, tensor in tensors.items() if key.endswith(f".{int8_mark.MARK}"))
    return any(int8_mark.decode_mark(mark).get("format") in int8_mark.INT8_FORMATS for mark in marks)


def _check_marks(checkpoint: Checkpoint) -> None:
    name, tensors = checkpoint.name, checkpoint.tensors
    known = {*QUANT_ALGOS, *int8_mark.INT8_FORMATS}
    for key in [key for key in tensors if key.endswith(f".{int8_mark.MARK}")]:
        try:
            mark = int8_mark.decode_mark(tensors[key])
        except ValueError as error:
            raise ValueError(f"{name}: {key} is {error}") from error
        if not isinstance(mark.get("format"), str) or mark["format"] not in known:
            raise ValueError(f"{name}: {key} names the quantization format {mark.get('format')!r}, which is unknown")
        if mark["format"] in int8_mark.INT8_FORMATS:
            _check_int8_layer(checkpoint, key.removesuffix(f".{int8_mark.MARK}"), mark)


def _check_int8_layer(checkpoint: Checkpoint, layer: str, mark: dict) -> None:
    name, tensors = checkpoint.name, checkpoint.tensors
    weight = tensors.get(f"{layer}.weight")
    scale = tensors.get(f"{layer}.{int8_mark.SCALE}")
    smooth = tensors.get(f"{layer}.{int8_mark.SMOOTH}")
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
