"""Work beside that of the callers: its order and its end, kernels that are compiled so, and whether calls find them."""

import contextlib
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace

import pytest
import torch
from triton.runtime import errors as runtime_errors

from kernels.ahead import calls_ahead as ahead
from kernels.card import device as card_device
from kernels.card.timing import Stopwatch
from kernels.internals import triton_runtime
from kernels.launching import background as background_module
from kernels.launching import launching
from kernels.launching.background import Background, foreground
from kernels.launching.launching import Launch, StandIn
from kernels.linear import gemm
from kernels.linear.gemm_kernel import Operands
from kernels.linear.linear_reference import BlockForm, LinearForm
from kernels.linear.rows import launch_quantize_activations
from kernels.linear.tiles import GemmConfig
from kernels.linear.tuning import Tuner
from kernels.weights.gguf_kernels import launch_gguf_channel_scales
from kernels.weights.weight_ops import expand_codes, expand_gguf, gguf_channel_scales, quantize_gguf
from kernels.weights.weight_reference import GroupedCodes
from support.tensors import DEVICE, random_float

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


@pytest.fixture
def asked(monkeypatch):
    """Which launches are to be compiled, each with who compiles it and its rank; none is."""
    found = []
    monkeypatch.setattr(Launch, "compile_by", lambda launch, by, rank, *given: found.append((by, rank, launch)))
    return found


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


def test_what_the_first_kernel_waits_for_is_begun_for_a_gpu(monkeypatch):
    begun = []
    monkeypatch.setattr(ahead, "takes_kernels", lambda device: device.type == "cuda")
    monkeypatch.setattr(ahead, "beside_loading", AT_ONCE)
    monkeypatch.setattr(triton_runtime, "check_driver", lambda: begun.append("driver"))
    monkeypatch.setattr(triton_runtime, "triton_key", lambda: begun.append("hash"))
    ahead.prepare_compiling(CPU)
    assert not begun
    ahead.prepare_compiling(GPU)
    assert begun == ["driver", "hash"]


def test_a_driver_that_fails_while_comfyui_starts_is_asked_again(monkeypatch):
    """Another pack may bring the compiler that it needs."""

    def fails():
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(ahead, "takes_kernels", lambda device: True)
    card_device.triton_error.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(triton_runtime, "check_driver", fails)
        with pytest.raises(RuntimeError, match="no C compiler"):
            ahead.prepare(GPU)
    monkeypatch.setattr(triton_runtime, "check_driver", lambda: None)
    assert card_device.triton_error() is None
    card_device.triton_error.cache_clear()


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


def operands_of(make, m, n, k, passes=1, bias=None):
    tensors = make((m, passes * k), torch.int8), make((n, k), torch.int8), make((m,), torch.float32)
    return Operands(*tensors, make((n,), torch.float32), bias, make((m, n), torch.bfloat16))


def real(shape, dtype):
    return torch.zeros(shape, dtype=dtype)


def stand_in(shape, dtype):
    return StandIn(shape, dtype, CPU)


@pytest.mark.parametrize("config", (GemmConfig(64, 64, 64, 4, 4, 2), GemmConfig(32, 64, 64, 4, 4, 2, split_k=2)))
@pytest.mark.parametrize("m, other_m", ((64, 4096), (33, 4095)))
def test_calls_find_the_launch_that_stand_ins_asked_for(config, m, other_m):
    launches = [
        gemm.GemmLaunch(config, operands_of(make, rows, 128, 256))._launch
        for make, rows in ((real, m), (stand_in, other_m))
    ]
    assert launches[0] is launches[1]


def test_calls_find_the_quantizer_that_stand_ins_asked_for(asked):
    for make in (stand_in, real):
        x, made = make((4096, 256), torch.bfloat16), [make((4096, 256), torch.int8), make((4096,), torch.float32)]
        smooth = make((256,), torch.float32)
        launch_quantize_activations((x, smooth), 64, 8).compile_by(None, 0, (x, smooth), made)
    assert asked[0][-1] is asked[1][-1]


@pytest.fixture
def card(monkeypatch):
    """Imitates what is asked of a GPU: its capability and multiprocessors can be set."""
    card = SimpleNamespace(multi_processor_count=82, major=8, minor=6)
    monkeypatch.delenv("INT8_DIT_TUNING", raising=False)
    monkeypatch.setattr(triton_runtime, "COMPILES_ALONE", True)
    monkeypatch.setattr(ahead, "beside_loading", AT_ONCE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    answers = {"current_device": 0, "get_device_name": "a card", "is_current_stream_capturing": False}
    monkeypatch.setattr(launching, "current_device", lambda: 0)
    for name, value in {**answers, "current_stream": 0, "default_stream": 0}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    return card


@pytest.mark.parametrize("calls_a_try", (1, 5))
def test_calls_try_tiles_and_settle(card, monkeypatch, calls_a_try):
    """Each call launches once, the rule's tile first, and one of some asks the tuner; when all is known, calls are
    launched past it."""
    card.major, card.minor, card.multi_processor_count = 9, 0, 132
    launched, compiled = [], []

    def run(launch, grid, *arguments):
        launch.is_compiled = True
        launched.append(launch)

    def compile_by(launch, threads, rank, *given):
        compiled.append((rank, launch))
        launch.is_compiled = True

    tuner = Tuner(Stopwatch(CPU))
    tuner.seconds_before, tuner.calls_a_try, asked = 0.0, calls_a_try, []
    run_by_tuner = tuner.run
    monkeypatch.setattr(tuner, "run", lambda *given: asked.append(1) or run_by_tuner(*given))
    monkeypatch.setattr(tuner, "_known", lambda key: None)
    monkeypatch.setattr(tuner, "_keep", lambda key, tried: None)
    monkeypatch.setattr(gemm, "tuner", tuner)
    monkeypatch.setattr(Launch, "__call__", run)
    monkeypatch.setattr(Launch, "compile_by", compile_by)
    on_card = partial(StandIn, device=GPU)
    q, weight, scale, weight_scale, _, out = operands_of(on_card, 4096, 4608, 1024)
    tuned, calls_made = gemm.TunedGemm(), 0
    while tuned._aligned is None and calls_made < 5000:
        tuned((q, scale, weight, weight_scale, None), (out,))
        calls_made += 1
        assert len(launched) == calls_made
    assert len(asked) == -(-calls_made // calls_a_try)
    candidates = gemm.gemm_candidates((9, 0), 132, 4096, 4608, 1024)
    assert tuned._aligned is not None and tuner.measured == 1 and not tuned._tried
    assert launched[0] is gemm.GemmLaunch(candidates[0], Operands(q, weight, scale, weight_scale, None, out))._launch
    kernels = {config.kernel for config in candidates}
    assert len({*launched}) == len(kernels) == len(compiled) > 2 and compiled[0][0] == 0
    tuned((q, scale, weight, weight_scale, None), (out,))
    assert launched[-1] is tuned._aligned._launch


def test_what_a_models_linears_launch_is_compiled(card, monkeypatch, asked):
    """The quantizers, and the rule's tile for images and for texts; the largest first, each once."""
    last, later = [], []
    monkeypatch.setattr(Background, "submit_later", lambda by, seconds, rank, task: later.append((seconds, task)))
    monkeypatch.setattr(gemm.tuner, "_known", lambda key: None)
    monkeypatch.setattr(ahead, "beside_loading", SimpleNamespace(submit=lambda rank, task: last.append((rank, task))))
    forms = [LinearForm(4608, 12288, True), LinearForm(4608, 4608, rotation_group=256), LinearForm(64, 2520)]
    ahead._compile(forms, None, torch.bfloat16, GPU)
    names = [launch._kernel.fn.__name__ for *_, launch in asked]
    assert names[:3] == ["quantize_rows_kernel"] * 3
    assert len(names) == 7 and set(names[3:]) <= {"int8_gemm_kernel", "ring_gemm_kernel"}  # the second where Gluon is
    assert [rank for _, rank, _ in asked] == [1, 1, 1, 1, 2, 1, 2]
    ((rank, others),) = last
    assert rank > 2
    others()
    ((seconds, others),) = later
    assert seconds > 0 and len(asked) == 7
    others()
    assert len(asked) == 11 and {by for by, *_ in asked[7:]} == {ahead.beside_calls}


def test_what_was_asked_for_is_not_looked_through_again(monkeypatch):
    asked = []
    monkeypatch.setattr(ahead, "fused_obstacle", lambda device: None)
    monkeypatch.setattr(ahead, "beside_loading", AT_ONCE)
    monkeypatch.setattr(ahead, "_compile", lambda *given: asked.append(given))
    forms = [LinearForm(128, 256), LinearForm(256, 128)]
    for given in (forms, forms[::-1], forms[:1]):
        ahead.compile_ahead(given, None, torch.bfloat16, GPU)
    ahead.compile_ahead(forms, None, torch.bfloat16, CPU)
    assert [forms for forms, *_ in asked] == [tuple(forms), tuple(forms[:1])] and asked[0][2:4] == (torch.bfloat16, GPU)


BLOCKS = [
    BlockForm(512, LinearForm(1536, 512), LinearForm(512, 2048), 128, False, False),
    BlockForm(
        512, LinearForm(1536, 512, False, False, True, 256), LinearForm(512, 1536, activation_bits=16), 64, True, True
    ),
]


@pytest.mark.parametrize("block", BLOCKS)
def test_what_blocks_launch_is_asked_for(card, asked, block):
    ahead._compile((), block, torch.bfloat16, GPU)
    launches = [launch for *_, launch in asked]
    names = [launch._kernel.fn.__name__ for launch in launches]
    fused = ["norm_quantize_kernel", "gated_residual_kernel", "activate_quantize_kernel"]
    assert names == [*fused, "norm_rope_kernel", "norm_rope_kernel"] and len(set(launches)) == 5


def stored_weights():
    """What makes INT8 of weights for each product, and its arguments."""
    yield expand_gguf, (torch.empty(64, 8 * 34, dtype=torch.uint8), "Q8_0", torch.empty(64, 1), None)
    for packed, levels in ((128, torch.empty(16)), (128, None), (192, None)):
        codes, scale = torch.empty(64, packed, dtype=torch.int8), torch.empty(64, 16).to(torch.float8_e4m3fn)
        yield expand_codes, (GroupedCodes(codes, scale, levels, 16), torch.empty(64, 1), torch.empty(64, 1), None)


@pytest.mark.parametrize("op, given", list(stored_weights()))
def test_other_calls_are_asked_for_first(card, asked, op, given):
    """As they launch with numbers."""
    ahead._compile((), BLOCKS[0], torch.bfloat16, GPU, (op.called_with(*given),))
    tensors = op._tensors(op.flat(given))
    layout, out = op.launch(*op.flat(given)), torch.empty(64, 256, dtype=torch.int8)
    read = [StandIn(x.shape, x.dtype, GPU) for x in layout.operands(tensors, [out])]
    assert asked[0][1:] == (1, layout.launcher.prepared(layout.form, read, layout.numbers)) and len(asked) == 6


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU")
@pytest.mark.parametrize("samples", (1, 2))
@pytest.mark.parametrize("block", BLOCKS)
def test_what_was_compiled_ahead_is_what_blocks_launch(monkeypatch, block, samples):
    """With modulations that are parts of one tensor, and heads that are parts of one."""
    compiled, first = [], Launch.first

    def watched(launch, grid, *arguments):
        compiled.append(launch.is_compiled)
        first(launch, grid, *arguments)

    monkeypatch.setattr(ahead, "beside_loading", AT_ONCE)
    ahead._compile((), block, torch.bfloat16, GPU)
    monkeypatch.setattr(Launch, "first", watched)

    def real(*shape, dtype=torch.bfloat16):
        shape = (samples, *shape[1:]) if len(shape) in (3, 4) else shape
        if len(shape) == 4:  # of queries, keys and values
            return torch.randn(*shape[:2], 3, *shape[2:], dtype=dtype, device=DEVICE)[:, :, 1]
        if len(shape) == 3 and shape[1] == 1:
            return torch.randn(*shape[:2], 4 * shape[2], dtype=dtype, device=DEVICE).chunk(4, -1)[1]
        return torch.rand(*shape, dtype=dtype, device=DEVICE) + 0.5

    for op, arguments in ahead._calls((), block, real):
        op(*arguments)
    assert compiled == [True] * 5
