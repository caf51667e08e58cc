"""Handlers of norms, activations, modulations, gates and residuals, also in place."""

from typing import Any

import torch
import torch.nn.functional as F

from ...kernels import Norm
from . import consumers
from .mode import Deferring
from .notes import MEMORY, Deferred, values_of
from .operands import Activated, Copied, Joined, Normed, Sliced, Spread
from .reading import PLAIN, Args, Kwargs, T, as_it_is, gate_of, is_rows, modulation_of, now, on, operand_of
from .views import slice_of, tokens_of

_RMS: Any = "rms", torch.finfo(torch.float32).eps, ("weight", "eps")
_LAYER: Any = "layer", 1e-5, ("weight", "bias", "eps")
_NORMS = {F.rms_norm: _RMS, torch.rms_norm: _RMS, F.layer_norm: _LAYER, torch.layer_norm: _LAYER}
"""The kind of each, PyTorch's default of eps, and the arguments behind input and shape."""


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
    for name, tensor in given.items():
        if name != "eps" and tensor is not None:
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
    """Return both arguments of an arithmetic function; None where there are options, such as `alpha`."""
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
            up = values_of(y)
            if type(up) in MEMORY and up.shape == x.note.shape and up.dtype == x.note.dtype:
                return mode.note(x, operand._replace(up=up), func, both)
    for x, y in (both, both[::-1]):
        if type(x) is not Deferred and is_rows(x) and (gate := gate_of(mode, y, x)) is not None:
            return mode.note(x, Normed(x, None, gate[0], rows=gate[1]), func, both)
    return _spread_plus(mode, func, both)


def _spread_plus(mode: Deferring, func: Any, both: tuple[Any, Any]) -> Any:
    """Handle arithmetic of a modulation of groups and a number, or a vector for all tokens: once a group."""
    for x, y in (both, both[::-1]):
        spread = operand_of(x, Spread)
        if spread is not None and (
            isinstance(y, (int, float)) or (type(y) in PLAIN and y.ndim and y.numel() == y.shape[-1])
        ):
            values = func(spread.values, y) if x is both[0] else func(y, spread.values)
            if values.shape == spread.values.shape and values.dtype == spread.values.dtype:
                return mode.note(x, spread._replace(values=values), func, both)
    return NotImplemented


@on(torch.add, T.add, T.__add__, T.__radd__, of_deferred=True)
def _add(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    both = _two(args, kwargs)
    if both is None:
        return NotImplemented
    for x, y in (both, both[::-1]):
        operand = operand_of(x, Normed)
        if operand is not None and operand.norm is not None and operand.shift is None:
            # A tensor of as many numbers is a shift of each token, or a residual, which models write first.
            shift = modulation_of(mode, y, x) if x is both[0] else gate_of(mode, y, x)
            if shift is not None and not operand.all_heads and (operand.scale is None or operand.rows is shift[1]):
                return mode.note(x, Normed(operand.x, operand.norm, operand.scale, *shift), func, both)
    for x, y in (both, both[::-1]):
        if type(y) is Deferred and operand_of(y, Normed) is not None:
            total = consumers.residual(values_of(x), y)
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
    start = values_of(start)
    for y, gate in (factors, factors[::-1]):
        operand, modulation = y.note.operand if type(y) is Deferred else None, None
        if type(operand) is Normed and operand.is_unmodulated:
            modulation = modulation_of(mode, gate, y)
        elif is_rows(y) and type(start) in MEMORY and start.shape == y.shape:
            modulation = gate_of(mode, gate, y)
        if modulation is not None:
            total = consumers.residual(start, y, modulation, in_place)
            if total is not None:
                return mode.tracked(total)
    return NotImplemented


_IN_PLACE = {T.add_: torch.add, T.__iadd__: torch.add, T.mul_: torch.mul, T.__imul__: torch.mul}


@on(*_IN_PLACE, of_deferred=True)
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
    total = consumers.residual(target, other, in_place=True)
    return NotImplemented if total is None else mode.tracked(total)


def _absorbed(mode: Deferring, func: Any, target: Deferred, other: Any) -> Any:
    """Make a write into a deferred tensor part of its note, which views of it read from now on."""
    note, sliced, changed = target.note, operand_of(target, Sliced), _mul if func is torch.mul else _add
    if sliced is None and (operand_of(target, Normed, Activated) is None or note.viewed or note.is_view):
        return NotImplemented
    parts = [target] if sliced is None else _tokens(mode, as_it_is(sliced.parent), sliced.start, sliced.stop)
    result = changed(mode, func, (parts[0], other), {}) if len(parts) == 1 else None
    if type(result) is not Deferred or result.note.shape != note.shape:
        return NotImplemented
    if sliced is not None:
        placed = _put(mode, sliced.parent, sliced.start, sliced.stop, result, func, other)
        return target if placed is None else NotImplemented
    target.note = result.note
    return target


def _tokens(mode: Deferring, x: Any, start: int, stop: int) -> list[Any]:
    """Return the parts that some tokens of a deferred norm consist of; none if they cannot be told apart."""
    operand, first, parts = operand_of(x, Normed, Joined), 0, []
    if stop - start == x.shape[-2]:
        return [x]
    if type(operand) is Normed:
        shared = operand.rows is None and all(t is None or t.shape[-2] == 1 for t in (operand.scale, operand.shift))
        if shared and start < stop:
            parts = [slice_of(mode, x, start, stop, operand._replace(x=operand.x[..., start:stop, :]))]
    elif operand is not None and operand.axis == len(x.note.shape) - 2:
        for part in operand.parts:
            last = first + part.shape[-2]
            if max(start, first) < min(stop, last):
                parts += _tokens(mode, part, max(start - first, 0), min(stop, last) - first)
            first = last
    return parts


def _put(mode: Deferring, target: Deferred, start: int, stop: int, part: Any, func: Any, other: Any) -> Any:
    """Replace some tokens of a deferred norm by another tensor, `func` of these tokens and `other`."""
    note, before = target.note, as_it_is(target)
    form = (*note.shape[:-2], stop - start, note.shape[-1])
    is_norm = operand_of(target, Normed, Joined) is not None and not (note.viewed or note.is_view)
    if not is_norm or (part.shape, part.dtype) != (form, note.dtype):
        return NotImplemented
    parts = [*_tokens(mode, before, 0, start), part, *_tokens(mode, before, stop, note.shape[-2])]
    if sum(part.shape[-2] for part in parts) != note.shape[-2]:
        return NotImplemented
    call = _with_tokens_changed, (before, func, start, stop, other)
    target.note = mode.note(before, Joined(tuple(parts), len(note.shape) - 2), *call).note
    return None


def _with_tokens_changed(x: torch.Tensor, func: Any, start: int, stop: int, other: torch.Tensor) -> torch.Tensor:
    changed = x.clone()
    changed[..., start:stop, :] = func(x[..., start:stop, :], other)
    return changed


@on(T.__setitem__, of_deferred=True)
def _set_item(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, index, value = args
    tokens = tokens_of(index, target) if type(target) is Deferred else None
    sliced = operand_of(value, Sliced)
    if sliced is not None and sliced.parent is target and tokens == (sliced.start, sliced.stop):
        return None  # what `target[index] *= scale` ends with
    if tokens is None or not isinstance(value, T) or (type(value) is Deferred and value.note.is_view):
        return NotImplemented
    return _put(mode, target, *tokens, as_it_is(value), lambda _, other: other, value)
