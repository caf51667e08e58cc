"""Weights that stored ones stand for and that lie nowhere in the host's memory: each is computed where ComfyUI copies
it."""

import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels import LazyTensor, check_channels, compile_ahead, dequantize_gguf, naming_layer
from ..comfyui.quantized import layout_of, stored, to_device
from ..files.errors import naming_file
from ..files.holding import STORED_KINDS
from ..files.reading.values import check_finite
from ..linears.int8_weight import int8_weight
from ..linears.weight_form import known_form


def lazy_int8(
    file: str, layer: str, weight: QuantizedTensor, device: torch.device, dtype: torch.dtype
) -> QuantizedTensor:
    """Return the INT8 weight [N, K] that a stored one of a file's layer stands for, in floats of `dtype` to ComfyUI.

    Each copy of it is computed on `device`. Its first one raises ValueError, as a load would, for a row that holds what
    no weight does.
    """
    kind = STORED_KINDS[layout_of(weight)]
    assert kind.held is not None
    held = kind.held(weight, dtype, True, None)
    known = kind.scale(held) if kind.finding is None else None
    compile_ahead((), None, dtype, device, kind.calls(held))

    def scale_of(there: QuantizedTensor | None = None) -> torch.Tensor:
        nonlocal known
        if known is None:
            scale = kind.scale(to_device(held, device) if there is None else there)
            with naming_file(file), naming_layer(layer):
                check_channels(scale.flatten())
                check_finite(f"{layer}.weight", 127 * scale)  # 127 of it is the largest value
            known = scale.to("cpu")
        return known

    def numbers() -> torch.Tensor:
        there = to_device(held, device)
        expand, arguments = kind.expansion(there, scale_of(there).to(device), None)
        return expand.at_once(*arguments)

    q, scale = LazyTensor(held.shape, torch.int8, numbers), known
    if scale is None:
        scale = LazyTensor((len(q), 1), torch.float32, scale_of)
    return int8_weight(q, scale, dtype, *known_form(held).unsmoothed)


def lazy_floats(file: str, key: str, weight: QuantizedTensor, device: torch.device, dtype: torch.dtype) -> LazyTensor:
    """Return the floats [N, K] that a file's weight in GGUF's blocks stands for.

    Each copy of them is computed on `device`, by plain PyTorch: they are few. Its first one raises ValueError, as a
    load would, for what no weight holds.
    """
    checked = False

    def numbers() -> torch.Tensor:
        nonlocal checked
        values = dequantize_gguf.reference(to_device(stored(weight), device), weight.params.gguf_format, dtype)
        if not checked:
            with naming_file(file):
                check_finite(key, values)
            checked = True
        return values

    return LazyTensor(weight.shape, dtype, numbers)
