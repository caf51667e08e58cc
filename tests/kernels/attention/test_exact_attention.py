"""Exact attention: what is computed, by which way, and what becomes of a way that fails."""

import threading
from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import SDPBackend

import kernels.attention.exact_attention as exact
import kernels.internals.torch_functions as torch_functions
from kernels import ATTENTION_CHOICES
from kernels.attention.exact_attention import (
    CUDNN,
    EFFICIENT,
    FLASH,
    PYTORCH,
    AttentionShape,
    exact_attention,
    fastest_way,
)
from kernels.call_cache import CACHE
from kernels.card.choices import Choice

CARD = torch.device("cuda:0")
HOPPER, AMPERE = (9, 0), (8, 6)
ALL = (FLASH, CUDNN, EFFICIENT, PYTORCH)


def plain(q, k, v, mask=None, scale=None):
    """softmax(q kᵀ · scale + mask) v in float64."""
    times = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(times, 1), v.double().repeat_interleave(times, 1)
    logits = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask
    return logits.softmax(-1) @ v


def operands(batch=2, heads=4, tokens=33, keys=None, width=64, key_heads=None, dtype=torch.float32, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    keys, key_heads = keys or tokens, key_heads or heads

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    shape = (batch, key_heads, keys, width)
    return normal(batch, heads, tokens, width), normal(*shape), normal(*shape)


def a_mask(kind, tokens, keys, device="cpu", dtype=torch.float32):
    """A mask of which no row is wholly masked."""
    generator = torch.Generator().manual_seed(1)
    shape = {"keys": (2, 1, 1, keys), "whole": (2, 4, tokens, keys), "one": (tokens, keys), "three": (1, tokens, keys)}
    form, _, bias = kind.partition(" ")
    taken = torch.rand(shape[form], generator=generator) < 0.7
    taken[..., 0] = True
    if not bias:
        return taken.to(device)
    return torch.randn(shape[form], generator=generator).masked_fill(~taken, -torch.inf).to(device, dtype)


CASES = {
    "plain": ({}, None),
    "cross, ragged": ({"tokens": 70, "keys": 19}, None),
    "grouped": ({"key_heads": 2}, None),
    "grouped, masked": ({"key_heads": 2}, "whole"),
    "a mask of keys": ({}, "keys"),
    "a bias for all": ({"keys": 40}, "whole bias"),
    "a mask of two axes": ({}, "one"),
    "a bias of three axes": ({}, "three bias"),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_attention(case):
    sizes, kind = CASES[case]
    q, k, v = operands(**sizes)
    mask = None if kind is None else a_mask(kind, q.shape[2], k.shape[2])
    for scale in (None, 0.3):
        result = exact_attention(q, k, v, mask, scale, enable_gqa=True)
        torch.testing.assert_close(result.double(), plain(q, k, v, mask, scale), rtol=1e-4, atol=1e-5)


@pytest.fixture
def card(monkeypatch, tmp_path):
    """A card of a capability, imitated on the CPU, whose ways take what they are said to take."""
    monkeypatch.setattr(ATTENTION_CHOICES, "machine", lambda device: {"card": "NVIDIA GeForce RTX 4090"})
    monkeypatch.setattr(ATTENTION_CHOICES, "path", lambda device: tmp_path / "attention.json")

    def imitate(capability, takes=lambda *call: ALL):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
        monkeypatch.setattr(exact, "_may_choose", lambda q, k, v: True)
        monkeypatch.setattr(exact, "exact_ways", takes)

    for forget in ATTENTION_CHOICES.after_change:
        forget()
    yield imitate
    for forget in ATTENTION_CHOICES.after_change:
        forget()


def shape(width=128, tokens=4096, keys=None, masked=False):
    return AttentionShape(tokens, keys or tokens, width, masked)


MEASURED = Choice(
    "2026-11-23",
    {
        shape(128, 1024): {FLASH: 1.0, CUDNN: 0.8, PYTORCH: 1.0},
        shape(128, 8192): {FLASH: 1.0, CUDNN: 0.99, PYTORCH: 1.0},
        shape(128, 8192, 256): {FLASH: 0.7, CUDNN: 1.1, PYTORCH: 0.8},
        shape(128, 4096, masked=True): {EFFICIENT: 2.0, CUDNN: 1.0, PYTORCH: 2.0},
    },
)


@pytest.mark.parametrize(
    "capability, measured, asked, takes, expected",
    [
        (HOPPER, None, shape(), ALL, CUDNN),
        (HOPPER, None, shape(256), (FLASH, PYTORCH), None),
        (AMPERE, None, shape(), ALL, None),
        (AMPERE, MEASURED, shape(tokens=1500), ALL, CUDNN),
        (AMPERE, MEASURED, shape(tokens=5000), ALL, FLASH),
        (AMPERE, MEASURED, shape(tokens=5000), (EFFICIENT, PYTORCH), PYTORCH),
        (AMPERE, MEASURED, shape(tokens=9000, keys=300), ALL, FLASH),
        (AMPERE, MEASURED, shape(masked=True), ALL[1:], CUDNN),
        (AMPERE, MEASURED, shape(64), ALL, None),
        (HOPPER, MEASURED, shape(tokens=5000), ALL, CUDNN),
        (HOPPER, MEASURED, shape(256), ALL, CUDNN),
    ],
)
def test_a_rule_or_a_measurement_chooses(card, capability, measured, asked, takes, expected):
    card(capability)
    if measured is not None:
        ATTENTION_CHOICES.decide_by(CARD, measured)
    assert exact.choose_exact_way(CARD, asked, takes) == expected


@pytest.fixture
def orders(monkeypatch):
    """Which backend is asked first by each call that has an order; backends in `failing` raise."""

    class Orders(list):
        failing: set = set()  # noqa: RUF012

    seen = Orders()

    def in_order(order, attend, *args):
        seen.append(order[0])
        if order[0] in seen.failing:
            raise RuntimeError("no execution plan")
        return attend(*args)

    monkeypatch.setattr(exact, "with_backend_order", in_order)
    return seen


def test_a_way_that_fails_is_not_asked_again(card, orders):
    card(HOPPER)
    orders.failing = {SDPBackend.CUDNN_ATTENTION}
    q, k, v = operands()
    assert fastest_way(q, k, v) == CUDNN
    for _ in range(2):
        torch.testing.assert_close(exact_attention(q, k, v).double(), plain(q, k, v), rtol=1e-4, atol=1e-5)
    assert orders == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.FLASH_ATTENTION]
    assert fastest_way(q, k, v) == FLASH
    exact_attention(q[:, :, :20], k, v)  # another layout
    assert orders[3:] == [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]


def test_what_no_way_computes_raises_as_pytorch_does(card, orders):
    card(HOPPER)
    q, k, v = operands()
    with pytest.raises(RuntimeError, match="Expected size"):
        exact_attention(q, k[..., :32], v)


@pytest.mark.parametrize("error", (torch.OutOfMemoryError("none left"), RuntimeError("CUDA error: out of memory")))
def test_memory_that_is_not_there_is_no_failure_of_a_way(card, monkeypatch, error):
    card(HOPPER)

    def out_of_memory(*args):
        raise error

    monkeypatch.setattr(exact, "with_backend_order", out_of_memory)
    with pytest.raises(type(error)):
        exact_attention(*operands())
    assert not CACHE


def test_grouped_queries_that_no_way_takes_have_their_keys_repeated(card, orders):
    card(HOPPER, lambda q, k, v, mask=None, gqa=False: (PYTORCH,) if gqa else (EFFICIENT, CUDNN, PYTORCH))
    q, k, v = operands(key_heads=2)
    mask = a_mask("keys", 33, 33)
    result = exact_attention(q, k, v, mask, enable_gqa=True)
    assert orders == [SDPBackend.CUDNN_ATTENTION]
    torch.testing.assert_close(result.double(), plain(q, k, v, mask), rtol=1e-4, atol=1e-5)


def test_a_new_measurement_counts_at_once(card, orders):
    card(AMPERE)
    q, k, v = operands(width=128)
    exact_attention(q, k, v)
    assert orders == [] and fastest_way(q, k, v) is None
    ATTENTION_CHOICES.decide_by(CARD, Choice("", {shape(tokens=33): {FLASH: 2.0, EFFICIENT: 1.0}}))
    assert fastest_way(q, k, v) == EFFICIENT


@pytest.mark.parametrize(
    "changes, chooses",
    [
        ({}, True),
        ({"requires_grad": True}, False),
        ({"device": torch.device("cpu")}, False),
        ({"numel": lambda: 1000}, False),
        ({"ndim": 3}, False),
    ],
)
def test_gradients_and_few_tokens_are_left_to_pytorch(monkeypatch, changes, chooses):
    monkeypatch.setattr(torch.version, "hip", None)
    on_card = {"device": CARD, "ndim": 4, "numel": lambda: 1 << 20, "requires_grad": False}
    q = SimpleNamespace(**(on_card | changes))
    assert exact._may_choose(q, q, q) == chooses
    with torch.no_grad():
        assert exact._may_choose(q, q, q) == (chooses or q.requires_grad)
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert not exact._may_choose(q, q, q)


def test_the_order_holds_for_the_call_only():
    before = torch._C._get_sdp_priority_order()
    inside = []

    def attend(fails):
        inside.append(torch._C._get_sdp_priority_order())
        if fails:
            raise ValueError

    order = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    torch_functions.with_backend_order(order, attend, False)
    with pytest.raises(ValueError):
        torch_functions.with_backend_order(order, attend, True)
    assert inside[0] == inside[1] and inside[0][:2] == [int(backend) for backend in order]
    assert sorted(inside[0]) == sorted(before)
    assert torch._C._get_sdp_priority_order() == before


def test_the_order_of_a_call_outlives_that_of_one_within():
    in_order, get = torch_functions.with_backend_order, torch._C._get_sdp_priority_order
    seen = in_order([SDPBackend.MATH], lambda: (in_order([SDPBackend.CUDNN_ATTENTION], get), get()))
    assert [order[0] for order in seen] == [int(SDPBackend.CUDNN_ATTENTION), int(SDPBackend.MATH)]


def test_threads_that_attend_at_once_leave_the_order_that_was_there():
    in_order, get = torch_functions.with_backend_order, torch._C._get_sdp_priority_order
    before, began, other_left, seen = get(), threading.Event(), threading.Event(), []

    def attend():
        began.set()
        other_left.wait(60)
        seen.append(get()[0])

    thread = threading.Thread(target=in_order, args=([SDPBackend.MATH], attend))
    in_order([SDPBackend.CUDNN_ATTENTION], lambda: (thread.start(), began.wait(60)))
    other_left.set()
    thread.join()
    assert seen == [int(SDPBackend.MATH)] and get() == before


def test_without_pytorch_s_private_functions_the_order_is_its_context_manager_s(monkeypatch):
    before = torch._C._get_sdp_priority_order()
    get = torch._C._get_sdp_priority_order
    in_order = torch_functions.with_backend_order

    class Inside:
        def __getattr__(self, name):
            if name == "_get_sdp_priority_order":
                raise AttributeError(name)
            return getattr(torch._C, name)

    class Torch:
        _C, compiler = Inside(), torch.compiler

    monkeypatch.setattr(torch_functions, "torch", Torch)
    assert in_order([SDPBackend.MATH], get)[0] == int(SDPBackend.MATH)
    assert get() == before


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("capability", [HOPPER, AMPERE])
def test_it_compiles_without_a_break(card, capability, masked):
    card(capability)
    torch._dynamo.reset()

    def attend(q, k, v, mask):
        return exact_attention(q, k, v, mask, enable_gqa=True) if fastest_way(q, k, v, mask) != EFFICIENT else q

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for tokens in (33, 40, 21):
        q, k, v = operands(tokens=tokens, key_heads=2)
        mask = a_mask("keys", tokens, tokens) if masked else None
        torch.testing.assert_close(compiled(q, k, v, mask).double(), plain(q, k, v, mask), rtol=1e-4, atol=1e-5)
    assert not CACHE


@pytest.fixture
def unmeasured(monkeypatch, nothing_kept):
    """This machine's card, as if no benchmark had run on it."""
    monkeypatch.setattr(ATTENTION_CHOICES, "stored", lambda device: None)


needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_card
@pytest.mark.parametrize("width", [40, 64, 128, 256])
@pytest.mark.parametrize("case", CASES)
def test_every_way_of_a_card_is_attention(case, width, unmeasured):
    sizes, kind = CASES[case]
    many = {name: 16 * size + 5 if name in ("tokens", "keys") else size for name, size in sizes.items()}
    for dtype, error in ((torch.bfloat16, 0.02), (torch.float16, 0.004), (torch.float32, 0.003)):
        q, k, v = operands(**({"tokens": 517} | many | {"width": width}), dtype=dtype, device="cuda")
        mask = None if kind is None else a_mask(kind, q.shape[2], k.shape[2], "cuda", dtype)
        right = plain(q, k, v, mask)

        def near(result, right=right, error=error):
            return (result - right).norm() <= error * right.norm()

        grouped = q.shape[1] != k.shape[1]
        assert near(exact_attention(q, k, v, mask, enable_gqa=True))
        assert near(exact_attention(q, k, v, mask, enable_gqa=True))
        for way in exact.exact_ways(q, k, v, mask, grouped):
            try:
                result = exact.attend_by(way, q, k, v, mask, enable_gqa=grouped)
            except RuntimeError as error:  # PyTorch has promised too much, and `exact_attention` went on
                assert way != PYTORCH, error
            else:
                assert near(result), (way, dtype)


@needs_card
def test_a_card_of_the_rule_has_heads_of_256_by_cudnn(unmeasured):
    q, k, v = operands(tokens=700, width=256, dtype=torch.bfloat16, device="cuda")
    major, _ = torch.cuda.get_device_capability()
    takes = exact.exact_ways(q, k, v)
    assert fastest_way(q, k, v) == (CUDNN if major >= 9 and CUDNN in takes else None)
    assert major != 9 or CUDNN in takes


@needs_card
def test_a_card_computes_it_in_a_graph_and_compiled(unmeasured):
    q, k, v = operands(tokens=700, dtype=torch.bfloat16, device="cuda")
    right = exact_attention(q, k, v)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = exact_attention(q, k, v)
    graph.replay()
    torch.testing.assert_close(inside, right)
    torch._dynamo.reset()
    compiled = torch.compile(exact_attention, fullgraph=True)(q, k, v)
    torch.testing.assert_close(compiled, right)
