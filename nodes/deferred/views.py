"""Views of deferred tensors, what joins them, and what changes nothing."""

from typing import Any

import torch
import torch.nn.functional as F

from ...kernels import FLOAT_DTYPES
from .mode import OF_DEFERRED, Deferring
from .notes import Deferred, called_on_values
from .operands import Activated, Copied, Joined, Normed, Sliced, Spread
from .reading import (
    Args,
    Kwargs,
    T,
    as_it_is,
    as_noted,
    is_rows,
    on,
    operand_of,
)
from .tracked import MEMORY


def tokens_of(index: Any, x: Deferred) -> tuple[int, int] | None:
    """Which tokens an index takes, if it takes whole tokens that follow each other of all samples."""
    parts = index if type(index) is tuple else (index,)
    axis, shape = len(x.note.shape) - 2, x.note.shape
    if (
        len(shape) not in (2, 3)
        or not axis < len(parts) <= len(shape)
        or any(type(part) is not slice for part in parts)
    ):
        return None
    whole = slice(None)
    if any(part != whole for place, part in enumerate(parts) if place != axis):
        return None
    start, stop, step = parts[axis].indices(shape[axis])
    return (start, stop) if step == 1 and start < stop else None


def _slice(mode: Deferring, x: Deferred, start: int, stop: int) -> Deferred:
    shape = torch.Size((*x.note.shape[:-2], stop - start, x.note.shape[-1]))
    part = mode.note(shape, x.note, Sliced(x, start, stop), _tokens, (x, start, stop))
    part.note.is_view = True  # it asks the tensor, also what that becomes
    return part


def _tokens(x: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return x[..., start:stop, :]


@on(T.__getitem__, of=OF_DEFERRED)
def _get_item(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, index = args
    if type(x) is not Deferred:
        return NotImplemented
    operand = operand_of(x, Normed, Spread)
    if operand is None:
        return NotImplemented
    if type(operand) is Normed and len(x.note.shape) > 3:
        return _view(mode, func, args, kwargs)
    tokens = tokens_of(index, x)
    if tokens is None:
        return NotImplemented
    if type(operand) is Normed:
        return _slice(mode, x, *tokens)
    if tokens[0]:
        return NotImplemented
    shape = torch.Size((*x.note.shape[:-2], tokens[1], x.note.shape[-1]))
    return mode.is_view(mode.note(shape, x.note, operand._replace(tokens=tokens[1]), _tokens, (x, *tokens)), x)


@on(torch.chunk, T.chunk, of=OF_DEFERRED)
def _chunk(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    if len(args) < 2:
        return NotImplemented
    x, number = args[:2]
    axis = args[2] if len(args) > 2 else kwargs.get("dim", 0)
    if (
        operand_of(x, Normed) is None
        or len(x.note.shape) not in (2, 3)
        or axis % len(x.note.shape) != len(x.note.shape) - 2
    ):
        return NotImplemented
    tokens = x.note.shape[-2]
    each = -(-tokens // number)
    return tuple(_slice(mode, x, start, min(start + each, tokens)) for start in range(0, tokens, each))


@on(
    *(T.view, T.reshape, T.unflatten, T.transpose, T.permute, T.movedim, T.swapaxes, T.unsqueeze, T.squeeze),
    *(torch.reshape, torch.transpose, torch.permute, torch.movedim, torch.unsqueeze, torch.squeeze, torch.unflatten),
    of=OF_DEFERRED,
)
def _view(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """A view of normed queries or keys: the norm of a view, as long as it is over the same numbers. Of a copy: that of
    a view."""
    x = args[0]
    operand = operand_of(x, Normed, Copied)
    normed = type(operand) is Normed
    if operand is None or (normed and (not operand.is_unmodulated or operand.norm is None or func is T.flatten)):
        return NotImplemented
    try:
        view = func(operand.x, *args[1:], **kwargs)
    except RuntimeError:  # the value may lie in memory otherwise
        return NotImplemented
    if view.dtype != operand.x.dtype:
        return NotImplemented
    shape, width = view.shape, operand.x.shape[-1]
    if func in (T.reshape, torch.reshape, T.flatten) and view.data_ptr() != operand.x.data_ptr():
        return NotImplemented  # a copy
    if not normed:
        return mode.is_view(mode.note(shape, x.note, Copied(view), func, (x, *args[1:]), kwargs), x)
    if operand.all_heads:
        kept = shape[-2:] == operand.x.shape[-2:]
        all_heads = True
    else:
        all_heads = view.ndim > 1 and shape[-1] != width and shape[-2] * shape[-1] == width
        all_heads = all_heads and func in (T.view, T.reshape, T.unflatten, torch.reshape, torch.unflatten)
        kept = all_heads or (shape[-1:] == (width,) and view.stride(-1) == operand.x.stride(-1))
    if not kept or (all_heads and not operand.all_heads and operand.norm.kind != "rms"):
        return NotImplemented
    normed = Normed(view, operand.norm, all_heads=all_heads)
    return mode.is_view(mode.note(shape, x.note, normed, func, (x, *args[1:]), kwargs), x)


@on(T.repeat)
def _repeat(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Keys and values for as many heads as queries have, which may be as many as they have."""
    x, *times = args
    once = not kwargs and len(times) > 1 and all(type(time) is int and time == 1 for time in times)
    if not once or not is_rows(x) or len(times) != x.ndim:
        return NotImplemented
    return mode.note(x.shape, x, Copied(x), func, args)


@on(F.scaled_dot_product_attention, of=OF_DEFERRED)
def _attention(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return called_on_values(func, tuple(map(_as_read, args)), kwargs)


def _as_read(x: Any) -> Any:
    """What is read in the place of a copy."""
    operand = operand_of(x, Copied)
    return operand.x if operand is not None and operand.x.dtype == x.dtype else x


@on(torch.cat, torch.concat)
def _cat(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    parts = args[0] if args else kwargs.get("tensors", ())
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not any(type(part) is Deferred for part in parts):
        return _cat_of_heads(mode, parts, axis)
    if len({len(part.shape) for part in parts}) != 1:
        return NotImplemented
    ndim = len(parts[0].shape)
    axis, read = axis % ndim, tuple(map(as_noted, parts))
    if len({part.dtype for part in parts}) != 1:
        return NotImplemented
    size = sum(part.shape[axis] for part in parts)
    shape = torch.Size((*parts[0].shape[:axis], size, *parts[0].shape[axis + 1 :]))
    if axis == ndim - 1:
        activated = operand_of(parts[-1], Activated)
        if len(parts) != 2 or activated is None or activated.beside is not None or type(parts[0]) not in MEMORY:
            return NotImplemented
        operand = activated._replace(beside=parts[0])
    elif axis and all(type(part) in MEMORY or operand_of(part, Normed, Sliced) is not None for part in parts):
        operand = Joined(tuple(map(as_it_is, parts)), axis)
    else:
        return NotImplemented
    return mode.note(shape, parts[-1], operand, _cat_of, (axis, *read))


def _cat_of_heads(mode: Deferring, parts: Any, axis: int) -> Any:
    """Heads of two streams behind each other, such as values: PyTorch's own `cat` is slow where they are parts of wider
    tensors."""
    if not all(type(part) in MEMORY and part.ndim == 4 and part.stride(-1) == 1 for part in parts):
        return NotImplemented
    axis, forms = axis % 4, {(part.dtype, part.device, part.select(axis, 0).shape) for part in parts if part.numel()}
    if axis == 3 or len(forms) != 1 or any(part.is_contiguous() or not part.numel() for part in parts):
        return NotImplemented
    shape = list(parts[0].shape)
    sizes = [part.shape[axis] for part in parts]
    shape[axis] = sum(sizes)
    joined = parts[0].new_empty(shape)
    for place, part in zip(joined.split(sizes, axis), parts, strict=True):
        place.copy_(part)
    return mode.tracked(joined)


def _cat_of(axis: int, *parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, axis)


@on(T.to, T.type_as)
def _to(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, *rest = args
    if len(rest) != 1 or kwargs:
        return NotImplemented
    wanted = rest[0]
    if isinstance(wanted, torch.Tensor) and wanted.device == x.device:
        wanted = wanted.dtype
    return _in_dtype(mode, func, args, wanted) if isinstance(wanted, torch.dtype) else NotImplemented


_IN = {T.float: torch.float32, T.bfloat16: torch.bfloat16, T.half: torch.float16}


@on(*_IN)
def _in(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return NotImplemented if len(args) != 1 or kwargs else _in_dtype(mode, func, args, _IN[func])


def _in_dtype(mode: Deferring, func: Any, args: Args, dtype: torch.dtype) -> Any:
    """A tensor in another dtype: many models norm in float32, as the fused ops do anyway."""
    x = args[0]
    if type(x) is Deferred:
        operand = x.note.operand
        if operand is not None and dtype == x.note.dtype:
            return x
        if type(operand) is Normed and operand.x.dtype == dtype:
            return mode.note(x.note.shape, operand.x, operand, func, (x.note, *args[1:]))
    elif dtype == torch.float32 != x.dtype and is_rows(x):
        return mode.note(x.shape, x, Copied(x), func, args, dtype=dtype)
    return NotImplemented


@on(F.dropout, of=OF_DEFERRED)
def _dropout(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    training = args[2] if len(args) > 2 else kwargs.get("training", True)
    return NotImplemented if training or type(args[0]) is not Deferred else args[0]


@on(T.contiguous)
def _contiguous(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if len(args) > 1 or kwargs:
        return NotImplemented
    if type(x) is Deferred:
        operand = operand_of(x, Activated, Normed, Joined)
        if operand is None:
            return NotImplemented
        if not x.note.is_view or (type(operand) is Normed and operand.x.is_contiguous()):
            return x
        return mode.note(x.note.shape, x.note, operand, func, (x.note,))
    if type(x) not in MEMORY or x.ndim != 4 or x.is_contiguous() or not is_rows(x):
        return NotImplemented
    return mode.note(x.shape, x, Copied(x), func, (x,))


@on(torch.repeat_interleave, T.repeat_interleave)
def _repeat_interleave(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, *rest = args
    named = {**dict(zip(("repeats", "dim"), rest, strict=False)), **kwargs}
    each, axis = named.get("repeats"), named.get("dim")
    if type(x) not in MEMORY or type(each) is not int or x.ndim != 3 or axis not in (1, -2) or len(named) != 2:
        return NotImplemented
    return _spread(mode, x, each)


def _spread(mode: Deferring, values: torch.Tensor, each: int) -> Any:
    if values.dtype not in FLOAT_DTYPES or each < 1:
        return NotImplemented
    shape = torch.Size((values.shape[0], values.shape[1] * each, values.shape[2]))
    return mode.note(shape, values, Spread(values, each, shape[1]), torch.repeat_interleave, (values, each), {"dim": 1})


@on(T.reshape, T.flatten)
def _reshape(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if type(x) is Deferred:
        return _view(mode, func, args, kwargs)
    if x.ndim != 4 or x.stride(2) or x.shape[2] == 1 or not x.shape[1] or x.dtype not in FLOAT_DTYPES or not is_rows(x):
        return NotImplemented
    shape = tuple(args[1:]) if len(args) > 2 else args[1] if len(args) > 1 else None
    samples, groups, each, width = x.shape
    if shape is None or isinstance(shape, int) or len(shape) != 3 or shape[0] != samples or shape[2] != width:
        return NotImplemented
    return _spread(mode, x[:, :, 0], each) if shape[1] in (-1, groups * each) else NotImplemented
