"""PyTorch's stack of function modes, and what else modes over its functions need of its insides."""

from typing import Any

import torch

_C: Any = torch._C

unseen = _C.DisableTorchFunction
"""A context in which neither modes nor tensors of a subclass see calls of PyTorch's functions."""

without_memory: Any = torch.Tensor._make_wrapper_subclass
"""(class, shape, dtype=, device=) -> a tensor of a subclass, without memory."""

unseen_as_subclass = _C.DisableTorchFunctionSubclass
"""A context in which tensors of a subclass do not see calls of PyTorch's functions, and modes do."""


def give_memory(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Let a tensor that `without_memory` made lie in the memory of another one of its form."""
    with unseen(), _C._DisableTorchDispatch(), torch.inference_mode(tensor.is_inference()):
        torch.ops.aten.set_.source_Tensor(tensor, value)


current_stream = getattr(_C, "_cuda_getCurrentRawStream", lambda index: 0)
"""(index of a GPU) -> the number of its current stream, 0 for the default one."""


def is_alone(x: torch.Tensor) -> bool:
    """Whether no other tensor shares the memory of `x`, as far as PyTorch says."""
    count = getattr(_C, "_storage_Use_Count", None)
    return count is not None and count(x.untyped_storage()._cdata) <= 2  # the tensor, and the storage that asks


def push(mode: Any) -> None:
    """Push a TorchFunctionMode on this thread's stack."""
    _C._push_on_torch_function_stack(mode)


def remove(mode: Any, everywhere: bool = False) -> bool:
    """Remove a mode if it is on top of the stack, or with `everywhere` wherever it is. Returns whether it was."""
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
