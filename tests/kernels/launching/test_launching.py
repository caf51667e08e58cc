"""Launches are found again where Triton would have compiled the same, and only there; what is kept has a bound."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from kernels import Norm, call_cache, norm_quantize, norm_rope
from kernels.call_cache import CACHE
from kernels.launching.launching import Launch, Launcher
from support.tensors import DEVICE, random_float, random_int8

RMS = Norm("rms", 1e-6)


def test_a_launch_is_for_what_triton_compiles_for():
    launcher = Launcher(None, lambda *form: ({}, {}))
    x = torch.zeros(64, dtype=torch.float16)
    known = [
        launcher.prepared((1,), [x, x], (32, 0.5)),
        launcher.prepared((2,), [x, x], (32, 0.5)),
        launcher.prepared((1,), [x, x.bfloat16()], (32, 0.5)),
        launcher.prepared((1,), [x[1:], x], (32, 0.5)),  # begins elsewhere than on 16 bytes
        launcher.prepared((1,), [x, x[1:]], (32, 0.5)),
        launcher.prepared((1,), [x, x], (33, 0.5)),
        launcher.prepared((1,), [x, x], (1, 0.5)),
        launcher.prepared((1,), [x, x], (1 << 31, 0.5)),
        Launcher(None, launcher.build).prepared((1,), [x, x], (32, 0.5)),
    ]
    assert not [pair for pair in itertools.combinations(known, 2) if pair[0] is pair[1]]
    other = torch.ones(128, dtype=torch.float16)
    assert launcher.prepared((1,), [other, other[8:]], (48, 0.25)) is known[0]
    assert launcher.prepared((1,), [other, other], (65, 0.5)) is known[5]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: Gluon has no interpreter")
def test_a_ring_is_launched_past_triton_for_all_numbers_of_tokens(nothing_kept):
    from kernels.internals.triton_runtime import DIRECT_LAUNCH, holds
    from kernels.linear.gemm import GemmLaunch
    from kernels.linear.gemm_kernel import Operands
    from kernels.linear.tiles import GemmConfig

    config = GemmConfig(256, 128, 64, 4, 8, 4, "ring", 3)
    weight = random_int8(4608, 4608, seed=2)
    for rows in (512, 4352, 48, 2560):
        q = random_int8(rows, 4608, seed=rows)
        out = torch.full((rows, 4608), 12345, dtype=torch.int32, device="cuda")
        operands = Operands(q, weight, None, None, None, out)
        launch = GemmLaunch(config, operands)
        assert launch.takes_addresses == (rows != 512 and holds(DIRECT_LAUNCH))  # the first is Triton's
        given = [tensor.data_ptr() for tensor in operands.read] if launch.takes_addresses else operands.read
        launch(q, weight, out, given)
        assert torch.equal(out, torch._int_mm(q, weight.t()))


def test_numbers_for_which_a_kernel_is_not_compiled_find_the_same_launch():
    names = ["x", "y", "M", "N", "BLOCK"]
    launchers = [Launcher(SimpleNamespace(arg_names=names, do_not_specialize=free), dict) for free in (["M"], [2], [])]
    x = torch.zeros(64, dtype=torch.float16)
    for launcher in launchers:
        launcher.build = lambda: ({}, {})
    for free, launcher in zip((True, True, False), launchers, strict=True):
        known = launcher.prepared((), [x, x], (32, 48))
        assert all((launcher.prepared((), [x, x], (m, 48)) is known) == free for m in (1, 33))
        assert launcher.prepared((), [x, x], (1 << 31, 48)) is not known  # an address in 64 bits
        assert launcher.prepared((), [x, x], (32, 49)) is not known


def test_what_is_kept_has_a_bound(monkeypatch, nothing_kept):
    monkeypatch.setattr(call_cache, "MOST_ENTRIES", 2)
    for tokens in range(1, 6):
        expected = norm_quantize.reference(random_float(tokens, 16), RMS)
        for _ in range(2):
            torch.testing.assert_close(norm_quantize(random_float(tokens, 16), RMS)[1], expected[1])
        assert len(CACHE) <= 2


def test_another_number_of_tokens_finds_the_same_launch(nothing_kept):
    def both(tokens):
        norm_quantize(random_float(2, tokens, 16), RMS)
        q = random_float(2, tokens, 2, 16)
        norm_rope(q, q, RMS, None, torch.zeros(tokens, 8, 2, 2, device=DEVICE), "halves")

    for tokens in (3, 5):
        both(tokens)
        assert len([value for value in CACHE.values() if isinstance(value, Launch)]) == 2
