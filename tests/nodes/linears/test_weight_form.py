"""What a linear keeps of its weight between calls: whatever is done to the weight, the next call computes with it."""

import contextlib
import copy
import gc
import pickle
import weakref

import pytest
import torch

from int8_dit.kernels import ChannelTransform, int8_linear, quantize_gguf, quantize_weight
from int8_dit.nodes.files.holding import held_gguf, read_gguf_weight
from int8_dit.nodes.linears import weight_form
from int8_dit.nodes.linears.int8_weight import int8_weight
from int8_dit.nodes.linears.weight_form import known_form, known_weight


@pytest.fixture(scope="module")
def model(dit):
    model = dit.quantize(dit.stock())
    dit.output(model)
    return model


@pytest.fixture
def layer(dit, model):
    """An INT8 linear [192, 192] of a loaded MODEL."""
    layer = dit.module(model, "joint_blocks.1.x_block.attn.proj")
    held = dict(layer._parameters)
    yield layer
    layer._parameters.update(held)


@pytest.fixture
def x(layer):
    """An input of the linear, which has been called with it, so that all is known of its weight."""
    x = torch.randn(2, 5, layer.in_features, generator=torch.Generator().manual_seed(0))
    computed(layer, x)
    assert layer.known_weight.is_of(layer.weight)
    return x


@pytest.fixture
def other(layer):
    """Another INT8 weight of its shape."""

    def make(smoothed=False, group=None, bits=8):
        generator = torch.Generator().manual_seed(1)
        smooth = torch.rand(layer.in_features, generator=generator) + 0.5 if smoothed else None
        transform = ChannelTransform(smooth, group)
        values = torch.randn(layer.out_features, layer.in_features, generator=generator)
        return int8_weight(*quantize_weight(values, transform), torch.float32, transform, bits)

    return make


def computed(layer, x):
    with torch.inference_mode():
        return layer(x)


def expected(layer, x):
    """Of what the weight is now, with nothing kept."""
    form = known_form(layer.weight, layer)
    transform, bits = form.input_form(layer.weight)
    with torch.inference_mode():
        return int8_linear(x, *form.operands(layer.weight), layer.bias, transform, activation_bits=bits)


def input_form(layer):
    form, _ = known_weight(layer)
    return None if form is None else form.input_form(layer.weight)


def replace(layer, weight):
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)


def copied(layer):
    """A copy of the weight in its place, which has been used: that of the MODEL stays as it is."""
    replace(layer, layer.weight.clone())
    computed(layer, torch.ones(1, layer.in_features))
    return layer.weight


CHANGES = {
    "none": lambda layer, other: None,
    "another": lambda layer, other: replace(layer, other()),
    "one with factors": lambda layer, other: replace(layer, other(smoothed=True, group=4)),
    "one of 16 bits": lambda layer, other: replace(layer, other(bits=16)),
    "swapped under the parameter, as by Module.to": lambda layer, other: torch.utils.swap_tensors(
        copied(layer), torch.nn.Parameter(other(group=4), requires_grad=False)
    ),
    "copied into, as by a hook": lambda layer, other: copied(layer).copy_(other()),
    "its data copied into": lambda layer, other: copied(layer).data.copy_(other()),
    "another bias": lambda layer, other: setattr(layer, "bias", torch.nn.Parameter(layer.bias.detach() + 3, False)),
    "no bias": lambda layer, other: setattr(layer, "bias", None),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", ("reference", "kernels"))
def test_the_next_call_computes_with_what_the_weight_is(layer, x, other, change, way, monkeypatch):
    if way == "kernels":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        layer.known_weight = None
    before, form = computed(layer, x), input_form(layer)
    CHANGES[change](layer, other)
    for _ in range(2):
        after = computed(layer, x)
        assert torch.equal(after, expected(layer, x))
    assert torch.equal(after, before) == (change == "none")
    transform = layer.weight._params.transform
    assert input_form(layer) is form or change != "none"
    assert input_form(layer).transform.rotation_group == transform.rotation_group
    assert input_form(layer).transform.smooth is transform.smooth


FUNCTIONS = {
    "weight": (lambda weight: weight * 2, lambda output, bias: output * 2 - bias, 0.05),
    "bias": (lambda bias: bias + 1, lambda output, bias: output + 1, 1e-5),
}


@pytest.mark.parametrize("kind", FUNCTIONS)
def test_a_function_of_it_is_heard_from_the_next_call_on(layer, x, kind):
    (function, changed, tolerance), functions = FUNCTIONS[kind], getattr(layer, f"{kind}_function")
    before = computed(layer, x)
    functions.append(function)
    try:
        torch.testing.assert_close(computed(layer, x), changed(before, layer.bias), rtol=tolerance, atol=tolerance)
    finally:
        functions.clear()
    assert torch.equal(computed(layer, x), before)


def test_a_weight_in_floats_and_back(layer, x):
    before, held = computed(layer, x), layer.weight
    replace(layer, held.dequantize())
    assert torch.equal(computed(layer, x), torch.nn.functional.linear(x, layer.weight, layer.bias))
    assert input_form(layer) is None
    layer.weight = held
    assert torch.equal(computed(layer, x), before)


def test_a_weight_on_another_device_is_not_where_the_input_is(layer, x):
    before = computed(layer, x)
    assert layer._lies_on(x.device, x.dtype)
    held = layer.weight
    replace(layer, held.to("meta"))
    assert not layer._lies_on(x.device, x.dtype)
    assert not layer._lies_on(torch.device("meta"), x.dtype)  # where its bias is not
    layer.weight = held
    assert torch.equal(computed(layer, x), before)


def test_a_weight_that_is_where_its_input_is_is_not_cast(layer, x, monkeypatch):
    before = computed(layer, x)
    monkeypatch.setattr("comfy.ops.cast_bias_weight", None)
    assert torch.equal(computed(layer, x), before)


def test_a_copy_looks_at_its_own_weight(layer, x, other):
    before, twin = computed(layer, x), copy.copy(layer)
    twin._parameters = dict(layer._parameters)
    replace(twin, other(group=4))
    assert torch.equal(computed(twin, x), expected(twin, x)) and torch.equal(computed(layer, x), before)
    assert copy.deepcopy(layer.known_weight) is None is pickle.loads(pickle.dumps(layer.known_weight))


@pytest.mark.parametrize("smoothed", (False, True))
def test_nothing_of_a_weight_is_held_when_it_is_gone(layer, x, other, smoothed):
    """Unloading a MODEL gives all of its memory back."""
    replace(layer, other(smoothed=smoothed))
    computed(layer, x)
    held = layer.weight._params
    tensors = [layer.weight._qdata, held.scale, *([held.smooth] if smoothed else [])]
    seen = list(map(weakref.ref, tensors))
    replace(layer, other())
    del tensors, held
    gc.collect()
    assert [tensor() for tensor in seen] == [None] * len(seen)


@pytest.mark.parametrize("where", ("on the card", "on the host", "cast by ComfyUI"))
def test_rows_of_blocks_are_looked_at_in_the_first_product(layer, x, monkeypatch, where):
    """And of another weight again."""
    values = torch.randn(layer.out_features, layer.in_features)
    blocks = quantize_gguf(values, "Q8_0")
    broken = blocks.clone()
    broken[3, :2] = torch.tensor([0, 0x7E], dtype=torch.uint8)  # the first block's size, a NaN
    monkeypatch.setattr(type(layer), "_lies_on", lambda *_: where == "on the card")
    looked, own, plan = [], weight_form.check_channels, []
    monkeypatch.setattr(weight_form, "check_channels", lambda scale: looked.append(1) or own(scale))
    monkeypatch.setattr(weight_form, "unplanned_memory", lambda: plan.append(1) or contextlib.nullcontext())

    def held(blocks):
        read = read_gguf_weight(blocks, "Q8_0", tuple(values.shape))
        return held_gguf(read, torch.float32, True, None)

    def product():
        with torch.inference_mode():
            return layer._forward(x, layer.weight, layer.bias) if where == "cast by ComfyUI" else layer(x)

    replace(layer, held(blocks))
    assert product().equal(product()) and looked == plan == [1]
    replace(layer, held(broken))
    for _ in range(2):
        with pytest.raises(ValueError, match=r"attn\.proj: weight has a NaN or Inf in output channel 3; download"):
            product()
    assert looked == [1, 1, 1]
