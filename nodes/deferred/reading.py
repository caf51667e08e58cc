"""Lookups that handlers make of their arguments."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ...kernels import FLOAT_DTYPES
from .mode import HANDLERS, Deferring, are_enough
from .notes import MEMORY, Deferred, deferred
from .operands import Spread

T = torch.Tensor
Args = Sequence[Any]
Kwargs = Mapping[str, Any]
PLAIN = (*MEMORY, torch.nn.Parameter)
"""The types of tensors in memory."""

Modulation = tuple[torch.Tensor, torch.Tensor | None]
"""A tensor that multiplies tokens or is added to them, with as many axes; and the row of it for each token, or None."""


def on(*functions: Any, of_deferred: bool = False) -> Any:
    """Register a handler of these functions, with `of_deferred` for calls with a deferred argument only."""

    def register(handler: Any) -> Any:
        HANDLERS.update(dict.fromkeys(functions, (handler, of_deferred)))
        return handler

    return register


def operand_of(x: Any, *kinds: type) -> Any:
    """Return the operand of a deferred tensor without a value, if it is of one of these kinds; else None."""
    operand = x.note.operand if type(x) is Deferred else None
    return operand if type(operand) in kinds else None


def is_rows(x: Any) -> bool:
    """Whether an argument is a tensor in memory with enough rows of channels."""
    return type(x) in MEMORY and x.dtype in FLOAT_DTYPES and are_enough(x.shape, x.is_cuda)


def modulation_of(forward: Deferring, x: Any, of: Any) -> Modulation | None:
    """Return a tensor as a modulation of the tokens of `of`; None where it is none."""
    spread = operand_of(x, Spread)
    tensor, shape = x if spread is None else spread.values, of.shape
    ndim = len(shape)
    if type(tensor) not in PLAIN or ndim not in (2, 3) or tensor.dtype != of.dtype or tensor.device != of.device:
        return None
    own = tensor.shape
    if not own or own[-1] != shape[-1] or len(own) > ndim:
        return None
    if len(own) < ndim:
        tensor = tensor.reshape((1,) * (ndim - len(own)) + own)
        own = tensor.shape
    if own[0] not in (1, shape[0]) or (own[-2] not in (1, shape[-2]) if spread is None else spread.tokens != shape[-2]):
        return None
    return tensor, None if spread is None else forward.rows_of(spread.each, spread.tokens, of.device)


def gate_of(forward: Deferring, y: Any, x: Any) -> Modulation | None:
    """Return `y` as a modulation of `x` that has fewer numbers than `x`; None where it is none."""
    fewer = operand_of(y, Spread) is not None or (type(y) in PLAIN and y.numel() < x.numel())
    return modulation_of(forward, y, x) if fewer else None


def now(x: Any) -> Any:
    """Return the value of a deferred tensor that is computed; anything else as it is."""
    return x.note.computed if type(x) is Deferred and x.note.operand is None else x


def as_it_is(x: Any) -> Any:
    """Return a second handle of a deferred tensor, unaffected by writes to the first."""
    return deferred(x.note) if type(x) is Deferred else x
