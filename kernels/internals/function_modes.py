"""Who sees calls of PyTorch's functions: its stack of modes, tensors of subclasses, and nobody."""

from typing import Any

import torch

_C: Any = torch._C

unseen = _C.DisableTorchFunction
"""A context in which calls of PyTorch's functions are shown to no mode and to no tensor of a subclass."""

without_memory: Any = torch.Tensor._make_wrapper_subclass
"""(class, shape, dtype=, device=) -> a tensor of a subclass that has no memory."""

current_stream = getattr(_C, "_cuda_getCurrentRawStream", lambda index: 0)
"""The stream that a GPU computes on now, by its number; 0 for the one that it begins with."""


def is_alone(x: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of `x`, as far as PyTorch says."""
    count = getattr(_C, "_storage_Use_Count", None)
    return count is not None and count(x.untyped_storage()._cdata) <= _OF_ITSELF


_OF_ITSELF = 2  # the tensor, and the storage that asks


def push(mode: Any) -> None:
    """Let a TorchFunctionMode see all calls from now on, in this thread."""
    _C._push_on_torch_function_stack(mode)


def remove(mode: Any, everywhere: bool = False) -> bool:
    """Take a mode off if it is the last one, or with `everywhere` wherever it is. Returns whether it was."""
    pop, at, length = _C._pop_torch_function_stack, _C._get_function_stack_at, _C._len_torch_function_stack()
    if length and at(length - 1) is mode:
        pop()
        return True
    if not everywhere or not any(at(place) is mode for place in range(length)):
        return False
    above = []
    while (found := pop()) is not mode:
        above.append(found)
    for other in reversed(above):
        push(other)
    return True
