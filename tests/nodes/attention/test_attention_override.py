"""INT8 attention under a MODEL, this pack's and comfy-kitchen's: which calls it gets and how, against ComfyUI's own;
what is refused.

A float function with their rules stands in for both.
"""

import logging
import weakref
from functools import partial

import comfy.sample
import comfy.samplers
import comfy_kitchen
import folder_paths
import pytest
import torch
from comfy.ldm.modules.attention import attention_pytorch as comfyui_attention

from int8_dit.nodes.attention import attention_override as attention
from int8_dit.nodes.attention.attention_kinds import ATTENTION_KINDS
from int8_dit.nodes.attention.attention_override import AttentionOverride
from int8_dit.nodes.load_int8_dit import LoadINT8DiT
from support.attention_calls import OVERRIDE, overridden, random_qkv
from support.tensors import relative_error

BATCH, HEADS, TOKENS, WIDTH = 2, 4, 10, 16
INT8, KITCHEN = "INT8", "INT8 (comfy-kitchen)"
CPU = torch.device("cpu")
NOTICE = "INT8 attention did not run"


def contained(core, qkv):
    return [core.AttentionTensorContainer(tensor) for tensor in qkv]


class StandIn:
    """comfy-kitchen's signature and its demands on its inputs, computing in floats."""

    def __init__(self, kind=KITCHEN):
        self.kind, self.scales = kind, []

    def __call__(self, q, k, v, *, scale=None, attn_mask=None):
        assert q.ndim == 4 and k.shape == v.shape
        assert q.dtype == k.dtype == v.dtype
        assert q.shape[0] == k.shape[0] and q.shape[1] % k.shape[1] == 0 and q.shape[3] == k.shape[3] <= 256
        assert self.kind == INT8 or all(tensor.stride(-1) == 1 for tensor in (q, k, v))
        if attn_mask is not None:
            assert attn_mask.dtype in (torch.bool, torch.float16, torch.bfloat16, torch.float32)
            attn_mask = attn_mask.broadcast_to((*q.shape[:3], k.shape[2]))
            attn_mask = attn_mask if attn_mask.dtype == torch.bool else attn_mask.to(q.dtype)
        self.scales.append(scale)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask, scale=scale, enable_gqa=True)

    @property
    def calls(self):
        return len(self.scales)


HALVES = "prequantize_int8_attention", "int8_attention_from_prequantized"


def halves_of(kernel):
    """The kernel in two functions, of which the second gets copies: as real ones get INT8."""
    return (
        lambda *qkv, **options: (tuple(map(torch.clone, qkv)), options),
        lambda quantized: kernel(*quantized[0], **quantized[1]),
    )


@pytest.fixture
def install(monkeypatch):
    """Let a function be one of the two INT8 attentions, on the CPU."""

    def install(kernel, kind, halves=None):
        if kind == INT8:

            def own(q, k, v, mask=None, scale=None):
                return kernel(q, k, v, scale=scale, **({} if mask is None else {"attn_mask": mask}))

            monkeypatch.setattr("int8_dit.nodes.attention.attention_kinds.int8_attention", own)
            return
        monkeypatch.setattr(comfy_kitchen, "int8_attention", kernel, raising=False)
        monkeypatch.setattr(comfy_kitchen, "int8_attention_is_available", lambda device=None: True, raising=False)
        for name, half in zip(HALVES, halves or (None, None), strict=True):
            monkeypatch.setattr(comfy_kitchen, name, half, raising=False)

    return install


@pytest.fixture(params=(INT8, KITCHEN))
def kernel(install, request):
    """One of the two, in its place."""
    kernel = StandIn(request.param)
    install(kernel, request.param, halves_of(kernel))
    return kernel


def tensors(kv_heads=HEADS, kv_tokens=TOKENS, by_head=False, dtype=torch.float32, width=WIDTH):
    return random_qkv((HEADS, kv_heads), (TOKENS, kv_tokens), width, BATCH, dtype, by_head)


def on_cpu(kernel, outer=None):
    """The override of the kind that a kernel was installed for."""
    return AttentionOverride(ATTENTION_KINDS[kernel.kind], CPU, outer)


run = partial(overridden, heads=HEADS)


@pytest.mark.parametrize("kv_tokens", (TOKENS, 3))
@pytest.mark.parametrize("scale", ({}, {"scale": 0.3}, {"scale": None}))
@pytest.mark.parametrize("kv_heads", (HEADS, 2, 1))
@pytest.mark.parametrize("flat_output", (True, False))
@pytest.mark.parametrize("by_head", (True, False))
def test_calls_that_fit_equal_comfyuis(kernel, by_head, flat_output, kv_heads, scale, kv_tokens):
    qkv = tensors(kv_heads, kv_tokens, by_head)
    options = {"skip_reshape": by_head, "skip_output_reshape": not flat_output, **scale}
    if kv_heads != HEADS:
        options["enable_gqa"] = True
    expected = comfyui_attention(*qkv, HEADS, **options)
    actual = run(comfyui_attention, on_cpu(kernel), qkv, low_precision_attention=True, **options)
    torch.testing.assert_close(actual, expected)
    assert kernel.scales == [scale.get("scale")]


def scattered(q, k, v):
    """Channels that are not side by side, which are gathered."""
    return q.transpose(2, 3).contiguous().transpose(2, 3), k, v


def by_head_but_queries(q, k, v):
    """As MMDiTs give them."""
    return q, *(tensor.unflatten(-1, (HEADS, WIDTH)) for tensor in (k, v))


def of_one_sample(q, k, v):
    return q, k[:1], v[:1]


@pytest.mark.parametrize(
    "form, by_head, fits", ((scattered, True, True), (by_head_but_queries, False, True), (of_one_sample, True, False))
)
def test_other_forms_of_tensors(kernel, form, by_head, fits):
    qkv = form(*tensors(by_head=by_head))
    expected = comfyui_attention(*qkv, HEADS, skip_reshape=by_head)
    torch.testing.assert_close(run(comfyui_attention, on_cpu(kernel), qkv, skip_reshape=by_head), expected)
    assert kernel.calls == fits


def random_mask(*shape, dtype=torch.bool):
    """One that leaves each query its first key."""
    allowed = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.5
    allowed[..., 0] = True
    return allowed if dtype == torch.bool else torch.zeros(shape, dtype=dtype).masked_fill(~allowed, -5.0)


MASKS = {
    "for all": random_mask(TOKENS, TOKENS),
    "of floats": random_mask(TOKENS, TOKENS, dtype=torch.float32),
    "by sample": random_mask(BATCH, TOKENS, TOKENS),
    "of keys": random_mask(BATCH, 1, 1, TOKENS),
    "by head": random_mask(BATCH, HEADS, TOKENS, TOKENS, dtype=torch.float32),
}


@pytest.mark.parametrize("kv_heads", (HEADS, 2))
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("by_head", (True, False))
def test_masked_calls_equal_comfyuis(kernel, by_head, mask, kv_heads):
    qkv = tensors(kv_heads, by_head=by_head)
    options = {"skip_reshape": by_head, "mask": MASKS[mask], "enable_gqa": kv_heads != HEADS}
    expected = comfyui_attention(*qkv, HEADS, **options)
    assert relative_error(comfyui_attention(*qkv, HEADS, **options | {"mask": None}), expected) > 0.1
    actual = run(comfyui_attention, on_cpu(kernel), qkv, **options)
    torch.testing.assert_close(actual, expected)
    assert kernel.calls == 1
    mask, called = options.pop("mask"), {OVERRIDE: on_cpu(kernel)}  # by its place
    torch.testing.assert_close(comfyui_attention(*qkv, HEADS, mask, transformer_options=called, **options), expected)
    assert kernel.calls == 2


@pytest.mark.parametrize("mask", MASKS)
def test_a_comfy_kitchen_without_masks_gets_none(install, mask):
    qkv, kernel = tensors(), StandIn()
    install(lambda q, k, v, *, scale=None: kernel(q, k, v, scale=scale), KITCHEN)
    actual = run(comfyui_attention, on_cpu(kernel), qkv, mask=MASKS[mask])
    assert torch.equal(actual, comfyui_attention(*qkv, HEADS, mask=MASKS[mask]))
    assert kernel.calls == 0


MISFITS = {
    "full precision": ({}, {"low_precision_attention": False}),
    "float32 scores": ({"dtype": torch.bfloat16}, {"attn_precision": torch.float32}),
    "float64": ({"dtype": torch.float64}, {}),
    "wide heads": ({"width": 264}, {}),
    "an option of tomorrow": ({}, {"tomorrow": 1}),
}


@pytest.mark.parametrize("by_head", (True, False))
@pytest.mark.parametrize("misfit", MISFITS)
def test_other_calls_get_comfyuis(kernel, misfit, by_head):
    shape, options = MISFITS[misfit]
    qkv = tensors(by_head=by_head, **shape)
    options = {"skip_reshape": by_head, **options}
    actual = run(comfyui_attention, on_cpu(kernel), qkv, **options)
    assert torch.equal(actual, comfyui_attention(*qkv, HEADS, **options))
    assert kernel.calls == 0


def test_gradients_get_comfyuis(kernel):
    q, k, v = tensors()
    q.requires_grad_()
    run(comfyui_attention, on_cpu(kernel), (q, k, v)).sum().backward()
    assert q.grad.abs().sum() > 0 and kernel.calls == 0
    with torch.no_grad():
        run(comfyui_attention, on_cpu(kernel), (q, k, v))
    assert kernel.calls == 1


def test_an_override_that_was_there_still_acts(kernel):
    names = []

    def doubling(func, q, *args, **kwargs):
        names.append(func.__name__)
        return func(2 * q, *args, **kwargs)

    q, k, v = tensors()
    actual = run(comfyui_attention, on_cpu(kernel, doubling), (q, k, v))
    torch.testing.assert_close(actual, comfyui_attention(2 * q, k, v, HEADS))
    assert kernel.calls == 1 and names == ["attention_pytorch"]


@pytest.mark.parametrize("in_containers", (False, True), ids=("tensors", "containers"))
@pytest.mark.parametrize("fits", (True, False), ids=("fits", "misfit"))
@pytest.mark.parametrize("kind", (INT8, KITCHEN))
def test_compiles_into_one_graph(install, of_today, monkeypatch, kind, fits, in_containers):
    # What ComfyUI runs on a CPU asks for the free memory.
    monkeypatch.setattr(of_today, "optimized_attention", of_today.attention_pytorch)
    calls = []

    @torch.library.custom_op("int8_dit_tests::attention", mutates_args=())
    def op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None) -> torch.Tensor:
        calls.append(scale)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scale).contiguous()

    op.register_fake(lambda q, k, v, scale: q.new_empty(q.shape))
    kernel = StandIn(kind)
    install(lambda q, k, v, *, scale=None: op(q, k, v, scale), kind)
    core, qkv, attend = of_today, tensors(), on_cpu(kernel)
    torch._dynamo.reset()

    def call(*qkv):
        given = contained(core, qkv) if in_containers else qkv
        return run(core.attention_pytorch, attend, given, low_precision_attention=fits)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    seen = set()
    token = attention._model_call.set((True, seen))  # the same in each step
    for _ in range(2):
        torch.testing.assert_close(compiled(*qkv), core.attention_pytorch(*qkv, HEADS))
    attention._model_call.reset(token)
    assert seen == ({None} if fits else {"the model asks for more precision"})
    assert len(calls) == (2 if fits else 0)


# Containers, as ComfyUI from 0.33 on gives them to an override


@pytest.mark.parametrize("mask", (None, MASKS["for all"]), ids=("plain", "mask"))
@pytest.mark.parametrize("by_head", (True, False))
def test_contained_calls_equal_comfyuis(install, of_today, kernel, by_head, mask):
    qkv = tensors(by_head=by_head)
    options = {"skip_reshape": by_head, "mask": mask}
    expected = of_today.attention_pytorch(*qkv, HEADS, **options)
    for halves in (None, halves_of(kernel)):
        install(kernel, kernel.kind, halves)
        held = contained(of_today, qkv)
        torch.testing.assert_close(run(of_today.attention_pytorch, on_cpu(kernel), held, **options), expected)
        assert [container.tensor for container in held] == [None] * 3
    assert kernel.calls == 2


def test_a_contained_misfit_gets_comfyuis(of_today, kernel):
    qkv = tensors()
    held = contained(of_today, qkv)
    actual = run(of_today.attention_pytorch, on_cpu(kernel), held, low_precision_attention=False)
    assert torch.equal(actual, of_today.optimized_attention(*qkv, HEADS))
    assert kernel.calls == 0 and [container.tensor for container in held] == [None] * 3


def test_taken_tensors_are_free_once_they_are_quantized(install, of_today):
    kernel, held = StandIn(), contained(of_today, tensors())
    alive = [weakref.ref(container.tensor) for container in held]
    quantize, attend = halves_of(kernel)

    def attend_alone(quantized):
        assert [tensor() for tensor in alive] == [None] * 3
        return attend(quantized)

    install(kernel, KITCHEN, (quantize, attend_alone))
    run(of_today.attention_pytorch, on_cpu(kernel), held)
    assert kernel.calls == 1


@pytest.mark.parametrize("has_container_function", (True, False))
@pytest.mark.parametrize("first", (True, False), ids=("it was there", "it comes later"))
def test_another_override_around_it_in_containers(of_today, kernel, first, has_container_function):
    """ComfyUI tells neither which function it would call: one that comes later calls what it found."""

    def doubling(func, q, *args, **kwargs):
        return func(2 * q, *args, **kwargs)

    q, k, v = tensors()
    override = on_cpu(kernel, doubling if first else None)
    if not first:
        inner = override

        def override(func, q, *args, **kwargs):
            return inner(func, 2 * q, *args, **kwargs)

        if has_container_function:

            def in_containers(q, *args, **kwargs):
                return inner.container_function(of_today.AttentionTensorContainer(2 * q.take()), *args, **kwargs)

            override.container_function = in_containers
    elif has_container_function:
        doubling.container_function = None  # not called: it would leave no place for INT8 attention
    actual = run(of_today.attention_pytorch, override, contained(of_today, (q, k, v)))
    torch.testing.assert_close(actual, of_today.attention_pytorch(2 * q, k, v, HEADS))
    assert kernel.calls == 1


# The whole way: a node, its MODEL, a sampling


@pytest.fixture
def warnings(caplog):
    """Summaries of the pack's warnings so far."""
    caplog.set_level(logging.INFO, "int8_dit")
    return lambda: [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and NOTICE in r.getMessage()]


@pytest.fixture
def load(dit, monkeypatch):
    """The MODEL of Load INT8 DiT."""
    monkeypatch.setattr(folder_paths, "get_full_path_or_raise", lambda folder, name: name)
    return lambda *args, **widgets: LoadINT8DiT.execute(str(dit.FILE), "fused int8", *args, **widgets)[0]


def test_a_sampling_runs_it_or_says_why_not(dit, load, kernel, warnings, monkeypatch):
    expected = dit.sample(load())
    assert kernel.calls == 0
    model = load(attention=kernel.kind)
    assert dit.relative_error(dit.sample(model), expected) < 0.02  # other float sums, which INT8 linears round
    assert kernel.calls == 3 and not warnings()  # one in each block
    dit.sample(model.clone())
    assert kernel.calls == 6
    bypassed = load(attention=kernel.kind)
    bypassed.model_options["transformer_options"][OVERRIDE] = lambda func, *a, **k: func(*a, **k)
    dit.sample(bypassed)
    monkeypatch.setattr("int8_dit.nodes.attention.attention_kinds._WIDEST_HEAD", 8)
    dit.sample(load(attention=kernel.kind))
    bypass, wide = warnings()
    assert kernel.calls == 6 and "no call reached it" in bypass and "its heads are wider than 8" in wide


def test_the_first_sixth_of_the_steps_stays_exact(dit, load, kernel, warnings):
    model = load(attention=kernel.kind)
    for steps, exact in ((5, 0), (6, 1), (13, 2), (13, 2)):
        before = kernel.calls
        dit.sample(model, steps=steps)
        assert kernel.calls - before == 3 * (steps - exact)
    assert not warnings()
    before = kernel.calls
    dit.attached_output(model)  # no sampling
    assert kernel.calls - before == 3


def test_a_schedule_that_is_sampled_again_has_its_first_steps_again(dit, load, kernel):
    """One tensor may serve many samplings."""
    model = load(attention=kernel.kind)
    sigmas = comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 6)
    context, pooled = dit.conditioning.encode("A")
    positive = [[context, {"pooled_output": pooled}]]
    empty = torch.zeros(1, dit.latents.CHANNELS, dit.latents.SIDE, dit.latents.SIDE)
    images = []
    for _ in range(2):
        before = kernel.calls
        sampler = comfy.samplers.sampler_object("euler")
        images.append(comfy.sample.sample_custom(model, empty, 1.0, sampler, sigmas, positive, positive, empty, seed=0))
        assert kernel.calls - before == 3 * 5
    assert torch.equal(*images)


def test_which_calls_are_of_the_first_steps():
    """Those with the most noise, until one has less; none where noise is added."""
    schedule = attention._Schedule()

    def first(sigmas, *asked):
        options = ({"sample_sigmas": sigmas, "sigmas": torch.tensor([sigma] * 2)} for sigma in asked)
        return list(map(schedule.begins_with, options))

    falling, other = torch.linspace(1, 0, 13), torch.linspace(0.5, 0, 7)
    for _ in range(2):
        assert first(falling, *falling.tolist()) == [True] * 2 + [False] * 11
        assert first(falling, 1.0) == [False]  # no call is waited for any more
        schedule.begin()
        assert first(falling, 0.9, 0.5, 1.0) == [True, False, False]
        assert first(other, *other.tolist()) == [True] + [False] * 6
    assert not any(first(falling.flip(0), *falling.tolist())) and not any(first(falling[:6], *falling.tolist()))
    assert not first(falling[:0], 1.0)[0]
    assert not schedule.begins_with({"sigmas": falling}) and not schedule.begins_with({})


def test_the_latest_int8_attention_counts_and_no_other_choice_undoes_it(dit, load, install):
    kernels = {kind: StandIn(kind) for kind in (INT8, KITCHEN)}
    for kind, kernel in kernels.items():
        install(kernel, kind)
    model = load(attention=INT8)
    options = model.model_options["transformer_options"]
    for kind in (KITCHEN, INT8):
        attention.set_attention(model, kind)
        override = options[OVERRIDE]
        for choice in (kind, "as ComfyUI", "auto"):
            attention.set_attention(model, choice)
        assert model.model_options["transformer_options"][OVERRIDE] is override and override.outer is None
        dit.sample(model)
    assert [kernel.calls for kernel in kernels.values()] == [3, 3]


# What is refused


def test_what_cannot_run_is_refused_and_says_why(load, install, monkeypatch):
    def refused(message, device=CPU, error=RuntimeError, choice=KITCHEN):
        with pytest.raises(error, match=message):
            attention.check_attention(choice, device)

    refused("attention must be one of auto, as ComfyUI, INT8, INT8", error=ValueError, choice="sage")
    monkeypatch.delattr(comfy_kitchen, "int8_attention", raising=False)
    refused(r"no INT8 attention. 0.2.29 has it: run `pip install .*set to as ComfyUI")
    install(StandIn(), KITCHEN)
    monkeypatch.setattr(comfy_kitchen, "int8_attention_is_available", lambda device: False)
    with pytest.raises(RuntimeError, match="runs on cpu, and INT8 attention needs a GPU"):
        load(attention=KITCHEN)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")
    for capability, message in (((7, 0), r"A Card \(sm_70\) is too old"), ((8, 6), "install a PyTorch")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        refused(message, torch.device("cuda"))
