"""Whether what a model holds in floats is what a trained model can hold, whatever its tensors are called.

The checks of a file know weights, biases and quantized layers by their names. Models have more: modulations, tables,
positions, tokens. What those are, only the built model says.
"""

import json
from collections.abc import Collection, Iterator, Mapping

import torch

from ..comfyui.memory import is_cpu
from ..comfyui.patcher import DIFFUSION_MODEL, CallbacksMP, ModelPatcher, weight_below_patches
from ..comfyui.quantized import QuantizedTensor
from ..comfyui.residency import CALLBACK_KEY
from ..files import int8_mark
from ..files.faults import naming_file
from ..files.gguf_weight import is_gguf
from ..files.values import WEIGHT_DTYPES, check_finite

_AT_ONCE = 1 << 20  # elements; on a card a larger tensor is looked at when it got there
_INDICES = (torch.int64, torch.bool)  # of buffers. No damage makes them of floats, which are shorter.
_MOST_JSON = 1 << 16  # bytes

Stored = Mapping[str, torch.dtype | None]
"""The tensors of a checkpoint: name -> its dtype, where no weight has it and no mark explains it, or else None."""


def stored(tensors: Mapping[str, torch.Tensor]) -> Stored:
    """What is to be known of a checkpoint's tensors after ComfyUI's loader, which empties them."""
    suffix = f".{int8_mark.MARK}"
    marked = {key.removesuffix(suffix) for key in tensors if key.endswith(suffix)}

    def explained(key: str, tensor: torch.Tensor) -> bool:
        return tensor.dtype in WEIGHT_DTYPES or is_gguf(tensor) or key.rpartition(".")[0] in marked or _is_json(tensor)

    return {key: None if explained(key, tensor) else tensor.dtype for key, tensor in tensors.items()}


def _is_json(tensor: torch.Tensor) -> bool:
    """Whether this is an option of a module, which newer ComfyUIs have in files."""
    if tensor.dtype != torch.uint8 or tensor.ndim != 1 or tensor.numel() > _MOST_JSON:
        return False
    try:
        json.loads(tensor.numpy().tobytes())
    except (RecursionError, ValueError):
        return False
    return True


def check_values(model: ModelPatcher, file: str, held: Stored, unexpected: Collection[str]) -> None:
    """Raise ValueError naming the first tensor of a loaded MODEL that no trained model has.

    On a card, large tensors are looked at there when a sampling begins, which then raises it: on the host it would
    take long.

    Args:
        model: just loaded.
        file: its file's name, for what is raised later.
        held: what the file held, by `stored`.
        unexpected: what of it the model has no use for.
    """
    for name in sorted({name for name, dtype in held.items() if dtype} - set(unexpected)):
        _check_index(model.model.diffusion_model, name, held[name])
    on_card = not is_cpu(model.load_device)
    later = []
    for name, tensor in _floats(model.model.diffusion_model, held):
        small = tensor.numel() <= _AT_ONCE
        if small and name in held and name.endswith((".weight", ".bias")):
            continue  # looked at in the file
        if small or not on_card:
            check_finite(name, tensor)
        else:
            later.append(name)

    def check_there(patcher: ModelPatcher) -> None:
        with naming_file(file):
            for name in later:
                check_finite(name, weight_below_patches(patcher, f"{DIFFUSION_MODEL}{name}"))
        later.clear()

    if later:
        model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, check_there)


def _check_index(module: torch.nn.Module, name: str, dtype: torch.dtype | None) -> None:
    """Raise ValueError for a tensor whose dtype no weight has, unless it is a table of indices that the model has."""
    buffer = dict(module.named_buffers()).get(name)
    if dtype not in _INDICES or buffer is None or buffer.dtype != dtype:
        raise ValueError(f"{name} is {dtype}, which no weight is; download or copy the file again")


def _floats(module: torch.nn.Module, held: Stored) -> Iterator[tuple[str, torch.Tensor]]:
    """What a model holds in floats: parameters, and those buffers that come from its file."""
    for name, parameter in module.named_parameters():
        if not isinstance(parameter, QuantizedTensor) and parameter.dtype in WEIGHT_DTYPES:
            yield name, parameter.detach()
    for name, buffer in module.named_buffers():
        if name in held and buffer.dtype in WEIGHT_DTYPES:
            yield name, buffer.detach()  # PixArt's is a parameter
