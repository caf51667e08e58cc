"""Tensors on the second GPU while the first is the current one: the same bits, and the current device stays."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import kernels.linear.gemm
from kernels import ChannelTransform, dequantize_weight, int8_linear, requantize_weight
from kernels.attention.int8_attention import float_attention, int8_attention
from kernels.call_cache import CACHE
from kernels.linear.int8_linear import quantize_activations
from kernels.linear.tiles import gemm_candidates
from kernels.linear.tuning import Tuner, settle
from kernels.weights.weight_ops import dequantize_gguf, expand_codes, expand_gguf, gguf_channel_scales, quantize_gguf
from kernels.weights.weight_reference import GroupedCodes, LowRank
from support.fused_op_cases import Form, calls
from support.tensors import int8_accumulate

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")

FIRST, SECOND = torch.device("cuda", 0), torch.device("cuda", 1)
# Few tiles and a long K, which is split; and a shape that is not.
SPLIT, WHOLE = (16, 64, 16384), (300, 512, 768)


@pytest.fixture(autouse=True)
def fresh(monkeypatch, tmp_path):
    """Nothing is known of any card, and the first GPU is the current one before and after."""
    monkeypatch.setenv("INT8_DIT_TUNING_CACHE", str(tmp_path))
    monkeypatch.setattr(kernels.linear.gemm, "tuner", Tuner())
    monkeypatch.setattr(kernels.linear.gemm, "_arrivals_of_streams", {})
    CACHE.clear()
    torch.cuda.set_device(FIRST)
    yield
    assert torch.cuda.current_device() == FIRST.index


def values(*shape, seed, device):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device)


def operands(shape, device):
    """x bf16 [M, K], weight int8 [N, K], its scale, and a bias, the same on each device."""
    m, n, k = shape
    q, scale = requantize_weight(values(n, k, seed=1, device=device))
    return values(m, k, seed=0, device=device).bfloat16(), q, scale, values(n, seed=2, device=device)


def linear(shape, device, **options):
    return (int8_linear(*operands(shape, device), **options),)


def transformed(device):
    transform = ChannelTransform(torch.linspace(0.5, 2, 768, device=device), 256)
    x, q, scale, bias = operands(WHOLE, device)
    quantized = quantize_activations(x, transform)
    return int8_linear(x, q, scale, bias, transform), *quantized, int8_accumulate(quantized[0], q)


def attention(device):
    q, k, v = (values(1, 2, 70, 256, seed=seed, device=device).bfloat16() for seed in range(3))
    return int8_attention(q, k, v), float_attention(q, k, v)


def weights(device):
    transform = ChannelTransform(torch.linspace(0.5, 2, 768, device=device), 256)
    q, scale = requantize_weight(values(512, 768, seed=1, device=device), transform, seed=7)
    return q, scale, dequantize_weight(q, scale, transform)


def blocks(device):
    made = quantize_gguf(values(512, 768, seed=1, device=device), "Q4_K")
    scale = gguf_channel_scales(made, "Q4_K")
    low_rank = LowRank(values(512, 8, seed=2, device=device), values(8, 768, seed=3, device=device))
    expanded = [expand_gguf(made, "Q4_K", scale, also) for also in (None, low_rank)]
    return scale, *expanded, dequantize_gguf(made, "Q4_K")


def grouped(device):
    codes = torch.arange(512 * 384, device=device).view(512, 384).to(torch.int8)
    weight = GroupedCodes(codes, values(512, 48, seed=1, device=device).to(torch.float8_e4m3fn), None, 16)
    low_rank = LowRank(values(512, 8, seed=2, device=device), values(8, 768, seed=3, device=device))
    scale = values(512, seed=4, device=device).abs()
    return expand_codes(weight), expand_codes(weight, scale, scale + low_rank.channel_scales(), low_rank)


def fused_ops(device):
    form = Form("", 768, tokens=10, heads=(6, 2))
    results = [case.op(*arguments) for case, _, arguments in calls(device, form, replace(form, group=256, smooth=True))]
    return [tensor for result in results for tensor in (result if isinstance(result, tuple) else (result,))]


def unaligned(device):
    """Begins beside 16 bytes: a launch of its own."""
    x, q, scale, bias = operands(WHOLE, device)
    return (int8_linear(x[:, 1:], q[:, 1:], scale, bias),)


COMPUTATIONS = {
    "split": lambda device: linear(SPLIT, device),
    "whole": lambda device: linear(WHOLE, device),
    "transformed": transformed,
    "attention": attention,
    "weights": weights,
    "blocks": blocks,
    "grouped": grouped,
    "fused ops": fused_ops,
    "16 bits": lambda device: linear(WHOLE, device, activation_bits=16),
    "unaligned": unaligned,
}


def on_host(results):
    return [result.cpu() for result in results]


def assert_equal(actual, expected):
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("compute", COMPUTATIONS.values(), ids=COMPUTATIONS)
def test_the_second_gpu_computes_what_the_first_does(compute):
    expected = on_host(compute(FIRST))
    for _ in range(2):  # launched for the first time, and again
        results = compute(SECOND)
        assert all(result.device == SECOND for result in results)
        assert torch.cuda.current_device() == FIRST.index
        assert_equal(on_host(results), expected)
    with torch.cuda.device(SECOND):
        assert_equal(on_host(compute(FIRST)), expected)
        assert torch.cuda.current_device() == SECOND.index


def test_the_split_shape_is_split():
    card = torch.cuda.get_device_properties(SECOND)
    likeliest = [
        gemm_candidates((card.major, card.minor), card.multi_processor_count, *shape)[0] for shape in (SPLIT, WHOLE)
    ]
    assert likeliest[0].split_k > 1 and likeliest[1].split_k == 1


def test_each_gpu_and_stream_counts_arrivals_in_memory_of_its_own():
    expected = on_host(linear(SPLIT, FIRST))
    assert_equal(on_host(linear(SPLIT, SECOND)), expected)
    stream = torch.cuda.Stream(SECOND)
    stream.wait_stream(torch.cuda.current_stream(SECOND))
    with torch.cuda.stream(stream):
        assert_equal(on_host(linear(SPLIT, SECOND)), expected)
    kept = kernels.linear.gemm._arrivals_of_streams
    assert sorted(device.index for device, _ in kept) == [0, 1, 1]
    for (device, _), arrivals in kept.items():
        assert arrivals.device == device and not arrivals.any()


def test_tiles_are_tried_on_the_gpu_of_the_tensors(monkeypatch):
    monkeypatch.setenv("INT8_DIT_TUNING", "on")
    tuner = kernels.linear.gemm.tuner
    monkeypatch.setattr(kernels.linear.tuning, "tuner", tuner)
    inputs = operands(WHOLE, SECOND)
    for device in (FIRST, SECOND):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(FIRST)
    settle(lambda: int8_linear(*inputs), SECOND)
    assert tuner.measured == 1
    assert torch.cuda.max_memory_allocated(FIRST) == before
    assert_equal(on_host([int8_linear(*inputs)]), on_host(linear(WHOLE, FIRST)))
    settle(lambda: linear(WHOLE, FIRST), FIRST)
    alike = torch.cuda.get_device_name(FIRST) == torch.cuda.get_device_name(SECOND)
    assert tuner.measured == (1 if alike else 2)


@pytest.mark.parametrize("sets_device", (True, False), ids=("sets its device", "does not"))
def test_a_thread_for_each_gpu(sets_device):
    """As ComfyUI samples on two GPUs at once, from the first launches on."""

    def work(device):
        if sets_device:
            torch.cuda.set_device(device)
        current = torch.cuda.current_device()
        results = [on_host(compute(device)) for _ in range(5) for compute in COMPUTATIONS.values()]
        assert torch.cuda.current_device() == current
        return results

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(work, (FIRST, SECOND))
    expected = [on_host(compute(FIRST)) for compute in COMPUTATIONS.values()] * 5
    for results in (first, second):
        for actual, alone in zip(results, expected, strict=True):
            assert_equal(actual, alone)
