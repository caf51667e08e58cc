"""Allocations outside of a host's memory plan: they outlive a call, or are made once.

ComfyUI's compiler records the allocations of a block's call, serves the next calls from that memory, and ends the
process over what is still held when a call returns. A host with such a plan sets the context for other allocations.
A CUDA graph has memory of its own, too.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

_outside: Callable[[], AbstractContextManager[Any]] = nullcontext


def ask_outside_plan_by(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Set the context of `unplanned_memory` for the whole process. The host calls it when it loads the pack."""
    global _outside
    _outside = context


def unplanned_memory() -> AbstractContextManager[Any]:
    """Return a context in which allocations are no part of the host's plan."""
    return _outside()


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph captures the calls on a device now."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
