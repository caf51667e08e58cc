"""Forwards that try to tell a deferred tensor from a computed one: tables, an entry a kind.

A forward takes a block and an input [2, 12, 64], float32 on the CPU, and gives two lists: of what must be exact, and of
what went through INT8 behind what was deferred. This file needs no ComfyUI before a forward runs, so that tests can be
named after its entries.
"""

from __future__ import annotations

import copy
import ctypes
import io
import operator
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

SAMPLES, TOKENS, WIDTH, HEADS = 2, 12, 64, 2


class Rounded(list):
    """Results that went through INT8."""


Lists = tuple[list[Any], list[Any]]
Forward = Callable[[Any, torch.Tensor], Lists]


class Block(torch.nn.Module):
    """Layers of a model with this pack's operations, of each form that an INT8 weight has."""

    def __init__(self) -> None:
        from int8_dit.kernels import ChannelTransform, quantize_weight
        from int8_dit.nodes.linears.int8_weight import int8_weight
        from int8_dit.nodes.linears.linear_call import name_linears
        from int8_dit.nodes.loading.load_plan import LoadPlan
        from int8_dit.nodes.loading.operations import int8_operations

        smooth, group = {"smoothed": torch.linspace(0.5, 2.0, WIDTH)}, {"rotated": WIDTH}

        def make(name: str, weight: torch.Tensor, _: object) -> Any:
            if name == "floats":
                return None
            transform, bits = ChannelTransform(smooth.get(name), group.get(name)), 16 if name == "of_16_bits" else 8
            return int8_weight(*quantize_weight(weight, transform), torch.float32, transform, bits)

        super().__init__()
        ops, floats = int8_operations(LoadPlan("fused int8", torch.float32, make)), {"dtype": torch.float32}
        tensors = {}
        for name in ("enter", "out", "other", "smoothed", "rotated", "of_16_bits", "floats", "up", "down"):
            k, n = {"up": (WIDTH, 2 * WIDTH), "down": (2 * WIDTH, WIDTH)}.get(name, (WIDTH, WIDTH))
            setattr(self, name, ops.Linear(k, n, **floats))
            tensors[f"{name}.weight"], tensors[f"{name}.bias"] = randn(n, k, seed=len(name)) / k**0.5, randn(n, seed=1)
        self.load_state_dict(tensors)
        self.norm = ops.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=True, **floats)
        self.layer = ops.LayerNorm(WIDTH, eps=1e-5, elementwise_affine=False, **floats)
        self.of_heads = ops.RMSNorm(WIDTH // HEADS, eps=1e-6, elementwise_affine=True, **floats)
        name_linears(self)
        self.requires_grad_(False)
        self.renewed()

    def renewed(self) -> Block:
        """The block with the weights of its norms as they were."""
        for norm in (self.norm, self.of_heads):
            norm.weight = torch.nn.Parameter(modulation(4, *norm.normalized_shape), requires_grad=False)
        return self

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        """The product of the linear that has the width of `x`."""
        return (self.out if x.shape[-1] == WIDTH else self.down)(x)


def deferring(block: Block, forward: Callable[[Block, Any], Any]) -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    """A model of a block and a forward, and what it computes as its own."""
    from int8_dit.nodes.deferred.install import deferring_class

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block.renewed()

        def forward(self, x: Any) -> Any:
            return forward(self.block, x)

    model = deferring_class(Model, torch.device("cpu"))()
    return model, lambda x: Model.forward(model, x)


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def modulation(seed: int, *shape: int) -> torch.Tensor:
    return 1 + randn(*(shape or (SAMPLES, 1, WIDTH)), seed=seed) / 2


def frames(block: Block, number: int = 4) -> torch.Tensor:
    """Modulations of frames, as a linear gives them."""
    return block.other(modulation(number, SAMPLES, number, WIDTH))


def places(*shape: int) -> torch.Tensor:
    """ComfyUI's matrices of rotary positions, of a shape in front of them."""
    angles = randn(*shape, WIDTH // HEADS // 2, seed=9)
    return torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), -1).unflatten(-1, (2, 2))


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:2], HEADS, -1)


def kitchen() -> Any:
    import comfy.quant_ops

    return comfy.quant_ops.ck


def turned(*heads: torch.Tensor) -> list[torch.Tensor]:
    freqs = places(1, TOKENS, 1) if heads[0].shape[1] == TOKENS else places(1, 1, TOKENS)
    return list(kitchen().apply_rope(*heads, freqs))


def taken(block: Block, *notes: torch.Tensor) -> Lists:
    """What all that may take a deferred tensor make of these, and their values."""
    rows = [note for note in notes if note.ndim in (2, 3) and note.shape[-1] in (WIDTH, 2 * WIDTH)]
    turns = [turned(note, note) for note in notes if note.ndim == 4 and note.shape[-1] == WIDTH // HEADS]
    products = [block.linear(note) for note in rows]
    return [*(randn(*note.shape, seed=7) + note for note in rows), *turns, *notes], products


def _gated(b: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, up = b.enter(x), b.other(x)
    return F.silu(y) * up, y, up


def _segments(b: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    note, scale, shift = b.norm(y := b.enter(x)), modulation(1), modulation(2)
    note[:, :5] *= scale
    note[:, :5] += shift
    note[:, 5:].mul_(shift)
    return note, y, scale, shift


def _turned_first(b: Block, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    y, freqs = heads(b.enter(x)), places(1, TOKENS, 1)
    note = kitchen().apply_rope1(b.of_heads(y), freqs)
    return note, y, freqs


def _spread(values: torch.Tensor, each: int) -> torch.Tensor:
    return values[:, :, None].expand(-1, -1, each, -1).reshape(len(values), -1, values.shape[-1])


def _cat_heads(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([heads(part).transpose(1, 2) for part in parts], 2)


_Note = tuple[torch.Tensor, ...]

NOTES: dict[str, Callable[[Block, torch.Tensor], _Note]] = {
    "norm of an input": lambda b, x: (b.norm(x), x),
    "norm": lambda b, x: (b.norm(y := b.enter(x)), y, b.norm.weight),
    "layer norm": lambda b, x: (b.layer(y := b.enter(x)), y),
    "norm by function": lambda b, x: (F.rms_norm(y := b.enter(x), (WIDTH,), w := modulation(1, WIDTH), 1e-6), y, w),
    "norm with a parameter": lambda b, x: (
        F.layer_norm(y := b.enter(x), (WIDTH,), w := torch.nn.Parameter(modulation(1, WIDTH), False)), y, w
    ),
    "norm in float32": lambda b, x: (
        F.rms_norm((y := b.enter(x).half()).float(), (WIDTH,), w := modulation(1, WIDTH), 1e-6), y, w
    ),
    "norm in float32 and back": lambda b, x: (
        F.layer_norm((y := b.enter(x).to(torch.float16)).to(torch.float32), (WIDTH,)).to(y), y
    ),
    "scaled": lambda b, x: (b.norm(y := b.enter(x)) * (s := modulation(1)), y, s),
    "shifted": lambda b, x: (b.layer(y := b.enter(x)) * (1 + (s := modulation(1))) + (t := modulation(2)), y, s, t),
    "addcmul": lambda b, x: (torch.addcmul(t := modulation(2), b.norm(y := b.enter(x)), s := modulation(1)), y, s, t),
    "gate": lambda b, x: ((g := modulation(1)) * (y := b.enter(x)), y, g),
    "activation": lambda b, x: (F.silu(y := b.enter(x)), y),
    "sigmoid": lambda b, x: (torch.sigmoid(y := b.enter(x)), y),
    "gated by a sigmoid": lambda b, x: ((z := b.other(x)) * F.sigmoid(y := b.enter(x)), y, z),
    "gated activation": _gated,
    "beside": lambda b, x: (torch.cat((z := b.other(x), F.gelu(y := b.enter(x), approximate="tanh")), -1), y, z),
    "tokens": lambda b, x: (b.norm(y := b.enter(x))[:, 2:11], y),
    "joined heads": lambda b, x: (b.of_heads(_cat_heads((y := b.enter(x))[:, :5], b.other(x)[:, 5:])), y),
    "joined": lambda b, x: (torch.cat((b.norm(y := b.enter(x)), b.norm(z := b.other(x))), 1), y, z),
    "frames": lambda b, x: (b.norm(y := b.enter(x)) * (s := frames(b)).repeat_interleave(3, 1), y, s),
    "expanded frames": lambda b, x: (b.norm(y := b.enter(x)) * _spread(s := frames(b), 3), y, s),
    "segments": _segments,
    "heads": lambda b, x: (b.of_heads(heads(y := b.enter(x))), y),
    "copied heads": lambda b, x: (b.of_heads(heads(y := b.enter(x)).transpose(1, 2).contiguous()), y),
    "repeated once": lambda b, x: (heads(y := b.enter(x)).unsqueeze(3).repeat(1, 1, 1, 1, 1).flatten(2, 3), y),
    "turned heads": _turned_first,
}  # fmt: skip
"""What may wait, and the tensors that it is made of."""


@torch.library.custom_op("int8_dit_test::scale", mutates_args=("target",), schema="(float by, Tensor(a!) target) -> ()")
def _scale(by: float, target: torch.Tensor) -> None:
    target.mul_(by)


_OPS = torch.ops.int8_dit_test


def _set(t: torch.Tensor, index: Any, value: Any) -> None:
    t[index] = value


WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda t: t.add_(1),
    "copy_": lambda t: t.copy_(t.flip(-1)),
    "addcmul_": lambda t: t.addcmul_(torch.ones_like(t), torch.full_like(t, 3.0)),
    "+=": lambda t: operator.iadd(t, 1),
    "a slice": lambda t: _set(t, slice(0, 1), 0.5),
    "an item by a mask": lambda t: _set(t, t > 0, 0.0),
    "through a slice, *=": lambda t: operator.imul(t[..., 3:9], 3),
    "through a chunk": lambda t: t.chunk(2, -1)[1].neg_(),
    "through .data": lambda t: t.data.mul_(2),
    "through as_strided": lambda t: torch.as_strided(t, (32,), (1,)).zero_(),
    "out=": lambda t: torch.add(t, 1, out=t),
    "out= of several": lambda t: torch.frexp(t.clone(), out=(t, torch.empty(0, dtype=torch.int32))),
    "aten": lambda t: torch.ops.aten.add_.Tensor(t, t),
    "aten out=": lambda t: torch.ops.aten.neg.out(t.clone(), out=t),
    "custom op by name": lambda t: _OPS.scale.default(target=t, by=3.0),
    "_foreach_add_": lambda t: torch._foreach_add_([t], 1.0),
    "relu_": lambda t: torch.relu_(t),
    "silu in place": lambda t: F.silu(t, inplace=True),
    "silu in place, by position": lambda t: F.silu(t, True),
    ".data =": lambda t: setattr(t, "data", torch.ones_like(t)),
    "numpy": lambda t: t.detach().numpy().fill(2),
    "data_ptr": lambda t: ctypes.memset(t.data_ptr(), 0, 256),
    "dlpack": lambda t: torch.from_dlpack(t.detach()).fill_(2),
    "storage": lambda t: t.untyped_storage().fill_(0),
    "transpose_": lambda t: t.transpose_(0, -1),
}
"""Writes in place."""

_S, _T = modulation(1), modulation(2)

NOTE_WRITES: dict[str, Callable[[torch.Tensor], object]] = {
    **WRITES,
    "scaled": lambda n: n.mul_(_S),
    "shifted": lambda n: n.add_(_T),
    "scaled and shifted": lambda n: n.mul_(_S).add_(_T),
    "a residual added": lambda n: n.add_(randn(*n.shape, seed=5)),
    "addcmul_ by a scale": lambda n: n.addcmul_(n, _S),
    "tokens scaled and shifted": lambda n: n[:, :5].mul_(_S).add_(_T),
    "all tokens": lambda n: (n[:, :5].mul_(_S), n[:, 5:].mul_(_T).add_(_S)),
    "tokens that overlap": lambda n: (n[:, :7].mul_(_S), n[:, 4:].mul_(_T)),
    "tokens of tokens": lambda n: n[:, :9][:, 3:].mul_(_S),
    "tokens twice": lambda n: (n[:, :5].mul_(_S), n[:, :5].mul_(_T), n[:, :5].add_(_S), n[:, :5].add_(_T)),
    "each other token": lambda n: n[:, ::2].mul_(_S),
    "tokens set": lambda n: _set(n, (slice(None), slice(0, 5)), _S),
    "tokens set to numbers": lambda n: _set(n, (slice(None), slice(0, 5)), randn(2, 5, WIDTH)),
    "all tokens set": lambda n: _set(n, (slice(None), slice(None)), randn(2, 12, WIDTH)),
    "tokens set to one sample's": lambda n: _set(n, (slice(None), slice(0, 5)), randn(1, 5, WIDTH)),
    "tokens set twice": lambda n: [
        _set(n, (slice(None), slice(start, start + 4)), randn(2, 4, WIDTH, seed=start)) for start in (2, 4)
    ],
    "tokens set and scaled": lambda n: (_set(n, (slice(None), slice(8, None)), randn(2, 4, WIDTH)), n.mul_(_S)),
    "tokens set to others": lambda n: _set(n, (slice(None), slice(0, 5)), n[:, 5:10]),
    "chunks scaled": lambda n: [part.mul_(_S) for part in n.chunk(2, dim=1)],
}  # fmt: skip
"""Those into deferred tensors themselves."""


OTHERS: dict[str, Callable[[Block, torch.Tensor], torch.Tensor]] = {
    "a name": lambda b, n: n,
    "a view": lambda b, n: n.view(-1, WIDTH),
    "a view of a view": lambda b, n: n.view(-1, WIDTH).view(n.shape),
    "tokens": lambda b, n: n[:, :9],
    "channels": lambda b, n: n[..., :32],
    "a chunk": lambda b, n: n.chunk(2, 1)[0],
    "a clone": lambda b, n: n.clone(),
    "a contiguous view": lambda b, n: n.view(-1, WIDTH).contiguous(),
    "of the same dtype": lambda b, n: n.to(torch.float32),
    "without dropout": lambda b, n: F.dropout(n, 0.5, False),
    "with others": lambda b, n: torch.cat((n, randn(2, 4, WIDTH)), 1),
    "a product": lambda b, n: n * _T,
    "taken": lambda b, n: (n, b.out(n))[0],
    "taken, a view": lambda b, n: (part := n.view(-1, WIDTH), b.out(part))[0],
}
"""What a deferred tensor may be, beside itself, when it is written into: of a norm, or of an activation."""


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * 2


def _saved(t: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save({"t": t}, file)
    file.seek(0)
    return torch.load(file)["t"]


def _in_a_thread(do: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(do).result()


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "form": lambda n: [
        *(n.shape, n.size(), n.size(-1), n.size(dim=0), n.dim(), n.ndim, n.ndimension(), n.numel(), n.nelement()),
        *(len(n), n.dtype, n.device, n.layout, n.requires_grad, n.is_leaf, n.get_device(), n.is_cuda, n.grad_fn),
        *(n.is_floating_point(), n.is_complex(), n.element_size(), n.itemsize, n.nbytes, isinstance(n, torch.Tensor)),
        *(torch.is_tensor(n), torch.is_floating_point(n), torch.numel(n), n.mT.shape, n.is_sparse, n.type()),
    ],
    "strides": lambda n: [n.stride(), n.stride(-1), n.is_contiguous(), n.storage_offset(), n.transpose(0, 1).stride()],
    "numpy": lambda n: torch.from_numpy(n.numpy().copy()),
    "array": lambda n: numpy.asarray(n).tolist(),
    "numbers": lambda n: [n.tolist(), n.flatten()[3].item(), float(n.sum()), bool((n > 0).any()), repr(n.flatten()[1])],
    "iteration": lambda n: [part.sum() for part in n],
    "indices": lambda n: [n[0], n[..., 1], n[:, [1, 0]], n[n > 0], n[None], n[-1, 1:], n[:, ::2]],
    "bits": lambda n: [bits := n.view(torch.int32), bits.dtype, bits.element_size(), n.view(torch.uint8).shape],
    "device": lambda n: [n.cpu(), n.to("cpu"), n.to(torch.device("cpu"), torch.float64)],
    "copy": lambda n: [copy.copy(n), copy.deepcopy(n), copy.deepcopy({"n": [n]})],
    "pickle": lambda n: pickle.loads(pickle.dumps([n])),
    "torch.save": _saved,
    "vmap": lambda n: [torch.vmap(torch.sin)(n), torch.vmap(lambda row: row.sum() * row)(n)],
    "func": lambda n: torch.func.grad(lambda t: (t * n).sum())(torch.ones_like(n)),
    "autograd.Function": lambda n: _Twice.apply(n),
    "threads": lambda n: [_in_a_thread(lambda: n.clone()), _in_a_thread(lambda: torch.stack([n, n]))],
    "stack": lambda n: [torch.stack([n, n]), torch.cat([n, n], -1), torch.cat([n, n]), torch.hstack((n, n))],
    "split": lambda n: [*n.chunk(2, 1), *torch.split(n, 5, 1), *n.unbind(0), *n.split([1, 1]), *n.tensor_split(3, 1)],
    "split by names": lambda n: [*n.chunk(chunks=2, dim=1), *torch.chunk(input=n, chunks=3, dim=-1)],
    "called by names": lambda n: [
        *(torch.reshape(input=n, shape=(-1,)), torch.transpose(input=n, dim0=0, dim1=1), torch.mul(input=n, other=n)),
        *(F.silu(input=n), torch.add(input=n, other=n, alpha=2), n.mul(other=_S.view(-1)[:1]), n.reshape(shape=(-1,))),
        *(torch.cat(tensors=(n, n), dim=1), torch.unsqueeze(input=n, dim=0), torch.repeat_interleave(n, 2, dim=0)),
    ],
    "dropout": lambda n: [F.dropout(n, 0.5, training=False), F.dropout(input=n, training=False), F.dropout(n, 0.0)],
    "norms": lambda n: [F.rms_norm(n, n.shape[-1:]), F.layer_norm(n, n.shape[-2:]), F.layer_norm(n, n.shape[1:])],
    "activations": lambda n: (
        [F.silu(n), F.gelu(n), F.gelu(n, approximate="tanh"), F.relu(n), n.sigmoid(), F.softmax(n, 0)]
    ),
    "arithmetic": lambda n: (
        [n + n, n * n, n - 1, 1 - n, 2 * n, n / 3, -n, n**2, n @ n.mT, n.add(n, alpha=2), n > 0, n == n]
    ),
    "0-dim": lambda n: [n * torch.tensor(2.0), torch.tensor(2.0) + n, n.mul(torch.tensor([3.0])), n * True],
    "equal": lambda n: [torch.equal(n, n.clone()), torch.allclose(n, n.clone()), any(t is n for t in [n]), n in [n]],
    "where": lambda n: (
        [torch.where(n > 0, n, -n), torch.einsum("b...->...b", n), n.masked_fill(n > 0, 0), *n.topk(2, -1)]
    ),
    "linear": lambda n: F.linear(n, randn(3, n.shape[-1]).to(n.dtype)),
    "attention": lambda n: [F.scaled_dot_product_attention(n, n, n), F.scaled_dot_product_attention(n, n, value=n)],
    "checkpoint": lambda n: checkpoint(torch.sin, n, use_reentrant=False),
    "attributes": lambda n: (setattr(n, "mark", 3), n.mark, hasattr(n, "no_mark"))[1:],
    "weakly": lambda n: weakref.ref(n)().sum(),
    "hash": lambda n: [hash(n) == hash(n), {n: 1}[n], dict.fromkeys([n, n]).__len__()],
    "out=": lambda n: torch.add(n, 1, out=torch.empty_like(n)),
    "out= of what may wait": lambda n: [
        (torch.sigmoid(n.clone(), out=(t := torch.zeros(n.shape, dtype=n.dtype))).sum(), t),
        (torch.cat((n, n), 1, out=(t := torch.cat((n.clone(), n.clone()), 1).zero_())).sum(), t),
    ],
    "made like it": lambda n: [torch.zeros_like(n), n.new_ones(2), n.new_zeros(n.shape), torch.full_like(n, 2.0)],
}  # fmt: skip
"""What may be asked of a deferred tensor."""

SHAPES: dict[str, Callable[[Block], Any]] = {
    "[K]": lambda b: modulation(1, 64),
    "[1, K]": lambda b: modulation(1, 1, 64),
    "[B, 1, K]": lambda b: modulation(1, 2, 1, 64),
    "[B, T, K]": lambda b: modulation(1, 2, 12, 64),
    "[T, K]": lambda b: modulation(1, 12, 64),
    "[B, 1, K], expanded": lambda b: modulation(1, 2, 1, 64).expand(-1, 12, -1),
    "[B, 1, K], strided": lambda b: modulation(1, 64, 1, 2).transpose(0, 2),
    "[2, 2, 1, K], more axes": lambda b: modulation(1, 2, 2, 1, 64),
    "frames": lambda b: frames(b).repeat_interleave(3, dim=1),
    "frames, expanded": lambda b: _spread(frames(b), 3),
    "frames, cut": lambda b: torch.repeat_interleave(frames(b), 4, 1)[:, :12],
    "frames, plus 1": lambda b: 1 + frames(b).repeat_interleave(3, 1),
    "frames, 0-dim": lambda b: frames(b).repeat_interleave(3, 1) * torch.tensor(2.0),
    "frames, plus [K]": lambda b: frames(b).repeat_interleave(3, 1) + modulation(2, 64),
    "frames of several sizes": lambda b: frames(b).repeat_interleave(torch.tensor([6, 3, 2, 1]), 1),
    "[3, 1, K], too many": lambda b: modulation(1, 3, 1, 64),
    "[1]": lambda b: modulation(1, 1),
    "[]": lambda b: torch.tensor(0.5),
    "a number": lambda b: 0.5,
    "float64": lambda b: modulation(1).double(),
    "a parameter": lambda b: torch.nn.Parameter(modulation(1, 64), requires_grad=False),
}
"""Modulations."""


def _iadd(h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    h += y
    return h


_Modulated = Callable[[torch.Tensor, torch.Tensor, Any, torch.Tensor], torch.Tensor]

MODULATED: dict[str, _Modulated] = {
    "n s": lambda n, h, s, y: n * s,
    "n (1 + s) + s": lambda n, h, s, y: n * (1 + s) + s,
    "s + s n": lambda n, h, s, y: s + s * n,
    "n s + [K]": lambda n, h, s, y: n * s + modulation(3, 64),
    "n s + other frames": lambda n, h, s, y: n * s + y[:, 2:8].repeat_interleave(2, 1),
    "other frames n + s": lambda n, h, s, y: n * y[:, 2:8].repeat_interleave(2, 1) + s,
    "n s - s": lambda n, h, s, y: n * s - s,
    "addcmul(s, n, s)": lambda n, h, s, y: torch.addcmul(s, n, s),
    "addcmul(n, n, s)": lambda n, h, s, y: torch.addcmul(n, n, s),
    "addcmul(h, n, s)": lambda n, h, s, y: torch.addcmul(h, n, s),
    "addcmul(h, s, y)": lambda n, h, s, y: h.addcmul(s, y),
    "addcmul(h, n, s, 2)": lambda n, h, s, y: torch.addcmul(h, n, s, value=2),
    "h + s n": lambda n, h, s, y: h + s * n,
    "h + 2 n s": lambda n, h, s, y: torch.add(h, n * s, alpha=2),
    "h += n s": lambda n, h, s, y: _iadd(h, n * s),
    "h.addcmul_(n, s)": lambda n, h, s, y: h.addcmul_(n, s),
    "h.addcmul_(s, y)": lambda n, h, s, y: h.addcmul_(s, y),
    "y += n s": lambda n, h, s, y: _iadd(y, n * s),
    "y[:1] + n s": lambda n, h, s, y: y[:1] + n * s,
    "silu(y) s": lambda n, h, s, y: F.silu(y) * s,
    "n.mul_(s)": lambda n, h, s, y: n.mul_(s).add_(s),
    "n[:, :5] s": lambda n, h, s, y: (n[:, :5].mul_(s[:, :5] if getattr(s, "ndim", 0) == 3 else s), n)[1],
}
"""What a modulation does to a norm, beside a residual and what the norm is of."""


def _hooked(register: Callable[..., Any], hook: Callable[..., Any], call: Callable[[], Lists]) -> Lists:
    handle = register(hook)
    try:
        return call()
    finally:
        handle.remove()


def _all_forms(b: Block, x: torch.Tensor) -> Lists:
    n = b.norm(b.enter(x)) * _S
    layers = (b.out, b.smoothed, b.of_16_bits, b.rotated, b.floats, b.other, b.smoothed, b.out)
    return [n], [layer(n) for layer in layers]


def _after_it_was_taken(b: Block, x: torch.Tensor) -> Lists:
    n = b.norm(y := b.enter(x))
    first = b.out(n)
    y.zero_()
    return [n, n + 1], [first, b.other(n)]


def _numpy_before(b: Block, x: torch.Tensor) -> Lists:
    y = b.enter(x)
    array = y.numpy()
    n = b.norm(y)
    array.fill(1)
    return taken(b, n)


def _numpy_before_others(b: Block, x: torch.Tensor) -> Lists:
    y, z, gate = b.enter(x), b.other(x), modulation(1)
    y.numpy()
    first, waiting = b.norm(y), gate * z
    F.silu(z)  # a note that is gone at once, so that one fewer waits
    gate.zero_()
    return [first, waiting], []


def _in_transposed_memory(b: Block, x: torch.Tensor) -> Lists:
    q = heads(b.enter(x)).transpose(1, 2)
    n = F.layer_norm(q, q.shape[-1:])
    return [n.view(-1, TOKENS, 32), n.flatten(0, 1), n.reshape(-1, 32), n.stride(), n.is_contiguous()], []


def _turned_elsewhere(b: Block, x: torch.Tensor) -> Lists:
    q, k = b.of_heads(heads(b.enter(x))), b.of_heads(heads(b.other(x)))
    return [kitchen().apply_rope1(t, freqs) for t, freqs in ((q, places(1, TOKENS, 1)), (k, -places(1, TOKENS, 1)))], []


def _contiguous_in_transposed_memory(b: Block, x: torch.Tensor) -> Lists:
    note = F.silu(heads(b.enter(x)).transpose(1, 2)).contiguous()
    return [note.is_contiguous(), note.view(-1), note], []


def _contiguous_views_written(b: Block, x: torch.Tensor) -> Lists:
    notes = b.norm(b.up(x)[..., :WIDTH]), F.silu(b.enter(x))
    views = [note.view(-1, WIDTH).contiguous().mul_(_S[0, 0]) for note in notes]
    return [*notes, *views], []


def _turns_apart(b: Block, x: torch.Tensor) -> Lists:
    q, k, freqs = heads(b.enter(x)), heads(b.other(x)), places(1, TOKENS, 1)
    first = kitchen().apply_rope1(b.of_heads(q), freqs)
    freqs.neg_()
    return [first, kitchen().apply_rope1(b.of_heads(k), freqs)], []


def turned_parts(b: Block, x: torch.Tensor, axis: int = 1) -> Lists:
    """Queries in parts of their tokens, and keys with a norm over all heads."""
    results = []
    for y, norm in ((b.enter(x), lambda y: b.of_heads(heads(y))), (b.other(x), lambda y: heads(b.norm(y)))):
        parts = zip(y.chunk(2, 1), places(1, TOKENS, 1).chunk(2, 1), strict=True)
        results.append(torch.cat([kitchen().apply_rope1(norm(part), freqs) for part, freqs in parts], axis))
    return results, []


def _normed_turns(b: Block, x: torch.Tensor) -> Lists:
    q, k = heads(b.enter(x)), heads(b.other(x))
    weight = b.of_heads.weight
    first = kitchen().rms_rope(q, k, places(1, TOKENS, 1), weight, weight, 1e-6)
    q.zero_()
    second = kitchen().rms_rope_split_half(b.norm(x).view(k.shape), k, places(1, TOKENS, 1), weight, None, 1e-5)
    return [*first, *second], []


def _gradient(b: Block, x: torch.Tensor) -> Lists:
    y = b.enter(x)
    with torch.enable_grad():
        leaf = y.clone().requires_grad_()
        n = b.norm(leaf) * _S
        (gradient,) = torch.autograd.grad(n.square().sum(), leaf)
    return [gradient, n.detach(), n.requires_grad, b.norm(y)], [b.out(n.detach())]


def _nested(b: Block, x: torch.Tensor) -> Lists:
    from int8_dit.nodes.deferred.mode import Deferring

    n = b.norm(y := b.enter(x))
    with Deferring() as inner:
        other = b.norm(z := b.other(x))
        y.mul_(2)
        z.mul_(2)
        inside = inner.finish(b.out(other))
    return taken(b, n)[0], [inside, b.out(n), b.out(other)]


def _nested_checking(b: Block, x: torch.Tensor) -> Lists:
    from int8_dit.nodes.deferred.mode import Deferring

    n = b.norm(y := b.enter(x))
    with Deferring(checking=True) as inner:
        inside = inner.finish(b.out(n * _S))
    y.zero_()
    return [n], [inside, b.out(n)]


def _of_two_samples(b: Block, x: torch.Tensor) -> Lists:
    y = b.enter(x[:1])
    return [modulation(1) * y, y + modulation(1) * y, b.norm(y) + randn(2, 12, 64), randn(1, 64) + b.norm(y)], []


def _hooks_that_read(b: Block, x: torch.Tensor) -> Lists:
    seen: list[torch.Tensor] = []
    n = b.norm(b.enter(x))
    product = _hooked(
        b.out.register_forward_hook, lambda m, args, out: seen.append(args[0] + out.mean()), lambda: b.out(n)
    )
    return [n], [product, *seen]


def _with_rows_set(
    h: torch.Tensor, scale: Any = _S, then: Callable[..., Any] = lambda rows: None
) -> list[torch.Tensor]:
    """A modulated norm whose first tokens, or middle ones, are set to rows with another modulation."""
    results = []
    for start, stop in ((0, 5), (3, 9)):
        n, rows = (F.layer_norm(t, (WIDTH,)) for t in (h, h[:, start:stop]))
        n, rows = n * scale + _T, rows * _T
        n[:, start:stop] = rows
        then(rows)
        results.append(n)
    return results


FORWARDS: dict[str, Forward] = {
    "one note, linears of all forms": _all_forms,
    "one note, linears of all forms, of tokens": lambda b, x: (
        ([], [f(b.norm(x)[:, 1:11]) for f in (b.out, b.smoothed, b.floats)])
    ),
    "used after it was taken": _after_it_was_taken,
    "used after a residual took it": lambda b, x: (
        ([(n := b.norm(y := b.enter(x))), y + n, y.zero_(), x + n], [b.out(n)])
    ),
    "numpy before the note": _numpy_before,
    "numpy before one of several notes": _numpy_before_others,
    "set_": lambda b, x: taken(b, n := b.norm(y := b.enter(x)), y.set_(torch.ones_like(y)), n),
    "norm in transposed memory": _in_transposed_memory,
    "contiguous, in transposed memory": _contiguous_in_transposed_memory,
    "contiguous views that are written": _contiguous_views_written,
    "rotary positions written between": _turns_apart,
    "other rotary positions": _turned_elsewhere,
    "norm and rotary positions": _normed_turns,
    "rotary positions of parts": turned_parts,
    "rotary positions of parts, joined otherwise": lambda b, x: turned_parts(b, x, 2),
    "a gradient": _gradient,
    "nested": _nested,
    "nested, checking": _nested_checking,
    "a batch that grows": _of_two_samples,
    "x + x": lambda b, x: ([(y := b.enter(x)) + y, y + b.norm(y), b.norm(y) + y, y.add_(y), b.norm(y) + b.norm(y)], []),
    "x += norm(x) g": lambda b, x: ([_iadd(x, b.norm(x) * _S), _iadd(x, b.norm(x)), _iadd(x, _S * x)], [b.out(x)]),
    "x += norm(x) g, a view": lambda b, x: ([_iadd(x[:, :9], b.norm(x)[:, 3:] * _S), x], [b.out(x)]),
    "x += norm(x) g, transposed": lambda b, x: ([_iadd(x.mT, b.norm(x.mT.contiguous().mT).mT), x], []),
    "a residual of another shape": lambda b, x: (
        ([b.norm(b.enter(x)) + randn(12, 64), b.norm(x) + randn(3, 2, 12, 64)], [])
    ),
    "a residual of another dtype": lambda b, x: ([x.double() + b.norm(x) * _S, x.bfloat16() + _S * b.enter(x)], []),
    "tokens joined": lambda b, x: (
        ([n := b.norm(x)], [b.out(torch.cat((n[:, 6:], n[:, :6]), 1)), b.out(torch.cat((n, x), 1))])
    ),
    "channels joined": lambda b, x: (
        [n := b.norm(x)], [b.down(torch.cat((n, n), -1)), b.down(torch.cat((F.silu(b.enter(x)), n), 2))]
    ),
    "batches joined": lambda b, x: ([n := b.norm(x)], [b.out(torch.cat((n, n))), b.out(torch.cat([n, x], dim=0))]),
    "tokens split": lambda b, x: (
        ([n := b.norm(x)], [b.out(part) for part in (*n.chunk(2, 1), *n.split(6, 1), *n.unbind(1))])
    ),
    "a parameter of a clone": lambda b, x: (
        [torch.nn.Parameter(t.clone(), requires_grad=False) * 2 for t in (b.enter(x), b.norm(b.enter(x)))], []
    ),
    "a hook reads": _hooks_that_read,
    "a hook writes": lambda b, x: _hooked(
        b.out.register_forward_pre_hook,
        lambda m, args: (args[0].mul_(2),),
        lambda: ([n := b.norm(x)], [b.out(n), b.out(n)]),
    ),
    "a hook writes into a norm's input": lambda b, x: _hooked(
        b.norm.register_forward_hook, lambda m, args, out: args[0].zero_() + out, lambda: taken(b, b.norm(b.enter(x)))
    ),
    "in training": lambda b, x: taken(b, F.dropout(b.norm(x), 1.0, True), F.dropout(b.layer(x), 0.5, training=False)),
    "rows of a norm set": lambda b, x: taken(b, *_with_rows_set(b.enter(x))),
    "rows of a norm set, of frames": lambda b, x: (
        taken(b, *_with_rows_set(b.enter(x), frames(b).repeat_interleave(3, 1)))
    ),
    "rows set, written into then": lambda b, x: (
        taken(b, *_with_rows_set(y := b.enter(x), then=lambda first: (y.mul_(2), first.mul_(3))), y)
    ),
    "dropout in place": lambda b, x: (
        taken(b, n := b.norm(y := b.enter(x)), F.dropout(y, 1.0, True, inplace=True), n * _S)
    ),
    "norms by function": lambda b, x: taken(
        b, *(f(b.enter(x), (WIDTH,)) for f in (F.rms_norm, F.layer_norm, torch.rms_norm, torch.layer_norm))
    ),
    "norms with weights": lambda b, x: taken(
        b, F.layer_norm(y := b.enter(x), [64], bias=_S[0, 0]), F.layer_norm(y, (64,), _S[0, 0], _T[0, 0], 1e-3),
        torch.layer_norm(y, (64,), _S[0, 0], None, 1e-3, False), F.rms_norm(y, y.shape[-1:], weight=_S[0, 0], eps=0.1)
    ),
    "norms of other widths": lambda b, x: (
        taken(b, F.rms_norm(b.enter(x), (12, 64)), F.layer_norm(b.up(x), (128,)).chunk(2, -1)[0])
    ),
    "inference mode inside": lambda b, x: torch.inference_mode()(lambda: taken(b, b.norm(b.enter(x)) * _S))(),
}  # fmt: skip
"""Forwards of other kinds."""
