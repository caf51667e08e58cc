"""Copies of this process that do something and end, or are killed: for what must hold between processes."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable


def fork(work: Callable[[], object]) -> int:
    """Start `work` in a copy of this process; its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        work()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def ended(process: int) -> int:
    """Wait for the end of a copy: 0, 1 if its work raised, or less than 0 if it was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
