"""Norms, activations and gates in one pass: against their formulas in float64 and against the separate passes."""

import pytest
import torch
import torch.nn.functional as F

from kernels import ChannelTransform, Norm, activate_quantize, gated_residual, norm_quantize, norm_rope
from kernels.linear import quantize_activations
from support.tensors import DEVICE, random_float, relative_error, rotation_matrix

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# K, smoothing, rotation group
TRANSFORMS = (
    (1, False, None),
    (77, False, None),
    (301, True, None),
    (96, False, 16),
    (192, True, 64),
    (512, True, 256),
)


def transform_of(channels, smooth, group):
    return ChannelTransform(random_float(channels, seed=9).abs() + 0.3 if smooth else None, group)


def in_real_arithmetic(values, transform):
    """Smoothed and rotated in float64."""
    if transform.smooth is not None:
        values = values / transform.smooth.double()
    if transform.rotation_group is None:
        return values
    groups = values.unflatten(-1, (-1, transform.rotation_group))
    return (groups @ rotation_matrix(transform.rotation_group)).flatten(-2)


def norm_in_float64(x, norm):
    x = x.double()
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = x if norm.weight is None else x * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def activation_in_float64(x, activation):
    x = x.double()
    return F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


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


def rounding_of(dtype, group, activation_bits):
    """Relative: of what comes from 16-bit floats, and goes to 8 bits, the kernels rotate 16 bits."""
    return 2.0**-15 if group and dtype != torch.float32 and activation_bits == 8 else 2e-6


def modulation(batch, tokens, channels, dtype, seed):
    """Two of the four parts of one tensor, as models chunk them."""
    return random_float(batch, tokens, 4 * channels, seed=seed, dtype=dtype).chunk(4, dim=-1)[1:3]


@pytest.mark.parametrize("channels, smooth, group", TRANSFORMS)
@pytest.mark.parametrize("activation_bits", (8, 16))
def test_norm_quantize(channels, smooth, group, activation_bits):
    dtype = DTYPES[channels % 3]
    x = random_float(3, 3, channels, seed=channels, dtype=dtype) * 4 + 1
    transform = transform_of(channels, smooth, group)
    kind = "layer" if channels % 2 == 0 else "rms"
    norm = Norm(kind, 1e-6, random_float(channels, seed=1, dtype=dtype) if group is None else None)
    scale, shift = modulation(3, 1, channels, dtype, seed=2)
    result = norm_quantize(x, norm, scale, shift, transform, activation_bits)
    exact = in_real_arithmetic(norm_in_float64(x, norm) * (1 + scale.double()) + shift.double(), transform)
    expected = norm_quantize.reference(x, norm, scale, shift, transform, activation_bits)
    assert_quantized(result, exact, expected, activation_bits, rounding_of(dtype, group, activation_bits))


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
    exact = exact if scale is None else exact * (1 + scale.double())
    exact = exact if shift is None else exact + shift.double()
    assert_quantized(result, exact, norm_quantize.reference(x, norm, scale, shift, ChannelTransform(), 8), 8)

    residual, gate = random_float(2, 3, 40, seed=5), modulation(batch, tokens, 40, torch.bfloat16, seed=6)[0]
    exact = residual.double() + gate.double() * norm_in_float64(x, norm)
    torch.testing.assert_close(gated_residual(residual, x, gate, norm).double(), exact, rtol=1e-5, atol=1e-5)


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


@pytest.mark.parametrize("channels, smooth, group", TRANSFORMS)
@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "gelu"))
@pytest.mark.parametrize("activation_bits", (8, 16))
def test_activate_quantize(channels, smooth, group, activation, activation_bits):
    dtype = DTYPES[channels % 3]
    wide = random_float(1, 3, 2 * channels + 3, seed=channels, dtype=dtype) * 3
    gate, up = wide[..., :channels], wide[..., channels : 2 * channels]
    gate = gate.abs() if channels == 1 else gate
    transform = transform_of(channels, smooth, group)
    result = activate_quantize(gate, activation, up, None, transform, activation_bits)
    exact = in_real_arithmetic(activation_in_float64(gate, activation) * up.double(), transform)
    expected = activate_quantize.reference(gate, activation, up, None, transform, activation_bits)
    assert_quantized(result, exact, expected, activation_bits, rounding_of(gate.dtype, group, activation_bits))


@pytest.mark.parametrize(
    "first, channels, group, leading",
    ((1, 7, None, (3,)), (64, 128, 64, (2, 2)), (100, 156, 256, (2, 1, 2)), (1025, 3, None, (2, 2))),
)
@pytest.mark.parametrize("with_up", (False, True))
def test_two_parts_side_by_side(first, channels, group, leading, with_up):
    wide = random_float(*leading, first + 2 * channels, seed=channels, dtype=torch.bfloat16) * 3
    beside, gate, up = wide.split((first, channels, channels), dim=-1)
    up = up if with_up else None
    transform = ChannelTransform(None, group)
    result = activate_quantize(gate, "gelu_tanh", up, beside, transform)
    exact = activation_in_float64(gate, "gelu_tanh")
    exact = exact if up is None else exact * up.double()
    exact = in_real_arithmetic(torch.cat([beside.double(), exact], dim=-1), transform)
    expected = activate_quantize.reference(gate, "gelu_tanh", up, beside, transform, 8)
    assert_quantized(result, exact, expected, 8, rounding_of(gate.dtype, group, 8))


@pytest.mark.parametrize("activation", ("silu", "gelu_tanh", "gelu"))
def test_activations_far_from_zero(activation):
    x = torch.tensor([[-3e38, -1e4, -90.0, -20.0, -1e-30, 0.0, 1e-30, 9.0, 90.0, 1e4]], device=DEVICE)
    q, scale = activate_quantize(x, activation)
    assert q.tolist() == [[0, 0, 0, 0, 0, 0, 0, 0, 1, 127]]
    torch.testing.assert_close(scale, torch.full_like(scale, 1e4 / 127))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", (None, "rms", "layer"))
@pytest.mark.parametrize("gated", (None, "plain", "tanh"))
def test_gated_residual(dtype, kind, gated):
    residual, x = (random_float(3, 2, 301, seed=seed, dtype=dtype) * 3 for seed in (1, 2))
    norm = None if kind is None else Norm(kind, 1e-6, random_float(301, seed=3, dtype=dtype))
    gate = None if gated is None else random_float(3, 1, 301, seed=4, dtype=dtype) * 0.5
    result = gated_residual(residual, x, gate, norm, tanh=gated == "tanh")
    values = x.double() if norm is None else norm_in_float64(x, norm)
    if gate is not None:
        values = values * (gate.double().tanh() if gated == "tanh" else gate.double())
    exact = residual.double() + values
    assert result.dtype == dtype and result.shape == residual.shape
    # the interpreter cuts bf16 off where a GPU rounds
    unit = torch.finfo(dtype).eps * (1.01 if DEVICE == "cpu" else 0.51)
    assert ((result.double() - exact).abs() <= unit * exact.abs() + 1e-6 * (1 + values.abs())).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels, smooth, group", ((77, False, None), (301, True, None), (512, True, 256)))
@pytest.mark.parametrize("activation_bits", (8, 16))
def test_no_further_from_the_truth_than_separate_passes(dtype, channels, smooth, group, activation_bits):
    x, up = (random_float(1, 3, channels, seed=seed, dtype=dtype) * 2 for seed in (1, 2))
    transform = transform_of(channels, smooth, group)
    scale, shift = modulation(1, 1, channels, dtype, seed=3)
    norm = Norm("rms", 1e-6, random_float(channels, seed=4, dtype=dtype))

    def error(result, exact):
        q, step = result[0].double(), result[1].double()[:, None]
        values = q[:, :channels] + (q[:, channels:] / 254 if activation_bits == 16 else 0)
        return relative_error(values * step, in_real_arithmetic(exact, transform).flatten(0, -2))

    def separate(values):
        return quantize_activations(values.flatten(0, -2), transform, activation_bits)

    fused = norm_quantize(x, norm, scale, shift, transform, activation_bits)
    unfused = separate(F.rms_norm(x, (channels,), norm.weight, 1e-6) * (1 + scale) + shift)
    exact = norm_in_float64(x, norm) * (1 + scale.double()) + shift.double()
    assert error(fused, exact) <= 1.02 * error(unfused, exact)

    fused = activate_quantize(x, "silu", up, None, transform, activation_bits)
    exact = activation_in_float64(x, "silu") * up.double()
    assert error(fused, exact) <= 1.02 * error(separate(F.silu(x) * up), exact)


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
    assert torch.equal(gated_residual(x, x, None, norm), gated_residual.reference(x, x, None, norm, False))


def rope_in_float64(x, norm, freqs, pairs):
    heads, width = x.shape[2:]
    if norm is not None and norm.weight is not None and norm.weight.numel() != width:
        x = norm_in_float64(x.flatten(2), norm).unflatten(-1, (heads, width))
    elif norm is not None:
        x = norm_in_float64(x, norm)
    half = width // 2
    first, second = (range(half), range(half, width)) if pairs == "halves" else (range(0, width, 2), range(1, width, 2))
    out, x, matrix = torch.empty_like(x, dtype=torch.float64), x.double(), freqs.double().reshape(-1, 1, half, 2, 2)
    out[..., first] = matrix[..., 0, 0] * x[..., first] + matrix[..., 0, 1] * x[..., second]
    out[..., second] = matrix[..., 1, 0] * x[..., first] + matrix[..., 1, 1] * x[..., second]
    return out


@pytest.mark.parametrize("pairs", ("neighbours", "halves"))
@pytest.mark.parametrize("heads, kv_heads, width", ((1, 1, 2), (5, 3, 8), (2, 2, 24)))
@pytest.mark.parametrize("over", (None, "head", "head without weight", "all heads"))
def test_norm_rope(pairs, heads, kv_heads, width, over):
    """Slices of one projection into new tensors, and into slices of a joint sequence of another dtype."""
    dtype = DTYPES[width % 3]
    qkv = random_float(2, 3, heads + 2 * kv_heads, width, seed=width, dtype=dtype)
    q, k, _ = qkv.split((heads, kv_heads, kv_heads), dim=2)
    norms = [None, None]
    if over is not None:
        sizes = [width * (count if over == "all heads" else 1) for count in (heads, kv_heads)]
        weights = [None if "without" in over else random_float(size, seed=size, dtype=dtype) for size in sizes]
        norms = [Norm("rms", 1e-6, weight) for weight in weights]
    freqs = random_float(1, 3, 1, width // 2, 2, 2, seed=3)
    exact = [rope_in_float64(x, norm, freqs, pairs) for x, norm in zip((q, k), norms, strict=True)]
    unit = torch.finfo(dtype).eps * (1.01 if DEVICE == "cpu" else 0.51)
    for result, wanted in zip(norm_rope(q, k, *norms, freqs, pairs), exact, strict=True):
        assert result.dtype == dtype and result.is_contiguous()
        assert ((result.double() - wanted).abs() <= unit * wanted.abs() + 1e-5).all()
    joint = random_float(2, heads + kv_heads, 9, width, seed=4).transpose(1, 2)
    before = joint.clone()
    out = (joint[:, 4:7, :heads], joint[:, 4:7, heads:])
    norm_rope(q, k, *norms, freqs, pairs, out)
    for result, wanted in zip(out, exact, strict=True):
        torch.testing.assert_close(result.double(), wanted, rtol=1e-5, atol=1e-5)
    untouched = [0, 1, 2, 3, 7, 8]
    assert torch.equal(joint[:, untouched], before[:, untouched])
    for result, wanted in zip(out, norm_rope.reference(q, k, *norms, freqs, pairs, None), strict=True):
        torch.testing.assert_close(result.to(dtype), wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)


def test_norms_of_one_side_and_in_place():
    q, k, freqs = random_float(1, 2, 3, 4, seed=1), random_float(1, 2, 3, 4, seed=2), random_float(2, 2, 2, 2, seed=3)
    expected = norm_rope.reference(q, k, RMS, None, freqs, "halves", None)
    result = norm_rope(q, k, RMS, None, freqs, "halves", (q, k))
    assert result[0] is q and result[1] is k
    for one, other in zip(result, expected, strict=True):
        torch.testing.assert_close(one, other)


X = torch.zeros(2, 3, 8, device=DEVICE)
Q, FREQS = torch.zeros(2, 3, 2, 4, device=DEVICE), torch.zeros(3, 2, 2, 2, device=DEVICE)
RMS = Norm("rms", 1e-6)


@pytest.mark.parametrize(
    "call, message",
    (
        (lambda: norm_quantize(X.double(), RMS), "x must be bfloat16, float16 or float32"),
        (lambda: norm_quantize(X, RMS, X[:, 0]), r"scale must have shape \(1 or 2, 1 or 3, 8\) to match x"),
        (lambda: norm_quantize(X, RMS, None, X[..., :4]), "shift must have shape"),
        (
            lambda: norm_quantize(X, Norm("rms", 1e-6, torch.ones(4, device=DEVICE))),
            "the norm's weight must have shape",
        ),
        (lambda: norm_quantize(X, Norm("batch", 1e-6)), "a norm's kind must be rms or layer"),
        (lambda: norm_quantize(X, RMS, transform=ChannelTransform(None, 16)), "does not divide K = 8"),
        (lambda: norm_quantize(X, RMS, activation_bits=4), "activation_bits must be 8 or 16"),
        (lambda: activate_quantize(X, "relu"), "activation must be one of"),
        (lambda: activate_quantize(X, "silu", X[..., :4]), "up must have the rows of gate"),
        (lambda: activate_quantize(X, "silu", None, X[:1]), "beside must have the rows of gate"),
        (lambda: gated_residual(X, X[:1]), "x must have the residual's shape"),
        (lambda: gated_residual(X, X, X[0]), "gate must have shape"),
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
