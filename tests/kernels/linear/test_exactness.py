"""What a kernel that no interpreter runs is asked before it is used: a small product, exactly."""

import logging

import pytest
import torch

from kernels.linear import exactness, gemm
from kernels.linear.exactness import WrongResult, check_exact
from kernels.linear.gemm_kernel import Operands
from kernels.linear.linear_reference import int8_accumulate_reference
from kernels.linear.tiles import ARCHITECTURES

CPU = torch.device("cpu")
RING = next(config for config in ARCHITECTURES["Ampere"].rates if config.pipeline == "ring")
DTYPES = (torch.int32, torch.float32, torch.float16, torch.bfloat16)


def exact(operands):
    q, weight, *_, out = operands
    out.copy_(int8_accumulate_reference(q, weight))


def rounding_its_parts(operands):
    q, weight, *_, out = operands
    half = q.shape[1] // 2 + 256
    parts = [int8_accumulate_reference(q[:, some], weight[:, some]) for some in (slice(half), slice(half, None))]
    out.copy_(sum(part.bfloat16().int() for part in parts))


def missing_channels(operands):
    q, weight, *_, out = operands
    out.copy_(int8_accumulate_reference(q, weight.roll(16, 1)))


def losing_the_last_row(operands):
    exact(operands._replace(q=operands.q[:-1], out=operands.out[:-1]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_exact_kernel_passes(dtype):
    given = []

    def launch(operands):
        given.append(operands)
        exact(operands)

    check_exact(launch, CPU, dtype, has_bias=True, one_scale=False)
    assert len(given) == 2
    q, weight, q_scale, weight_scale, bias, out = given[0]
    assert out.dtype == dtype and q.dtype == weight.dtype == torch.int8
    floats = dtype != torch.int32
    assert [operand is not None for operand in (q_scale, weight_scale, bias)] == [floats] * 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("launch", (rounding_its_parts, missing_channels, losing_the_last_row))
def test_a_wrong_kernel_is_seen(launch, dtype):
    with pytest.raises(WrongResult):
        check_exact(launch, CPU, dtype, has_bias=False, one_scale=True)


def test_a_kernel_that_is_right_only_the_first_time_is_seen():
    launches = []

    def launch(operands):
        launches.append(operands)
        exact(operands) if len(launches) == 1 else losing_the_last_row(operands)

    with pytest.raises(WrongResult):
        check_exact(launch, CPU, torch.bfloat16, has_bias=False, one_scale=False)


@pytest.fixture
def asked(monkeypatch, nothing_kept):
    """What a card is asked, and what it answers."""
    answers, calls = [], []

    def check(launch, *form):
        calls.append(form)
        if answers and answers[-1] is not None:
            raise answers[-1]

    monkeypatch.setattr(gemm, "check_exact", check)
    monkeypatch.setattr(gemm, "device_name", lambda index: "a card")
    return answers, calls


def asking(dtype):
    q, scale = torch.ones(1, 16, dtype=torch.int8), torch.ones(1)
    return Operands(q, q, scale, scale, None, torch.ones(1, 1, dtype=dtype))


def test_a_kernel_is_asked_once_and_told_of_once(asked, caplog):
    answers, calls = asked
    answers.append(WrongResult())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not gemm._is_exact(RING, asking(torch.bfloat16))
    assert len(calls) == 1 and [record.getMessage() for record in caplog.records if "not used there" in record.message]
    assert len(caplog.records) == 1
    answers.append(None)
    assert gemm._is_exact(RING, asking(torch.float16))  # another kernel
    assert gemm._is_exact(RING, asking(torch.float16)) and len(calls) == 2


def test_too_little_memory_says_nothing(asked, caplog):
    answers, calls = asked
    answers.append(torch.cuda.OutOfMemoryError("out of memory"))
    assert not gemm._is_exact(RING, asking(torch.bfloat16)) and not caplog.records
    answers.append(None)
    assert gemm._is_exact(RING, asking(torch.bfloat16)) and len(calls) == 2


def test_the_check_is_of_ragged_tiles_and_long_sums():
    assert exactness._M % 128 and exactness._N % 128 and exactness._K // 2 > 256
