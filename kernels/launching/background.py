"""Background threads that compile kernels and write files. They neither outlive the process nor delay it."""

import atexit
import itertools
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from time import monotonic, sleep

logger = logging.getLogger(__name__)

# At the end of the process, for running tasks: a kernel takes a second to compile, a locked file five.
_SECONDS_AT_EXIT = 10.0
_STOP = (float("inf"), 0, None)
# Another forward follows at once, or the sampling has ended.
_SECONDS_UNTIL_IDLE, _SECONDS_BETWEEN = 0.3, 0.05


class Foreground:
    """A count of the callers that compute now, and of those that wait for a compilation.

    A thread that compiles holds Python's lock most of the time. A thread that launches kernels would wait for it.
    """

    def __init__(self) -> None:
        self._computing = self._waiting = 0
        self._ended = float("-inf")
        self._lock = threading.Lock()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context: in it, and for a moment after it, no task begins that nobody waits for."""
        with self._lock:
            self._computing += 1
        try:
            yield
        finally:
            with self._lock:
                self._computing -= 1
                self._ended = monotonic()

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Return a context in which tasks begin all the same: the caller may wait for one of them."""
        with self._lock:
            self._waiting += 1
        try:
            yield
        finally:
            with self._lock:
                self._waiting -= 1

    @property
    def is_busy(self) -> bool:
        """Whether tasks should wait."""
        if self._waiting:
            return False
        return self._computing > 0 or monotonic() - self._ended < _SECONDS_UNTIL_IDLE


foreground = Foreground()


class Background:
    """At most so many threads that run tasks in the order of their ranks, the smallest first.

    At exit running tasks are waited for: a thread that the interpreter ends while it compiles may end the process with
    an error. Waiting tasks are dropped, but for those of a negative rank, which are quick. Those of a positive rank do
    not begin while the foreground computes: nobody waits for them.
    """

    def __init__(self, threads: int) -> None:
        self._most = threads
        self._threads: list[threading.Thread] = []
        self._tasks: queue.PriorityQueue = queue.PriorityQueue()
        self._count, self._lock, self._ended = itertools.count(), threading.Lock(), False
        self._open = self._later = 0  # tasks that wait or run; those that `submit_later` holds

    def submit(self, rank: float, task: Callable[[], object]) -> None:
        """Run a task in a thread. What it raises is only logged."""
        with self._lock:
            if self._ended:
                return
            self._tasks.put((rank, next(self._count), task))
            self._open += 1
            if len(self._threads) < min(self._most, self._open):
                thread = threading.Thread(target=self._work, name="INT8 DiT in the background", daemon=True)
                self._threads.append(thread)
                thread.start()
                if len(self._threads) == 1:
                    atexit.register(self.end)

    def submit_later(self, seconds: float, rank: float, task: Callable[[], object]) -> None:
        """Submit a task after so many seconds, unless the process has ended by then."""

        def now() -> None:
            self.submit(rank, task)
            with self._lock:
                self._later -= 1

        timer = threading.Timer(seconds, now)
        timer.daemon = True
        with self._lock:
            self._later += 1
        timer.start()

    @property
    def is_idle(self) -> bool:
        """Whether no task runs or waits."""
        return not (self._open or self._later)

    def end(self) -> None:
        """Wait for the running tasks, and take no more."""
        with self._lock:
            self._ended = True
        left = []
        with suppress(queue.Empty):
            while True:
                left.append(self._tasks.get_nowait())
        for _ in self._threads:
            self._tasks.put(_STOP)
        for thread in self._threads:
            thread.join(_SECONDS_AT_EXIT)
        for rank, _, task in left:
            if rank < 0:
                _run_logged(task)

    def _work(self) -> None:
        while (entry := self._tasks.get())[2] is not None:
            if entry[0] > 0 and foreground.is_busy and not self._ended:
                self._tasks.put(entry)  # another one may come first
                sleep(_SECONDS_BETWEEN)
                continue
            _run_logged(entry[2])
            with self._lock:
                self._open -= 1


def _run_logged(task: Callable[[], object]) -> None:
    try:
        task()
    except Exception:
        logger.debug("INT8 DiT: work in the background failed", exc_info=True)


# Twelve threads make a load no shorter, nor do processes: compiling and loading wait for the same host.
beside_loading = Background(max(1, min(8, (os.cpu_count() or 2) - 1)))
beside_calls = Background(1)
