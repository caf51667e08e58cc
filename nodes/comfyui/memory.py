"""Devices, their memory, and the cancel button."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import comfy.model_management
import torch

if TYPE_CHECKING:  # a type checker does not see ComfyUI
    outside_memory_plan: Callable[[], AbstractContextManager[Any]]
else:
    try:
        from comfy.model_prefetch import pause_malloc_graph as outside_memory_plan
    except ImportError:  # this ComfyUI plans no memory
        outside_memory_plan = nullcontext

Cancelled = comfy.model_management.InterruptProcessingException
"""What ComfyUI raises where the user has cancelled."""

OUT_OF_MEMORY: type[BaseException] = comfy.model_management.OOM_EXCEPTION


def default_device() -> torch.device:
    """The device that ComfyUI computes on where nothing says otherwise."""
    return comfy.model_management.get_torch_device()


def is_cpu(device: torch.device) -> bool:
    """Whether weights are where they are computed with as soon as they are loaded."""
    return comfy.model_management.is_device_cpu(device)


def all_devices() -> list[torch.device]:
    """Every device that ComfyUI may compute on."""
    return comfy.model_management.get_all_torch_devices()


def total_memory(device: torch.device) -> int:
    """Bytes that a device has."""
    return comfy.model_management.get_total_memory(device)


def reserved_for_inference() -> int:
    """Bytes that ComfyUI keeps free of weights."""
    return comfy.model_management.minimum_inference_memory()


def free(needed: int, device: torch.device) -> None:
    """Let ComfyUI unload models until so many bytes of a GPU are free."""
    if not is_cpu(device):
        comfy.model_management.free_memory(needed, device)


def dtype_computed_in(device: torch.device, supported: Sequence[torch.dtype]) -> torch.dtype:
    """The dtype that ComfyUI computes in on a device, of those that a model supports."""
    return comfy.model_management.unet_manual_cast(None, device, supported)


def moved(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None, copy: bool = False
) -> torch.Tensor:
    """A tensor on a device, of a dtype (None: its own); a new one where `copy` says so."""
    return comfy.model_management.cast_to_device(tensor, device, dtype, copy=copy)


def check_cancelled() -> None:
    """Raise Cancelled where the user has pressed the button."""
    comfy.model_management.throw_exception_if_processing_interrupted()


def is_training() -> bool:
    """Whether a node trains a model at the moment."""
    return bool(comfy.model_management.in_training)


def current(device: torch.device) -> AbstractContextManager:
    """Inside, a GPU is the one that kernels are launched on."""
    return comfy.model_management.cuda_device_context(device)
