"""What a model will launch, compiled before its weights are there: what is asked for, and whether calls find it."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch

from kernels.ahead import calls_ahead as ahead
from kernels.card import device as card_device
from kernels.card.timing import Stopwatch
from kernels.internals import triton_runtime
from kernels.launching import launching
from kernels.launching.background import Background
from kernels.launching.launching import Launch, StandIn
from kernels.linear import gemm
from kernels.linear.gemm_kernel import Operands
from kernels.linear.linear_reference import BlockForm, LinearForm
from kernels.linear.rows import launch_quantize_activations
from kernels.linear.tiles import GemmConfig
from kernels.linear.tuning import Tuner
from kernels.weights.weight_ops import expand_codes, expand_gguf
from kernels.weights.weight_reference import GroupedCodes
from support.tensors import DEVICE

pytestmark = pytest.mark.usefixtures("nothing_kept")

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
AT_ONCE = SimpleNamespace(submit=lambda rank, task: task())


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
