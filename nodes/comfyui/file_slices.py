"""Tensors in a file as ComfyUI reads them with dynamic VRAM: past the file's mapping, and straight onto the card."""

import threading
from collections.abc import Callable, Iterable
from typing import Any

import comfy.memory_management
import torch

_SLICE, _SOURCE = "_comfy_tensor_file_slice", "_comfy_source_path"


def slices_of(path: str) -> Callable[[torch.Tensor, int], None]:
    """Return a function that tells ComfyUI from which byte of the file a tensor was mapped, whole and contiguous.

    Without dynamic VRAM it does nothing: ComfyUI copies from the mapping.
    """
    slice_of = getattr(comfy.memory_management, "TensorFileSlice", None)
    if slice_of is None or not getattr(comfy.memory_management, "aimdo_enabled", False):
        return lambda tensor, offset: None
    file, lock = open(path, "rb"), threading.Lock()  # noqa: SIM115 - open as long as a tensor is

    def tell(tensor: torch.Tensor, offset: int) -> None:
        of_file = slice_of(file, lock, offset, tensor.nbytes)
        setattr(tensor.untyped_storage(), _SLICE, of_file)

    return tell


def read_into(copy: torch.Tensor, x: torch.Tensor) -> bool:
    """Fill a tensor of a GPU from the file that `x` lies in, if ComfyUI knows the place; return whether it did."""
    read = getattr(comfy.memory_management, "read_tensor_file_slice_into", None)
    if read is None or not copy.is_cuda:
        return False
    return read(x, copy, stream=torch.cuda.current_stream(copy.device))


class _Unfilled:
    """What ComfyUI takes for a place in a file. It raises an error wherever that place is asked for."""

    def __init__(self, error: Exception) -> None:
        self._kind, self._said = type(error), error.args  # a traceback would keep tensors

    def __getattr__(self, name: str) -> Any:
        raise self._kind(*self._said)


def refuse_reads_of(copy: torch.Tensor, error: Exception) -> None:
    """Let ComfyUI raise an error again where it reads pinned memory that was left without numbers: it takes what it
    has pinned for the weight, also after an error."""
    setattr(copy.untyped_storage(), _SLICE, _Unfilled(error))


def forget_source(tensors: Iterable[torch.Tensor]) -> None:
    """Let ComfyUI not know which file tensors were read from: it would hold what is made of them unpinned where the
    disk is fast, as if it could read it there again."""
    for tensor in tensors:
        if hasattr(storage := tensor.untyped_storage(), _SOURCE):
            delattr(storage, _SOURCE)
