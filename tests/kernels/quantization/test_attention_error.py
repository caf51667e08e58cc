"""What INT8 attention costs: the same number by hand, whatever the shapes; merged; of outputs that are no numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

from kernels import AttentionError, int8_attention
from kernels.quantization import attention_error
from support.tensors import DEVICE


def tensors(queries=40, keys=40, heads=4, kv_heads=4, samples=2, width=64):
    generator = torch.Generator().manual_seed(0)
    shapes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(samples, count, tokens, width, generator=generator).to(DEVICE) for count, tokens in shapes]


MASKS = {
    "none": lambda queries, keys: None,
    "boolean": lambda queries, keys: torch.ones(queries, keys, dtype=torch.bool).tril(keys // 2),
    "of keys": lambda queries, keys: (torch.arange(keys) < keys - 3)[None, None, None],
    "by sample and head": lambda queries, keys: torch.randn(
        2, 4, queries, keys, generator=torch.Generator().manual_seed(1)
    ),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kv_heads", (4, 2, 1))
@pytest.mark.parametrize("most", (1, 1 << 25), ids=("head by head", "all heads"))
def test_it_is_the_error_of_the_outputs(monkeypatch, mask, kv_heads, most):
    monkeypatch.setattr(attention_error, "_MOST_ELEMENTS", most)
    q, k, v = tensors(keys=30, kv_heads=kv_heads)
    mask = MASKS[mask](40, 30)
    mask = mask if mask is None else mask.to(DEVICE)
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.2, enable_gqa=True)
    wanted = (int8_attention(q, k, v, mask, 0.2) - expected).norm() / expected.norm()
    error = AttentionError()
    error.update(q, k, v, mask, 0.2)
    assert error.calls == 1 and error.error == pytest.approx(float(wanted), rel=1e-3) and error.error > 1e-3


def test_of_many_queries_some_are_compared():
    q, k, v = tensors(queries=1000)
    q[:, :, 1::2] = math.nan  # every sixteenth is asked
    error = AttentionError()
    error.update(q, k, v, torch.ones(1000, 40, dtype=torch.bool, device=DEVICE))
    assert 1e-3 < error.error < 0.05


def test_merged_it_is_that_of_all_calls():
    parts, whole = [AttentionError(), AttentionError()], AttentionError()
    for index, (error, size) in enumerate(zip(parts, (1.0, 9.0), strict=True)):
        q, k, v = (tensor * size for tensor in tensors(queries=20 + index))
        for one in (error, whole):
            one.update(q, k, v)
    merged = AttentionError.merged(parts)
    assert merged.calls == 2 and merged.sums == pytest.approx(whole.sums)
    assert AttentionError(merged.calls, *merged.sums).error == merged.error
    assert AttentionError.merged([]).error == AttentionError().error == 0.0


def test_outputs_that_are_no_numbers(monkeypatch):
    q, k, v = tensors()
    error = AttentionError()
    error.update(q, k, v * math.inf)  # nothing to compare with
    assert (error.calls, error.error) == (1, 0.0)
    monkeypatch.setattr(attention_error, "int8_attention", lambda q, *_: q * math.nan)
    error.update(q, k, v)
    assert error.error > 100 and math.isfinite(error.error)


@pytest.mark.parametrize("sums", ((-1, 0, 0), (1, -1, 1), (1, math.nan, 1), (1, 1, math.inf), (0, 1, 1)))
def test_what_no_calls_leave_behind_is_refused(sums):
    with pytest.raises(ValueError, match="calls with squares of"):
        AttentionError(*sums)


def test_of_many_calls_some_are_compared():
    error, calls = AttentionError(), []
    error.update = lambda *call: calls.append(call)
    for number in range(40):
        error.offer(number)
    compared = [number for (number,) in calls]
    assert compared[0] == 0 and len(compared) == 8
    # As many of either branch of CFG, and of a block's first and second attention.
    assert sum(number % 2 for number in compared) == 4
