"""Deferred operands: a forward computes what it computes without them, whatever it does with its tensors."""

import contextlib
import dataclasses
import math
import operator
from collections import Counter

import comfy.model_management
import pytest
import torch
import torch.nn.functional as F
from comfy.ldm.modules.attention import optimized_attention_masked
from comfy.quant_ops import ck

from int8_dit.kernels import Norm, function_modes
from int8_dit.nodes import deferred as deferral
from int8_dit.nodes.attention.attention_kinds import AttentionKind, Way
from int8_dit.nodes.attention.attention_override import AttentionOverride
from support import deferred_forwards as forwards
from support import ideogram_block
from support.architectures import ARCHITECTURES
from support.comfyui_today import today
from support.covering import covering
from support.deferred_forwards import deferring
from support.tensors import relative_error

EXACT, ROUNDED = 1e-6, 1e-2  # behind an INT8 linear a value may round to its neighbour
AS_EXACT = 1.3  # both round to 16 bits and INT8, at slightly different values: which of them is luckier is chance
KINDS = ("smoothed", "rotated", "protected", "16 bits")
TAKEN = {  # linears, residuals and rotary positions at least
    "Flux": (8, 5, 2),
    "Flux 2": (8, 5, 2),
    "SD3": (11, 5, 0),
    "Hunyuan Video": (14, 9, 2),
    "Wan t2v": (12, 4, 2),
    "LTX-Video": (10, 4, 2),
    "Z-Image": (24, 12, 6),
    "Qwen-Image": (20, 8, 2),
    "OmniGen 2": (15, 6, 3),
    "Ideogram 4": (8, 4, 2),
    "Krea 2": (34, 4, 2),
    "Kandinsky 5": (14, 8, 3),
}


@pytest.fixture(scope="session")
def block():
    return forwards.Block()


@pytest.fixture
def made(monkeypatch):
    """A list that grows with each note."""
    made, init = [], deferral.notes.Note.__init__
    monkeypatch.setattr(deferral.notes.Note, "__init__", lambda *args, **named: made.append(1) or init(*args, **named))
    return made


@pytest.fixture
def took(monkeypatch):
    """How often each consumer took something."""
    counts = Counter()

    def counting(name, own):
        def run(*args, **named):
            result = own(*args, **named)
            counts[name] += result is not None
            return result

        return run

    monkeypatch.setattr(deferral.mode, "LEAST_ROWS", 2)
    for name in ("linear", "residual", "rotated"):
        monkeypatch.setattr(deferral.consumers, name, counting(name, getattr(deferral.consumers, name)))
    return counts


def alike(value, expected, limit):
    """Whether results are the same: of the same form, numbers up to a relative error."""
    if isinstance(expected, forwards.Rounded):
        return len(value) == len(expected) and all(map(alike, value, expected, [ROUNDED] * len(expected)))
    if isinstance(expected, torch.Tensor):
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (expected.shape, expected.dtype):
            return False
        if torch.equal(value, expected) or not (limit and expected.is_floating_point()):
            return torch.allclose(value, expected, 0, 0, equal_nan=True)
        return relative_error(value.double(), expected.double()) <= limit
    if isinstance(expected, dict):
        return value.keys() == expected.keys() and all(alike(value[key], expected[key], limit) for key in expected)
    if type(expected) in (list, tuple):
        return len(value) == len(expected) and all(alike(*pair, limit) for pair in zip(value, expected, strict=True))
    if type(expected) is float:
        return math.isclose(value, expected, rel_tol=max(limit, 1e-12), abs_tol=10 * limit)
    return value == expected


def is_plain(value):
    """Whether all tensors of a result are of PyTorch's own classes."""
    if isinstance(value, (list, tuple)):
        return all(map(is_plain, value))
    return not isinstance(value, torch.Tensor) or type(value) in (torch.Tensor, torch.nn.Parameter)


@pytest.fixture
def run(block):
    """Call a forward on an input of its own. Returns its two lists, what it was given, and the mode."""

    def call(forward, mode=None):
        block.renewed()
        x = forwards.randn(forwards.SAMPLES, forwards.TOKENS, forwards.WIDTH, seed=3)
        modes = torch._C._len_torch_function_stack()
        try:
            with torch.no_grad():
                if mode is None:
                    outputs = forward(block, x)
                else:
                    with mode:
                        outputs = forward(block, x)
                    outputs = mode.finish(outputs)
                    assert is_plain(outputs)
        finally:
            assert torch._C._len_torch_function_stack() == modes and deferral.notes.tracking.forward is None
        exact, rounded = outputs
        return [exact, forwards.Rounded(rounded), [x, block.norm.weight, block.of_heads.weight]]

    return call


@pytest.fixture
def check(run, made):
    """Compare a forward's results, or its error, with and without deferral."""

    def compare(forward, may_fail=False, agrees=False):
        try:
            expected = run(forward)
        except Exception as error:
            if not may_fail:
                raise
            for checking in (True, False):
                with pytest.raises(type(error)):
                    run(forward, deferral.mode.Deferring(checking))
            return
        made.clear()
        assert alike(run(forward, deferral.mode.Deferring()), expected, EXACT) and made
        found = None
        # A model runs as its own behind an error, as where its values are not alike.
        with contextlib.suppress(Exception):
            mode = deferral.mode.Deferring(checking=True)
            results = run(forward, mode)
            found = mode.agreed()
        assert not found or alike(results, expected, ROUNDED)
        assert found or not agrees, "what was compared is not alike"

    return compare


@pytest.mark.parametrize("write", forwards.WRITES)
@pytest.mark.parametrize("note", forwards.NOTES)
def test_a_write_into_what_waits_reads(check, block, note, write):
    make = forwards.NOTES[note]
    for place in range(1, len(make(block.renewed(), forwards.randn(2, 12, 64)))):

        def forward(block, x, place=place):
            waiting, *reads = make(block, x)
            forwards.WRITES[write](reads[place - 1])
            exact, rounded = forwards.taken(block, waiting)
            return [*exact, *reads], rounded

        check(forward)


# How a write is seen does not depend on what else there is of the tensor.
WRITTEN = [
    (other, write)
    for other in forwards.OTHERS
    for write in forwards.NOTE_WRITES
    if write not in forwards.WRITES or other in ("a name", "tokens", "taken")
]


@pytest.mark.parametrize("other, write", WRITTEN)
def test_a_write_into_what_waits(check, other, write):
    for make in (lambda b, y: b.norm(y), lambda b, y: F.silu(y)):
        for place in (0, 1, 2):  # the note itself, the other one of it, and the note before the other one is made

            def forward(block, x, make=make, place=place):
                note = make(block, block.enter(x))
                if place == 2:
                    forwards.NOTE_WRITES[write](note)
                second = forwards.OTHERS[other](block, note)
                if place < 2:
                    forwards.NOTE_WRITES[write]((note, second)[place])
                return forwards.taken(block, note, second)

            check(forward, may_fail=True)


@pytest.mark.parametrize("read", forwards.READS)
@pytest.mark.parametrize("note", forwards.NOTES)
def test_what_is_read_of_it(check, note, read):
    def forward(block, x):
        waiting, *_ = forwards.NOTES[note](block, x)
        first = forwards.READS[read](waiting)
        exact, rounded = forwards.taken(block, waiting)
        return [first, *exact], rounded

    check(forward)


@pytest.mark.parametrize("shape", forwards.SHAPES)
@pytest.mark.parametrize("form", forwards.MODULATED)
def test_modulations(check, form, shape):
    for write in (False, True):

        def forward(block, x, write=write):
            y, h, scale = block.enter(x), x.clone(), forwards.SHAPES[shape](block)
            note = forwards.MODULATED[form](block.norm(y), h, scale, y)
            if write and isinstance(scale, torch.Tensor):
                scale.zero_()
            products = [block.out(note)] if note.dtype == torch.float32 else []
            return [note, h, y, scale, h + note], products

        check(forward, may_fail=True, agrees=not write)


@pytest.mark.parametrize("name", forwards.FORWARDS)
def test_a_forward(check, name):
    check(forwards.FORWARDS[name])


COMPARED = {
    "a part that is modulated in part": lambda block, x: torch.cat(
        (modulated_in_part(block.norm(block.enter(x))), block.norm(block.other(x))), 1
    ),
    "turned heads": lambda block, x: forwards.kitchen().apply_rope1(
        block.enter(x)[:, :, None], forwards.places(1, forwards.TOKENS, 1).repeat(1, 1, 1, forwards.HEADS, 1, 1)
    ),
}


def modulated_in_part(note):
    note[:, :5] *= forwards.modulation(1)
    return note


@pytest.mark.parametrize("read", COMPARED.values(), ids=COMPARED)
def test_what_a_linear_reads_is_compared(check, read):
    check(lambda block, x: ([block.out(read(block, x))], []), agrees=True)


@pytest.mark.parametrize("checking", (False, True))
@pytest.mark.parametrize("note", forwards.NOTES)
def test_what_outlives_the_forward(run, note, checking):
    kept, (expected, *_) = [], run(lambda b, x: (forwards.NOTES[note](b, x), []))

    def forward(block, x):
        made = forwards.NOTES[note](block, x)
        kept.extend(made)
        return [], []

    _, _, (x, *weights) = run(forward, deferral.mode.Deferring(checking))
    for tensor in (x, *weights, *kept[1:]):
        tensor.zero_()
    assert alike(kept[0] * 1, expected[0], EXACT)
    assert torch.equal(kept[0] + 1, 1 + kept[0].clone()) and is_plain(kept[0] + 1)


@pytest.mark.parametrize("checking", (False, True))
@pytest.mark.parametrize("note", forwards.NOTES)
def test_an_error_in_the_middle(block, note, checking):
    kept, modes = [], torch._C._len_torch_function_stack()
    x, other = forwards.randn(2, 12, 64, seed=3), torch.overrides.BaseTorchFunctionMode()
    expected = forwards.NOTES[note](block.renewed(), x)[0] + 0
    with pytest.raises(ZeroDivisionError), torch.no_grad(), other, deferral.mode.Deferring(checking):
        kept.append(forwards.NOTES[note](block, x)[0])
        raise ZeroDivisionError
    assert torch._C._len_torch_function_stack() == modes and deferral.notes.tracking.forward is None
    assert alike(kept[0] * 1, expected, EXACT)


def test_modes_of_others_that_begin_and_end_within(block):
    x, modes = forwards.randn(2, 12, 64, seed=3), torch._C._len_torch_function_stack()
    expected = block.renewed().norm(x)
    with torch.no_grad(), deferral.mode.Deferring() as mode:
        first = block.norm(x)
        with torch.overrides.BaseTorchFunctionMode():
            second = block.norm(x)
            with torch.device("cpu"):
                del first
                third = block.norm(x)
            x.zero_()
    assert torch._C._len_torch_function_stack() == modes
    assert all(alike(t, expected, EXACT) for t in mode.finish([second, third]))


def test_no_forward_is_deferred_that_may_be_differentiated(block, made):
    model, own = deferring(block, lambda block, x: block.out(block.norm(x) * 2) + block.norm(x))
    x = forwards.randn(2, 12, 64)
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    with torch.enable_grad():
        for leaf, forward in zip(leaves, (model, own), strict=True):
            forward(leaf).square().sum().backward()
    assert not made and torch.equal(leaves[0].grad, leaves[1].grad)
    with torch.no_grad():
        first, second, expected = model(x), model(x), own(x)
    assert made and alike(first, expected, ROUNDED) and alike(second, expected, ROUNDED)


DEFECTS = {
    "eps": lambda normed: normed._replace(norm=dataclasses.replace(normed.norm, eps=0.5)),
    "no norm": lambda normed: normed._replace(norm=None),
    "another scale": lambda normed: normed._replace(scale=1.05 * normed.scale),
    "samples swapped": lambda normed: normed._replace(scale=normed.scale.flip(0)),
}


@pytest.mark.parametrize("defect", (None, *DEFECTS))
def test_checking_finds_a_defect(block, monkeypatch, defect):
    scale, shift, x = forwards.modulation(1), forwards.modulation(2), forwards.randn(2, 12, 64)

    def forward():
        h = block.enter(x)
        return h + scale * block.norm(block.out(block.norm(h) * scale + shift))

    with torch.no_grad():
        expected = forward()
        value = deferral.operands.Normed.value

        def defective(normed):
            return value(normed if None in (defect, normed.scale, normed.shift) else DEFECTS[defect](normed))

        monkeypatch.setattr(deferral.operands.Normed, "value", defective)
        with deferral.mode.Deferring(checking=True) as mode:
            output = forward()
    assert alike(mode.finish(output), expected, ROUNDED)
    assert mode.agreed() is (defect is None)


@pytest.mark.parametrize("last", ("as the others", "another eps", "a shift", "fewer tokens"))
def test_each_kind_of_work_is_compared_in_a_few_blocks(block, monkeypatch, last):
    """Not in all of them, and what only the last block does is compared there."""
    scale, x, compared = forwards.modulation(1), forwards.randn(2, 12, 64), []
    others = torch.nn.LayerNorm(64, eps=1e-3, elementwise_affine=False)
    value = deferral.operands.Normed.value
    monkeypatch.setattr(deferral.operands.Normed, "value", lambda normed: compared.append(1) or value(normed))

    def forward(blocks, last):
        h = block.enter(x)
        for _ in range(blocks):
            h = h + block.out(block.norm(h) * scale)
        if last == "fewer tokens":
            return block.out(block.norm(h[:, :9]) * scale)
        norm = others if last == "another eps" else block.norm
        scaled = norm(h) * scale
        return block.out(scaled + scale if last == "a shift" else scaled)

    counts = []
    for blocks in (1, 3, 9):
        compared.clear()
        with torch.no_grad(), deferral.mode.Deferring(checking=True) as mode:
            mode.finish(forward(blocks, last))
        assert mode.agreed()
        counts.append(len(compared))
    assert counts == ([2, 3, 3] if last == "as the others" else [2, 4, 4])


SURE = {
    "a source written": lambda b, n, y: y.zero_(),
    "a source written by a slice": lambda b, n, y: y[:, :3].zero_(),
    "a number": lambda b, n, y: n.mul_(2),
    "+= 1": lambda b, n, y: operator.iadd(n, 1),
    "tokens zero": lambda b, n, y: operator.setitem(n, (slice(None), slice(0, 2)), 0),
    "a view": lambda b, n, y: n.view(-1).mul_(2),
    "a residual": lambda b, n, y: y.add_(n),
    "a modulation": lambda b, n, y: n.mul_(forwards.modulation(1)),
}


@pytest.mark.parametrize("write", SURE)
def test_checking_takes_no_write_for_a_defect(block, write):
    def forward():
        note = block.norm(y := block.enter(forwards.randn(2, 12, 64)))
        SURE[write](block, note, y)
        return block.out(note)

    with torch.no_grad():
        expected = forward()
        with deferral.mode.Deferring(checking=True) as mode:
            output = forward()
    assert alike(mode.finish(output), expected, ROUNDED) and mode.agreed() is True


@pytest.mark.parametrize(("consumer", "fails"), (("rotated", False), ("rotated", True), ("gated_residual", True)))
def test_a_model_with_a_defect_runs_as_its_own(block, monkeypatch, warned, consumer, fails):
    fused = getattr(deferral.consumers, consumer)

    def turned(block, x):
        y = block.enter(x)
        y = y + forwards.modulation(1) * block.norm(y)
        q = block.of_heads(forwards.heads(y))
        return forwards.turned(q, q)[0]

    def defective(*args):
        if fails:
            raise RuntimeError("no such kernel")
        return [1.05 * t for t in fused(*args)]

    (model, own), x = deferring(block, turned), forwards.randn(2, 12, 64)
    monkeypatch.setattr(deferral.consumers, consumer, defective)
    with torch.no_grad():
        outputs, expected = [model(x) for _ in range(3)], own(x)
    assert all(torch.equal(output, expected) for output in outputs)
    assert len(warned) == 1 and "Model" in warned[0][-1]


OUT_OF_MEMORY = (torch.OutOfMemoryError("no room"), torch.AcceleratorError("CUDA error: out of memory"), MemoryError())


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_once_is_no_defect(block, made, monkeypatch, warned, error):
    """The user hears of it, and later forwards are those of a fresh model."""

    def fail(*args):
        raise error

    (model, _), x = deferring(block, lambda block, x: block.out(block.norm(block.enter(x)))), forwards.randn(2, 12, 64)
    with torch.no_grad():
        with monkeypatch.context() as patched, pytest.raises(type(error)):
            patched.setattr(deferral.consumers, "linear", fail)
            model(x)
        model(x)
        made.clear()
        model(x)
    assert made and not warned


def test_an_offloaded_text_encoder_is_fused_where_it_computes(monkeypatch):
    """Its weights may be elsewhere, and come for each product, and its tokens are lists."""
    devices = []

    class Encoder(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = torch.nn.Parameter(torch.empty(4, device="meta"))

        def forward(self, tokens, mask=None, *, embeds=None):
            return embeds

    monkeypatch.setattr(
        deferral.install._Calls, "run", lambda self, root, call, device, *_: devices.append(str(device))
    )
    encoder = deferral.install.deferring_class(Encoder, torch.device("cuda", 1))()
    encoder(None, embeds=torch.zeros(2, 4))
    encoder(torch.zeros(1, 2, dtype=torch.long), None)
    encoder([[(1, 1.0)]])
    assert devices == ["cpu", "cpu", "cuda:1"]


@pytest.fixture
def of_today(request):
    """Whether ComfyUI has its interface of today, or is the one that is there."""
    with today() if request.param else contextlib.nullcontext():
        yield request.param


def both_ways(small, architecture, model, dtype=torch.float32):
    """What a MODEL computes as its own and deferred, in float64, and whether a comparison of both agreed."""
    comfy.model_management.load_models_gpu([model])
    results = [small.output_of(architecture, model, dtype)]
    for checking in (False, True):
        with deferral.mode.Deferring(checking) as mode:
            output = small.output_of(architecture, model, dtype)
        results.append(mode.finish(output))
    own, deferred, checked = (result.double() for result in results)
    assert relative_error(checked, own) <= ROUNDED or dtype != torch.float32
    return own, deferred, mode.agreed()


@pytest.mark.parametrize("of_today", (False, pytest.param(True, marks=pytest.mark.slow)), indirect=True)
@pytest.mark.parametrize(
    "name, kind", [(name, "plain") for name in ARCHITECTURES] + covering(ARCHITECTURES, KINDS, slow_rounds=3)
)
def test_each_architecture(small, took, of_today, name, kind):
    architecture = ARCHITECTURES[name]
    model = small.int8_of(architecture, kind)
    own, deferred, agreed = both_ways(small, architecture, model)
    assert relative_error(deferred, own) <= ROUNDED and agreed is True
    # Today's linears are given some of the work before them.
    least = (kind != "protected", 0, 0) if of_today or kind != "plain" else TAKEN.get(name, (1, 0, 0))
    # Each is taken deferred, and beside a comparison again.
    counts = [took[consumer] // 2 for consumer in ("linear", "residual", "rotated")]
    assert all(map(operator.ge, counts, least)), counts


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "Cosmos"])  # which ComfyUI runs in float32
def test_as_exact_in_half_precision(small, took, name, dtype):
    architecture = ARCHITECTURES[name]
    exact = small.output_of(architecture, small.stock_of(architecture)).double()
    own, deferred, agreed = both_ways(small, architecture, small.int8_of(architecture, dtype=dtype), dtype)
    assert took["linear"] and agreed is True
    assert relative_error(deferred, exact) <= max(AS_EXACT * relative_error(own, exact), ROUNDED)


def in_place(block, x, mask, places, given):
    """Ideogram 4's block as another pack may have written it: in another order and in place."""
    one, two, three, four = block.adaln_modulation(given).unflatten(-1, (4, -1)).unbind(-2)
    hidden = block.attention_norm1(x)
    hidden *= 1 + one
    attended = attention_of(block.attention, hidden, mask, places, optimized_attention_masked)
    total = x.clone().addcmul_(torch.tanh(two), block.attention_norm2(attended))
    hidden = block.ffn_norm1(total).mul_(three.add(1))
    gate, up = block.feed_forward.w1(hidden), block.feed_forward.w3(hidden)
    product = block.feed_forward.w2(F.silu(gate).mul_(up))
    total += block.ffn_norm2(product) * torch.tanh(four)
    return total


def attention_of(attention, x, mask, places, attend):
    q, k, v = attention.qkv(x).unflatten(-1, (3, attention.num_heads, -1)).unbind(-3)
    q, k = ck.apply_rope_split_half(attention.norm_q(q), attention.norm_k(k), places)
    q, k, v = (t.movedim(1, 2) for t in (q, k, v))
    return attention.o(attend(q, k, v, attention.num_heads, mask, skip_reshape=True))


def test_a_block_that_another_pack_rewrote(took):
    block, inputs = ideogram_block.block(), ideogram_block.inputs(tokens=12)

    def deferred(forward):
        took.clear()
        with deferral.mode.Deferring() as mode:
            output = forward(*inputs)
        return mode.finish(output), dict(took)

    with torch.inference_mode():
        own = block(*inputs)
        output, original = deferred(block)
        rewritten, counts = deferred(lambda *args: in_place(block, *args))
    assert original["linear"] == counts["linear"] >= 4
    assert max(relative_error(t, own) for t in (output, rewritten)) <= ROUNDED


@pytest.mark.parametrize("joined", (False, True))
def test_heads_lie_in_the_order_of_tokens(block, joined):
    """So attention's result does, and the next linear reads it without a copy."""
    with torch.no_grad(), deferral.mode.Deferring() as mode:
        y = block.renewed().enter(forwards.randn(2, 12, 64))
        x = torch.cat([forwards.heads(part).transpose(1, 2) for part in (y, y)], 2)
        if joined:
            x = kitchen_rope(block.of_heads(x), forwards.places(1, 1, 24))
    assert mode.finish(x).transpose(1, 2).is_contiguous()


def kitchen_rope(heads, freqs):
    return forwards.kitchen().apply_rope(heads, heads, freqs)[0]


def test_parts_at_positions_of_their_own_are_one_pass_each(block, monkeypatch):
    calls, fused = [], deferral.consumers.norm_rope
    monkeypatch.setattr(deferral.consumers, "norm_rope", lambda *args: calls.append(args) or fused(*args))
    with torch.no_grad(), deferral.mode.Deferring():
        forwards.turned_parts(block.renewed(), forwards.randn(2, 12, 64))
    assert len(calls) == 2 and all(call[2] is not None for call in calls)  # no half of heads has a norm over all


@pytest.mark.parametrize("form", (lambda q: q, lambda q: q.contiguous()), ids=("memory", "deferred"))
def test_attention_that_is_launched_on_addresses_writes_into_nothing(block, form):
    def attend(call):
        assert all(type(tensor) in deferral.notes.MEMORY and tensor.data_ptr() for tensor in call[:3])
        return F.scaled_dot_product_attention(*call[:3])

    ways = (Way(lambda call: None, attend),)
    override = AttentionOverride(
        AttentionKind("", lambda device: None, lambda device: ways, False), torch.device("cpu")
    )
    with torch.no_grad(), deferral.mode.Deferring():
        y = block.renewed().enter(forwards.randn(2, 12, 64))
        waiting, q = block.norm(y), form(forwards.heads(y).transpose(1, 2))
        override(None, q, q, q, forwards.HEADS, skip_reshape=True)
        assert waiting.note.computed is None


def address_that_pytorch_does_not_see(x):
    """As a function in C++ gets it, such as SageAttention's."""
    with function_modes.unseen():
        return torch.Tensor.data_ptr(x)


def test_who_asks_for_strides_finds_memory(block):
    """SageAttention asserts them, and hands the tensor to a kernel: without memory that would read address 0."""
    with torch.no_grad(), deferral.mode.Deferring() as mode:
        x = block.norm(block.renewed().enter(forwards.randn(2, 12, 64)))
        q = forwards.heads(x)
        assert type(q) is deferral.notes.Deferred and not address_that_pytorch_does_not_see(q)
        assert q.stride(-1) == 1
        value = q.note.value()
        assert address_that_pytorch_does_not_see(q) == value.data_ptr() > 0
        with function_modes.unseen():
            assert (torch.Tensor.size(q), torch.Tensor.stride(q)) == (value.shape, value.stride())
    assert torch.equal(mode.finish(q), value)


def test_a_compiled_function_within_a_forward(block):
    """As an attention override may call one. The compiler does not look into the forward."""
    function = torch.compile(lambda q: torch.softmax(q * 2, -1), backend="eager")
    with torch.no_grad():
        for make in (block.norm, lambda y: y):
            with deferral.mode.Deferring() as mode:
                x = make(block.renewed().enter(forwards.randn(2, 12, 64)))
                assert type(x) in (deferral.notes.Deferred, deferral.notes.Tracked)
                output = mode.finish(function(x))
            assert torch.equal(output, torch.softmax(mode.finish(x) * 2, -1))


def norms_in_float32_and_a_sigmoid_gate(block, x):
    weight, y = forwards.modulation(2, forwards.WIDTH), block.enter(x)
    normed = F.rms_norm(y.float(), weight.shape, weight + 1, 1e-5).to(y.dtype)
    scaled = normed * forwards.modulation(3).to(y.dtype)
    return block.smoothed(block.out(scaled) * torch.sigmoid(block.other(normed)))


def norm_of_patches_of_a_padded_latent(block, latent):
    """As that of HunyuanVideo's first block."""
    padded, weight = F.pad(latent, (0, 1, 0, 1), mode="replicate"), forwards.randn(forwards.WIDTH, 4, 2, 2)
    patches = F.conv2d(padded, weight, stride=2).flatten(2).transpose(1, 2)
    return block.out(torch.ops.comfy_kitchen.adaln(patches, forwards._S[:1], forwards._T[:1], 1e-6))


def norm_of_a_stream_put_together_of_parts(block, x):
    """As MiniMax H3 does with text, video and sound, where its norms are of no class of the pack's."""
    h = torch.empty(x.shape)
    h[:, :5], h[:, 5:] = block.enter(x)[:, :5], block.other(x)[:, 5:]  # no note waits, and no mode is on
    return block.out(F.rms_norm(h, (forwards.WIDTH,)))


ROWS_OF_X = (forwards.SAMPLES, forwards.TOKENS, forwards.WIDTH)


@pytest.mark.parametrize(
    "forward, shape, dtype, count",
    (
        (norms_in_float32_and_a_sigmoid_gate, ROWS_OF_X, torch.float16, 3),
        (norms_in_float32_and_a_sigmoid_gate, ROWS_OF_X, torch.bfloat16, 3),
        (norm_of_patches_of_a_padded_latent, (1, 4, 7, 7), torch.float32, 1),
        (norm_of_a_stream_put_together_of_parts, ROWS_OF_X, torch.float32, 1),
    ),
)
def test_what_models_do_is_taken(block, took, forward, shape, dtype, count):
    x = forwards.randn(*shape, seed=3)
    with torch.no_grad():
        exact, own = forward(block, x), forward(block, x.to(dtype))
        output = deferral.install.deferred_call(lambda: forward(block, deferral.notes.as_tracked(x.to(dtype))))
    assert took["linear"] == count and output.dtype == own.dtype
    assert relative_error(output, exact) <= max(1.1 * relative_error(own, exact), ROUNDED)


ROWS = {  # that are set in a modulated norm, made of which of its input's rows
    "the first ones": (0, 5, lambda h: h),
    "middle ones": (3, 9, lambda h: h),
    "the last ones": (9, 12, lambda h: h),
    "all of them": (0, 12, lambda h: h),
    "computed already": (0, 5, lambda h: h.as_subclass(torch.Tensor).clone()),
}


@pytest.mark.parametrize("start, stop, source", ROWS.values(), ids=ROWS)
def test_rows_that_are_set_are_quantized_beside_the_others(block, took, start, stop, source):
    """As Qwen-Image 2.1 does where tokens of its prompt have a modulation of their own."""
    adaln, scales, shift = (
        torch.ops.comfy_kitchen.adaln,
        [forwards.modulation(seed) for seed in (1, 2)],
        torch.zeros(64),
    )

    def forward(x):
        h = block.enter(x)
        n = adaln(h, scales[0], shift, 1e-6)
        n[:, start:stop] = adaln(source(h[:, start:stop]), scales[1], shift, 1e-6)
        return torch.cat([layer(n) for layer in (block.out, block.smoothed, block.of_16_bits)])

    x = forwards.randn(forwards.SAMPLES, forwards.TOKENS, forwards.WIDTH, seed=3)
    with torch.no_grad():
        own = forward(x)
        output, agreed = deferral.install._compared(block, lambda: forward(x), [block.out])
        assert agreed and took["linear"] == 3
        assert torch.equal(deferral.install.deferred_call(lambda: forward(x)), output)
    assert relative_error(output, own) <= ROUNDED


RESHAPED = {
    "transpose_": lambda t: t.transpose_(-1, -2),
    "unsqueeze_": lambda t: t.unsqueeze_(0),
    ".data =": lambda t: setattr(t, "data", torch.zeros(3, 5, dtype=torch.float64)),
    "out=": lambda t: torch.add(torch.ones(2, 2), 1, out=t.resize_(0)),
    "out= of several": lambda t: torch.frexp(torch.ones(2, 2), out=(t.resize_(0), torch.empty(0, dtype=torch.int32))),
}


@pytest.mark.parametrize("outlives", (False, True))
@pytest.mark.parametrize("write", RESHAPED.values(), ids=RESHAPED)
def test_a_tensor_that_is_written_into_says_what_it_is_then(write, outlives):
    x = forwards.randn(2, 12, 64)
    with torch.no_grad(), contextlib.ExitStack() as forward:
        mode = forward.enter_context(deferral.mode.Deferring())
        tracked, plain = mode.tracked(x.clone()), x.clone()
        if outlives:  # as a model keeps it for its next step
            forward.close()
        assert type(tracked) is deferral.notes.Tracked and tracked.shape == plain.shape
        for tensor in (tracked, plain):
            write(tensor)
        for ask in ("shape", "dtype", "device", "ndim", "is_cuda"):
            assert getattr(tracked, ask) == getattr(plain, ask)
        for ask in ("size", "dim", "numel", "get_device", "is_floating_point", "__len__"):
            assert getattr(tracked, ask)() == getattr(plain, ask)()


@pytest.mark.parametrize("own, other", ((0, 7), (7, 0), (7, 8)))
def test_another_stream_takes_nothing(monkeypatch, own, other):
    """Neither what waits nor rows that were quantized: what waits for one stream need not have waited for another."""
    streams, x = [own], forwards.randn(2, 12, 64)
    monkeypatch.setattr(deferral.notes, "_current_stream", lambda index: streams[-1])
    operand = deferral.operands.Normed(x, Norm("rms", 1e-6))
    note = deferral.notes.Note((x.shape, x.dtype, torch.device("cuda", 0)), operand, (abs, (x,), {}), None, False)
    note.quantized = {(): "rows"}
    waiting = deferral.notes.deferred(note)
    for stream, taken in ((other, (None, None)), (own, (operand, "rows"))):
        streams.append(stream)
        assert (note.taken(deferral.operands.Normed), deferral.consumers._rows(waiting, (), ())) == taken


@pytest.mark.parametrize("rate, enough", ((936e9, 1_989_000), (360e9, 765_000), (4917e9, 10_448_640)))
def test_small_tensors_wait_for_nothing(monkeypatch, rate, enough):
    """On a GPU the host would take longer for a note than the GPU for a pass: on an RTX 3090, an RTX 3060, an H200."""
    monkeypatch.setattr(deferral.mode, "memory_rate", lambda: rate)
    for rows, waits in ((-(-enough // 64), True), (enough // 64 - 1, False)):
        assert deferral.mode.are_enough(torch.Size((1, rows, 64)), True) == waits


@pytest.mark.parametrize("shape, enough", (((1, 8, 2), True), ((1, 7, 2), False), ((64,), False), ((64, 1), False)))
def test_few_rows_wait_for_nothing(shape, enough):
    assert deferral.mode.are_enough(torch.Size(shape), False) == enough
