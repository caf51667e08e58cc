"""The products that newer ComfyUI asks of a layout: as exact as the separate passes, only where INT8 was chosen."""

from dataclasses import replace

import pytest
import torch

from support.tensors import relative_error

ROWS, CHANNELS = 96, 128
ACTIVATIONS = (None, "none", "gelu_tanh", "swiglu", "rms_norm")
FORMS = ("plain", "smoothed", "rotated", "both", "16 bits")
EPS = 1e-5


def randn(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.fixture
def layout(pack):
    from int8_dit.nodes.layers.int8_weight import PerChannelINT8Layout

    return PerChannelINT8Layout


@pytest.fixture
def make(pack):
    """An INT8 weight [ROWS, CHANNELS] in one of FORMS, for a kernel."""
    from int8_dit.kernels import ChannelTransform, quantize_weight
    from int8_dit.nodes.comfyui.quantized import HeldWeight, stored
    from int8_dit.nodes.layers.int8_weight import LAYOUT, int8_weight

    def weight(form="plain", kernel="fused int8", dtype=torch.float32):
        smooth = torch.linspace(0.5, 2.0, CHANNELS) if form in ("smoothed", "both") else None
        transform = ChannelTransform(smooth, 64 if form in ("rotated", "both") else None)
        quantized = quantize_weight(randn(ROWS, CHANNELS, seed=1) / CHANNELS**0.5, transform)
        made = int8_weight(*quantized, dtype, transform, 16 if form == "16 bits" else 8)
        return HeldWeight(stored(made), LAYOUT, replace(made.params, kernel=kernel))

    return weight


def activated(x, activation, norm_weight):
    if activation == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if activation == "swiglu":
        gate, up = x.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up
    if activation == "rms_norm":
        return torch.nn.functional.rms_norm(x, (CHANNELS,), norm_weight, EPS)
    return x


def separately(weight, x, bias):
    """The INT8 linear of floats."""
    from int8_dit.kernels import int8_linear

    params = weight._params
    bits = params.activation_bits
    return int8_linear(x, weight._qdata, params.scale, bias, params.transform, activation_bits=bits)


def assert_as_exact(output, weight, values, exact, bias, residual=None, scale=None):
    """`values` are what the linear multiplies, as separate passes compute them; `exact` in float64."""
    expected = exact.double() @ weight.dequantize().double().t() + bias.double()
    usual = separately(weight, values, bias)
    if residual is not None:
        expected = residual.double() + scale.double() * expected
        usual = residual + scale * usual
    error = relative_error(output.double(), expected)
    half = values.dtype != torch.float32
    assert error <= 1.1 * relative_error(usual.double(), expected)
    assert error < (0.0003 if weight._params.activation_bits == 16 and not half else 0.03)


def inputs(activation, samples=2, dtype=torch.float32):
    return randn(samples, 5, CHANNELS * (2 if activation == "swiglu" else 1), seed=2, dtype=dtype)


DTYPES = [(form, torch.float32) for form in FORMS] + [("plain", dtype) for dtype in (torch.bfloat16, torch.float16)]


@pytest.mark.parametrize("form, dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_activation_before_the_linear(layout, make, activation, form, dtype):
    """Of three axes, in half precision of two."""
    weight, x, bias = make(form, dtype=dtype), inputs(activation, dtype=dtype), randn(ROWS, seed=3, dtype=dtype)
    x = x if dtype == torch.float32 else x[0]
    norm_weight = 1 + 0.1 * randn(CHANNELS, seed=4, dtype=dtype)
    output = layout.linear_input_act(weight, x, bias, activation, norm_weight, EPS)
    assert output.shape == (*x.shape[:-1], ROWS) and output.dtype == dtype
    values, exact = (activated(t, activation, norm_weight.to(t.dtype)) for t in (x, x.double()))
    assert_as_exact(output, weight, values, exact, bias)


@pytest.mark.parametrize("shape", ((ROWS,), (1, 1, ROWS), (2, 1, ROWS), (2, 5, ROWS)))
@pytest.mark.parametrize("activation", (None, "gelu_tanh"))
def test_a_scaled_residual_behind_it(layout, make, activation, shape):
    weight, x, bias = make(), inputs(activation), randn(ROWS, seed=3)
    residual, scale = randn(2, 5, ROWS, seed=5), randn(*shape, seed=6)
    before = residual.clone()
    output = layout.linear_input_act(weight, x, bias, activation, residual=residual, residual_scale=scale)
    values, exact = (activated(t, activation, None) for t in (x, x.double()))
    assert_as_exact(output, weight, values, exact, bias, residual, scale)
    assert torch.equal(residual, before)


@pytest.mark.parametrize("form", FORMS)
def test_a_modulated_norm_before_it(layout, make, form):
    weight, x, bias = make(form), inputs(None), randn(ROWS, seed=3)
    norm_weight, scale = 1 + 0.1 * randn(CHANNELS, seed=4), randn(1, 1, CHANNELS, seed=5)
    output = layout.fused_rms_modulated(x, weight, bias, norm_weight, EPS, scale)
    values, exact = (activated(t, "rms_norm", norm_weight.to(t.dtype)) * (1 + scale) for t in (x, x.double()))
    assert_as_exact(output, weight, values, exact, bias)


def test_as_comfy_kitchen_computes_them(layout, make):
    """The same calls of its own layout, 0.2.40 or newer."""
    from comfy_kitchen.tensor import QuantizedTensor, TensorWiseINT8Layout

    if not hasattr(TensorWiseINT8Layout, "fused_rms_modulated"):
        pytest.skip("a comfy-kitchen that asks its layouts for no products")
    from comfy_kitchen import use_backend

    ours, bias, norm_weight = make(), randn(ROWS, seed=3), 1 + 0.1 * randn(CHANNELS, seed=4)
    params = TensorWiseINT8Layout.Params(ours._params.scale, torch.float32, tuple(ours.shape))
    theirs = QuantizedTensor(ours._qdata, "TensorWiseINT8Layout", params)
    added = {"residual": randn(2, 5, ROWS, seed=5), "residual_scale": randn(2, 1, ROWS, seed=6)}
    for activation in ACTIVATIONS:
        call = (inputs(activation), bias, activation, norm_weight, EPS)
        for more in ({}, added):
            results = [weight.linear_input_act(*call, **more) for weight in (ours, theirs)]
            assert relative_error(*results) < 0.01, activation
    call = (bias, norm_weight, EPS, randn(CHANNELS, seed=5))
    with use_backend("eager"):
        expected = TensorWiseINT8Layout.fused_rms_modulated(inputs(None), theirs, *call)
    assert relative_error(layout.fused_rms_modulated(inputs(None), ours, *call), expected) < 0.01


# Where the caller's own passes are to run


X, RESIDUAL = inputs(None), randn(2, 5, ROWS)
GELU = (None, "gelu_tanh")
UNUSUAL = {
    "another activation": (X, None, "situ"),
    "a norm without weight": (X, None, "rms_norm"),
    "a norm of another width": (X, None, "rms_norm", torch.ones(CHANNELS + 1), EPS),
    "another width": (X[..., 1:], *GELU),
    "one half only": (X, None, "swiglu"),
    "one axis": (X[0, 0], *GELU),
    "four axes": (X[None], *GELU),
    "float64": (X.double(), *GELU),
    "another device": (X.to("meta"), *GELU),
    "a gradient": (X.clone().requires_grad_(), *GELU),
    "no scale of the residual": (X, None, None, None, 0.0, RESIDUAL),
    "a scale for each number of tokens": (X, None, None, None, 0.0, RESIDUAL, torch.ones(5, ROWS)),
    "a single scale": (X, None, None, None, 0.0, RESIDUAL, torch.ones(())),
    "a residual of another shape": (X, None, None, None, 0.0, RESIDUAL[:1], torch.ones(ROWS)),
}


@pytest.mark.parametrize("case", UNUSUAL)
def test_arguments_that_are_no_product_of_this_layout(layout, make, case):
    assert layout.linear_input_act(make(), *UNUSUAL[case]) is NotImplemented


def test_weights_that_are_not_for_this_layout(layout, make):
    for weight in (make().t(), make(kernel="bf16"), make(kernel="auto")):  # without a card for it
        assert layout.linear_input_act(weight, X, *GELU) is NotImplemented
    assert layout.linear_input_act(make(), make(), *GELU) is NotImplemented


@pytest.mark.parametrize(
    "change",
    (
        {"modulation_scale": torch.zeros(2, 1, CHANNELS)},  # one per sample
        {"norm_weight": torch.ones(1)},
        {"x": torch.ones(5, CHANNELS - 1)},
        {"modulation_scale": torch.zeros(CHANNELS, requires_grad=True)},
    ),
    ids=("a modulation per sample", "another norm", "another width", "a gradient"),
)
def test_no_modulated_norm_for_this_layout(layout, make, change):
    usual = {"norm_weight": torch.ones(CHANNELS), "norm_eps": EPS, "modulation_scale": torch.zeros(CHANNELS)}
    arguments = {"x": inputs(None), "weight": make(), "bias": None} | usual
    assert layout.fused_rms_modulated(**arguments) is not NotImplemented
    assert layout.fused_rms_modulated(**arguments | change) is NotImplemented
    assert layout.fused_rms_modulated(**arguments | {"weight": make(kernel="bf16")}) is NotImplemented


def test_a_compiler_gets_the_separate_passes(layout, make):
    """Inductor makes one kernel of those."""
    weight = make()

    def linear(x):
        product = layout.linear_input_act(weight, x, None, "gelu_tanh")
        return torch.nn.functional.gelu(x) if product is NotImplemented else product

    compiled = torch.compile(linear, backend="eager", fullgraph=True)
    assert compiled(inputs(None)).shape[-1] == CHANNELS and linear(inputs(None)).shape[-1] == ROWS


# What a layer of a MODEL holds


def kernels(dit, model):
    return {weight._params.kernel for weight in dit.int8_weights(model).values()}


@pytest.mark.parametrize("kernel", ("fused int8", "bf16", "auto"))
def test_weights_know_the_choice_of_kernel(dit, kernel, tmp_path):
    from int8_dit.nodes.saving.save import save_int8_model

    quantized = dit.quantize(dit.stock(), kernel=kernel)
    assert kernels(dit, quantized) == {kernel}
    saved = save_int8_model(quantized, str(tmp_path / "model.safetensors"), {})
    assert kernels(dit, dit.load(saved, kernel="fused int8")) == {"fused int8"}


@pytest.mark.parametrize("partially", (False, True))
def test_a_lora_keeps_the_choice_of_kernel(dit, smoothed, lora, layout, partially):
    patched = dit.with_lora(smoothed, lora)
    if partially:
        patched.patch_model(device_to=patched.load_device, lowvram_model_memory=1)
    dit.forward(patched) if partially else dit.output(patched)
    assert kernels(dit, patched) == {"fused int8"}
    weight = dit.module(patched, dit.LAYER).weight
    again = weight.requantize_from_float(weight.dequantize(), scale="recalculate")
    x = randn(5, weight.shape[1])
    assert again._params.kernel == "fused int8" and again.to(torch.bfloat16)._params.kernel == "fused int8"
    assert weight._layout_cls == layout.__name__ and layout.linear_input_act(weight, x, None, "gelu_tanh").shape[0] == 5
    patched.unpatch_model(patched.offload_device)
    assert kernels(dit, smoothed) == {"fused int8"}
