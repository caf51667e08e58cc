"""Writes in place into deferred tensors, and of deferred operands into residuals."""

from typing import Any

import torch

from . import arithmetic
from .mode import OF_DEFERRED, Deferring
from .notes import Deferred
from .operands import Activated, Normed, Segment, Sliced
from .reading import (
    Args,
    Kwargs,
    T,
    modulation_of,
    now,
    on,
    operand_of,
    or_not,
    rows_of,
)
from .tracked import MEMORY
from .views import tokens_of


@on(T.add_, T.__iadd__, of=OF_DEFERRED)
def _add_in_place(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    both = arithmetic.two(args, kwargs)
    if both is None or (type(both[0]) is not Deferred and type(both[1]) is not Deferred):
        return NotImplemented
    target, other = both
    if type(target) is Deferred:
        return _absorbed(mode, torch.add, target, other)
    if operand_of(other, Normed) is None or other.note.shape != target.shape:
        return NotImplemented
    mode.before_write((target,))
    return or_not(arithmetic.residual(mode, target, other, in_place=True))


@on(T.mul_, T.__imul__, of=OF_DEFERRED)
def _mul_in_place(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    both = arithmetic.two(args, kwargs)
    return NotImplemented if both is None or type(both[0]) is not Deferred else _absorbed(mode, torch.mul, *both)


@on(T.addcmul_)
def _addcmul_in_place(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 3 or kwargs or type(args[0]) not in MEMORY:
        return NotImplemented
    target, *factors = map(now, args)
    mode.before_write((target,))
    for y, gate in (factors, factors[::-1]):
        operand = operand_of(y, Normed)
        if operand is not None and operand.is_unmodulated and (modulation := modulation_of(gate, y)) is not None:
            given = modulation[0], rows_of(mode, modulation[1], target.device)
            total = arithmetic.residual(mode, target, y, given, in_place=True)
            if total is not None:
                return total
    return arithmetic.gated(mode, target, factors, in_place=True)


def _absorbed(mode: Deferring, func: Any, target: Deferred, other: Any) -> Any:
    """A write into a deferred tensor becomes part of its note; views of it read what it is from now on."""
    sliced = operand_of(target, Sliced)
    if sliced is not None:
        return _segment(mode, func, target, other, sliced)
    note = target.note
    if operand_of(target, Normed, Activated) is None or note.viewed or note.is_view:
        return NotImplemented
    result = (arithmetic.mul if func is torch.mul else arithmetic.add)(mode, func, (target, other), {})
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
    if parent.note.viewed or parent.note.is_view:
        return NotImplemented
    modulation = modulation_of(other, target)
    if modulation is None or modulation[1] is not None:
        return NotImplemented
    same = [segment for segment in operand.segments if (segment.start, segment.stop) == (start, stop)]
    others = tuple(segment for segment in operand.segments if segment not in same)
    known = same[0] if same else Segment(start, stop, None, None)
    if any(segment.start < stop and start < segment.stop for segment in others) or known.shift is not None:
        return NotImplemented
    if func is torch.mul:
        changed = known._replace(scale=modulation[0] if known.scale is None else known.scale * modulation[0])
    else:
        changed = known._replace(shift=modulation[0])
    new = operand._replace(segments=(*others, changed))
    call = (parent.note, func, start, stop, other)
    parent.note = mode.note(parent.note.shape, parent.note, new, _with_tokens_changed, call).note
    return target


def _with_tokens_changed(x: torch.Tensor, func: Any, start: int, stop: int, other: torch.Tensor) -> torch.Tensor:
    changed = x.clone()
    changed[..., start:stop, :] = func(x[..., start:stop, :], other)
    return changed


@on(T.__setitem__, of=OF_DEFERRED)
def _set_item(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    target, index, value = args
    sliced = operand_of(value, Sliced)
    if sliced is not None and sliced.parent is target and tokens_of(index, target) == (sliced.start, sliced.stop):
        return None  # what `target[index] *= scale` ends with
    return NotImplemented
