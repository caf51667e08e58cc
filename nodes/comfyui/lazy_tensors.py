"""Lazy tensors: parts of a weight that lie nowhere in the host's memory, and are computed where ComfyUI copies them.

With dynamic VRAM, ComfyUI copies a weight to the card when a layer needs it, and into memory that it has pinned. Those
copies are all that a step reads. What a file has in fewer bits need not lie in the host's memory as INT8 beside them.
"""

from functools import cache
from typing import Any

import comfy.memory_management
import comfy.model_management
import comfy.model_patcher
import torch
from comfy.quant_ops import QuantizedTensor

from ...kernels import LazyTensor
from .file_slices import refuse_reads_of

LazyTensor.left_unfilled = staticmethod(refuse_reads_of)


def are_copied(device: torch.device) -> bool:
    """Return whether ComfyUI loads a MODEL for this device with dynamic VRAM, and copies its weights as they are."""
    try:
        dynamic = issubclass(comfy.model_patcher.CoreModelPatcher, comfy.model_patcher.ModelPatcherDynamic)
    except AttributeError:
        return False
    return dynamic and not comfy.model_management.is_device_cpu(device) and copies_right()


@cache
def copies_right() -> bool:
    """Return whether ComfyUI fills a buffer with a weight by copying it, tried with two numbers."""
    values = torch.tensor([[1.5, -2.0]])
    lazy = LazyTensor(values.shape, values.dtype, lambda: values)
    try:
        buffer = torch.zeros(comfy.memory_management.vram_aligned_size([lazy]), dtype=torch.uint8)
        comfy.model_management.cast_to_gathered([lazy], buffer)
        return torch.equal(comfy.memory_management.interpret_gathered_like([values], buffer)[0], values)
    except Exception:  # whatever it is, a load can do without
        return False


def whole_state_dict(root: torch.nn.Module) -> dict[str, Any]:
    """Return the state dict of a module with its lazy tensors, for which its own has placeholders."""
    return root.state_dict() | lazy_pieces(root)


def lazy_pieces(root: torch.nn.Module) -> dict[str, LazyTensor]:
    """Return the lazy tensors that the weights of a module consist of, by name in its state dict."""
    pieces: dict[str, LazyTensor] = {}
    for name, module in root.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor):
            parts = weight.state_dict(f"{name}.weight" if name else "weight").items()
            pieces |= {key: part for key, part in parts if isinstance(part, LazyTensor)}
    return pieces
