"""Linears called many times over: the same bits as `int8_linear`, whatever one call differs in from those before."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import ChannelTransform, RepeatedLinear, quantize_weight
from kernels import repeated_linear as module
from kernels.linear import int8_linear
from support.tensors import DEVICE, random_float


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The kernels' launches, on a CPU too."""
    if DEVICE == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture
def checked(monkeypatch):
    """The products that went the long way."""
    calls = []
    run = module.int8_gemm
    monkeypatch.setattr(module, "int8_gemm", lambda *args: calls.append(1) or run(*args))
    return calls


class Layer:
    def __init__(self, channels=64, outputs=48, group=None, bits=8, with_smooth=False, with_bias=True):
        self.smooth = random_float(channels, seed=1).abs() + 0.5 if with_smooth else None
        self.transform, self.bits = ChannelTransform(self.smooth, group), bits
        self.weight, scale = quantize_weight(random_float(outputs, channels, seed=2), self.transform)
        self.scale = scale[:, None]
        self.bias = random_float(outputs, seed=3, dtype=torch.bfloat16) if with_bias else None
        self.repeated = RepeatedLinear(group, bits)

    def __call__(self, x):
        quantized = self.repeated.quantize(x, self.weight, self.smooth)
        return self.repeated.multiply(quantized, self.weight, self.scale, self.bias, x.shape[:-1], x.dtype)

    def expected(self, x):
        return int8_linear(x, self.weight, self.scale, self.bias, self.transform, activation_bits=self.bits)


FORMS = (
    {},
    {"with_bias": False},
    {"with_smooth": True},
    {"group": 16},
    {"with_smooth": True, "group": 64, "bits": 16},
    {"bits": 16},
)


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", ((5,), (2, 3), (1, 1, 4)))
def test_the_same_bits_again_and_again(checked, form, shape):
    layer = Layer(**form)
    for call in range(3):
        x = random_float(*shape, 64, seed=call, dtype=torch.bfloat16)
        assert torch.equal(layer(x), layer.expected(x))
    assert len(checked) == 1  # the first


def test_another_shape_and_dtype(checked):
    layer = Layer()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens in (3, 4, 3):
            x = random_float(2, tokens, 64, dtype=dtype)
            result = layer(x)
            assert result.dtype == dtype and torch.equal(result, layer.expected(x))
    assert len(checked) == 3  # one for each dtype


def test_another_tensor_in_the_same_layer(checked):
    """A weight that was moved or patched, and its factors."""
    layer, x = Layer(with_smooth=True), random_float(3, 64)
    layer(x)
    other = Layer(with_smooth=True)
    other.smooth = layer.smooth * 2
    other.transform = ChannelTransform(other.smooth)
    other.weight, scale = quantize_weight(random_float(48, 64, seed=9), other.transform)
    other.scale, other.repeated = scale[:, None], layer.repeated
    assert torch.equal(other(x), other.expected(x)) and not torch.equal(other(x), layer(x))
    assert len(checked) == 1


@pytest.mark.parametrize("what", ("weight", "bias"))
def test_what_a_compiled_kernel_would_read_wrong_goes_the_long_way(checked, what):
    layer, x = Layer(), random_float(3, 64, dtype=torch.bfloat16)
    layer(x), layer(x)
    assert len(checked) == 1
    if what == "weight":
        layer.weight = torch.cat([layer.weight.flatten().new_zeros(1), layer.weight.flatten()])[1:].view(48, 64)
    else:
        layer.bias = torch.cat([layer.bias.new_zeros(1), layer.bias])[1:]
    assert torch.equal(layer(x), layer.expected(x))
    assert len(checked) > 1


def test_errors_are_those_of_the_linear():
    layer, x = Layer(), random_float(3, 64)
    layer(x)
    with pytest.raises(ValueError, match="x has K = 32 but weight has K = 64"):
        layer(random_float(3, 32))
    with pytest.raises(RuntimeError, match="no gradient"):
        layer(random_float(3, 64).requires_grad_())
    layer.bias = layer.bias[:-1]
    with pytest.raises(ValueError, match="bias must have shape"):
        layer(x)


def test_who_watches_operators_sees_them():
    class Watch(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen += (function,)
            return function(*args, **(kwargs or {}))

    layer, x = Layer(), random_float(3, 64)
    layer(x), layer(x)
    with Watch() as watch:
        layer(x)
    assert torch.ops.int8_dit.int8_gemm.default in watch.seen


def test_shapes_do_not_add_up(monkeypatch):
    monkeypatch.setattr(module, "_MOST_SHAPES", 3)
    layer = Layer()
    for tokens in (1, 20, 40, 80, 200, 300):
        x = random_float(tokens, 64)
        assert torch.equal(layer(x), layer.expected(x))
        assert len(layer.repeated._gemms) <= 3
