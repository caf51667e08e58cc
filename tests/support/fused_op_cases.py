"""What the tests know of each fused op: calls of its variants, its formula in float64, calls as models make them.

An op's entry in CASES brings it into the tests of results, operators, memory accesses, a second GPU and machine code.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from kernels import ChannelTransform, Norm, activate_quantize, gated_residual, norm_quantize, norm_rope
from kernels.operators import Operator


@dataclass(frozen=True)
class Form:
    """The shapes of a call."""

    kind: str  # which of the op's variants, in words of its own
    channels: int  # length of the rows, of all heads together
    batch: int = 2
    tokens: int = 3
    heads: tuple[int, int] = (1, 1)  # of queries and of keys, for an op that has them
    group: int = 1  # channels of a rotation, 1 for none
    smooth: bool = False  # whether there are smoothing factors
    activation_bits: int = 8  # 8 or 16
    dtype: torch.dtype = torch.bfloat16  # of activations, modulations and weights


Make = Callable[..., torch.Tensor]
"""A tensor of a shape, and of a dtype other than the form's."""


@dataclass(frozen=True)
class Case:
    """"""

    op: Operator  # the op
    call: Callable[[Make, Form], tuple]  # its arguments for a form
    # Takes these, and returns the results in float64, before they are smoothed, rotated and rounded.
    exact: Callable[..., Sequence[torch.Tensor]]
    kinds: tuple[str, ...]  # the variants
    models: tuple[Form, ...]  # forms of models, at which the machine code is looked at

    @property
    def name(self) -> str:
        return self.op.name


def _transform(make: Make, form: Form) -> ChannelTransform:
    smooth = make(form.channels, dtype=torch.float32).abs() + 0.3 if form.smooth else None
    return ChannelTransform(smooth, form.group if form.group > 1 else None)


def _modulation(make: Make, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
    """Two of the four parts of one tensor, as models chunk them."""
    return make(form.batch, 1, 4 * form.channels).chunk(4, dim=-1)[1:3]


def _chosen_by_rows(make: Make, form: Form) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same with two rows, and which of them each token has."""
    scale, shift = make(form.batch, 2, 4 * form.channels).chunk(4, dim=-1)[1:3]
    return scale, shift, (make(form.tokens, dtype=torch.float32) > 0).int()


def norm_in_float64(x: torch.Tensor, norm: Norm | None) -> torch.Tensor:
    x = x.double()
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    x = x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt()
    x = x if norm.weight is None else x * norm.weight.double()
    return x if norm.bias is None else x + norm.bias.double()


def _norm_quantize(make: Make, form: Form) -> tuple:
    x, (scale, shift) = make(form.batch, form.tokens, form.channels) * 4 + 1, _modulation(make, form)
    kind, *more = form.kind.split()
    rows = None
    if "rows" in more:
        scale, shift, rows = _chosen_by_rows(make, form)
    if kind == "layer":
        norm = Norm("layer", 1e-6, bias=make(form.channels) if "bias" in more else None)
    else:
        norm, shift = Norm("rms", 1e-6, make(form.channels)), None
    return x, norm, scale, shift, _transform(make, form), form.activation_bits, rows


def _norm_quantize_in_float64(x, norm, scale, shift, *rest):
    exact = norm_in_float64(x, norm)
    if len(rest) == 3 and rest[-1] is not None:
        scale, shift = (None if part is None else part[:, rest[-1]] for part in (scale, shift))
    exact = exact if scale is None else exact * scale.double()
    return (exact if shift is None else exact + shift.double(),)


def _gated_residual(make: Make, form: Form) -> tuple:
    """The kind is that of the norm and of the gate."""
    residual, x = (make(form.batch, form.tokens, form.channels) * 3 for _ in range(2))
    kind, gated, *more = form.kind.split()
    norm = None if kind == "no" else Norm(kind, 1e-6, make(form.channels))
    gate, _, rows = _chosen_by_rows(make, form) if more else (*_modulation(make, form), None)
    return residual, x, None if gated == "ungated" else gate * 0.5, norm, rows


def _gated_residual_in_float64(residual, x, gate, norm, rows=None):
    values = norm_in_float64(x, norm)
    if gate is not None:
        gate = gate if rows is None else gate[:, rows]
        values = values * gate.double()
    return (residual.double() + values,)


def _activate_quantize(make: Make, form: Form) -> tuple:
    """The kind is the activation, and whether it has another factor or channels beside it."""
    activation, *others = form.kind.split()
    first = (form.channels // 5 if form.channels < 1024 else 1024) if "beside" in others else 0
    wide = make(form.batch, form.tokens, 2 * form.channels) * 3
    wide = wide.abs() if form.channels == 1 else wide  # one small value alone would be all its rounding
    beside, gate, up = wide.split((first, form.channels - first, form.channels), dim=-1)
    up = up[..., : gate.shape[-1]] if "up" in others else None
    beside = beside if "beside" in others else None
    return gate, activation, up, beside, _transform(make, form), form.activation_bits


def activation_in_float64(x: torch.Tensor, activation: str) -> torch.Tensor:
    x = x.double()
    if activation in ("silu", "sigmoid"):
        return F.silu(x) if activation == "silu" else x.sigmoid()
    return F.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")


def _activate_quantize_in_float64(gate, activation, up, beside, *_):
    exact = activation_in_float64(gate, activation)
    exact = exact if up is None else exact * up.double()
    return (exact if beside is None else torch.cat([beside.double(), exact], dim=-1),)


def _norm_rope(make: Make, form: Form) -> tuple:
    """The kind is what the norms go over, and how elements are paired."""
    over, pairs, *each = form.kind.split()
    (heads, kv_heads), width = form.heads, form.channels // form.heads[0] // 2 * 2
    kv_heads = heads if each else kv_heads
    q, k, _ = make(form.batch, form.tokens, heads + 2 * kv_heads, width).split((heads, kv_heads, kv_heads), dim=2)
    norms = [None, None]
    if over != "none":
        weights = [make(width * (count if over == "all" else 1)) for count in (heads, kv_heads)]
        weights = (None, None) if over == "plain" else weights
        norms = [Norm("rms", eps, weight) for eps, weight in zip((1e-6, 0.1), weights, strict=True)]
    of_all = (1, form.tokens, 1, width // 2, 2, 2)
    freqs = make(1, form.tokens, heads, width // 2, 2, 2) if each else make(*of_all, dtype=torch.float32)
    return q, k, *norms, freqs, pairs


def norm_rope_in_float64(q, k, q_norm, k_norm, freqs, pairs):
    return tuple(_rope_in_float64(x, norm, freqs, pairs) for x, norm in ((q, q_norm), (k, k_norm)))


def _rope_in_float64(x, norm, freqs, pairs):
    heads, width = x.shape[2:]
    if norm is not None and norm.weight is not None and norm.weight.numel() != width:
        x = norm_in_float64(x.flatten(2), norm).unflatten(-1, (heads, width))
    else:
        x = norm_in_float64(x, norm)
    half = width // 2
    first, second = (range(half), range(half, width)) if pairs == "halves" else (range(0, width, 2), range(1, width, 2))
    out, matrix = torch.empty_like(x, dtype=torch.float64), freqs.double().reshape(x.shape[1], -1, half, 2, 2)
    out[..., first] = matrix[..., 0, 0] * x[..., first] + matrix[..., 0, 1] * x[..., second]
    out[..., second] = matrix[..., 1, 0] * x[..., first] + matrix[..., 1, 1] * x[..., second]
    return out


# Hidden and inner widths: Flux and Qwen-Image, Z-Image, Ideogram 4, Wan.
WIDTHS, INNER = (3072, 3840, 4608, 5120), (10240, 12288, 13824)
_ROTATED_TO_16_BITS = {"group": 256, "smooth": True, "activation_bits": 16, "dtype": torch.float32}


def _forms(kinds: Sequence[str], widths: Sequence[int], **rest) -> list[Form]:
    return [Form(kind, width, tokens=64, **rest) for width in widths for kind in kinds]


CASES = {
    case.name: case
    for case in (
        Case(
            norm_quantize,
            _norm_quantize,
            _norm_quantize_in_float64,
            ("rms", "layer", "layer bias", "layer rows"),
            (
                *_forms(("rms", "layer"), WIDTHS),
                *_forms(("rms",), WIDTHS, activation_bits=16, dtype=torch.float32),
                *_forms(("rms",), WIDTHS, **_ROTATED_TO_16_BITS),
                *_forms(("rms",), (4608,), group=64, smooth=True),
                *_forms(("layer rows",), (4096,)),
            ),
        ),
        Case(
            gated_residual,
            _gated_residual,
            _gated_residual_in_float64,
            (
                *(f"{norm} {gate}" for norm in ("no", "rms", "layer") for gate in ("ungated", "plain")),
                "no plain rows",
            ),
            (*_forms(("no plain", "rms plain"), WIDTHS), *_forms(("no plain rows",), (4096,))),
        ),
        Case(
            activate_quantize,
            _activate_quantize,
            _activate_quantize_in_float64,
            ("silu up", "gelu_tanh beside", "gelu", "silu", "gelu_tanh up", "sigmoid up", "gelu_tanh up beside"),
            (
                *_forms(("silu up",), INNER),
                *_forms(("sigmoid up",), (6144,)),
                *_forms(("silu up",), INNER, group=256, smooth=True),
                *_forms(("gelu_tanh beside",), (15360,)),
                *_forms(("gelu_tanh beside",), (15360,), group=256, smooth=True),
                *_forms(("gelu_tanh beside",), (15360,), activation_bits=16),
                *_forms(("gelu",), INNER, **_ROTATED_TO_16_BITS),
            ),
        ),
        Case(
            norm_rope,
            _norm_rope,
            norm_rope_in_float64,
            (
                *(
                    f"{over} {pairs}"
                    for over in ("none", "plain", "heads", "all")
                    for pairs in ("neighbours", "halves")
                ),
                "all halves each",
                "heads neighbours each",
            ),
            (
                Form("heads halves", 256 * 18, tokens=64, heads=(18, 18)),
                *(Form("heads neighbours", 128 * n, tokens=64, heads=(n, n)) for n in (24, 30)),
                Form("all neighbours", 128 * 40, tokens=64, heads=(40, 40)),
                Form("all halves each", 128 * 32, tokens=64, heads=(32, 32)),
            ),
        ),
    )
}


def calls(device: torch.device | str, *forms: Form) -> Iterator[tuple[Case, Form, tuple]]:
    """All variants of all ops, at the forms in turn: case, form and arguments."""
    for case in CASES.values():
        for kind, form in zip(case.kinds, itertools.cycle(forms), strict=False):
            yield case, replace(form, kind=kind), call_at(case, replace(form, kind=kind), device)


def call_at(case: Case, form: Form, device: torch.device | str) -> tuple:
    """An op's arguments for a form, random and the same on each device."""
    generator = torch.Generator().manual_seed(form.channels)

    def make(*shape: int, dtype: torch.dtype = form.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    return case.call(make, form)
