"""Work beside that of the callers: its order and its end, and kernels that are compiled so."""

import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import errors as runtime_errors

from kernels.internals import triton_runtime
from kernels.launching import background as background_module
from kernels.launching import launching
from kernels.launching.background import Background, foreground
from kernels.launching.launching import Launch, StandIn
from kernels.weights.gguf_kernels import launch_gguf_channel_scales
from kernels.weights.weight_ops import gguf_channel_scales, quantize_gguf
from support.tensors import random_float

pytestmark = pytest.mark.usefixtures("nothing_kept")

PROJECT = Path(__file__).resolve().parents[3]
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_tasks_are_done_by_their_ranks_and_an_error_ends_nothing():
    background, begins, done = Background(1), threading.Event(), []
    background.submit(0, begins.wait)
    for rank in (3, 1, 2):
        background.submit(rank, lambda rank=rank: done.append(rank) or 1 / (rank - 1))
    last = threading.Event()
    background.submit(5, last.set)
    begins.set()
    assert last.wait(60) and done == [1, 2, 3]


def test_a_task_does_not_wait_for_one_thread_where_more_may_work():
    background, meeting = Background(2), threading.Barrier(3)
    background.submit(0, lambda: meeting.wait(60))
    while background._tasks.qsize():
        sleep(0.001)
    background.submit(0, lambda: meeting.wait(60))
    meeting.wait(60)
    background.end()


@pytest.mark.parametrize(
    "rank, computes, waits, begins",
    ((1, True, False, False), (0, True, False, True), (1, True, True, True), (1, False, False, True)),
)
def test_what_nobody_waits_for_begins_when_nobody_computes(monkeypatch, rank, computes, waits, begins):
    slept, done = threading.Event(), threading.Event()
    monkeypatch.setattr(background_module, "_SECONDS_UNTIL_IDLE", 0.0)
    monkeypatch.setattr(background_module, "sleep", lambda seconds: slept.set())
    tasks = Background(1)
    with contextlib.ExitStack() as stack:
        for is_so, within in ((computes, foreground.computing), (waits, foreground.waiting)):
            if is_so:
                stack.enter_context(within())
        tasks.submit(rank, done.set)
        assert (done if begins else slept).wait(60)
        assert done.is_set() == begins
    assert done.wait(60)
    tasks.end()


def test_what_waits_for_an_idle_time_delays_no_end(monkeypatch):
    monkeypatch.setattr(background_module, "sleep", lambda seconds: None)
    tasks, done = Background(1), []
    with foreground.computing():
        tasks.submit(1, lambda: done.append(1))
        tasks.submit(-1, lambda: done.append(-1))
        tasks.end()
    assert -1 in done


def test_kernels_are_compiled_while_a_first_launch_waits():
    """One of them may be that kernel."""
    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *arguments, **named: seen.append(foreground.is_busy)

    launch = Launch(Kernel(), {}, {})
    with foreground.computing():
        assert foreground.is_busy
        launch.first((1, 1))
        assert foreground.is_busy
    assert seen == [False]


def test_a_task_for_later_begins_then():
    background, done, begins = Background(1), threading.Event(), monotonic()
    assert background.is_idle
    background.submit_later(0.2, 0, done.set)
    assert not background.is_idle
    assert done.wait(60) and monotonic() - begins >= 0.2
    background.end()
    assert background.is_idle


def test_at_the_end_only_what_is_quick_is_still_done():
    background, begun, goes_on, done = Background(1), threading.Event(), threading.Event(), []

    def first():
        begun.set()
        goes_on.wait()
        done.append("under way")

    background.submit(0, first)
    assert begun.wait(60)
    background.submit(1, lambda: done.append("compiled"))
    background.submit(-1, lambda: done.append("written"))
    ending = threading.Thread(target=background.end)
    ending.start()
    while not background._ended:
        pass
    goes_on.set()
    ending.join(60)
    background.submit(-1, lambda: done.append("late"))
    assert done == ["under way", "written"]


EXITS = """
import time
from kernels.launching.background import Background

background = Background(2)
for number in range(9):
    background.submit(number, lambda number=number: (time.sleep(0.5), print(f"{number}\\n", end="", flush=True)))
while background._tasks.qsize() > 7:
    time.sleep(0.01)
"""


@pytest.mark.slow
def test_a_process_ends_though_a_thread_compiles():
    ended = subprocess.run([sys.executable, "-c", EXITS], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0 and not ended.stderr
    assert sorted(ended.stdout.split()) == ["0", "1"]


class Kernel:
    """Stands in for Triton's: it is compiled alone or by a launch, once."""

    def __init__(self, error=None):
        self.compiled, self.error = [], error

    def warmup(self, *arguments, grid, **named):
        self.compiled.append("alone")
        if self.error is not None:
            raise self.error

    def __getitem__(self, grid):
        return lambda *arguments, **named: self.compiled.append("launched")


@pytest.fixture
def launch(monkeypatch):
    monkeypatch.setattr(launching, "COMPILES_ALONE", True)
    monkeypatch.setattr(launching, "compile_launcher", lambda compiled: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    return Launch(Kernel(), {}, {})


AT_ONCE = SimpleNamespace(submit=lambda rank, task: task())


def test_a_kernel_is_compiled_once_whoever_asks(launch):
    waiting = []
    late = SimpleNamespace(submit=lambda rank, task: waiting.append(task))
    for _ in range(3):
        launch.compile_by(late, 0, CPU)
    assert len(waiting) == 1 and not launch.is_compiled
    launch.first((1, 1))  # does not wait for a thread that has not begun
    waiting[0]()
    assert launch.is_compiled and launch._kernel.compiled == ["launched"]


def test_threads_that_compile_do_not_all_read_triton_itself(monkeypatch):
    """Triton asks in each thread which version it is, until one knows."""
    reading, at_once, known = [], [], []

    def key():
        if not known:
            reading.append(1)
            at_once.append(len(reading))
            sleep(0.02)
            reading.pop()
            known.append(True)

    monkeypatch.setattr(triton_runtime, "triton_key", key)
    threads = [threading.Thread(target=triton_runtime.compile_alone, args=(Kernel(), (), {})) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert at_once == [1]


def test_a_launch_does_not_read_triton_beside_a_thread_that_does(launch):
    first = threading.Thread(target=launch.first, args=((1, 1),))
    with triton_runtime.hashing:
        first.start()
        first.join(0.05)
        assert not launch._kernel.compiled
    first.join()
    assert launch._kernel.compiled == ["launched"]


def test_what_does_not_fit_the_card_is_said_at_the_launch(launch):
    launch._kernel.error = runtime_errors.OutOfResources(200, 100, "shared memory")
    launch.compile_by(AT_ONCE, 0, CPU)
    assert launch.is_compiled
    with pytest.raises(runtime_errors.OutOfResources):
        launch.first((1, 1))


def test_what_failed_beside_the_calls_is_tried_again_by_one(launch):
    launch._kernel.error = OSError(28, "No space left on device")
    with pytest.raises(OSError):
        launch.compile_by(AT_ONCE, 0, CPU)
    launch.first((1, 1))
    assert launch._kernel.compiled == ["alone", "launched"]


def test_calls_at_once_do_not_wait_for_the_kernel(monkeypatch, asked):
    """They ask for it, in the form that they launch, and compute in plain PyTorch until it is there."""
    blocks = StandIn((8, 68), torch.uint8, GPU)
    monkeypatch.setattr(launching, "COMPILES_ALONE", True)
    layout = launch_gguf_channel_scales((blocks,), "Q8_0")
    assert not layout.need_not_wait((blocks,), [((8,), torch.float32)])
    ((_, _, launch),) = asked
    launch.is_compiled = True
    assert layout.need_not_wait((blocks,), [((8,), torch.float32)]) and [each for *_, each in asked] == [launch] * 2


@pytest.mark.parametrize("is_compiled", (True, False))
def test_calls_at_once_compute_the_same(monkeypatch, interpreter, is_compiled):
    plain, reference = [], gguf_channel_scales.reference
    monkeypatch.setattr(launching.Layout, "need_not_wait", lambda layout, tensors, results: is_compiled)
    monkeypatch.setattr(gguf_channel_scales, "reference", lambda *given: plain.append(1) or reference(*given))
    blocks = quantize_gguf(random_float(8, 64), "Q8_0")
    assert torch.equal(gguf_channel_scales.at_once(blocks, name="Q8_0"), gguf_channel_scales(blocks, "Q8_0"))
    assert plain == [1] * (not is_compiled)
