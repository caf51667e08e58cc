"""How often a process launches the INT8 GEMM."""

from __future__ import annotations

import threading
from collections import Counter
from types import ModuleType


def count_launches(gemm: ModuleType) -> Counter[int]:
    """By the GPU's index, from now on and without those that measure configurations; `gemm` is
    kernels.triton_kernels.gemm.

    They are counted where each launch passes, whatever has prepared it.
    """
    launches: Counter[int] = Counter()
    measuring = threading.local()  # each GPU may have a thread of its own
    launch, choose = gemm.GemmLaunch.__call__, gemm.tuner.choose

    def counting_launch(prepared, q, weight, out, given):
        if not getattr(measuring, "runs", False):
            launches[out.device.index] += 1
        launch(prepared, q, weight, out, given)

    def choose_uncounted(*arguments):
        measuring.runs = True
        try:
            return choose(*arguments)
        finally:
            measuring.runs = False

    gemm.GemmLaunch.__call__, gemm.tuner.choose = counting_launch, choose_uncounted
    return launches
