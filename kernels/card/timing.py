"""Times of work on a device."""

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch


class Stopwatch:
    """Spans of time on a device: device events on a GPU, which must be the current one, the wall clock elsewhere."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def begin(self) -> list:
        """Return a new span."""
        return [self._now()]

    def end(self, span: list) -> None:
        span.append(self._now())

    def is_over(self, span: list) -> bool:
        """Whether the device has reached the end of an ended span."""
        return not self._on_gpu or span[1].query()

    def milliseconds(self, span: list) -> float:
        """Return the length of an ended span, after waiting for the device."""
        begin, end = span
        if not self._on_gpu:
            return (end - begin) * 1e3
        end.synchronize()
        return begin.elapsed_time(end)

    def mean(self, work: Callable[[], object], passes: int = 1) -> float:
        """Return the mean milliseconds of so many calls of `work`, back to back."""
        span = self.begin()
        for _ in range(passes):
            work()
        self.end(span)
        return self.milliseconds(span) / passes

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


_WINDOW_MILLISECONDS = 150.0
# Enough work for a graph to make the gaps between its replays small, in calls or in milliseconds.
_CALLS_PER_GRAPH = 20
_MILLISECONDS_PER_GRAPH = 30.0
_PASSES_ON_CPU = 3


class GraphPool:
    """Memory that CUDA graphs share: no two run at the same time, and nobody reads their results."""

    def __init__(self) -> None:
        self.handle = torch.cuda.graph_pool_handle()

    def renew(self) -> None:
        """Replace the pool after a failed capture, which leaves it unusable. Earlier graphs keep theirs."""
        self.handle = torch.cuda.graph_pool_handle()


class CallSeries:
    """Calls of one method, timed as a model makes them: back to back, on a GPU that has been busy for a while.

    The calls rotate over operands, such as so many copies of a weight that each call finds its own out of cache. On a
    GPU they are one CUDA graph, which takes the host's launches out of the time. A method that cannot be captured
    (because it synchronizes, perhaps) is called in a loop instead, and `looped` is True.

    Args:
        run: takes the index of its operand; must have run once before.
        operands: the number of operands.
        device: where the method runs; a GPU must be the current one at each use.
        pool: memory to share with other series.
    """

    def __init__(
        self, run: Callable[[int], object], operands: int, device: torch.device, pool: GraphPool | None = None
    ) -> None:
        self._run, self._watch = run, Stopwatch(device)
        self._window = _WINDOW_MILLISECONDS if device.type == "cuda" else 0.0
        self._indices = list(range(operands))
        self._graph = None
        if self._window:
            passes_in_time = int(_MILLISECONDS_PER_GRAPH / self._watch.mean(self._call_all))
            self._indices *= max(1, min(math.ceil(_CALLS_PER_GRAPH / operands), passes_in_time))
            self._graph = self._capture(device, pool or GraphPool())
        else:
            self._indices *= _PASSES_ON_CPU
        self.looped = self._window > 0 and self._graph is None

    def _capture(self, device: torch.device, pool: GraphPool) -> torch.cuda.CUDAGraph | None:
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        # A capture that fails does not leave its stream; this does.
        with torch.cuda.stream(stream):
            self._run(0)  # what a library sets up per stream is none of the graph's business
            torch.cuda.synchronize(device)
            try:
                # Other threads of the process may use the GPU meanwhile.
                with torch.cuda.graph(graph, pool=pool.handle, stream=stream, capture_error_mode="thread_local"):
                    self._call_all()
            except RuntimeError:
                pool.renew()
                return None
        return graph

    def _call_all(self) -> None:
        for index in self._indices:
            self._run(index)

    def milliseconds(self) -> float:
        """Return the mean time of a call over a window of uninterrupted work; on a CPU over a few calls."""
        work = self._call_all if self._graph is None else self._graph.replay
        passes = math.ceil(self._window / self._watch.mean(work)) if self._window else 1
        return self._watch.mean(work, passes) / len(self._indices)


def sustained_milliseconds(
    series: Mapping[str, CallSeries], rounds: int, check: Callable[[], None] = lambda: None
) -> dict[str, list[float]]:
    """Return milliseconds per call of each series in each round. `check` runs before each timing and may raise to stop.

    A round times every series once, so that a drifting clock meets all methods alike.
    """
    times: dict[str, list[float]] = {name: [] for name in series}
    for _ in range(rounds):
        for name, calls in series.items():
            check()
            times[name].append(calls.milliseconds())
    return times
