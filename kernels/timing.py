"""Measuring how long device work takes."""

import time
from collections.abc import Callable

import torch

# Larger than any card's L2: overwriting it before each run leaves no operand in cache, and keeps the device busy while
# the host queues the run, so that launch latency stays out of the figure.
_FLUSH_BYTES = 256 << 20


def median_milliseconds(run: Callable[[], object], device: torch.device, repetitions: int) -> float:
    """Median time of one `run()` in milliseconds, after one call that compiles and warms up.

    On a GPU the time between device events, each run starting with a cold L2; on a CPU wall clock.
    """
    run()
    if device.type != "cuda":
        times = []
        for _ in range(repetitions):
            begin = time.perf_counter()
            run()
            times.append((time.perf_counter() - begin) * 1e3)
        return sorted(times)[repetitions // 2]
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.int8, device=device)
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repetitions)]
    for start, end in events:
        flush.zero_()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize(device)
    return sorted(start.elapsed_time(end) for start, end in events)[repetitions // 2]
