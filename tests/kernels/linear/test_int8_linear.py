"""The fused GEMM and the INT8 linear, on the GPU or under Triton's interpreter, against PyTorch and float64."""

import itertools
from dataclasses import replace

import pytest
import torch

from kernels import UNCHANGED, ChannelTransform, int8_linear, quantize_weight
from kernels.internals.kitchen import kitchen_gemm
from kernels.linear import gemm
from kernels.linear.gemm import GemmLaunch, KitchenLaunch, launch_config
from kernels.linear.gemm_kernel import Operands
from kernels.linear.int8_linear import int8_gemm, quantize_activations
from kernels.linear.linear_reference import int8_accumulate_reference
from kernels.linear.tiles import ARCHITECTURES, KITCHEN, GemmConfig, gpu_architecture
from support.tensors import DEVICE, int8_accumulate, random_float, random_int8, relative_error

RINGS = list({config.kernel: config for config in ARCHITECTURES["Ampere"].rates if config.pipeline == "ring"}.values())

# One row, one column, sizes around and between the tile sizes, primes, K below one tile and far above it.
SIDES = ((1, 1), (1, 128), (4, 9), (5, 1), (16, 48), (17, 31), (32, 32), (33, 129), (65, 70), (96, 33))
SHAPES = [(m, n, k) for m, n in SIDES for k in (1, 15, 63, 64, 129, 200)]


INTERPRETED = [GemmConfig(32, 32, 64, 4, 4, 1), GemmConfig(16, 64, 32, 1, 4, 3), GemmConfig(64, 32, 128, 8, 4, 2)]


def exact_sums(q, weight):
    """In int64. Of activations of 16 bits, whose K is walked twice, the sums over the remainders are in steps of 254,
    halves away from zero."""
    left, *right = (part.cpu().long() @ weight.cpu().long().t() for part in q.split(weight.shape[1], dim=1))
    return left + sum(part.sign() * ((part.abs() + 127) // 254) for part in right)


@pytest.mark.parametrize("passes", (1, 2))
@pytest.mark.parametrize("m, n, k", SHAPES)
def test_accumulator_is_bit_exact(m, n, k, passes):
    q, weight = random_int8(m, passes * k, seed=1), random_int8(n, k, seed=2)
    assert torch.equal(int8_accumulate(q, weight).cpu().long(), exact_sums(q, weight))


@pytest.mark.parametrize("passes", (1, 2))
def test_the_reference_is_exact_for_many_channels(passes):
    """It sums them in slices, as far as float32 is exact."""
    for k in (1, 40, 1024, 1025, 2100):
        q, weight = random_int8(5, passes * k, seed=1), random_int8(7, k, seed=2)
        assert torch.equal(int8_accumulate_reference(q, weight).cpu().long(), exact_sums(q, weight))


EXTREMES = torch.full((17, 300), 127, dtype=torch.int8, device=DEVICE)
STRIDED = random_int8(80, 96, seed=1)[::2, 16:80]


@pytest.mark.parametrize(
    "q, weight",
    (
        (-EXTREMES, EXTREMES),
        (-EXTREMES.repeat(1, 2), EXTREMES),  # K is walked twice
        *((STRIDED, random_int8(40, 2 * channels, seed=2)[:, ::2]) for channels in (64, 32)),
    ),
    ids=("extremes", "extremes twice", "strided", "strided twice"),
)
def test_accumulator_of_extremes_and_of_strided_operands(q, weight):
    assert torch.equal(int8_accumulate(q, weight).cpu().long(), exact_sums(q, weight))


@pytest.mark.parametrize("remainder, steps", ((126, 0), (127, 1), (380, 1), (381, 2)))
def test_halves_of_remainders_are_rounded_away_from_zero(remainder, steps):
    parts = [min(127, max(0, remainder - 127 * place)) for place in range(3)]
    q = torch.tensor([[1, 0, 0, *parts], [1, 0, 0, *(-part for part in parts)]], dtype=torch.int8, device=DEVICE)
    weight = torch.ones(1, 3, dtype=torch.int8, device=DEVICE)
    for accumulate in (int8_accumulate, int8_accumulate_reference):
        assert accumulate(q, weight).flatten().tolist() == [1 + steps, 1 - steps]


def configs():
    """All that a card here can run; a few small ones where an interpreter runs them."""
    if DEVICE == "cpu":
        return INTERPRETED
    own = gpu_architecture(torch.cuda.get_device_capability())
    return list(dict.fromkeys([*ARCHITECTURES["Ampere"].rates, *own.rates]))


@pytest.mark.parametrize("config", configs(), ids=repr)
def test_every_configuration_is_bit_exact_where_k_is_walked_twice(config):
    for m, n, k in (*SHAPES[::8], *([(301, 1008, 1280), (77, 515, 4608)] if DEVICE == "cuda" else [])):
        q, weight = random_int8(m, 2 * k, seed=1), random_int8(n, k, seed=2)
        out = torch.full((m, n), 12345, dtype=torch.int32, device=DEVICE)
        launch_config(config, Operands(q, weight, None, None, None, out))
        assert torch.equal(out.cpu().long(), exact_sums(q, weight)), (m, n, k)
    with pytest.raises(ValueError, match="cannot be split"):
        launch_config(replace(config, split_k=2), Operands(q, weight, None, None, None, out))


def test_k_shared_by_several_programs():
    """Parts of unequal length, more parts than blocks of K, and sums of a tile that are added a part at a time."""
    for config in (GemmConfig(16, 32, 32, 2, 4, 1, split_k=2), GemmConfig(64, 32, 32, 4, 1, 1, split_k=5)):
        for m, n, k in ((1, 7, 40), (33, 65, 129), (80, 40, 200)):
            q, weight = random_int8(m, k, seed=1), random_int8(n, k, seed=2)
            scales = random_float(m, seed=3).abs(), random_float(n, seed=4).abs()
            bias, out = random_float(n, seed=5), torch.empty(m, n, device=DEVICE)
            launch_config(config, Operands(q, weight, scales[0], scales[1], bias, out))
            expected = int8_gemm.reference(q, scales[0], weight, scales[1], bias, torch.float32)
            assert torch.allclose(out, expected, rtol=1e-5, atol=1e-2), (config, m, n, k)


@pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU: Gluon has no interpreter")
@pytest.mark.parametrize("parts", (1, 2, 5))
@pytest.mark.parametrize("config", RINGS, ids=repr)
def test_a_ring_of_buffers(config, parts):
    """M and N ragged, 1, and of more tiles than multiprocessors; K below the loop's step, ragged, and far above it."""
    config = replace(config, split_k=parts)
    for m, n, k in ((1, 16, 16), (257, 1, 4608), (300, 1001, 1552), (77, 640, 12288), (4352, 4608, 784)):
        q, weight = random_int8(m, k, seed=1), random_int8(n, k, seed=2)
        expected = int8_accumulate_reference(q, weight)
        out = torch.empty(m, n, dtype=torch.int32, device=DEVICE)
        for _ in range(3):  # a later launch finds the workspace as the one before left it
            out.fill_(12345)
            launch_config(config, Operands(q, weight, None, None, None, out))
            assert torch.equal(out, expected), (config, m, n, k)
        assert GemmLaunch(config, Operands(q, weight, None, None, None, out)).takes_addresses
        q_scale, bias = random_float(m, seed=3).abs() / 100, random_float(n, seed=5)
        scales = random_float(n, seed=4).abs() / 100
        forms = (torch.bfloat16, scales, bias), (torch.float16, scales[:1], None), (torch.float32, scales, None)
        for dtype, weight_scale, addend in forms:
            out = torch.full((m, n), float("nan"), dtype=dtype, device=DEVICE)
            launch_config(config, Operands(q, weight, q_scale, weight_scale, addend, out))
            exact = expected.double() * q_scale.double()[:, None] * weight_scale.double()
            largest = exact.abs() + (0 if addend is None else addend.double().abs())
            exact = exact if addend is None else exact + addend.double()
            tolerance = ROUNDING[dtype] * exact.abs() + 2.0**-22 * largest + 2.0**-24
            assert ((out.double() - exact).abs() <= tolerance).all(), (config, m, n, k, dtype)


def _like_kitchen(q, weight, q_scale, weight_scale, bias, out):
    out.copy_(int8_gemm.reference(q, q_scale, weight, weight_scale, bias, out.dtype))
    return True


def _unlike_kitchen(*given):
    _like_kitchen(*given)
    given[-1].view(torch.int32)[0, 0] ^= 1  # the last bit
    return True


@pytest.mark.parametrize("one_scale", (False, True))
@pytest.mark.parametrize(
    "run, same",
    (
        *((_like_kitchen, True), (_unlike_kitchen, False), (lambda *given: False, False), (None, False)),
        (lambda *given: int("another signature"), False),
    ),
)
def test_kitchens_gemm_runs_only_where_it_gives_the_same_bits(run, same, one_scale, monkeypatch, nothing_kept):
    """It is compared with the pack's own on the operands of a call."""
    monkeypatch.setattr(gemm, "kitchen_gemm", lambda: run)
    q, weight = random_int8(33, 64, seed=1), random_int8(48, 64, seed=2)
    scales = torch.full((33,), 0.25, device=DEVICE), torch.full((1 if one_scale else 48,), 0.5, device=DEVICE)
    operands = Operands(q, weight, *scales, None, torch.zeros(33, 48, device=DEVICE))
    asked = []
    monkeypatch.setattr(gemm, "_own_config", lambda operands: asked.append(1) or INTERPRETED[0])
    for _ in range(2):
        assert gemm._gives_the_same(KitchenLaunch(operands), operands) is same
    assert len(asked) <= 1  # a call that is timed waits for no rule


def test_kitchens_gemm_is_compared_with_a_bias_that_rounds(monkeypatch, nothing_kept):
    """Whatever bias the first layer of a shape has: zeros hide how one is added."""

    def with_a_rounded_bias(q, weight, q_scale, weight_scale, bias, out):
        return _like_kitchen(q, weight, q_scale, weight_scale, bias.bfloat16(), out)

    monkeypatch.setattr(gemm, "kitchen_gemm", lambda: with_a_rounded_bias)
    monkeypatch.setattr(gemm, "_own_config", lambda operands: INTERPRETED[0])
    q, weight, bias = random_int8(33, 64, seed=1), random_int8(48, 64, seed=2), torch.zeros(48, device=DEVICE)
    scales = torch.full((33,), 0.25, device=DEVICE), torch.full((48,), 0.5, device=DEVICE)
    operands = Operands(q, weight, *scales, bias, torch.zeros(33, 48, device=DEVICE))
    assert not gemm._gives_the_same(KitchenLaunch(operands), operands)
    assert not bias.any()


@pytest.mark.skipif(DEVICE != "cuda" or kitchen_gemm() is None, reason="needs a GPU and comfy-kitchen's GEMM")
def test_kitchens_gemm_on_a_card(monkeypatch, nothing_kept):
    """Bits of the pack's own, through the tuner, in a CUDA graph too; replaced where it cannot read the operands."""
    taken = []
    run = kitchen_gemm()
    monkeypatch.setattr(gemm, "kitchen_gemm", lambda: lambda *given: taken.append(1) or run(*given))
    monkeypatch.setattr(gemm.tuner, "settled", lambda key: KITCHEN)
    monkeypatch.setattr(gemm.tuner, "run", lambda key, m, configs, launch, ready: launch(KITCHEN))
    for m, n, k in ((1, 16, 16), (77, 640, 512), (300, 1008, 1552), (4096, 4608, 12288), (4352, 13824, 4608)):
        q, weight = random_int8(m, k, seed=1), random_int8(n, k, seed=2)
        q_scale = random_float(m, seed=3).abs() / 100
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            for scales, bias in (
                (random_float(n, 1, seed=4).abs() / 100, random_float(n, seed=5).to(dtype)),
                (q_scale[:1], None),
            ):
                out, expected = (torch.zeros(m, n, dtype=dtype, device=DEVICE) for _ in range(2))
                launch_config(GemmConfig(128, 128, 64, 8, 4, 3), Operands(q, weight, q_scale, scales, bias, expected))
                gemm.TunedGemm()((q, q_scale, weight, scales, bias), [out])
                assert torch.equal(out, expected), (m, n, k, dtype)
    assert len(taken) > 20
    graph, again = torch.cuda.CUDAGraph(), torch.zeros_like(out)
    launch = gemm.TunedGemm()
    launch((q, q_scale, weight, scales, bias), [again])
    again.zero_()
    with torch.cuda.graph(graph):
        launch((q, q_scale, weight, scales, bias), [again])
    graph.replay()
    assert torch.equal(again, expected)
    taken.clear()
    gemm.TunedGemm()((q, q_scale, weight, scales, random_float(n, seed=5)), [out.to(torch.bfloat16)])
    assert not taken  # a bias in another dtype


@pytest.mark.parametrize("config", RINGS[:1], ids=repr)
def test_a_ring_is_replaced_where_it_cannot_run(config):
    """Rows that do not begin on 16 bytes, channels that 16 does not divide, K walked twice; an interpreter."""
    q, weight = random_int8(33, 256, seed=1), random_int8(24, 256, seed=2)
    for a, b in ((q[:, 1:65], weight[:, :64]), (q[:, :64], weight[:, 3:67]), (q[:, :72], weight[:, :72])):
        out = torch.empty(33, 24, dtype=torch.int32, device=DEVICE)
        launch_config(config, Operands(a, b, None, None, None, out))
        assert torch.equal(out, int8_accumulate_reference(a, b))
    q[:, 128:] = 0  # no remainders
    out = torch.empty(33, 24, dtype=torch.int32, device=DEVICE)
    launch_config(config, Operands(q, weight[:, :128], None, None, None, out))
    assert torch.equal(out, int8_accumulate_reference(q[:, :128], weight[:, :128]))


# One rounding to each output dtype. Triton's interpreter truncates to bfloat16 where the hardware rounds to nearest.
ROUNDING = {torch.bfloat16: 2.0**-8 if DEVICE == "cuda" else 2.0**-7, torch.float16: 2.0**-11, torch.float32: 2.0**-22}


@pytest.mark.parametrize("out_dtype", ROUNDING)
@pytest.mark.parametrize("with_bias", (False, True))
@pytest.mark.parametrize("scale_shape, passes", (("per channel", 2), ("column", 1), ("scalar", 1), ("one", 1)))
def test_epilogue_against_float64(out_dtype, with_bias, scale_shape, passes):
    m, n, k = 45, 70, 123
    q, weight = random_int8(m, passes * k, seed=1), random_int8(n, k, seed=2)
    q_scale = random_float(m, seed=3).abs() / 100
    weight_scale = random_float(n, seed=4).abs() / 100
    weight_scale = {
        "per channel": weight_scale,
        "column": weight_scale[:, None],
        "scalar": weight_scale[0],
        "one": weight_scale[:1],
    }[scale_shape]
    bias = random_float(n, seed=5) if with_bias else None
    out = int8_gemm(q, q_scale, weight, weight_scale, bias, out_dtype)
    sums = exact_sums(q, weight).to(DEVICE).double()
    product = sums * q_scale.double()[:, None] * weight_scale.double().reshape(1, -1)
    expected = product if bias is None else product + bias.double()
    # With a bias the sum may cancel: the float32 roundings are relative to the terms.
    largest = product.abs() + (0 if bias is None else bias.double().abs())
    smallest = torch.finfo(out_dtype).smallest_normal * ROUNDING[out_dtype]  # subnormals are spaced evenly
    tolerance = ROUNDING[out_dtype] * expected.abs() + 2.0**-22 * largest + smallest
    assert out.dtype == out_dtype
    assert ((out.double() - expected).abs() <= tolerance).all()


# Each value meets each of the other parameters.
LINEARS = [
    (dtype, bool(number % 2), bool(number // 2 % 2), group)
    for number, (dtype, group) in enumerate(
        itertools.product((torch.bfloat16, torch.float16, torch.float32), (None, 16, 64))
    )
]


@pytest.mark.parametrize("dtype, with_bias, with_smooth, group", LINEARS)
def test_linear_against_float64(dtype, with_bias, with_smooth, group):
    """Smoothing and rotation cancel out: the product is that of x and w up to the two INT8 roundings."""
    tokens, n, k = 37, 50, 192
    x, w = random_float(tokens, k, seed=1, dtype=dtype), random_float(n, k, seed=2, dtype=dtype)
    smooth = random_float(k, seed=3).abs() + 0.5 if with_smooth else None
    bias = random_float(n, seed=4, dtype=dtype) if with_bias else None
    transform = ChannelTransform(smooth, group)
    weight, weight_scale = quantize_weight(w, transform)
    out = int8_linear(x, weight, weight_scale, bias, transform)
    expected = x.double() @ w.double().t() + (0 if bias is None else bias.double())
    assert out.dtype == dtype
    assert relative_error(out, expected) < 0.025  # arbitrary smoothing factors widen the range of the rows

    # Against the exact product of what was quantized only the output rounding is left.
    q, q_scale = quantize_activations(x, transform)
    exact = (q.double() * q_scale.double()[:, None]) @ (weight.double() * weight_scale.double()[:, None]).t()
    terms = exact.abs() + (0 if bias is None else bias.double().abs())
    exact = exact if bias is None else exact + bias.double()
    # float64 rounding of `exact` itself, where the integer sum is zero
    smallest = torch.finfo(dtype).smallest_normal * ROUNDING[dtype] + 1e-12
    assert ((out.double() - exact).abs() <= ROUNDING[dtype] * exact.abs() + 2.0**-21 * terms + smallest).all()


@pytest.mark.parametrize("with_smooth, group", ((False, None), (True, None), (True, 16)))
def test_with_16_bits_outliers_cost_nothing_beyond_the_weight(with_smooth, group):
    """Four channels of 256 are a hundred times as large: what is left is the rounding of the weight."""
    tokens, n, k = 37, 50, 256
    x, w = random_float(tokens, k, seed=1), random_float(n, k, seed=2)
    x[:, [3, 77, 130, 201]] *= 100
    transform = ChannelTransform(random_float(k, seed=3).abs() + 0.5 if with_smooth else None, group)
    weight, scale = quantize_weight(w, transform)
    bias = random_float(n, seed=4)
    # The exact transform in float64, which the weight's rounding is told apart with.
    prepared = transform.to_activations(x).double()
    of_weight = prepared @ (weight.double() * scale.double()[:, None]).t() + bias.double()
    exact = x.double() @ w.double().t() + bias.double()
    outs = {bits: int8_linear(x, weight, scale, bias, transform, activation_bits=bits).double() for bits in (8, 16)}
    assert relative_error(outs[16], exact) < 1.02 * relative_error(of_weight, exact)
    assert relative_error(outs[16], of_weight) < relative_error(outs[8], of_weight) / 50


@pytest.mark.parametrize("bits", (8, 16))
@pytest.mark.parametrize("leading", ((), (0,), (1,), (2, 3), (2, 0, 5), (1, 2, 3, 4)))
def test_leading_dimensions(leading, bits):
    k, n = 64, 24
    x = random_float(*leading, k, seed=1)
    weight, scale = quantize_weight(random_float(n, k, seed=2))
    out = int8_linear(x, weight, scale, activation_bits=bits)
    flat = int8_linear(x.reshape(x.numel() // k, k), weight, scale, activation_bits=bits)
    assert out.shape == (*leading, n) and torch.equal(out.reshape(-1, n), flat)


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), -float("inf")))
@pytest.mark.parametrize("group, bits", ((None, 8), (16, 8), (None, 16)))
def test_rows_that_are_not_finite_or_zero_stay_in_their_row(bad, group, bits):
    x = random_float(6, 64, seed=1)
    x[4] = 0
    clean = x.clone()
    x[2, 5] = bad
    transform = ChannelTransform(None, group)
    weight, scale = quantize_weight(random_float(20, 64, seed=2), transform)
    bias = random_float(20, seed=3)
    out, expected = (int8_linear(rows, weight, scale, bias, transform, activation_bits=bits) for rows in (x, clean))
    others = [0, 1, 3, 4, 5]
    assert out[2].isnan().all() and torch.equal(out[4], bias)
    assert torch.equal(out[others], expected[others])
    q, q_scale = quantize_activations(x, transform, bits)
    assert q_scale[2].isnan() and not q[2].any()


def test_no_channels_gives_the_bias():
    bias = random_float(4, seed=1)
    weight, scale = torch.zeros(4, 0, dtype=torch.int8, device=DEVICE), torch.ones(4, device=DEVICE)
    assert torch.equal(int8_linear(torch.zeros(3, 0, device=DEVICE), weight, scale, bias), bias.expand(3, 4))


def gemm_arguments(**changes):
    arguments = {
        "q": random_int8(4, 16),
        "q_scale": torch.ones(4, device=DEVICE),
        "weight": random_int8(8, 16),
        "weight_scale": torch.ones(8, device=DEVICE),
    }
    return {**arguments, **changes}


@pytest.mark.parametrize(
    "changes, error, message",
    [
        ({"q": torch.zeros(4, 16)}, TypeError, "q must be int8"),
        ({"weight": torch.zeros(8, 16)}, TypeError, "weight must be int8"),
        ({"q": torch.zeros(4, dtype=torch.int8)}, ValueError, "q must be 2-D"),
        ({"weight": torch.zeros(8, 15, dtype=torch.int8)}, ValueError, "K = 16 but weight has K = 15"),
        ({"q_scale": torch.ones(5)}, ValueError, "q_scale must have shape"),
        ({"q_scale": torch.ones(4, dtype=torch.float64)}, TypeError, "q_scale must be float32"),
        ({"weight_scale": torch.ones(7)}, ValueError, "weight_scale must hold 1 or 8"),
        ({"weight_scale": torch.ones(8, dtype=torch.float16)}, TypeError, "weight_scale must be float32"),
        ({"bias": torch.ones(7)}, ValueError, "bias must have shape"),
        ({"bias": torch.ones(8, dtype=torch.int32)}, TypeError, "bias must be a floating point"),
        ({"bias": torch.ones(8, device="meta")}, ValueError, "different devices: .*bias on meta"),
        ({"out_dtype": torch.int32}, TypeError, "out_dtype must be"),
    ],
)
def test_bad_arguments_are_named(changes, error, message):
    with pytest.raises(error, match=message):
        int8_gemm(**gemm_arguments(**changes))


@pytest.mark.parametrize(
    "x, transform, error, message",
    [
        (torch.zeros(2, 16, dtype=torch.float64), UNCHANGED, TypeError, "x must be bfloat16"),
        (torch.zeros(16), UNCHANGED, ValueError, "x must be 2-D"),
        (torch.zeros(2, 16), ChannelTransform(None, 64), ValueError, "does not divide K = 16"),
    ],
)
def test_bad_activations_are_named(x, transform, error, message):
    with pytest.raises(error, match=message):
        quantize_activations(x, transform)


def test_linear_names_its_own_arguments():
    weight, scale = quantize_weight(random_float(8, 16))
    with pytest.raises(ValueError, match="x has K = 17 but weight has K = 16"):
        int8_linear(random_float(2, 17), weight, scale)
    with pytest.raises(ValueError, match="x must have at least one dimension"):
        int8_linear(torch.zeros((), device=DEVICE), weight, scale)
    with pytest.raises(TypeError, match="weight must be int8"):
        int8_linear(random_float(2, 16), weight.float(), scale)
    for bits in (12, 0, 32, None):
        with pytest.raises(ValueError, match=f"activation_bits must be 8 or 16, got {bits}"):
            int8_linear(random_float(2, 16), weight, scale, activation_bits=bits)


@pytest.mark.parametrize("k, passes", ((40, 1), (24, 2), (17, 1), (63, 2), (64, 1)))
def test_rows_begin_on_16_bytes(monkeypatch, k, passes):
    """Other rows are fetched byte by byte, which took OmniGen 2 (K = 2520) 50 times as long."""
    q, weight = random_int8(5, k * passes, seed=1), random_int8(7, k, seed=2)
    launched, own = [], gemm.TunedGemm._tune

    def tune(tuned, operands):
        launched.append((operands.q.stride(0), operands.weight.stride(0)))
        own(tuned, operands)

    monkeypatch.setattr(gemm.TunedGemm, "_tune", tune)
    sums = int8_accumulate(q, weight)
    assert all(stride % 16 == 0 for strides in launched for stride in strides) and launched
    assert torch.equal(sums.cpu(), int8_accumulate_reference(q, weight).cpu())
