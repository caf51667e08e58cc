"""The benchmark: its arithmetic on made-up figures, what it leaves out, and what its rows compute."""

import gc
import importlib.util
import json
import math
import weakref

import pytest
import torch

from kernels.benchmark import methods as table
from kernels.benchmark.methods import (
    BENCHMARK_METHODS,
    BF16,
    COMFYUI_INT8,
    FP16_SUMS,
    FUSED,
    FUSED_CODES,
    FUSED_GGUF,
    TICKS,
    UNFUSED,
    Operands,
    benchmark_shape,
    shown_methods,
    weight_copies,
)
from kernels.benchmark.shape_results import LinearShape, ShapeResult, Unavailable, notes
from kernels.card.timing import CallSeries, GraphPool, sustained_milliseconds

FP8, KITCHEN_CUDA = "fp8 _scaled_mm", "comfy-kitchen cuda"
CPU = torch.device("cpu")
NEEDS_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def made_up(milliseconds, name="qkv", m=100, tokens=None):
    """A result whose methods take these times in all three rounds."""
    rounds = {method: [time, time, time] for method, time in milliseconds.items()}
    return ShapeResult(LinearShape(name, 1000, 2000, tokens), m, rounds=rounds)


def methods(*names, **changes):
    """Entries of the table by name, some of their attributes replaced."""
    chosen = [method for method in BENCHMARK_METHODS if method.name in names]
    assert len(chosen) == len(names)
    return [method._replace(**changes) for method in chosen]


def test_the_table_of_methods_is_consistent():
    names = [method.name for method in BENCHMARK_METHODS]
    assert len(set(names)) == len(names)
    assert {method.name for method in shown_methods(())} == {BF16, FP16_SUMS, FUSED_CODES, FUSED_GGUF, FUSED}
    everything = shown_methods(TICKS)
    assert everything == BENCHMARK_METHODS
    assert {method.tick for method in BENCHMARK_METHODS} == {"", *TICKS}
    # bf16, fp16, e4m3, INT8, NF4, Q8_0, Q4_K, W4A8
    forms = {method.form for method in BENCHMARK_METHODS}
    assert sum(form.bytes_per_weight for form in forms) == 2 + 2 + 1 + 1 + 0.5625 + 34 / 32 + 144 / 256 + 9 / 16


def test_notes_say_what_is_missing_and_what_is_doubtful():
    results = [made_up({BF16: 1.0}), made_up({BF16: 1.0}, m=77)]
    assert notes(results) == []
    for result in results:
        result.absent[FP8] = "no FP8"
    results[1].absent[KITCHEN_CUDA] = "no FP8"
    (line,) = notes(results)
    assert line == f"Left out (no FP8): {FP8}; {KITCHEN_CUDA} (77 x 1000 x 2000)."

    results[0].relative_errors = {UNFUSED: 0.01, FUSED: math.nan}
    results[0].rounds[BF16] = [1.0, 1.2, 1.0]
    results[0].looped = [FUSED]
    looped, _, wrong, unsteady = notes(results)
    assert "not captured" in looped and wrong.startswith(FUSED) and "20%" in unsteady


def test_tables_and_json_of_one_shape():
    result = made_up({BF16: 8.0, FUSED: 2.0})
    result.rounds = {BF16: [9.0, 8.0, 3.0], FUSED: [1.9, 2.0, 2.1]}
    result.relative_errors, result.weight_bytes = {BF16: 0.002, FUSED: math.nan}, {BF16: 4e6, FUSED: 2e6}
    result.looped, result.absent = [FUSED], {FP8: "no FP8"}
    assert result.speedup(FUSED) == 4.0 and result.speedup(KITCHEN_CUDA) is result.speedup(FUSED, FP8) is None
    assert result.teraflops(BF16) == pytest.approx(2 * 100 * 1000 * 2000 / 8e-3 / 1e12)
    columns, rows = result.table()
    assert columns == ["", "ms", "spread", "TOPS", "x bf16", "error", "weight MB"]
    assert rows == [
        [BF16, "8.000", "± 37.5 %", "0.05", "1.00", "0.0020", "4.0"],
        [FUSED, "2.000\\*", "± 5.0 %", "0.2", "4.00", "nan", "2.0"],
    ]
    content = json.loads(json.dumps(result.as_json(), allow_nan=False))
    again = ShapeResult(LinearShape(**content["shape"]), content["m"], rounds=content["rounds"])
    assert again.rounds == result.rounds and content["milliseconds"] == {BF16: 8.0, FUSED: 2.0}
    assert content["relative_errors"] == {BF16: 0.002, FUSED: None} and content["absent"] == result.absent


@pytest.mark.parametrize(
    "weight_bytes, cache_bytes, free_bytes, copies",
    (
        (1000, 0, 10**9, 2),  # larger than any cache: in turn all the same
        (100, 250, 10**9, 6),  # 6 x 100 > 2 x 250
        (100, 250, 2 * 4 * 700, 4),  # no more than half of the memory
        (100, 250, 100, 1),  # but one at least
        (1, 250, 10**9, 64),  # and not thousands of small ones
    ),
)
def test_copies_of_a_weight(weight_bytes, cache_bytes, free_bytes, copies):
    assert weight_copies(weight_bytes, cache_bytes, 7 * weight_bytes, free_bytes) == copies


def test_rounds_alternate_between_the_methods():
    order = []
    series = {name: CallSeries(lambda copy, name=name: order.append(f"{name}{copy}"), 2, CPU) for name in "ab"}
    times = sustained_milliseconds(series, 2, check=lambda: order.append("check"))
    assert {name: len(rounds) for name, rounds in times.items()} == {"a": 2, "b": 2}
    assert order == ["check", *["a0", "a1"] * 3, "check", *["b0", "b1"] * 3] * 2


def test_peers_are_unavailable_on_a_cpu(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    operands = Operands(4, 32, 256, 1, CPU)
    for method in BENCHMARK_METHODS:
        if method.name in (COMFYUI_INT8, "NF4 dequantized"):
            with pytest.raises((Unavailable, LookupError), match="not installed"):
                method.call(operands)
        elif method.foreign or method.name in (FUSED, FUSED_CODES, FUSED_GGUF):
            with pytest.raises(Unavailable, match="no GPU"):
                method.call(operands)
        else:
            method.call(operands)


@pytest.fixture(params=(False, True))
def fp16_sums_elsewhere(request):
    """Whether the process allows fp16 sums; PyTorch's settings are no attributes that monkeypatch could give back."""
    settings = torch.backends.cuda.matmul
    before = settings.allow_fp16_accumulation
    settings.allow_fp16_accumulation = request.param
    yield request.param
    settings.allow_fp16_accumulation = before


@pytest.mark.parametrize("fails", (False, True))
def test_fp16_sums_are_allowed_inside_of_their_row_only(monkeypatch, fp16_sums_elsewhere, fails):
    settings, seen = torch.backends.cuda.matmul, []

    def linear(x, weight):
        seen.append((settings.allow_fp16_accumulation, x.dtype, weight.dtype))
        if fails:
            raise RuntimeError("not supported")
        return x @ weight.t()

    monkeypatch.setattr(table.F, "linear", linear)
    (row,) = methods(FP16_SUMS, require=lambda device: None)
    result = benchmark_shape(LinearShape("tiny", 32, 64), 4, CPU, [row], rounds=1)
    assert set(seen) == {(True, torch.float16, torch.float16)}
    assert settings.allow_fp16_accumulation == fp16_sums_elsewhere
    assert result.absent == ({FP16_SUMS: "not supported"} if fails else {})


def test_fp16_sums_are_left_out_where_pytorch_has_none(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.backends.cuda, "matmul", object())
    with pytest.raises(Unavailable, match=r"from 2\.7 on"):
        table.require_fp16_sums(torch.device("cuda"))


TRUE_ERRORS = {
    BF16: (0.0, 0.004),
    FP16_SUMS: (0.0, 0.02),  # summed in float32 on a CPU
    "fp8 dequantized": (0.02, 0.045),
    "GGUF Q8_0 dequantized": (0.004, 0.008),
    "GGUF Q4_K dequantized": (0.06, 0.09),
    "fake-quant": (0.008, 0.015),
    UNFUSED: (0.008, 0.015),
    FUSED_CODES: (0.06, 0.09),
    FUSED_GGUF: (0.06, 0.09),
    FUSED: (0.008, 0.015),
}


def test_every_row_computes_the_linear():
    """The error of each, on normal data, is that of its format; the same INT8 numbers give the same error."""
    own = methods(*TRUE_ERRORS, require=lambda device: None)
    errors = benchmark_shape(LinearShape("small", 32, 256), 32, CPU, own, rounds=1).relative_errors
    assert set(errors) == set(TRUE_ERRORS)
    for name, (least, most) in TRUE_ERRORS.items():
        assert least <= errors[name] <= most, name
    assert abs(errors["fake-quant"] - errors[FUSED]) < 0.002 and abs(errors[UNFUSED] - errors[FUSED]) < 0.001


def test_comfyui_s_own_int8_is_measured_where_it_can_be_had():
    pytest.importorskip("comfy_kitchen")
    (native,) = methods(COMFYUI_INT8)
    result = benchmark_shape(LinearShape("small", 96, 1024), 32, CPU, [native], rounds=1)
    assert 0.01 <= result.relative_errors[COMFYUI_INT8] <= 0.02 and result.rounds[COMFYUI_INT8][0] > 0


def test_a_cpu_times_few_tokens():
    assert benchmark_shape(LinearShape("", 8, 16), 4352, CPU, methods(BF16), rounds=1).m < 100


def test_what_was_timed_is_freed_at_once(monkeypatch):
    """On a card the next shape needs its memory."""
    made = []

    def operands(*sizes):
        made.append(weakref.ref(found := Operands(*sizes)))
        return found

    monkeypatch.setattr(table, "Operands", operands)
    gc.disable()
    benchmark_shape(LinearShape("tiny", 32, 64), 4, CPU, methods(BF16, UNFUSED), rounds=1)
    gc.enable()
    assert [each() for each in made] == [None]


@NEEDS_GPU
def test_what_cannot_be_captured_is_looped():
    device = torch.device("cuda")
    x, pool, stream = torch.ones(16, device=device), GraphPool(), torch.cuda.current_stream()
    before, looped, after = (
        CallSeries(run, 1, device, pool) for run in (lambda _: x.sum(), lambda _: x.sum().item(), lambda _: x.sum())
    )
    assert [series.looped for series in (before, looped, after)] == [False, True, False]
    assert min(series.milliseconds() for series in (before, looped, after)) > 0
    assert torch.cuda.current_stream() == stream
    torch.randn(4, device=device)  # the failure has left no mark on the generator
