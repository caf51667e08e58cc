"""Consumers of operands: linears, residuals, rotary positions. Each returns None where values are to be read."""

from collections.abc import Sequence
from typing import Any

import torch

from ...kernels import FLOAT_DTYPES, ChannelTransform, Norm, Quantized, function_modes, gated_residual, norm_rope
from .notes import MEMORY, Deferred, Tracked, values_of
from .operands import Activated, Joined, Normed, Turned


def linear(layer: Any, x: Deferred, transform: ChannelTransform, bits: int) -> Quantized | None:
    """Return the rows of a deferred tensor, quantized once for all INT8 linears that want them alike."""
    if x.note.shape[-1] != layer.in_features or x.note.computed is not None:
        return None
    factors = None if transform.smooth is None else layer.weight.params.factors or layer
    return _rows(x, (bits, transform.rotation_group, factors), (transform, bits))


def _rows(x: Any, key: tuple, form: tuple) -> Quantized | None:
    if type(x) is not Deferred or x.note.computed is not None:
        return Normed(values_of(x)).quantize(*form)
    note = x.note
    found: Any = note.quantized.get(key) if note.quantized is not None and note.is_here() else None
    if found is not None:
        return found
    operand: Any = note.taken(Normed, Activated, Joined)
    if type(operand) is Joined:
        along_tokens, samples = operand.axis == len(note.shape) - 2, note.shape[0] if len(note.shape) == 3 else 1
        parts: Any = [_rows(part, key, form) for part in operand.parts] if along_tokens else [None]
        if None not in parts:
            both = ([t.unflatten(0, (samples, -1)) for t in tensors] for tensors in zip(*parts, strict=True))
            found = tuple(torch.cat(tensors, 1).flatten(0, 1) for tensors in both)
    elif operand is not None:
        found = operand.quantize(*form)
        read, _, *others = operand[:4]
        if note.forward is not None and type(read) is Tracked:
            # Writes into tracked tensors are seen without the mode, so that nothing waits for this note.
            for other in others:
                if type(other) is torch.Tensor:
                    other.__class__ = Tracked
            note.release()
    if found is not None:
        note.quantized = {**(note.quantized or {}), key: found}
    return found


def residual(x: torch.Tensor, y: Any, gate: Any = None, in_place: bool = False) -> torch.Tensor | None:
    """Return x + gate y, or x + y, in one pass; `y` may be deferred. None where the fused op does not add it."""
    if type(x) not in MEMORY or y.dtype != x.dtype:
        return None
    operand = y.note.taken(Normed) if type(y) is Deferred else Normed(y)
    if operand is None or operand.shift is not None or (gate is not None and operand.scale is not None):
        return None
    operand = operand if gate is None else operand._replace(scale=gate[0], rows=gate[1])
    if operand.all_heads or operand.norm is operand.scale is None:
        return None
    y = operand.x
    if x.shape != y.shape or x.ndim not in (2, 3) or x.dtype != y.dtype or x.dtype not in FLOAT_DTYPES:
        return None
    out = (x,) if in_place and x.is_contiguous() else None
    result = gated_residual(x, y, operand.scale, operand.norm, operand.rows, out)
    if not in_place or out is not None:
        return result
    # A strided stream, such as a convolution's patches, would be read and written slowly in every block.
    alone = type(x) is Tracked and function_modes.is_alone(x)
    take: Any = torch.Tensor.set_
    return take(x, result) if alone else x.copy_(result)


HEADS_BY_TOKENS = (0, 2, 1, 3)
"""The axes of [B, H, T, D] in the order of memory, each token's heads side by side. Attention returns its result in the
order of its queries, and the next linear reads that without a copy."""

Part = tuple[torch.Tensor, Norm | None, bool]
"""Some tokens of queries or keys, their norm, and whether that is over all heads."""


def _parts(x: Any) -> tuple[int | None, list[Part]]:
    """Return the axis along which queries or keys are joined of parts (None for one part), and the parts."""
    joined = x.note.taken(Joined) if type(x) is Deferred else None
    return (None, [_part(x)]) if joined is None else (joined.axis, list(map(_part, joined.parts)))


def _part(x: Any) -> Part:
    operand = x.note.taken(Normed) if type(x) is Deferred else None
    if operand is not None and operand.is_unmodulated and operand.norm is not None and operand.x.dtype == x.dtype:
        norm = operand.norm
        if norm.kind == "rms" and norm.bias is None and (norm.weight is not None or not operand.all_heads):
            return operand.x, norm, operand.all_heads
    return values_of(x), None, False


def rotated(
    q: Any, k: Any, freqs: torch.Tensor, pairs: Any, norms: tuple[Norm | None, Norm | None] = (None, None)
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return queries and keys [B, T, H, D] or [B, H, T, D], normed and at their rotary positions, each in new memory.

    Args:
        freqs: ComfyUI's matrices [.., D / 2, 2, 2]. Their other axes tell which axis of heads the tokens are.
        norms: of queries and keys, over each head, where their own are not deferred.
    """
    if norms[0] is not None:
        q, k = values_of(q), values_of(k)
    if len(q.shape) != 4 or len(k.shape) != 4 or freqs.ndim != 6 or q.dtype not in FLOAT_DTYPES or q.dtype != k.dtype:
        return None
    axis = 2 if freqs.shape[1] == 1 and freqs.shape[2] == q.shape[2] else 1
    fits = (
        freqs.shape[-3] * 2 == q.shape[3] == k.shape[3]
        and q.shape[0] == k.shape[0]
        and freqs.shape[0] in (1, len(q))
        and freqs.shape[axis] == q.shape[axis] == k.shape[axis]
        and (freqs.shape[3 - axis] == 1 or (axis == 1 and freqs.shape[2] == q.shape[2] == k.shape[2]))
    )
    if not fits:
        return None
    (q_axis, q_parts), (k_axis, k_parts) = sides = _parts(q), _parts(k)
    sizes = [[part.shape[axis] for part, _, _ in parts] for _, parts in sides]
    if not {q_axis, k_axis} <= {None, axis} or sizes[0] != sizes[1]:
        return None
    if axis == 2 and any(all_heads for _, parts in sides for _, _, all_heads in parts):
        return None
    order = HEADS_BY_TOKENS if axis == 2 else (0, 1, 2, 3)
    outs = [torch.empty_permuted(x.shape, order, dtype=x.dtype, device=x.device) for x in (q, k)]
    whole, start = len(q_parts) == len(freqs) == 1, 0
    for (q_part, q_norm, _), (k_part, k_norm, _), count in zip(q_parts, k_parts, sizes[0], strict=True):
        given = [q_part, k_part, *(outs if whole else (out.narrow(axis, start, count) for out in outs))]
        given = [t.transpose(1, 2) for t in given] if axis == 2 else given
        places = freqs if whole else freqs.narrow(axis, start, count)
        chosen = norms[0] or q_norm, norms[1] or k_norm
        for sample in range(len(freqs)):
            one = given if len(freqs) == 1 else [t[sample : sample + 1] for t in given]
            norm_rope(one[0], one[1], *chosen, places if whole else places[sample], pairs, (one[2], one[3]))
        start += count
    return outs[0], outs[1]


def turned_parts(parts: Sequence[Turned]) -> torch.Tensor | None:
    """Return the concatenation [B, T, H, D] of parts of the tokens, each at its own rotary positions.

    The kernel turns queries and keys at once: the first half of the heads are its queries, the others its keys.
    """
    read = [_part(part.heads) for part in parts]
    first = read[0][0]
    samples, _, number, width = first.shape
    for (x, _, all_heads), (_, freqs, _) in zip(read, parts, strict=True):
        fits = (len(x), *x.shape[2:], x.dtype) == (samples, number, width, first.dtype)
        if not fits or number == 1 or all_heads or freqs.shape != (1, x.shape[1], 1, width // 2, 2, 2):
            return None
    joined = first.new_empty((samples, sum(x.shape[1] for x, _, _ in read), number, width))
    start, half = 0, number // 2
    for (x, norm, _), (_, freqs, pairs) in zip(read, parts, strict=True):
        out = joined.narrow(1, start, x.shape[1])
        halves = [(t[:, :, :half], t[:, :, half:]) for t in (x, out)]
        norm_rope(*halves[0], norm, norm, freqs, pairs, halves[1])
        start += x.shape[1]
    return joined
