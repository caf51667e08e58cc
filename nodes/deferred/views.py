"""Handlers of views, concatenations, copies and casts."""

from typing import Any

import torch
import torch.nn.functional as F

from ...kernels import FLOAT_DTYPES
from . import consumers
from .mode import TRACKED, Deferring
from .notes import MEMORY, Deferred, called_on_values
from .operands import Activated, Copied, Joined, Normed, Sliced, Spread, Turned
from .reading import Args, Kwargs, T, as_it_is, is_rows, on, operand_of

TRACKED.update(
    (
        *(F.linear, F.pad, F.conv1d, F.conv2d, F.conv3d, F.dropout, torch.tanh, T.tanh, torch.nan_to_num, T.clone),
        *(torch.add, T.add, T.__add__, T.__radd__, T.add_, T.__iadd__, torch.sub, T.sub, T.__sub__, T.to, T.type_as),
        *(T.float, T.bfloat16, T.half),
        *(torch.mul, T.mul, T.__mul__, T.__rmul__, torch.addcmul, T.addcmul, torch.cat, torch.concat, T.contiguous),
        *(T.view, T.reshape, T.unflatten, T.transpose, T.permute, T.movedim, T.swapaxes, T.unsqueeze, T.squeeze),
        *(torch.reshape, torch.unflatten, torch.transpose, torch.permute, torch.movedim, torch.unsqueeze),
        *(torch.squeeze, torch.flatten, T.flatten, T.expand, T.__getitem__, T.select, T.narrow, torch.narrow),
        *(torch.chunk, T.chunk, torch.split, T.split, T.split_with_sizes, torch.unbind, T.unbind),
    )
)


def tokens_of(index: Any, x: Deferred) -> tuple[int, int] | None:
    """Return the first token and the end of an index of whole, consecutive tokens of all samples; None for others."""
    parts, shape = index if type(index) is tuple else (index,), x.note.shape
    axis = len(shape) - 2
    if axis not in (0, 1) or not axis < len(parts) <= len(shape) or any(type(part) is not slice for part in parts):
        return None
    start, stop, step = parts[axis].indices(shape[axis])
    whole = all(part == slice(None) for place, part in enumerate(parts) if place != axis)
    return (start, stop) if whole and step == 1 and start < stop else None


def slice_of(mode: Deferring, x: Deferred, start: int, stop: int, operand: Any = None) -> Deferred:
    """Return a view of some tokens of a deferred tensor. Linears read its own operand, if it has one."""
    shape = torch.Size((*x.note.shape[:-2], stop - start, x.note.shape[-1]))
    call = T.narrow, (x, -2, start, stop - start)
    return mode.note(x, operand or Sliced(x, start, stop), *call, shape=shape, is_view=True)


@on(T.__getitem__, of_deferred=True)
def _get_item(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x, index = args
    operand = operand_of(x, Normed, Spread)
    if type(operand) is Normed and len(x.note.shape) > 3:
        return _view(mode, func, args, kwargs)
    tokens = None if operand is None else tokens_of(index, x)
    if tokens is not None and type(operand) is Normed:
        return slice_of(mode, x, *tokens)
    if tokens is None or type(operand) is not Spread or tokens[0]:
        return NotImplemented
    x.note.viewed = True
    return slice_of(mode, x, *tokens, operand._replace(tokens=tokens[1]))


@on(
    *(T.view, T.unflatten, T.transpose, T.permute, T.movedim, T.swapaxes, T.unsqueeze, T.squeeze),
    *(torch.reshape, torch.transpose, torch.permute, torch.movedim, torch.unsqueeze, torch.squeeze, torch.unflatten),
    of_deferred=True,
)
def _view(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Return the norm of a view for a view of a norm, as long as it is over the same numbers. Likewise of a copy."""
    x = args[0]
    operand = operand_of(x, Normed, Copied)
    norm = operand.norm if type(operand) is Normed else None
    if operand is None or (type(operand) is Normed and (not operand.is_unmodulated or not norm or func is T.flatten)):
        return NotImplemented
    try:
        view = func(operand.x, *args[1:], **kwargs)
    except RuntimeError:  # the value may lie in memory otherwise
        return NotImplemented
    if view.dtype != operand.x.dtype:
        return NotImplemented
    new: Any = Copied(view)
    if norm is not None:
        shape, width, all_heads = view.shape, operand.x.shape[-1], operand.all_heads
        if all_heads:
            kept = shape[-2:] == operand.x.shape[-2:]
        else:
            splits = func in (T.view, T.reshape, T.unflatten, torch.reshape, torch.unflatten)
            all_heads = splits and view.ndim > 1 and shape[-1] != width == shape[-2] * shape[-1]
            one = shape[-1:] == (width,) and view.stride(-1) == operand.x.stride(-1)
            kept = norm.kind == "rms" if all_heads else one
        if not kept:
            return NotImplemented
        new = Normed(view, norm, all_heads=all_heads)
    x.note.viewed = True
    return mode.note(x, new, func, args, kwargs, view.shape, is_view=True)


@on(T.repeat)
def _repeat(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle a repetition of keys and values for the heads of queries, which may be as many."""
    x, *times = args
    if kwargs or not is_rows(x) or times != [1] * x.ndim:
        return NotImplemented
    return mode.note(x, Copied(x), func, args)


@on(F.scaled_dot_product_attention, of_deferred=True)
def _attention(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Call it on the sources of copies."""
    copies = [(x, operand_of(x, Copied)) for x in args]
    sources = [x if copy is None or copy.x.dtype != x.dtype else copy.x for x, copy in copies]
    return called_on_values(func, sources, kwargs)


@on(torch.cat, torch.concat)
def _cat(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    parts = args[0] if args else kwargs.get("tensors", ())
    axis = args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not any(type(part) is Deferred for part in parts):
        return _cat_of_heads(mode, parts, axis)
    first, ndim = parts[0], len(parts[0].shape)
    if any(len(part.shape) != ndim or part.dtype != first.dtype for part in parts):
        return NotImplemented
    axis %= ndim
    turned: list[Any] = [operand_of(part, Turned) for part in parts]
    if axis == 1 and None not in turned:
        whole = consumers.turned_parts(turned)
        if whole is None:
            return NotImplemented
        mode.compare([whole], func, args, kwargs)
        return mode.tracked(whole)
    if axis == ndim - 1:
        activated = operand_of(parts[-1], Activated)
        if len(parts) != 2 or activated is None or activated.beside is not None or type(first) not in MEMORY:
            return NotImplemented
        operand = activated._replace(beside=first)
    elif axis and all(type(part) in MEMORY or operand_of(part, Normed) is not None for part in parts):
        operand = Joined(tuple(map(as_it_is, parts)), axis)
    else:
        return NotImplemented
    shape = torch.Size((*first.shape[:axis], sum(part.shape[axis] for part in parts), *first.shape[axis + 1 :]))
    return mode.note(parts[-1], operand, _cat_of, (axis, *parts), shape=shape)


def _cat_of_heads(mode: Deferring, parts: Any, axis: int) -> Any:
    """Concatenate heads of two streams, such as values: `torch.cat` is slow where they are parts of wider tensors."""
    if not all(type(part) in MEMORY and part.ndim == 4 and part.stride(-1) == 1 for part in parts):
        return NotImplemented
    axis, forms = axis % 4, {(part.dtype, part.device, part.select(axis, 0).shape) for part in parts if part.numel()}
    if axis == 3 or len(forms) != 1 or any(part.is_contiguous() or not part.numel() for part in parts):
        return NotImplemented
    first, sizes = parts[0], [part.shape[axis] for part in parts]
    shape = list(first.shape)
    shape[axis] = sum(sizes)
    by_tokens = axis == 2 and first.stride(1) < first.stride(2)  # as in the linears' outputs
    order = consumers.HEADS_BY_TOKENS if by_tokens else (0, 1, 2, 3)
    joined = torch.empty_permuted(shape, order, dtype=first.dtype, device=first.device)
    for place, part in zip(joined.split(sizes, axis), parts, strict=True):
        place.copy_(part)
    return mode.tracked(joined)


def _cat_of(axis: int, *parts: torch.Tensor) -> torch.Tensor:
    return torch.cat(parts, axis)


_DTYPES = {T.float: torch.float32, T.bfloat16: torch.bfloat16, T.half: torch.float16}


@on(T.to, T.type_as, *_DTYPES)
def _to(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    """Handle casts: many models norm in float32, as the fused ops do anyway."""
    x, *given = args
    given = [_DTYPES[func], *given] if func in _DTYPES else given
    if len(given) != 1 or kwargs:
        return NotImplemented
    (dtype,) = given
    if isinstance(dtype, torch.Tensor) and dtype.device == x.device:
        dtype = dtype.dtype
    if type(x) is Deferred and isinstance(dtype, torch.dtype):
        operand = x.note.operand
        if operand is not None and dtype == x.note.dtype:
            return x
        if type(operand) is Normed and operand.x.dtype == dtype:
            return mode.note(x, operand, func, args, dtype=dtype)
    elif dtype == torch.float32 != x.dtype and is_rows(x):
        return mode.note(x, Copied(x), func, args, dtype=torch.float32)
    return NotImplemented


@on(F.dropout)
def _dropout(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    return NotImplemented if kwargs["training"] else args[0]  # PyTorch shows all but the input by name


@on(T.contiguous)
def _contiguous(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if len(args) > 1 or kwargs:
        return NotImplemented
    if type(x) is Deferred:
        operand = operand_of(x, Activated, Normed, Joined)
        if operand is None:
            return NotImplemented
        x.note.viewed = True  # as PyTorch's, it may be the same memory
        return mode.note(x, operand, func, args, is_view=True)
    if type(x) not in MEMORY or x.ndim != 4 or x.is_contiguous() or not is_rows(x):
        return NotImplemented
    return mode.note(x, Copied(x), func, args)


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
    call = torch.repeat_interleave, (values, each), {"dim": 1}
    return mode.note(values, Spread(values, each, shape[1]), *call, shape)


@on(T.reshape, T.flatten)
def _reshape(mode: Deferring, func: Any, args: Args, kwargs: Kwargs) -> Any:
    x = args[0]
    if type(x) is Deferred:
        return _view(mode, func, args, kwargs)
    if x.ndim != 4 or x.stride(2) or x.shape[2] == 1 or not x.shape[1] or x.dtype not in FLOAT_DTYPES or not is_rows(x):
        return NotImplemented
    samples, groups, each, width = x.shape
    shape = args[1] if len(args) == 2 and not isinstance(args[1], int) else args[1:]
    fits = tuple(shape) in ((samples, -1, width), (samples, groups * each, width))
    return _spread(mode, x[:, :, 0], each) if fits else NotImplemented
