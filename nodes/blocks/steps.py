"""What the fused forwards of blocks share: a norm and the linears behind it, an activation and the linear behind it,
rotary positions, the call of ComfyUI's attention.

A linear takes part in two ways. The fused op quantizes for one that computes in INT8, which is an INT8Linear of
nodes/layers. Any other one, such as a protected one, is called with floats.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch

from ...kernels import (
    ACTIVATIONS,
    ChannelTransform,
    Norm,
    activate_quantize,
    gated_residual,
    norm_quantize,
    norm_rope,
)
from ..comfyui.attention import contained, preference
from ..comfyui.layers import weight_and_bias

GELU = {"none": "gelu", "tanh": "gelu_tanh"}
"""torch.nn.GELU's `approximate` -> the name of the activation."""

ROWS_OF_PART = 8192
"""A feed-forward of twice as many tokens or more is computed in parts of at least so many."""

Activated = tuple[torch.Tensor, str, torch.Tensor | None]
"""What is activated, how, and what that is multiplied with: `project_activated`'s arguments."""


class InputForm(NamedTuple):
    """How a linear's input is to be quantized; smoothing factors may be on another device."""

    transform: ChannelTransform
    activation_bits: int


def input_form(layer: Any, cls: type | None = None) -> InputForm | None:
    """How a fused op quantizes for a linear; None for one that must be given floats. `cls` if it has another in use."""
    form = getattr(cls or type(layer), "input_form", None)
    return None if form is None else form(layer)


def _alike(layer: Any, form: InputForm, other: Any, others: InputForm) -> bool:
    """Whether two linears quantize the same input alike, as far as the host knows without looking at factors."""
    if (form.activation_bits, form.transform.rotation_group) != (
        others.activation_bits,
        others.transform.rotation_group,
    ):
        return False
    if form.transform.smooth is None and others.transform.smooth is None:
        return True
    group = layer.input_group  # of linears whose factors were compared when they were loaded
    return group is not None and group is other.input_group


def norm_of(module: Any, x: torch.Tensor) -> Norm | None:
    """A norm of ComfyUI's as a value, with its weight where `x` is; None for the identity. Values stay as they are."""
    if isinstance(module, Norm):
        return module
    if isinstance(module, torch.nn.Identity):
        return None
    kind = "layer" if isinstance(module, torch.nn.LayerNorm) else "rms"
    eps = torch.finfo(torch.float32).eps if module.eps is None else module.eps
    return Norm(kind, eps) if module.weight is None else Norm(kind, eps, *weight_and_bias(module, x))


def project_normed(
    layers: Sequence[Any],
    x: torch.Tensor,
    norm: Any,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    grouped: bool = False,
) -> Iterator[torch.Tensor]:
    """The products of norm(x) (1 + scale) + shift with each of `layers`, one at a time.

    Args:
        x: [B, T, K] or [T, K].
        norm: one of ComfyUI's norms, or the value of one.
        scale, shift: [B or 1, T or 1, K], or None; with `rows` as `norm_quantize` has them.
        grouped: whether `rows` are those of `rows_of_groups` for all of x.
    """
    shape, dtype = x.shape[:-1], x.dtype
    values = value = made_for = quantized = None
    for layer in layers:
        form, held = input_form(layer), None
        if form is None:  # such as a protected one, or a few gates beside many channels
            values = _modulated(x, norm, scale, shift, rows, grouped) if values is None else values
            yield layer(values)
            continue
        try:
            if made_for is None or not _alike(layer, form, *made_for):
                quantized = None  # its memory can be had for the new one
                value = norm_of(norm, x) if made_for is None else value
                transform, held = layer.open(form, x.device, dtype)
                quantized = norm_quantize(x, value, scale, shift, transform, form.activation_bits, rows)
                made_for = layer, form
            products = [layer.project(quantized, shape, dtype, held)]
        finally:
            layer.close(held)
        yield products.pop()


def _modulated(
    x: torch.Tensor,
    norm: Any,
    scale: torch.Tensor | None,
    shift: torch.Tensor | None,
    rows: torch.Tensor | None,
    grouped: bool,
) -> torch.Tensor:
    """norm(x) (1 + scale) + shift in floats."""
    values = torch.nn.functional.rms_norm(x, x.shape[-1:], eps=norm.eps) if isinstance(norm, Norm) else norm(x)
    if scale is None:
        return values
    scale, shape = 1 + scale, values.shape
    if rows is not None and grouped and shape[-2] % scale.shape[-2] == 0:
        # Equal groups: no scale and shift for each token is written.
        values = values.unflatten(-2, (scale.shape[-2], -1))
        scale, shift = scale.unsqueeze(-2), None if shift is None else shift.unsqueeze(-2)
    elif rows is not None:
        scale, shift = scale.index_select(-2, rows), None if shift is None else shift.index_select(-2, rows)
    return (values * scale if shift is None else torch.addcmul(shift, values, scale)).view(shape)


def project_activated(
    layer: Any,
    gate: torch.Tensor,
    activation: str,
    up: torch.Tensor | None = None,
    beside: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of a linear with activation(gate) up, behind the channels of `beside`; shapes as `activate_quantize`
    has them."""
    form = input_form(layer)
    if form is not None:
        transform, held = layer.open(form, gate.device, gate.dtype)
        try:
            quantized = activate_quantize(gate, activation, up, beside, transform, form.activation_bits)
            return layer.project(quantized, gate.shape[:-1], gate.dtype, held)
        finally:
            layer.close(held)
    values = ACTIVATIONS[activation](gate)
    if up is not None:
        values *= up
    return layer(values if beside is None else torch.cat((beside, values), dim=-1))


def modulation_rows(
    segments: Sequence[tuple[int, int | None, Any]], modulations: int, x: torch.Tensor
) -> torch.Tensor | None:
    """Which modulation each token of [B, T, K] or [T, K] has, int32 [T].

    Args:
        segments: first token, the one behind the last or None for the end, and the number of the modulation, or one
            for each token.
        modulations: how many there are.

    Returns:
        None for segments that do not follow each other to the end, or name a modulation that is not there.
    """
    tokens, end = x.shape[-2], 0
    rows = torch.empty(tokens, dtype=torch.int32, device=x.device)
    for start, stop, row in segments:
        if start != end or not (isinstance(row, torch.Tensor) or 0 <= row < modulations):
            return None
        end = tokens if stop is None else stop
        rows[start:end] = row
    return rows if end == tokens else None


def rows_of_groups(modulations: int, x: torch.Tensor) -> torch.Tensor | None:
    """The same for modulations that each serve as many tokens that follow each other, the last one what is left: such
    as those of frames. None where there is one in all, or one for each token."""
    tokens = x.shape[-2]
    if modulations in (1, tokens):
        return None
    return torch.arange(tokens, dtype=torch.int32, device=x.device) // -(-tokens // modulations)


def feed_forward(
    layers: Sequence[Any],
    activated: Callable[..., Activated],
    last: Any,
    x: torch.Tensor,
    norm: Any,
    scale: torch.Tensor | None = None,
    shift: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product of `last` with what `activated` makes of the products of `project_normed`.

    Between its linears a feed-forward is several times as wide as its input. So many tokens are computed a part at a
    time, which gives the same bits: each token is quantized by itself. Each weight is streamed, and made INT8 of fewer
    bits, once for all parts. A linear that must be given floats would be streamed for each part: then there are none. A
    compiler sees none either.
    """
    tokens, parts = x.shape[-2], 1
    if not torch.compiler.is_compiling() and all(input_form(layer) is not None for layer in (*layers, last)):
        parts = x.numel() // (x.shape[-1] * ROWS_OF_PART)
    if parts < 2:
        return project_activated(last, *activated(*list(project_normed(layers, x, norm, scale, shift, rows))))

    value, out, step = norm_of(norm, x), None, -(-tokens // parts)
    *first, second = [layer.keep(x.device, x.dtype) for layer in (*layers, last)]
    for start in range(0, tokens, step):
        part = slice(start, start + step)
        own_scale, own_shift = (_of_part(modulation, part, rows) for modulation in (scale, shift))
        own_rows = None if rows is None else rows[part]
        products = project_normed(first, x[..., part, :], value, own_scale, own_shift, own_rows)
        y = project_activated(second, *activated(*list(products)))
        out = y.new_empty((*x.shape[:-1], y.shape[-1])) if out is None else out
        out[..., part, :] = y
        del y, products
    assert out is not None
    return out


def _of_part(modulation: torch.Tensor | None, part: slice, rows: torch.Tensor | None) -> torch.Tensor | None:
    """Those of some tokens of scales or shifts [B or 1, T or 1, K]; all of them where `rows` choose."""
    if modulation is None or rows is not None or modulation.shape[-2] == 1:
        return modulation
    return modulation[..., part, :]


def silu_gated(gate: torch.Tensor, up: torch.Tensor) -> Activated:
    """silu(gate) up."""
    return gate, "silu", up


def swiglu(module: Any, x: torch.Tensor, norm: Any, scale: torch.Tensor | None) -> torch.Tensor:
    """w2(silu(w1(y)) w3(y)) of y = norm(x) (1 + scale)."""
    return feed_forward((module.w1, module.w3), silu_gated, module.w2, x, norm, scale)


def rotations(freqs: torch.Tensor | None, samples: int, tokens: int, width: int) -> torch.Tensor | None:
    """Rotary matrices of ComfyUI's as [1 or B, T, D / 2, 2, 2]; None if they are of another form."""
    if freqs is None or tuple(freqs.shape[-3:]) != (width // 2, 2, 2):
        return None
    given = [axis for axis in freqs.shape[:-3] if axis != 1]
    for first in (1, samples):
        if given == [axis for axis in (first, tokens) if axis != 1]:
            return freqs.reshape(first, tokens, width // 2, 2, 2)
    return None


def norm_and_rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    norms: tuple[Any, Any],
    matrices: torch.Tensor,
    pairs: Literal["neighbours", "halves"],
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm_rope` with norms of ComfyUI's, and with matrices that may differ between samples: [1 or B, T, ...]."""
    q_norm, k_norm = norm_of(norms[0], q), norm_of(norms[1], k)
    if len(matrices) == 1:
        return norm_rope(q, k, q_norm, k_norm, matrices[0], pairs, out)
    out = (q.new_empty(q.shape), k.new_empty(k.shape)) if out is None else out
    for sample, matrix in enumerate(matrices):
        one = slice(sample, sample + 1)
        norm_rope(q[one], k[one], q_norm, k_norm, matrix, pairs, (out[0][one], out[1][one]))
    return out


def attend(
    function: Callable[..., torch.Tensor],
    layer: Any,
    held: list[torch.Tensor],
    *args: Any,
    contains: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """What `function`, one of ComfyUI's for attention, makes of [q, k, v]; as the own forward of `layer` calls it.

    `held` is emptied, so that q, k and v are gone as soon as they are read. Where the layer has a preference, its own
    forward passes that, and hands tensors over in containers; others do that too where `contains` says so.
    """
    given: list[Any] = list(held)
    preferred = preference(layer)
    if preferred is not None:
        kwargs["preferred_attention"] = preferred
    if preferred is not None or contains:
        given = list(map(contained, held))
    held.clear()
    return function(*given, *args, **kwargs)


def add(
    residual: torch.Tensor,
    x: torch.Tensor,
    gate: torch.Tensor | None = None,
    norm: Any = None,
    tanh: bool = False,
    rows: torch.Tensor | None = None,
) -> torch.Tensor:
    """`gated_residual` with a norm of ComfyUI's."""
    return gated_residual(residual, x, gate, None if norm is None else norm_of(norm, x), tanh, rows)
