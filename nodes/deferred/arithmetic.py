"""Norms, activations, modulations, gates and residuals, also in place: what functions do to deferred operands."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels import Norm
from . import takers
from .mode import OF_DEFERRED, Deferring
from .notes import MEMORY, Deferred, valued
from .operands import Activated, Copied, Joined, Normed, Segment, Sliced, Spread
from .reading import PLAIN, Args, Kwargs, T, as_it_is, gate_of, is_rows, modulation_of, now, on, operand_of
from .views import slice_of, tokens_of

_RMS: Any = "rms", torch.finfo(torch.float32).eps, ("weight", "eps")
_LAYER: Any = "layer", 1e-5, ("weight", "bias", "eps")
_NORMS = {F.rms_norm: _RMS, torch.rms_norm: _RMS, F.layer_norm: _LAYER, torch.layer_norm: _LAYER}
"""Each with its kind, what PyTorch adds where it says nothing of that, and its arguments behind input and shape."""


@on(*_NORMS)
def _norm(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    kind, least, names = _NORMS[func]
    if len(args) < 2:
        return NotImplemented
    x, shape, *rest = args
    given = {**dict(zip(names, rest, strict=False)), **kwargs}
    copied = operand_of(x, Copied)
    source = now(x) if copied is None else copied.x
    if not is_rows(source) or len(shape) != 1 or shape[0] != source.shape[-1]:
        return NotImplemented
    for name in ("weight", "bias"):
        tensor = given.get(name)
        if tensor is None:
            continue
        if tensor.dtype != x.dtype or tensor.device != source.device or type(tensor) not in PLAIN:
            return NotImplemented
        if type(tensor) is not torch.nn.Parameter:
            given[name] = tensor.clone()  # ComfyUI takes back the memory of a weight that it has cast
    eps = given.get("eps")
    operand = Normed(source, Norm(kind, least if eps is None else eps, given.get("weight"), given.get("bias")))
    return mode.note(x, operand, func, (source if source.dtype == x.dtype else x, shape), given)


_ACTIVATIONS = {
    F.silu: "silu", F.gelu: "gelu", F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", T.sigmoid: "sigmoid"
}  # fmt: skip


@on(*_ACTIVATIONS)
def _activation(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = now(args[0])
    if not is_rows(x) or kwargs.get("inplace"):
        return NotImplemented
    name = "gelu_tanh" if kwargs.get("approximate") == "tanh" else _ACTIVATIONS[func]
    return mode.note(x, Activated(x, name), func, (x,), kwargs)


def _two(args: Args, kwargs: Kwargs) -> tuple[Any, Any] | None:
    """Both operands of an arithmetic function that is called without options."""
    return (now(args[0]), now(args[1])) if len(args) == 2 and not kwargs else None


@on(torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__)
def _mul(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    both = _two(args, kwargs)
    if both is None:
        return NotImplemented
    for x, y in (both, both[::-1]):
        if type(x) is not Deferred:
            continue
        operand = x.note.operand
        if type(operand) is Normed and operand.is_unmodulated and not operand.all_heads:
            modulation = modulation_of(mode, y, x)
            if modulation is not None:
                new = Normed(operand.x, operand.norm, modulation[0], None, modulation[1])
                return mode.note(x, new, func, both)
        elif type(operand) is Activated and operand.up is operand.beside is None and type(y) in (*MEMORY, Deferred):
            up = valued(y)
            if type(up) in MEMORY and up.shape == x.note.shape and up.dtype == x.note.dtype:
                return mode.note(x, operand._replace(up=up), func, both)
    for x, y in (both, both[::-1]):
        if type(x) is not Deferred and is_rows(x) and (gate := gate_of(mode, y, x)) is not None:
            return mode.note(x, Normed(x, None, gate[0], rows=gate[1]), func, both)
    return _spread_plus(mode, func, both)


def _spread_plus(mode: Deferring, func: Any, both: tuple[Any, Any]) -> Any:
    """Arithmetic of a modulation of groups and a number, or what all tokens share: done once a group."""
    for x, y in (both, both[::-1]):
        spread = operand_of(x, Spread)
        if spread is not None and (
            isinstance(y, (int, float)) or (type(y) in PLAIN and y.ndim and y.numel() == y.shape[-1])
        ):
            values = func(spread.values, y) if x is both[0] else func(y, spread.values)
            if values.shape == spread.values.shape and values.dtype == spread.values.dtype:
                return mode.note(x, spread._replace(values=values), func, both)
    return NotImplemented


@on(torch.add, T.add, T.__add__, T.__radd__, of=OF_DEFERRED)
def _add(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    both = _two(args, kwargs)
    if both is None:
        return NotImplemented
    for x, y in (both, both[::-1]):
        operand = operand_of(x, Normed)
        if operand is not None and operand.norm is not None and operand.shift is None and not operand.segments:
            # What has as many numbers is a shift of each token, or a residual, which models write first.
            shift = modulation_of(mode, y, x) if x is both[0] else gate_of(mode, y, x)
            if shift is not None and not operand.all_heads and (operand.scale is None or operand.rows is shift[1]):
                return mode.note(x, Normed(operand.x, operand.norm, operand.scale, *shift), func, both)
    for x, y in (both, both[::-1]):
        if type(y) is Deferred and operand_of(y, Normed) is not None:
            total = takers.residual(valued(x), y)
            if total is not None:
                return mode.tracked(total)
    return _spread_plus(mode, func, both)


@on(torch.addcmul, T.addcmul, T.addcmul_)
def _addcmul(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    in_place = func is T.addcmul_
    if len(args) != 3 or kwargs or (in_place and type(args[0]) not in MEMORY):
        return NotImplemented
    start, *factors = map(now, args)
    if in_place:
        mode.before_write((start,))
    for x, y in () if in_place else (factors, factors[::-1]):
        operand = operand_of(x, Normed)
        if operand is not None and operand.is_unmodulated and not operand.all_heads and operand.norm is not None:
            modulation = modulation_of(mode, y, x)
            if modulation is None:
                continue
            scale, rows = modulation
            if start is x:
                return mode.note(x, Normed(operand.x, operand.norm, 1 + scale, None, rows), func, args)
            shift = gate_of(mode, start, x)
            if shift is not None and shift[1] is rows:
                return mode.note(x, Normed(operand.x, operand.norm, scale, shift[0], rows), func, args)
    return _gated(mode, valued(start), factors, in_place)


def _gated(mode: Deferring, start: Any, factors: Sequence[Any], in_place: bool) -> Any:
    """start + y gate by the fused op, for a y that is normed or in memory."""
    for y, gate in (factors, factors[::-1]):
        operand, modulation = y.note.operand if type(y) is Deferred else None, None
        if type(operand) is Normed and operand.is_unmodulated:
            modulation = modulation_of(mode, gate, y)
        elif is_rows(y) and type(start) in MEMORY and start.shape == y.shape:
            modulation = gate_of(mode, gate, y)
        if modulation is not None:
            total = takers.residual(start, y, modulation, in_place)
            if total is not None:
                return mode.tracked(total)
    return NotImplemented


_IN_PLACE = {T.add_: torch.add, T.__iadd__: torch.add, T.mul_: torch.mul, T.__imul__: torch.mul}


@on(*_IN_PLACE, of=OF_DEFERRED)
def _write(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    both = _two(args, kwargs)
    if both is None:
        return NotImplemented
    (target, other), func = both, _IN_PLACE[func]
    if type(target) is Deferred:
        return _absorbed(mode, func, target, other)
    if func is torch.mul or operand_of(other, Normed) is None or other.note.shape != target.shape:
        return NotImplemented
    mode.before_write((target,))
    total = takers.residual(target, other, in_place=True)
    return NotImplemented if total is None else mode.tracked(total)


def _absorbed(mode: Deferring, func: Any, target: Deferred, other: Any) -> Any:
    """A write into a deferred tensor becomes part of its note; views of it read what it is from now on."""
    sliced = operand_of(target, Sliced)
    if sliced is not None:
        return _segment(mode, func, target, other, sliced)
    note = target.note
    if operand_of(target, Normed, Activated) is None or note.viewed or note.is_view:
        return NotImplemented
    result = (_mul if func is torch.mul else _add)(mode, func, (target, other), {})
    if type(result) is not Deferred or result.note.shape != note.shape:
        return NotImplemented
    target.note = result.note
    return target


def _segment(mode: Deferring, func: Any, target: Deferred, other: Any, sliced: Sliced) -> Any:
    """The same for a write into some tokens of one."""
    parent, start, stop = sliced
    operand = operand_of(parent, Normed)
    if operand is None or operand.norm is None or not (operand.scale is operand.shift is None) or operand.all_heads:
        return NotImplemented
    modulation = modulation_of(mode, other, target)
    if parent.note.viewed or parent.note.is_view or modulation is None or modulation[1] is not None:
        return NotImplemented
    others = {(segment.start, segment.stop): segment for segment in operand.segments}
    known = others.pop((start, stop), Segment(start, stop, None, None))
    if known.shift is not None:
        return NotImplemented
    value = modulation[0]
    if func is torch.add:
        known = known._replace(shift=value)
    else:
        known = known._replace(scale=value if known.scale is None else known.scale * value)
    new = operand._replace(segments=(*others.values(), known))
    parent.note = mode.note(parent, new, _with_tokens_changed, (parent, func, start, stop, other)).note
    return target


def _with_tokens_changed(x: torch.Tensor, func: Any, start: int, stop: int, other: torch.Tensor) -> torch.Tensor:
    changed = x.clone()
    changed[..., start:stop, :] = func(x[..., start:stop, :], other)
    return changed


@on(T.__setitem__, of=OF_DEFERRED)
def _set_item(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, index, value = args
    tokens = tokens_of(index, target) if type(target) is Deferred else None
    sliced = operand_of(value, Sliced)
    if sliced is not None and sliced.parent is target and tokens == (sliced.start, sliced.stop):
        return None  # what `target[index] *= scale` ends with
    operand = operand_of(target, Normed)
    if tokens is None or operand is None or operand.segments or target.note.viewed or target.note.is_view:
        return NotImplemented
    if operand.rows is not None or any(t is not None and t.shape[-2] > 1 for t in (operand.scale, operand.shift)):
        return NotImplemented  # tokens of which each has a modulation of its own
    (start, stop), before, note = tokens, as_it_is(target), target.note
    is_view, form = type(value) is Deferred and value.note.is_view, (*note.shape[:-2], stop - start, note.shape[-1])
    if not isinstance(value, T) or (value.shape, value.dtype) != (form, note.dtype) or is_view:
        return NotImplemented
    parts: dict[int, Any] = {start: as_it_is(value)}
    for first, last in ((0, start), (stop, note.shape[-2])):
        if first < last:
            parts[first] = slice_of(mode, before, first, last, operand._replace(x=operand.x[..., first:last, :]))
    joined = Joined(tuple(parts[first] for first in sorted(parts)), len(note.shape) - 2)
    call = _with_tokens_changed, (before, lambda _, other: other, start, stop, value)
    target.note = mode.note(before, joined, *call).note
    return None
