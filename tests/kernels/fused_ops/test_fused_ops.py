"""Norms, activations and gates in one pass: against their formulas in float64 and against the separate passes."""

import pytest
import torch

from kernels import ChannelTransform, Norm, activate_quantize, gated_residual, norm_quantize, norm_rope
from kernels.fused_ops import fused_ops as fused
from kernels.operators import Operator
from support.fused_op_cases import (
    CASES,
    Form,
    call_at,
    norm_in_float64,
)
from support.tensors import DEVICE, random_float, rotation_matrix

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# K, smoothing, rotation group
TRANSFORMS = (
    (1, False, None),
    (77, False, None),
    (301, True, None),
    (96, False, 16),
    (192, True, 64),
    (512, True, 256),
    (1028, False, None),  # of which an activation has 1024 channels beside it
)


def in_real_arithmetic(values, transform):
    """Smoothed and rotated in float64."""
    if transform.smooth is not None:
        values = values / transform.smooth.double()
    if transform.rotation_group is None:
        return values
    groups = values.unflatten(-1, (-1, transform.rotation_group))
    return (groups @ rotation_matrix(transform.rotation_group)).flatten(-2)


def assert_quantized(result, exact, expected, activation_bits, rounding=2e-6):
    """Within rounding of the exact values, and as the separate passes but for ties that fall aside."""
    q, scale = result
    exact = exact.flatten(0, -2)
    channels = exact.shape[-1]
    assert q.dtype == torch.int8 and scale.dtype == torch.float32 and scale.shape == q.shape[:1]
    values, step = q[:, :channels].double(), 0.501 + 127 * rounding
    if activation_bits == 16:
        assert q.shape[1] == 2 * channels
        values, step = values + q[:, channels:].double() / 254, 0.501 / 254 + 1e-4
    torch.testing.assert_close(scale.double(), exact.abs().amax(-1) / 127, rtol=rounding, atol=1e-12)
    assert ((values * scale[:, None] - exact).abs() <= step * scale[:, None] + 1e-7).all()
    difference = (q[:, :channels].int() - expected[0][:, :channels].int()).abs()
    assert difference.max() <= 1 and (difference > 0).sum() <= 1 + max(1e-3, 127 * rounding) * difference.numel()


def transform_in(arguments):
    return next(value for value in arguments if isinstance(value, ChannelTransform))


def rounding_of(dtype, group, activation_bits):
    """Relative: of what comes from 16-bit floats, and goes to 8 bits, the kernels rotate 16 bits."""
    return 2.0**-15 if group and dtype != torch.float32 and activation_bits == 8 else 2e-6


def modulation(batch, tokens, channels, dtype, seed):
    """Two of the four parts of one tensor, as models chunk them."""
    return random_float(batch, tokens, 4 * channels, seed=seed, dtype=dtype).chunk(4, dim=-1)[1:3]


@pytest.mark.parametrize("channels, smooth, group", TRANSFORMS)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.op.rounds])
def test_rounded_results(name, channels, smooth, group):
    case, dtype = CASES[name], DTYPES[channels % 3]
    for number, kind in enumerate(case.kinds):
        bits = (8, 16)[(number + TRANSFORMS.index((channels, smooth, group))) % 2]  # each variant meets both
        form = Form(kind, channels, group=group or 1, smooth=smooth, activation_bits=bits, dtype=dtype)
        arguments = call_at(case, form, DEVICE)
        (exact,) = case.exact(*arguments)
        exact = in_real_arithmetic(exact, transform_in(arguments))
        result, expected = case.op(*arguments), case.op.reference(*arguments)
        assert_quantized(result, exact, expected, bits, rounding_of(dtype, group, bits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not case.op.rounds])
def test_results_in_floats(name, dtype):
    case = CASES[name]
    # the interpreter cuts bf16 off where a GPU rounds
    unit = torch.finfo(dtype).eps * (1.01 if DEVICE == "cpu" else 0.51)
    for kind in case.kinds:
        form = Form(kind, 301, batch=3, tokens=2, heads=(5, 3), dtype=dtype)
        arguments = call_at(case, form, DEVICE)
        results = case.op(*arguments)
        results = results if isinstance(results, tuple) else (results,)
        for result, exact in zip(results, case.exact(*arguments), strict=True):
            assert result.dtype == dtype and result.shape == exact.shape and result.is_contiguous(), kind
            assert ((result.double() - exact).abs() <= unit * exact.abs() + 1e-5).all(), kind


def test_every_op_has_cases():
    assert {value.name for value in vars(fused).values() if isinstance(value, Operator)} == CASES.keys()


@pytest.mark.parametrize("batch, tokens", ((1, 1), (1, 3), (2, 1), (2, 3)))
@pytest.mark.parametrize("given", ("scale", "shift", "both", "neither"))
def test_modulations_of_every_shape(batch, tokens, given):
    """One row for all, one a sample, one a token, one of each."""
    x = random_float(2, 3, 40, seed=1, dtype=torch.bfloat16)
    scale, shift = modulation(batch, tokens, 40, torch.float32, seed=2)
    scale, shift = (scale if given in ("scale", "both") else None), (shift if given in ("shift", "both") else None)
    norm = Norm("rms", 1e-5, random_float(40, seed=3), random_float(40, seed=4, dtype=torch.bfloat16))
    result = norm_quantize(x, norm, scale, shift)
    exact = norm_in_float64(x, norm)
    exact = exact if scale is None else exact * scale.double()
    exact = exact if shift is None else exact + shift.double()
    assert_quantized(result, exact, norm_quantize.reference(x, norm, scale, shift, ChannelTransform(), 8), 8)

    residual, gate = random_float(2, 3, 40, seed=5), modulation(batch, tokens, 40, torch.bfloat16, seed=6)[0]
    exact = residual.double() + gate.double() * norm_in_float64(x, norm)
    torch.testing.assert_close(gated_residual(residual, x, gate, norm).double(), exact, rtol=1e-5, atol=1e-5)
    written = gated_residual(residual, x, gate, norm, out=(residual,))
    assert written is residual
    torch.testing.assert_close(residual.double(), exact, rtol=1e-5, atol=1e-5)


def test_strided_tokens_of_a_norm():
    """Token slices of a joint sequence, and channels that do not lie side by side."""
    joint = random_float(2, 9, 64, seed=1)
    for x in (joint[:, 2:4], joint[:, ::4], joint[1, :3], joint.transpose(0, 1)[:2], random_float(2, 64, 2).mT):
        norm = Norm("rms", 1e-6)
        result, expected = norm_quantize(x, norm), norm_quantize(x.contiguous(), norm)
        assert torch.equal(result[0], expected[0]) and torch.equal(result[1], expected[1])
        result = gated_residual(x, x, None, norm)
        assert (
            torch.equal(result, gated_residual(x.contiguous(), x.contiguous(), None, norm)) and result.is_contiguous()
        )


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "gelu"))
def test_activations_far_from_zero(activation):
    x = torch.tensor([[-3e38, -1e4, -90.0, -20.0, -1e-30, 0.0, 1e-30, 9.0, 90.0, 1e4]], device=DEVICE)
    q, scale = activate_quantize(x, activation)
    assert q.tolist() == [[0, 0, 0, 0, 0, 0, 0, 0, 1, 127]]
    torch.testing.assert_close(scale, torch.full_like(scale, 1e4 / 127))


@pytest.mark.parametrize("bad", (float("nan"), float("inf"), float("-inf")))
@pytest.mark.parametrize("group", (None, 64))
@pytest.mark.parametrize("activation_bits", (8, 16))
def test_a_broken_row_stays_one_row(bad, group, activation_bits):
    x = random_float(2, 2, 192, seed=1)
    whole = x.clone()
    x[1, 0, 100] = bad
    transform, rows = ChannelTransform(None, group), [0, 1, 3]
    for kind in ("rms", "layer"):
        q, scale = norm_quantize(x, Norm(kind, 1e-6), transform=transform, activation_bits=activation_bits)
        expected = norm_quantize(whole, Norm(kind, 1e-6), transform=transform, activation_bits=activation_bits)
        assert scale[2].isnan() and not q[2].any()
        assert torch.equal(q[rows], expected[0][rows]) and torch.equal(scale[rows], expected[1][rows])
    q, scale = activate_quantize(x.abs(), "silu", None, x, transform, activation_bits)
    assert scale[2].isnan() and not q[2].any() and scale[rows].isfinite().all()


@pytest.mark.parametrize("shape", ((0, 5, 64), (2, 0, 64)))
def test_no_tokens(shape):
    x = torch.empty(shape, device=DEVICE)
    for q, scale in (norm_quantize(x, Norm("rms", 1e-6), activation_bits=16), activate_quantize(x, "gelu", None, x)):
        assert q.shape == (0, 128) and q.dtype == torch.int8 and scale.shape == (0,)
    assert gated_residual(x, x).shape == shape


def test_rows_longer_than_registers():
    x, norm = random_float(1, 2, 33000, seed=1, dtype=torch.bfloat16), Norm("rms", 1e-6)
    result, expected = norm_quantize(x, norm), norm_quantize.reference(x, norm, None, None, ChannelTransform(), 8)
    assert_quantized(result, norm_in_float64(x, norm), expected, 8)
    assert torch.equal(gated_residual(x, x, None, norm), gated_residual.reference(x, x, None, norm))


@pytest.mark.parametrize("heads, width", (((1, 1), 2), ((5, 3), 8), ((2, 2), 24)))
@pytest.mark.parametrize("kind", CASES["norm_rope"].kinds)
def test_norm_rope_into_slices(kind, heads, width):
    """Of a joint sequence of another dtype."""
    case, dtype = CASES["norm_rope"], DTYPES[width % 3]
    arguments = call_at(case, Form(kind, heads[0] * width, heads=heads, dtype=dtype), DEVICE)
    first, second = (x.shape[2] for x in arguments[:2])
    joint = random_float(2, first + second, 9, width, seed=4).transpose(1, 2)
    before = joint.clone()
    out = joint[:, 4:7, :first], joint[:, 4:7, first:]
    case.op(*arguments, out)
    for result, wanted in zip(out, case.exact(*arguments), strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    untouched = [0, 1, 2, 3, 7, 8]
    assert torch.equal(joint[:, untouched], before[:, untouched])
    for result, wanted in zip(out, case.op.reference(*arguments, None), strict=True):
        torch.testing.assert_close(result.to(dtype), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_norms_of_one_side_and_in_place():
    q, k, freqs = random_float(1, 2, 3, 4, seed=1), random_float(1, 2, 3, 4, seed=2), random_float(2, 2, 2, 2, seed=3)
    expected = norm_rope.reference(q, k, RMS, None, freqs, "halves", None)
    result = norm_rope(q, k, RMS, None, freqs, "halves", (q, k))
    assert result[0] is q and result[1] is k
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_heads_that_lie_more_than_32_bits_apart():
    """Of a video, whose heads lie one after the other: the whole of the tensor is never touched."""
    apart = 2**30
    freqs = random_float(2, 2, 2, 2, seed=3)
    q = torch.empty(2 * apart + 8, dtype=torch.bfloat16, device=DEVICE).as_strided((1, 2, 3, 4), (8, 4, apart, 1))
    q.copy_(random_float(1, 2, 3, 4, seed=1))
    k = random_float(1, 2, 3, 4, seed=2, dtype=torch.bfloat16)
    expected = norm_rope.reference(q, k, RMS, None, freqs, "halves", None)
    for one, other in zip(norm_rope(q, k, RMS, None, freqs, "halves", (q, k)), expected, strict=True):
        torch.testing.assert_close(one, other.to(one.dtype), rtol=2**-7, atol=1e-5)


X = torch.zeros(2, 3, 8, device=DEVICE)
ROWS = torch.zeros(3, dtype=torch.int32, device=DEVICE)
Q, FREQS = torch.zeros(2, 3, 2, 4, device=DEVICE), torch.zeros(3, 2, 2, 2, device=DEVICE)
RMS = Norm("rms", 1e-6)


@pytest.mark.parametrize(
    "call, message",
    (
        (lambda: norm_quantize(X.double(), RMS), "x must be bfloat16, float16 or float32"),
        (lambda: norm_quantize(X, RMS, X[:, 0]), r"scale must have shape \(1 or 2, 1 or 3, 8\) to match x"),
        (lambda: norm_quantize(X, RMS, X, rows=ROWS[:2]), r"rows must have shape \(3,\) to match x"),
        (lambda: norm_quantize(X, RMS, X[..., :4], rows=ROWS), r"scale must have shape \(1 or 2, any, 8\)"),
        (
            lambda: norm_quantize(X, Norm("rms", 1e-6, torch.ones(4, device=DEVICE))),
            "the norm's weight must have shape",
        ),
        (lambda: norm_quantize(X, Norm("batch", 1e-6)), "a norm's kind must be rms or layer"),
        (lambda: norm_quantize(X, RMS, activation_bits=4), "activation_bits must be 8 or 16"),
        (lambda: activate_quantize(X, "relu"), "activation must be one of"),
        (lambda: activate_quantize(X, "sigmoid"), "a sigmoid is quantized with up"),
        (lambda: activate_quantize(X, "silu", X[..., :4]), "up must have the rows of gate"),
        (lambda: gated_residual(X, X[:1]), "x must have the residual's shape"),
        (lambda: gated_residual(X, X, X[0]), "gate must have shape"),
        (lambda: gated_residual(X, X, out=(X.mT,)), "out must be a contiguous"),
        (lambda: gated_residual(X, X, X, rows=ROWS.long()), "rows must be int32"),
        (lambda: norm_rope(Q, Q[:1], None, None, FREQS, "halves"), "q and k must be"),
        (lambda: norm_rope(Q, Q, None, None, FREQS, "thirds"), "pairs must be neighbours or halves"),
        (lambda: norm_rope(Q, Q, None, None, FREQS[:2], "halves"), "freqs must be floating point"),
        (lambda: norm_rope(Q, Q, Norm("layer", 1e-6), None, FREQS, "halves"), "the norm of q must be an rms norm"),
        (lambda: norm_rope(Q, Q, None, None, FREQS, "halves", (Q, Q[:1])), "the output of k must have shape"),
        (lambda: norm_quantize(X.clone().requires_grad_(), RMS), "no gradient"),
    ),
)
def test_bad_arguments_are_refused(call, message):
    for _ in range(2):  # a refused call is not remembered as a good one
        with pytest.raises((TypeError, ValueError, RuntimeError), match=message):
            call()


def test_a_gradient_passes_the_residual():
    x, gate = random_float(2, 3, 8, seed=1).requires_grad_(), random_float(2, 1, 8, seed=2)
    gated_residual(x, x, gate, RMS).sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
