"""What ComfyUI calls a linear with, beside its input: every kind of linear follows it, or refuses it by its name."""

from functools import partial
from types import SimpleNamespace

import comfy.ops
import pytest
import torch
from comfy.weight_adapter.bypass import BypassForwardHook

from int8_dit.kernels import ActivationStatistics
from int8_dit.nodes.comfyui.quantized import FORWARDED_LAYOUT, NATIVE_LAYOUT, has_layout
from int8_dit.nodes.deferred.install import deferred_call
from int8_dit.nodes.deferred.notes import as_tracked
from int8_dit.nodes.linears import linear_call
from int8_dit.nodes.quantization.recorder import observed_linear
from support import called_linears as linears
from support import comfyui_today
from support.tensors import relative_error

APART = 0.01


@pytest.fixture(autouse=True, params=(pytest.param("as it is", marks=pytest.mark.slow), "today"))
def version(request):
    """This ComfyUI, and as it is behind 0.39."""
    if request.param == "as it is":
        yield request.param
        return

    with comfyui_today.today():
        yield request.param


@pytest.fixture
def make(monkeypatch):
    """One of KINDS, by its name."""

    def linear(kind):
        entry = linears.KINDS[kind]
        if not entry.there():
            pytest.skip(f"this ComfyUI does not know {entry.needs}")
        if kind == "ComfyUI's INT8":
            for place in ("kernels.card.device", "nodes.loading.operations"):
                monkeypatch.setattr(f"int8_dit.{place}.int8_path", lambda *_: "native int8")
        return entry.make()

    return linear


@pytest.fixture
def fused_ops(monkeypatch):
    """The names of the fused ops that calls of linears run."""
    names = []
    for name in ("activate_quantize", "norm_quantize", "gated_residual"):
        run = getattr(linear_call, name)
        monkeypatch.setattr(linear_call, name, lambda *args, run=run, name=name: names.append(name) or run(*args))
    return names


KINDS, ASKED = list(linears.KINDS), list(linears.ASKED)


def called(linear, asked, how):
    x, named = asked.input(), asked.named()
    with torch.inference_mode():
        if how == "by name":
            return linear(x, **named)
        if how == "by name, what it needs":
            return linear(x, **{name: value for name, value in named.items() if value is not None})
        return linear(x, *named.values())


def expected(linear, asked):
    with torch.inference_mode():
        return asked.composed(linear, asked.input())


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", KINDS)
def test_a_linear_follows_its_arguments(make, fused_ops, kind, asked, version):
    linear, call = make(kind), linears.ASKED[asked]
    if asked == "a residual" and version == "today" and linears.KINDS[kind].passed_on:
        pytest.skip("ComfyUI's own forward wants a scale with a residual")
    output, wanted = called(linear, call, "by name"), expected(linear, call)
    assert output.dtype == torch.float32 and output.shape == wanted.shape
    assert relative_error(output, wanted) <= APART
    ops = {"gelu_tanh": "activate_quantize", "swiglu": "activate_quantize", "rms_norm": "norm_quantize"}
    fused = linears.KINDS[kind].fused and call.input_act is not None and asked != "rms_norm without weight"
    assert [name for name in fused_ops if name != "gated_residual"] == ([ops[call.input_act]] if fused else [])
    if linears.KINDS[kind].fused:
        assert fused_ops.count("gated_residual") == (call.residual_scale is not None)
    for how in ("by name, what it needs", "by place"):
        assert relative_error(called(linear, call, how), wanted) <= APART


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("kind", ("INT8", "applied", "a LoRA in use"))
def test_an_input_that_waits(make, kind, asked):
    def run(call, **others):
        x = linears.ASKED[asked].input()
        with torch.inference_mode():
            return call(torch.nn.functional.rms_norm(as_tracked(x), x.shape[-1:]), **others)

    linear, call = make(kind), linears.ASKED[asked]
    output = deferred_call(lambda: run(linear, **call.named()))
    assert relative_error(output, run(partial(call.composed, linear))) <= APART
    with pytest.raises(TypeError, match="is called with act_scale"):
        deferred_call(lambda: run(linear, **call.named(), act_scale=torch.ones(1)))


@pytest.mark.parametrize("kind", ("INT8", "a LoRA in use", "applied", "protected", "text encoder", "bf16 fallback"))
def test_the_weight_of_a_norm_may_be_the_norm(make, kind, version):
    """As ComfyUI of October 2026 gives it, whose own linears take no arguments again."""
    if kind == "protected" and version == "today":
        pytest.skip("ComfyUI's own forward of that state wants a tensor")
    linear, call = make(kind), linears.ASKED["all"]
    norm = comfy.ops.disable_weight_init.RMSNorm(linears.K, eps=call.act_eps)
    norm.load_state_dict({"weight": call.act_weight})
    given = {**call.named(), "act_weight": norm, "act_eps": 0.0}
    with torch.inference_mode():
        assert relative_error(linear(call.input(), **given), expected(linear, call)) <= APART


@pytest.mark.parametrize("shape", ((), (3,), (2, 1, 3)), ids=str)
@pytest.mark.parametrize("asked", ("gelu_tanh", "swiglu", "rms_norm"))
@pytest.mark.parametrize("kind", ("INT8", "applied"))
def test_inputs_of_other_shapes(make, kind, asked, shape):
    linear, call = make(kind), linears.ASKED[asked]
    x = linears.randn(*shape, call.input().shape[-1], seed=9)
    residual, scale = linears.randn(*shape, linears.N, seed=10), linears.randn(linears.N, seed=11)
    call = type(call)(**{**call.named(), "residual": residual, "residual_scale": scale})
    before = residual.clone()
    with torch.inference_mode():
        assert relative_error(linear(x, **call.named()), call.composed(linear, x)) <= APART
    assert torch.equal(residual, before)


@pytest.mark.parametrize("kind", ("INT8", "applied", "protected"))
def test_a_residual_of_another_dtype_becomes_that_of_the_product(make, kind):
    linear, call = make(kind), linears.ASKED["a residual and a scale of a channel"]
    wide = type(call)(**{**call.named(), "residual": call.residual.double()})
    with torch.inference_mode():
        output = linear(call.input(), **wide.named())
    assert kind == "protected" or output.dtype == torch.float32
    assert relative_error(output.float(), expected(linear, call)) <= APART


INT8_KINDS = ("INT8", "GGUF as stored", "GGUF in floats", "W4A8 as stored", "applied", "text encoder", "bf16 fallback")


@pytest.mark.parametrize("kind", INT8_KINDS)
def test_what_nobody_knows_is_refused_and_named(make, kind):
    linear, x = make(kind), linears.ASKED["nothing"].input()
    for unknown in ({"act_scale": torch.ones(1)}, {"dropout": 0.5}):
        (name,) = unknown
        with pytest.raises(TypeError, match=f"{linears.NAME} is called with {name}"):
            linear(x, **unknown)
    with pytest.raises(ValueError, match=f"{linears.NAME} is called with the activation 'leaky'"):
        linear(x, input_act="leaky")
    with pytest.raises(TypeError):
        linear(x, None, None, 0.0, None, None, torch.ones(1))


@pytest.mark.parametrize("kind", INT8_KINDS)
def test_what_asks_for_nothing_is_taken(make, kind):
    """ComfyUI gives all arguments in some calls: the next one that it has must not end every image."""
    linear, x = make(kind), linears.ASKED["nothing"].input()
    with torch.inference_mode():
        output = linear(x)
        assert torch.equal(linear(x, None, None), output)
        assert torch.equal(linear(x, input_act=None, act_weight=torch.ones(2), residual_scale=torch.ones(3)), output)
        assert torch.equal(linear(x, of_a_later_version=None), output)


@pytest.mark.parametrize("kind", ("INT8", "GGUF as stored", "applied", "text encoder", "bf16 fallback", "protected"))
def test_an_activation_that_only_comfyui_knows(make, kind, monkeypatch, version):
    if version != "today":
        pytest.skip("this ComfyUI's linears take none")
    monkeypatch.setitem(comfy.ops.INPUT_ACT_EAGER, "squared", lambda x: x.relu().square())
    linear, x = make(kind), linears.ASKED["nothing"].input()
    residual = linears.ASKED["a residual"].residual
    with torch.inference_mode():
        output = linear(x, input_act="squared", residual=residual, residual_scale=torch.ones(linears.N))
        assert relative_error(output, residual + linear(x.relu().square())) <= APART


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("form", ("plain", "smoothed", "rotated", "16 bits"))
def test_in_half_precision(form, dtype):
    linear = linears.loaded(partial(linears.int8, dtype=dtype, **linears.FORMS[form]), dtype=dtype)
    for asked in ASKED:
        call = linears.ASKED[asked].of(dtype)
        x = call.input().to(dtype)
        with torch.inference_mode():
            output, wanted = linear(x, **call.named()), call.composed(linear, x)
        assert output.dtype == dtype and relative_error(output.float(), wanted.float()) <= APART, asked


# What ComfyUI or comfy-kitchen compute there, no compiler sees into.
BREAKS = ("a LoRA in use", "applied, a LoRA in use", "applied, declined", "ComfyUI's INT8")
QUICK = ("INT8", "GGUF as stored", "applied", "protected")


@pytest.mark.parametrize("kind", [k if k in QUICK else pytest.param(k, marks=pytest.mark.slow) for k in KINDS])
def test_compiled(make, kind):
    linear = make(kind)
    for asked in ("gelu_tanh", "swiglu", "rms_norm", "a residual and a scale of a sample", "all"):
        torch._dynamo.reset()
        call = linears.ASKED[asked]
        named = {name: value for name, value in call.named().items() if value is not None}
        run = torch.compile(partial(linear, **named), backend="aot_eager", fullgraph=kind not in BREAKS)
        with torch.inference_mode():
            assert relative_error(run(call.input()), call.composed(linear, call.input())) <= APART, asked


@pytest.mark.parametrize("kind", ("INT8", "GGUF as stored", "applied", "protected"))
@pytest.mark.parametrize("asked", ("swiglu", "all"))
def test_behind_the_hook_of_a_bypass_lora(make, kind, asked):
    """It calls the forward that was there with all that it was given."""
    linear, call = make(kind), linears.ASKED[asked]
    wanted = expected(linear, call) + 1
    adds_one = SimpleNamespace(weights=(), h=lambda x, base_out: torch.ones_like(base_out), g=lambda y: y)
    hook = BypassForwardHook(linear, adds_one)
    hook.inject()
    try:
        assert relative_error(called(linear, call, "by name"), wanted) <= APART
    finally:
        hook.eject()


@pytest.mark.parametrize("kind", ("INT8", "smoothed", "applied", "text encoder", "bf16 fallback"))
def test_a_weight_that_comfyui_casts_once_for_parts_of_an_input(make, kind):
    """As its block-sparse attention does with `_forward`."""
    linear, x = make(kind), linears.ASKED["nothing"].input()[0]
    with torch.inference_mode():
        held = comfy.ops.cast_bias_weight(
            linear, dtype=linear.weight.dtype, device=x.device, bias_dtype=x.dtype, offloadable=True,
            compute_dtype=x.dtype, want_requant=True,
        )  # fmt: skip
        output = linear._forward(x, held[0].to(dtype=x.dtype), held[1])
        comfy.ops.uncast_bias_weight(linear, *held)
        assert relative_error(output, linear(x)) <= APART


def test_a_weight_changed_in_use_keeps_activations_of_16_bits(make):
    linear, x = make("text encoder"), linears.ASKED["nothing"].input()
    exact = torch.nn.functional.linear(x, 2 * linear.weight.dequantize(), linear.bias)
    linear.weight_function = [lambda weight: 2 * weight]
    with torch.inference_mode():
        assert relative_error(linear(x), exact) <= 0.001


def test_a_gradient_passes(make):
    linear, call = make("INT8"), linears.ASKED["all"]
    x = call.input().requires_grad_()
    output = linear(x, **call.named())
    exact = torch.nn.functional.linear(
        torch.nn.functional.rms_norm(x, (linears.K,), call.act_weight, call.act_eps),
        linear.weight.dequantize(), linear.bias,
    )  # fmt: skip
    torch.testing.assert_close(output, call.residual + call.residual_scale * exact, rtol=1e-4, atol=1e-4)
    output.sum().backward()
    assert x.grad.abs().sum() > 0


@pytest.mark.parametrize("function", ("weight_function", "bias_function"))
@pytest.mark.parametrize("kind", ("INT8", "smoothed", "applied", "GGUF as stored"))
def test_a_gradient_reaches_what_changes_the_weight(make, kind, function):
    """A LoRA in training, of a linear whose input needs none, such as the first ones of a prompt."""
    linear, trained = make(kind), torch.zeros(linears.N, 1, requires_grad=True)
    setattr(linear, function, [lambda tensor: tensor + trained.view(-1, *[1] * (tensor.ndim - 1))])
    linear(linears.ASKED["nothing"].input()).sum().backward()
    assert trained.grad.abs().sum() > 0


@pytest.mark.parametrize("asked", ("gelu_tanh", "swiglu", "rms_norm", "all"))
@pytest.mark.parametrize("kind", ("INT8", "protected", "protected, cast"))
def test_a_calibration_sees_what_is_multiplied(make, kind, asked):
    """And not what the linear is given, which may be twice as wide."""
    linear, call, given, before = make(kind), linears.ASKED[asked], ActivationStatistics(), ActivationStatistics()
    for seen, run in ((given, lambda: called(linear, call, "by name")), (before, lambda: expected(linear, call))):
        with observed_linear(linear, seen):
            run()
    assert given.calls == before.calls == 1 and given.absmax.shape == (linears.K,)
    torch.testing.assert_close(given.absmax, before.absmax)


def test_recordings_may_end_in_any_order(make):
    """As those of two MODELs with the same modules, beside each other in one guider."""
    linear = make("protected")
    first, second = (observed_linear(linear, ActivationStatistics()) for _ in range(2))
    for recording in (first, second):
        recording.__enter__()
    for recording in (first, second):
        recording.__exit__(None, None, None)
    assert "comfy_force_forward" not in vars(linear) and not linear._forward_pre_hooks


def test_under_its_other_name_comfyuis_own_product_is_the_same(make):
    """Where an INT8 weight has the name that Apply gives it, and this pack does not multiply by it."""
    linear, x = make("applied, declined"), linears.ASKED["nothing"].input()
    with torch.inference_mode():
        own = linear(x)
        linear.weight._layout_cls = FORWARDED_LAYOUT
        assert torch.equal(linear(x), own) and has_layout(linear.weight, FORWARDED_LAYOUT)


def test_comfyuis_int8_computes_the_same_while_it_is_observed():
    linear, x = linears.from_file(linears.native_layer(linears.weight())), linears.ASKED["nothing"].input()
    with torch.inference_mode():
        own = linear(x)
        with observed_linear(linear, ActivationStatistics()):
            assert torch.equal(linear(x), own) and has_layout(linear.weight, FORWARDED_LAYOUT)
    assert has_layout(linear.weight, NATIVE_LAYOUT) and not linear._forward_pre_hooks and not linear._forward_hooks


@pytest.mark.parametrize("kind", ("fused", "applied"))
def test_an_argument_of_a_hook_that_nobody_knows_is_refused(kind):
    linear = (
        linears.loaded(linears.int8) if kind == "fused" else linears.applied(linears.native_layer(linears.weight()))
    )
    before = linear.weight
    with pytest.raises(TypeError, match=f"{linears.NAME} is called with sharpness"):
        linear.set_weight(linears.weight(), inplace_update=True, seed=1, sharpness=2.0)
    assert linear.weight is before
    linear.set_weight(linears.weight(), inplace_update=True, seed=1)
    assert linear.weight is not before
