"""Norms, activations, modulations, gates and residuals: what functions of PyTorch's do to deferred operands."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from ...kernels import Norm
from . import takers
from .mode import OF_DEFERRED, Deferring
from .notes import Deferred, called_on_values, outside, valued
from .operands import Activated, Copied, Normed, Spread
from .reading import PLAIN, Args, Kwargs, T, as_noted, gate_of, is_rows, modulation_of, now, on, operand_of, rows_of
from .tracked import MEMORY

_LEAST_EPS = torch.finfo(torch.float32).eps  # what PyTorch takes where a norm says none


def normed(forward: Deferring, func: Any, x: Any, *args: Any) -> Any:
    """What a norm of PyTorch's makes of `x`, deferred where that may be: of layers that call it themselves, with
    parameters of their own in the dtype and on the device of `x`."""
    forward.settle()
    if torch.is_grad_enabled():
        return func(x, *args)
    with outside():
        width, *parameters, eps = args
        source = _source(x, width)
        if source is None:
            return forward.tracked(called_on_values(func, (x, *args), {}))
        return _noted(forward, func, x, source, parameters, eps, args, {})


def _source(x: Any, width: Any) -> torch.Tensor | None:
    """What a norm over so many channels reads; None where that is nothing that a fused op norms."""
    copied = operand_of(x, Copied)
    source = now(x) if copied is None else copied.x
    return source if is_rows(source) and len(width) == 1 and width[0] == source.shape[-1] else None


def _noted(
    forward: Deferring, func: Any, x: Any, source: torch.Tensor, parameters: Any, eps: Any, args: Any, kwargs: Kwargs
) -> Any:
    """The note of a norm of `x`, whose values are those of `source`; `args` are what follows it in the call."""
    if func in _RMS:
        norm = Norm("rms", _LEAST_EPS if eps is None else eps, *parameters)
    else:
        norm = Norm("layer", 1e-5 if eps is None else eps, *parameters)
    read = source if source.dtype == x.dtype else x.note
    return forward.note(source.shape, x, Normed(source, norm), func, (read, *args), kwargs)


_RMS = (F.rms_norm, torch.rms_norm)
_NAMES = ("input", "normalized_shape", "weight", "bias", "eps")


@on(*_RMS, F.layer_norm, torch.layer_norm)
def _norm(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    names = tuple(name for name in _NAMES if name != "bias") if func in _RMS else _NAMES
    given = {**dict(zip(names, args, strict=False)), **{name: kwargs[name] for name in names if name in kwargs}}
    x, shape = given["input"], given["normalized_shape"]
    source = _source(x, shape)
    if source is None:
        return NotImplemented
    parameters = [given.get(name) for name in names[2:-1]]
    for tensor in parameters:
        if tensor is not None and (
            tensor.dtype != x.dtype or tensor.device != source.device or type(tensor) not in PLAIN
        ):
            return NotImplemented
    # ComfyUI takes back the memory of a weight that it has cast; one of the model's own stays.
    kept = [t if t is None or type(t) is torch.nn.Parameter else t.clone() for t in parameters]
    same = {name: value for name, value in given.items() if name not in ("input", "normalized_shape")}
    same |= {name: value for name, value in zip(names[2:-1], kept, strict=True) if name in same}
    return _noted(mode, func, x, source, kept, given.get("eps"), (shape,), same)


_ACTIVATIONS = {
    F.silu: "silu", F.gelu: "gelu", F.sigmoid: "sigmoid", torch.sigmoid: "sigmoid", T.sigmoid: "sigmoid"
}  # fmt: skip


@on(*_ACTIVATIONS)
def _activation(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, *others = args or (kwargs["input"],)
    x = now(x)
    if not is_rows(x) or others or kwargs.get("inplace"):
        return NotImplemented
    name = "gelu_tanh" if kwargs.get("approximate") == "tanh" else _ACTIVATIONS[func]
    return mode.note(
        x.shape, x, Activated(x, name), func, (x,), {k: v for k, v in kwargs.items() if k == "approximate"}
    )


def two(args: Args, kwargs: Kwargs) -> tuple[Any, Any] | None:
    """Both operands of an arithmetic function that is called without options."""
    return (now(args[0]), now(args[1])) if len(args) == 2 and not kwargs else None


def _modulated(mode: Deferring, func: Any, args: Args, x: Deferred, operand: Any) -> Any:
    """The note of a deferred tensor with a modulation more."""
    return mode.note(x.note.shape, x.note, operand, func, tuple(map(as_noted, args)))


@on(torch.mul, torch.multiply, T.mul, T.multiply, T.__mul__, T.__rmul__)
def mul(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    both = two(args, kwargs)
    if both is None:
        return NotImplemented
    for x, y in (both, both[::-1]):
        if type(x) is not Deferred:
            continue
        operand = x.note.operand
        if type(operand) is Normed and operand.is_unmodulated and not operand.all_heads:
            modulation = modulation_of(y, x)
            if modulation is not None:
                rows = rows_of(mode, modulation[1], y.device)
                return _modulated(mode, func, both, x, operand._replace(scale=modulation[0], rows=rows))
        elif type(operand) is Activated and operand.up is operand.beside is None and type(y) in (*MEMORY, Deferred):
            up = valued(y)
            if type(up) in MEMORY and up.shape == x.note.shape and up.dtype == x.note.dtype:
                return _modulated(mode, func, both, x, operand._replace(up=up))
    for x, y in (both, both[::-1]):
        if type(x) is not Deferred and is_rows(x) and (modulation := gate_of(y, x)) is not None:
            operand = Normed(x, None, modulation[0], rows=rows_of(mode, modulation[1], x.device))
            return mode.note(x.shape, x, operand, func, tuple(map(as_noted, both)))
    return _spread_plus(mode, func, both)


def _spread_plus(mode: Deferring, func: Any, both: tuple[Any, Any]) -> Any:
    """Arithmetic of a modulation of groups and a number, or what all tokens share: done once a group."""
    for place, (x, y) in enumerate((both, both[::-1])):
        spread = operand_of(x, Spread)
        if spread is not None and (
            isinstance(y, (int, float)) or (type(y) in PLAIN and y.ndim and y.numel() == y.shape[-1])
        ):
            values = func(spread.values, y) if place == 0 else func(y, spread.values)
            if values.shape == spread.values.shape and values.dtype == spread.values.dtype:
                return mode.note(x.note.shape, x.note, spread._replace(values=values), func, tuple(map(as_noted, both)))
    return NotImplemented


@on(torch.add, T.add, T.__add__, T.__radd__, of=OF_DEFERRED)
def add(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    both = two(args, kwargs)
    if both is None or (type(both[0]) is not Deferred and type(both[1]) is not Deferred):
        return NotImplemented
    for x, y in (both, both[::-1]):
        operand = operand_of(x, Normed)
        if operand is not None and operand.norm is not None and operand.shift is None and not operand.segments:
            # What has as many numbers is a shift of each token, or a residual, which models write first.
            modulation = modulation_of(y, x) if x is both[0] else gate_of(y, x)
            rows = None if modulation is None else rows_of(mode, modulation[1], y.device)
            if modulation is not None and not operand.all_heads and (operand.scale is None or operand.rows is rows):
                return _modulated(mode, func, both, x, operand._replace(shift=modulation[0], rows=rows))
    for x, y in (both, both[::-1]):
        if type(y) is Deferred and operand_of(y, Normed) is not None:
            total = residual(mode, valued(x), y)
            if total is not None:
                return total
    return _spread_plus(mode, func, both)


def residual(mode: Deferring, x: Any, y: Any, gate: Any = None, in_place: bool = False) -> Any:
    """x + gate y by the fused op, or None."""
    return mode.tracked(takers.residual(x, y, gate, in_place))


@on(torch.addcmul, T.addcmul)
def _addcmul(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if len(args) != 3 or kwargs:
        return NotImplemented
    start, *factors = map(now, args)
    for x, y in (factors, factors[::-1]):
        operand = operand_of(x, Normed)
        if operand is not None and operand.is_unmodulated and not operand.all_heads and operand.norm is not None:
            modulation = modulation_of(y, x)
            if modulation is None:
                continue
            rows = rows_of(mode, modulation[1], x.device)
            if start is x:
                return _modulated(mode, func, args, x, operand._replace(scale=1 + modulation[0], rows=rows))
            shift = gate_of(start, x)
            if shift is not None and shift[1] == modulation[1]:
                scaled = operand._replace(scale=modulation[0], shift=shift[0], rows=rows)
                return _modulated(mode, func, args, x, scaled)
            total = residual(mode, valued(start), x, (modulation[0], rows))
            if total is not None:
                return total
    return gated(mode, valued(start), factors)


def gated(mode: Deferring, start: Any, factors: Sequence[Any], in_place: bool = False) -> Any:
    """start + y gate, for a y in memory."""
    for y, gate in (factors, factors[::-1]):
        if (
            is_rows(y)
            and type(start) in MEMORY
            and start.shape == y.shape
            and (modulation := gate_of(gate, y)) is not None
        ):
            given = modulation[0], rows_of(mode, modulation[1], y.device)
            total = residual(mode, start, y, given, in_place)
            if total is not None:
                return total
    return NotImplemented
