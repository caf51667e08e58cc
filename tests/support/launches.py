"""How often a process launches the INT8 GEMM."""

from __future__ import annotations

import threading
from collections import Counter
from types import ModuleType


def count_launches(gemm: ModuleType) -> Counter[int]:
    """By the GPU's index, from now on and without those that ask whether a kernel is exact; `gemm` is
    kernels.linear.gemm.

    They are counted where each launch passes, whatever has prepared it.
    """
    launches: Counter[int] = Counter()
    asking = threading.local()  # each GPU may have a thread of its own
    launch, check = gemm.GemmLaunch.__call__, gemm.check_exact

    def counting_launch(prepared, q, weight, out, given):
        if not getattr(asking, "runs", False):
            launches[out.device.index] += 1
        launch(prepared, q, weight, out, given)

    def check_uncounted(*arguments):
        asking.runs = True
        try:
            return check(*arguments)
        finally:
            asking.runs = False

    gemm.GemmLaunch.__call__, gemm.check_exact = counting_launch, check_uncounted
    return launches
