"""Times the ways to compute attention side by side: the exact ones, ComfyUI's choice among them, and INT8 ones.

A new way is a new entry of ATTENTION_METHODS.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from ..card.timing import CallSeries, GraphPool, sustained_milliseconds
from ..internals.kitchen import kitchen_attention
from ..interruption import interruptible
from ..ops.attention import int8_attention, int8_attention_obstacle
from ..ops.exact_attention import (
    COMFYUI_ORDER,
    CUDNN,
    EFFICIENT,
    EXACT_WAYS,
    FLASH,
    PYTORCH,
    TRITON,
    AttentionShape,
    attend,
    attend_by,
    exact_ways,
)
from .operands import Unavailable, leaving_out
from .report import Times, spread

_ERROR_ROWS = 256
_MOST_TOKENS_OF_IDEOGRAM4 = 1 << 15  # the time grows with their square
_MOST_ELEMENTS_ON_CPU = 1 << 20  # of the logits: what a CPU does in a fraction of a second


@dataclass(frozen=True)
class AttentionCall:
    """What is computed in one attention call of a model.

    Attributes:
        name: for the user.
        heads: of q.
        shape: of each head.
        key_heads: of k and v.
        batch: how many samples.
        count: how many such calls a forward has.
    """

    name: str
    heads: int
    shape: AttentionShape
    key_heads: int
    batch: int = 1
    count: int = 1

    def place(self) -> str:
        """Heads, their width and the tokens, in words."""
        tokens, keys, head_dim, masked = self.shape
        grouped = "" if self.key_heads == self.heads else f" ({self.key_heads} of keys)"
        across = "" if keys == tokens else f" x {keys}"
        samples = "" if self.batch == 1 else f"{self.batch} x "
        return f"{samples}{self.heads} heads{grouped} of {head_dim}, {tokens}{across} tokens{', masked' * masked}"


def ideogram4_attention(tokens: int) -> AttentionCall:
    """That of Ideogram 4 for so many tokens of image and text, as far as it has so many."""
    tokens = min(tokens, _MOST_TOKENS_OF_IDEOGRAM4)
    return AttentionCall("Ideogram 4", 18, AttentionShape(tokens, tokens, 256, False), 18)


class AttentionOperands:
    """Random q [B, H, T, D], k and v [B, G, S, D] in bf16, laid out as projections leave them, and a mask of the keys.

    `key_means` times a random vector per head is added to all keys: what real models have, and INT8 suffers from.
    """

    def __init__(self, call: AttentionCall, device: torch.device, key_means: float = 0.0) -> None:
        generator = torch.Generator(device).manual_seed(0)

        def normal(tokens: int, heads: int) -> torch.Tensor:
            size = (call.batch, tokens, heads, call.shape.head_dim)
            return torch.randn(size, device=device, generator=generator)

        means = key_means * normal(1, call.key_heads)[:1]
        shape = call.shape
        self.call, self.device = call, device
        self.q = normal(shape.tokens, call.heads).bfloat16().transpose(1, 2)
        self.k = (normal(shape.keys, call.key_heads) + means).bfloat16().transpose(1, 2)
        self.v = normal(shape.keys, call.key_heads).bfloat16().transpose(1, 2)
        self.mask: torch.Tensor | None = None
        if shape.masked:  # the last sixteenth of the keys is padding
            taken = torch.arange(shape.keys, device=device) < shape.keys - shape.keys // 16
            self.mask = taken.expand(call.batch, 1, 1, shape.keys)

    @property
    def grouped(self) -> bool:
        """Whether a head of k serves several of q."""
        return self.call.heads != self.call.key_heads

    def exact(self, rows: torch.Tensor) -> torch.Tensor:
        """What attention is for these queries: float64 [B, H, rows, D], a head at a time."""
        call, results = self.call, []
        for sample in range(call.batch):
            for head in range(call.heads):
                key_head = head * call.key_heads // call.heads
                q = self.q[sample, head, rows].double() * call.shape.head_dim**-0.5
                logits = q @ self.k[sample, key_head].double().t()
                if self.mask is not None:
                    logits.masked_fill_(~self.mask[sample, 0], -torch.inf)
                results.append(logits.softmax(-1) @ self.v[sample, key_head].double())
        return torch.stack(results).unflatten(0, (call.batch, call.heads))


@dataclass(frozen=True)
class AttentionMethod:
    """A way to compute attention.

    Attributes:
        name: the heading of its row, and its key in results.
        prepare: makes the call that is timed. Raises Unavailable where this machine or this shape does not have it.
        foreign: whether it is the code of others: then what it raises leaves the row out.
    """

    name: str
    prepare: Callable[[AttentionOperands], Callable[[], torch.Tensor]]
    foreign: bool = True


def _exact(way: str, operands: AttentionOperands) -> Callable[[], torch.Tensor]:
    q, k, v, mask, grouped = operands.q, operands.k, operands.v, operands.mask, operands.grouped
    if way not in exact_ways(q, k, v, mask, grouped):
        raise Unavailable("there is no such kernel here")
    return lambda: attend_by(way, q, k, v, mask, enable_gqa=grouped)


def _comfyui(operands: AttentionOperands) -> Callable[[], torch.Tensor]:
    return lambda: attend(COMFYUI_ORDER, operands.q, operands.k, operands.v, operands.mask, None, operands.grouped)


def _kitchen(operands: AttentionOperands) -> Callable[[], torch.Tensor]:
    try:
        kernel = kitchen_attention(operands.device)
    except LookupError as error:
        raise Unavailable(str(error)) from error
    options = {} if operands.mask is None else {"attn_mask": operands.mask}
    return lambda: kernel(operands.q, operands.k, operands.v, **options)


def _own_int8(operands: AttentionOperands) -> Callable[[], torch.Tensor]:
    obstacle = "no GPU" if operands.device.type != "cuda" else int8_attention_obstacle(operands.device)
    if obstacle is not None:
        raise Unavailable(obstacle)
    return lambda: int8_attention(operands.q, operands.k, operands.v, operands.mask)


COMFYUI_CHOICE = "ComfyUI's choice"
KITCHEN_INT8 = "comfy-kitchen INT8"
OWN_INT8 = "INT8 of this pack"

ATTENTION_METHODS = (
    AttentionMethod(FLASH, partial(_exact, FLASH)),
    AttentionMethod(CUDNN, partial(_exact, CUDNN)),
    AttentionMethod(EFFICIENT, partial(_exact, EFFICIENT)),
    AttentionMethod(TRITON, partial(_exact, TRITON), foreign=False),
    AttentionMethod(PYTORCH, partial(_exact, PYTORCH)),
    AttentionMethod(COMFYUI_CHOICE, _comfyui),
    AttentionMethod(KITCHEN_INT8, _kitchen),
    AttentionMethod(OWN_INT8, _own_int8, foreign=False),
)
"""In the order of the rows. INT8 ones are timed with the quantization of their inputs."""


@dataclass
class AttentionResult(Times):
    """The times of one call."""

    call: AttentionCall

    @property
    def name(self) -> str:
        return self.call.name

    def exact_milliseconds(self) -> dict[str, float]:
        """Those of the ways that `exact_attention` chooses from."""
        return {way: time for way, time in self.milliseconds.items() if way in EXACT_WAYS}

    def place(self) -> str:
        return self.call.place()

    def as_json(self) -> dict:
        return super().as_json() | {"call": vars(self.call) | {"shape": self.call.shape._asdict()}}


def attention_memory(call: AttentionCall) -> int:
    """Bytes that `benchmark_attention` needs at its peak, rounded up: float32 draws, INT8 copies, some float64 rows."""
    queries, keys = call.heads * call.shape.tokens, call.key_heads * call.shape.keys
    logits = 32 * min(call.shape.tokens, 2 * _ERROR_ROWS) * call.shape.keys
    return call.batch * call.shape.head_dim * (16 * queries + 24 * keys) + logits


def feasible_call(call: AttentionCall, device: torch.device) -> AttentionCall:
    """The call that is timed: on a CPU with fewer tokens, as many of both kinds at most."""
    if device.type != "cpu":
        return call
    most = max(1, int((_MOST_ELEMENTS_ON_CPU / (call.batch * call.heads)) ** 0.5))
    shape = call.shape._replace(tokens=min(call.shape.tokens, most), keys=min(call.shape.keys, most))
    return replace(call, shape=shape)


@torch.no_grad()
def benchmark_attention(
    call: AttentionCall,
    device: torch.device,
    methods: Sequence[AttentionMethod] = ATTENTION_METHODS,
    rounds: int = 3,
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda method: None,
    key_means: float = 0.0,
) -> AttentionResult:
    """Time `methods` on one call with random bf16 data; `check` runs between them and may raise to stop.

    Without rounds only the errors are measured. What this machine does not have, or has no memory for, is left out. A
    GPU must be the current one. `say` gets the name of each method that is prepared.
    """
    operands, result = AttentionOperands(call, device, key_means), AttentionResult(call)
    rows = torch.arange(0, call.shape.tokens, max(1, call.shape.tokens // _ERROR_ROWS), device=device)
    exact = operands.exact(rows)
    pool = GraphPool() if device.type == "cuda" else None
    series = {}
    for method in methods:
        check()
        say(method.name)
        with leaving_out(method.name, method.foreign, result.absent):
            with interruptible(check):
                run = method.prepare(operands)
                output = run()[:, :, rows].double()
            result.relative_errors[method.name] = ((output - exact).norm() / exact.norm()).item()
            if rounds:
                series[method.name] = CallSeries(lambda _, run=run: run(), 1, device, pool)
    result.rounds = sustained_milliseconds(series, rounds, check)
    result.looped = [name for name, calls in series.items() if calls.looped]
    del series, operands
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return result


def attention_table(result: AttentionResult) -> tuple[list[str], list[list[str]]]:
    """Column headings and a row for each method that ran on a call."""
    times = result.milliseconds
    rows = []
    for name, rounds in result.rounds.items():
        ratio = f"{times[COMFYUI_CHOICE] / times[name]:.2f}" if COMFYUI_CHOICE in times else "-"
        star = "\\*" if name in result.looped else ""
        rows.append([name, f"{times[name]:.3f}{star}", spread(rounds), ratio, f"{result.relative_errors[name]:.4f}"])
    return ["", "ms", "spread", f"x {COMFYUI_CHOICE}", "error"], rows
