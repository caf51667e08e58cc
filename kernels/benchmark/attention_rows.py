"""The table of ways to compute attention: the exact ones, ComfyUI's choice among them, and INT8 ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from ..attention.exact_attention import (
    COMFYUI_ORDER,
    EXACT_WAYS,
    PYTORCH,
    TRITON,
    AttentionShape,
    attend_by,
    exact_ways,
)
from ..attention.int8_attention import int8_attention
from ..internals.kitchen import kitchen_attention
from ..internals.torch_functions import with_backend_order
from .methods import require_fused
from .shape_results import ERROR_ROWS, Times, Unavailable, sampled_rows

_MOST_TOKENS_OF_IDEOGRAM4 = 1 << 15  # the time grows with their square
_TOKENS_AT_2048_PX = 16640  # of Ideogram 4, 256 of them of the text
_MOST_ELEMENTS_ON_CPU = 1 << 20  # of the logits: what a CPU does in a fraction of a second


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of one attention call of a model."""

    name: str
    heads: int
    shape: AttentionShape  # of each head
    key_heads: int  # of k and v
    batch: int = 1
    count: int = 1  # of such calls in a forward

    def place(self) -> str:
        """Return heads, their width and the tokens, in words."""
        tokens, keys, head_dim, masked = self.shape
        grouped = "" if self.key_heads == self.heads else f" ({self.key_heads} of keys)"
        across = "" if keys == tokens else f" x {keys}"
        samples = "" if self.batch == 1 else f"{self.batch} x "
        return f"{samples}{self.heads} heads{grouped} of {head_dim}, {tokens}{across} tokens{', masked' * masked}"


def ideogram4_attention(tokens: int, device: torch.device) -> list[AttentionSizes]:
    """Return the calls of Ideogram 4 to time on a device: with so many tokens of image and text, if it has so many, and
    with those of 2048 px, where attention is most of a step. One where both are the same."""
    sizes = {"Ideogram 4": min(tokens, _MOST_TOKENS_OF_IDEOGRAM4), "Ideogram 4, 2048 px": _TOKENS_AT_2048_PX}
    calls = [AttentionSizes(name, 18, AttentionShape(size, size, 256, False), 18) for name, size in sizes.items()]
    first, second = (feasible_call(call, device) for call in calls)
    return [first] if first.shape == second.shape else [first, second]


class AttentionOperands:
    """Random q [B, H, T, D], k and v [B, G, S, D] in bf16, laid out as projections leave them; a mask of the keys."""

    copies = 1

    def __init__(self, call: AttentionSizes, device: torch.device) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int) -> torch.Tensor:
            size = (call.batch, tokens, heads, call.shape.head_dim)
            return torch.randn(size, device=device, generator=generator).bfloat16().transpose(1, 2)

        shape = call.shape
        self.call, self.device = call, device
        self.grouped = call.heads != call.key_heads
        self.q = normal(shape.tokens, call.heads)
        self.k, self.v = (normal(shape.keys, call.key_heads) for _ in range(2))
        self.mask: torch.Tensor | None = None
        if shape.masked:  # the last sixteenth of the keys is padding
            taken = torch.arange(shape.keys, device=device) < shape.keys - shape.keys // 16
            self.mask = taken.expand(call.batch, 1, 1, shape.keys)

    def sample(self, output: torch.Tensor) -> torch.Tensor:
        """Return the queries of an output [B, H, T, D] that errors are measured on."""
        return output[:, :, sampled_rows(self.call.shape.tokens, self.device)]

    def exact(self) -> torch.Tensor:
        """Return exact attention for these queries: float64 [B, H, rows, D], a head at a time."""
        call, results = self.call, []
        for sample, queries in enumerate(self.sample(self.q)):
            for head, rows in enumerate(queries):
                key_head = head * call.key_heads // call.heads
                logits = rows.double() * call.shape.head_dim**-0.5 @ self.k[sample, key_head].double().t()
                if self.mask is not None:
                    logits.masked_fill_(~self.mask[sample, 0], -torch.inf)
                results.append(logits.softmax(-1) @ self.v[sample, key_head].double())
        return torch.stack(results).unflatten(0, (call.batch, call.heads))


class AttentionMethod(NamedTuple):
    """A way to compute attention; `name`, `foreign` and `small` are as Method has them.

    `call` returns a function to time, of an index that is always 0. It raises Unavailable or LookupError where this
    machine or this shape does not have the way.
    """

    name: str
    call: Callable[[AttentionOperands], Callable[[int], torch.Tensor]]
    foreign: bool = True
    small = True


def _exact(way: str, operands: AttentionOperands) -> Callable[[int], torch.Tensor]:
    q, k, v, mask, grouped = operands.q, operands.k, operands.v, operands.mask, operands.grouped
    if way not in exact_ways(q, k, v, mask, grouped):
        raise Unavailable("there is no such kernel here")
    return lambda _: attend_by(way, q, k, v, mask, enable_gqa=grouped)


def _comfyui(operands: AttentionOperands) -> Callable[[int], torch.Tensor]:
    call = PYTORCH, operands.q, operands.k, operands.v, operands.mask, None, operands.grouped
    return lambda _: with_backend_order(COMFYUI_ORDER, attend_by, *call)


def _kitchen(operands: AttentionOperands) -> Callable[[int], torch.Tensor]:
    kernel = kitchen_attention(operands.device)
    options = {} if operands.mask is None else {"attn_mask": operands.mask}
    return lambda _: kernel(operands.q, operands.k, operands.v, **options)


def _own_int8(operands: AttentionOperands) -> Callable[[int], torch.Tensor]:
    require_fused(operands.device)
    return lambda _: int8_attention(operands.q, operands.k, operands.v, operands.mask)


COMFYUI_CHOICE = "ComfyUI's choice"
KITCHEN_INT8 = "comfy-kitchen INT8"

ATTENTION_METHODS = (
    *(AttentionMethod(way, partial(_exact, way), foreign=way != TRITON) for way in EXACT_WAYS),
    AttentionMethod(COMFYUI_CHOICE, _comfyui),
    AttentionMethod(KITCHEN_INT8, _kitchen),
    AttentionMethod("INT8 of this pack", _own_int8, foreign=False),
)
"""In the order of the rows. INT8 ones are timed with the quantization of their inputs."""


@dataclass
class AttentionResult(Times):
    """The times of one call."""

    reference: ClassVar[str] = COMFYUI_CHOICE
    call: AttentionSizes

    @property
    def name(self) -> str:
        return self.call.name

    def exact_milliseconds(self) -> dict[str, float]:
        """Return the times of the ways that `exact_attention` chooses from."""
        return {way: time for way, time in self.milliseconds.items() if way in EXACT_WAYS}

    def place(self) -> str:
        return self.call.place()

    def as_json(self) -> dict:
        return super().as_json() | {"call": vars(self.call) | {"shape": self.call.shape._asdict()}}


def attention_memory(call: AttentionSizes) -> int:
    """Return the peak bytes of `benchmark_attention`, rounded up: float32 draws, INT8 copies, some float64 rows."""
    queries, keys = call.heads * call.shape.tokens, call.key_heads * call.shape.keys
    logits = 32 * min(call.shape.tokens, 2 * ERROR_ROWS) * call.shape.keys
    return call.batch * call.shape.head_dim * (16 * queries + 24 * keys) + logits


def feasible_call(call: AttentionSizes, device: torch.device) -> AttentionSizes:
    """Return the call to time: on a CPU with fewer tokens, as many of both kinds at most."""
    if device.type != "cpu":
        return call
    most = max(1, int((_MOST_ELEMENTS_ON_CPU / (call.batch * call.heads)) ** 0.5))
    shape = call.shape._replace(tokens=min(call.shape.tokens, most), keys=min(call.shape.keys, most))
    return replace(call, shape=shape)


def benchmark_attention(
    call: AttentionSizes, device: torch.device, methods: Sequence[AttentionMethod] = ATTENTION_METHODS, **how: Any
) -> AttentionResult:
    """Time `methods` on one call by `Times.measure`, whose keywords these are; on a CPU for fewer tokens."""
    result = AttentionResult(feasible_call(call, device))
    result.measure(methods, AttentionOperands(result.call, device), **how)
    torch.cuda.empty_cache()
    return result
