"""Linears called many times over: the same bits as `int8_linear`, whatever one call differs in from those before."""

import ctypes

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kernels import ChannelTransform, RepeatedLinear, call_cache, quantize_weight
from kernels.call_cache import CACHE
from kernels.launching.launching import Launch
from kernels.linear import int8_linear as module
from kernels.linear.int8_linear import int8_gemm, quantize_activations
from support.covering import covering
from support.tensors import DEVICE, random_float


def at(address, like):
    """A tensor that begins at an address, of which no more is known, as of a compiled kernel's arguments."""
    if not isinstance(like, torch.Tensor) or isinstance(address, torch.Tensor):
        return address
    return torch.frombuffer((ctypes.c_char * like.element_size()).from_address(address), dtype=like.dtype)


@pytest.fixture(autouse=True)
def launched(monkeypatch, interpreter, nothing_kept):
    """The kernels' launches, on a CPU too: past the first ones on addresses, as on a card."""
    if DEVICE == "cpu":
        by_triton = Launch.first

        def first(launch, grid, *arguments):
            def direct(columns, rows, *given):
                given = (at(each, like) for each, like in zip(given, arguments, strict=True))
                by_triton(launch, (columns, rows), *given)
                launch.direct = direct

            by_triton(launch, grid, *arguments)
            launch.direct = direct

        monkeypatch.setattr(Launch, "first", first)


@pytest.fixture
def checked(monkeypatch):
    """The halves of calls that went the long way."""
    calls = []
    for op in (quantize_activations, int8_gemm):

        def counting(*args, op=op):
            calls.append(op.name)
            return op(*args)

        counting.launch_of = op.launch_of
        monkeypatch.setattr(module, op.name, counting)
    return calls


class Layer:
    def __init__(self, channels=64, outputs=48, group=None, bits=8, with_smooth=False, with_bias=True, one_scale=False):
        self.smooth = random_float(channels, seed=1).abs() + 0.5 if with_smooth else None
        self.transform, self.bits = ChannelTransform(self.smooth, group), bits
        self.weight, scale = quantize_weight(random_float(outputs, channels, seed=2), self.transform)
        self.scale = scale.max() if one_scale else scale[:, None]
        self.bias = random_float(outputs, seed=3, dtype=torch.bfloat16) if with_bias else None
        self.repeated = RepeatedLinear(self.held, group, bits)

    @property
    def held(self):
        return self.weight, self.scale, self.smooth

    def __call__(self, x):
        return self.repeated(x, self.held, self.bias)

    def product(self, x):
        """The same of an input that was quantized before, as fused ops do."""
        quantized = quantize_activations(x.view(-1, x.shape[-1]), self.transform, self.bits)
        return self.repeated.multiply(quantized, self.held, self.bias, x.shape[:-1], x.dtype)

    def expected(self, x):
        quantized = quantize_activations(x.reshape(-1, x.shape[-1]), self.transform, self.bits)
        return int8_gemm(*quantized, self.weight, self.scale, self.bias, x.dtype).view(*x.shape[:-1], -1)


FORMS = (
    {},
    {"with_bias": False},
    {"with_smooth": True},
    {"group": 16},
    {"with_smooth": True, "group": 64, "bits": 16},
    {"bits": 16},
    {"one_scale": True},
    {"channels": 80, "one_scale": True, "with_smooth": True, "bits": 16},
    {"channels": 70},
)


@pytest.mark.parametrize("form, shape", covering(FORMS, ((5,), (2, 3), (1, 1, 4))), ids=str)
def test_the_same_bits_again_and_again(checked, form, shape):
    layer = Layer(**form)
    for call in range(3):
        x = random_float(*shape, form.get("channels", 64), seed=call, dtype=torch.bfloat16)
        expected = layer.expected(x)
        for result in (layer(x), layer.product(x)):
            assert result.shape == expected.shape and torch.equal(result, expected)
    # The first; or all, where rows have to be copied into wider ones.
    assert len(checked) == 2 if layer.weight.shape[1] % 16 == 0 else len(checked) > 6


def test_another_shape_and_dtype(checked):
    layer = Layer()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for tokens in (3, 4, 3):
            x = random_float(2, tokens, 64, dtype=dtype)
            result = layer(x)
            assert result.dtype == dtype and torch.equal(result, layer.expected(x))
    assert len(checked) == 2 * 6


def launches():
    return [value for value in CACHE.values() if isinstance(value, Launch)]


def test_prompts_of_all_lengths_find_the_same_launches(checked):
    """But for 1 and for multiples of 16, for which the GEMM is compiled of its own."""
    layer = Layer()
    for kinds, tokens in enumerate((1, 16, 2), 1):
        for _ in range(2):
            x = random_float(tokens, 64, seed=tokens)
            assert torch.equal(layer(x), layer.expected(x))
        assert len(launches()) == 1 + kinds
    for tokens in (3, 9, 15):
        layer(random_float(tokens, 64)), layer.product(random_float(tokens, 64))
    assert len(launches()) == 4


def test_linears_of_one_form_share_their_launches():
    one, other, wider = Layer(), Layer(), Layer(outputs=32)

    def of(layer):
        return RepeatedLinear.of(layer.held, None, 8)

    assert of(one) is of(other) is not of(wider)
    assert RepeatedLinear.of(one.held, 16, 8) is not of(one)
    assert RepeatedLinear.of(one.held, None, 16) is not of(one)
    assert RepeatedLinear.of((one.weight, one.scale.max(), None), None, 8) is not of(one)


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
    assert len(checked) == 2


@pytest.mark.parametrize("what", ("rows", "memory", "weight", "bias", "dtype of the bias"))
def test_what_a_compiled_kernel_would_read_wrong_goes_the_long_way(checked, what):
    layer, x = Layer(), random_float(3, 64, dtype=torch.bfloat16)
    layer(x), layer(x)
    assert len(checked) == 2
    if what == "rows":
        x = random_float(3, 128, dtype=torch.bfloat16)[:, :64]
    elif what == "memory":
        x = random_float(3 * 64 + 1, dtype=torch.bfloat16)[1:].view(3, 64)
    elif what == "weight":
        layer.weight = torch.cat([layer.weight.flatten().new_zeros(1), layer.weight.flatten()])[1:].view(48, 64)
    elif what == "dtype of the bias":
        layer.bias = layer.bias.float()
    else:
        layer.bias = torch.cat([layer.bias.new_zeros(1), layer.bias])[1:]
    assert torch.equal(layer(x), layer.expected(x))
    assert len(checked) > 2


def test_errors_are_those_of_the_linear():
    layer, x = Layer(), random_float(3, 64)
    layer(x)
    with pytest.raises(ValueError, match="x has K = 32 but weight has K = 64"):
        layer(random_float(3, 32))
    with pytest.raises(ValueError, match="x has K = 128 but weight has K = 64"):
        layer(random_float(3, 128))  # as many as activations of 16 bits have numbers
    with pytest.raises(RuntimeError, match="no gradient"):
        layer(random_float(3, 64).requires_grad_())
    for _ in range(2):
        layer(x)
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


def test_what_passes_is_asked_for_again():
    """While it is open what stays, a launch is kept for some calls."""
    key, calls = ("a key",), []
    CACHE[key] = call_cache.ExpiringEntry(key, lambda *given: calls.append(given), 2)
    passes = CACHE[key]
    passes("x", 1)
    assert CACHE[key] is passes
    passes("y", 2)
    assert key not in CACHE and calls == [("x", 1), ("y", 2)]


def test_forms_do_not_add_up(monkeypatch):
    monkeypatch.setattr(call_cache, "MOST_ENTRIES", 5)
    for outputs in (16, 32, 48, 64):
        layer, x = Layer(outputs=outputs), random_float(3, 64)
        for _ in range(2):
            assert torch.equal(layer(x), layer.expected(x))
        assert len(CACHE) <= 5
