"""Memory that a host's plan for the memory of calls must not count on: it outlives a call, or is asked for once.

ComfyUI's compiler records what a call of a block asks for, serves the next calls from that, and ends the process over
what is still held when a call returns. Whoever plans so says how to ask for other memory.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

_outside: Callable[[], AbstractContextManager[Any]] = nullcontext


def ask_outside_plan_by(context: Callable[[], AbstractContextManager[Any]]) -> None:
    """Let `unplanned_memory` be `context()` from now on, in the whole process. For the host, when it loads the pack."""
    global _outside
    _outside = context


def unplanned_memory() -> AbstractContextManager[Any]:
    """A context in which allocations are no part of the host's plan."""
    return _outside()
