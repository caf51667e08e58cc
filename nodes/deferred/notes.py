"""Notes of pending ops, deferred tensors, whose values are pending, and tracked tensors, whose calls are seen.

A note has two sides: the model's own call, which computes the value, and the operand, which a fused op reads instead.
A consumer takes the operand and computes the value in one pass with its own work. Anybody else reads the value.
"""

import copy
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from ...kernels import Norm, function_modes, read_as_plain

hidden_calls = function_modes.unseen
_current_stream = function_modes.current_stream
_NOTHING: Any = None


class Note:
    """A pending op of a deferred tensor: a function, its arguments and its named ones."""

    __slots__ = (
        *("shape", "dtype", "device", "computed", "operand", "quantized", "is_view", "viewed", "forward", "kinds"),
        *("check", "expected", "_call", "_args", "_kwargs", "_stream", "__weakref__"),
    )

    def __init__(self, form: tuple, operand: Any, call: tuple, forward: Any, is_view: bool) -> None:
        self.shape, self.dtype, self.device = form  # of the value
        self.operand = operand  # the op as a fused op reads it; None once the value is computed
        self.forward = forward  # the one that counts this note as waiting; None once it is computed, gone or released
        self.is_view = is_view  # whether the value shares the memory of another one
        self.viewed = False  # whether another shares the memory of this one
        self._call, self._args, self._kwargs = call
        self.computed: torch.Tensor | None = None  # the value once it is computed
        self.quantized: dict[tuple, Any] | None = None  # rows as linears quantized them, by transform and bits
        self.kinds: tuple[int, ...] = ()  # in a forward that compares, of the call and of deferred work that it reads
        # Compares the operand's value with `expected`, the plain one, when it is taken; None where nothing is.
        self.check: Callable[[torch.Tensor, torch.Tensor], None] | None = None
        self.expected: torch.Tensor | None = None
        self._stream = _current_stream(self.device.index) if self.device.type == "cuda" else None

    def value(self) -> torch.Tensor:
        """Return the value. The first call computes it as the model does, on the stream of the model's call."""
        if self.computed is not None:
            return self.computed
        if self.expected is not None and not self.is_view:
            return self.resolve(self.expected)
        if self.is_here():
            return self.resolve(self._called(Note.value))
        now, number = torch.cuda.current_stream(self.device), self._stream
        its = torch.cuda.ExternalStream(number, self.device) if number else torch.cuda.default_stream(self.device)
        with torch.cuda.stream(its):
            value = self._called(Note.value)
        now.wait_stream(its)
        return self.resolve(value)

    def resolve(self, value: torch.Tensor) -> torch.Tensor:
        """Store the value, wherever it was computed, drop the call that would compute it, and return the value."""
        self.computed = value
        self._call = self._args = self._kwargs = self.operand = _NOTHING
        self.quantized = self.expected = None
        self._end()
        return value

    def plain(self) -> torch.Tensor:
        """Return the value for a comparison. Nothing that is computed for it is stored in notes."""
        if self.computed is not None:
            return self.computed
        return self.expected if self.expected is not None and not self.is_view else self._called(Note.plain)

    def _called(self, read: "Callable[[Note], torch.Tensor]") -> torch.Tensor:
        with hidden_calls():
            return self._call(*[values_of(argument, read) for argument in self._args], **self._kwargs)

    def is_here(self) -> bool:
        """Whether the current stream is the note's."""
        return self._stream is None or self._stream == _current_stream(self.device.index)

    def taken(self, *kinds: type) -> Any:
        """Return the operand if it is of these kinds; None if not, if the value is computed, or on another stream."""
        operand = self.operand
        if type(operand) not in kinds or not self.is_here():
            return None
        if self.check is not None:
            own = operand.value()
            if own is None:
                return None
            self.check(own, self.plain())
        return operand

    def release(self) -> None:
        """Release this note and its inputs: the forward waits for them no more."""
        if self.forward is not None:
            self._end()
            for made_of in self._args or ():
                if type(made_of) is Note:
                    made_of.release()

    def _end(self) -> None:
        forward, self.forward = self.forward, None
        if forward is not None:
            forward.waits_no_more()

    __del__ = _end

    def is_in(self, storages: set[int]) -> bool:
        """Whether the value or an input lies in one of these storages. Inputs without a value are asked themselves."""
        given = (self.computed, self._args, *(self._kwargs or {}).values(), self.operand)
        return any(storage_of(tensor) in storages for tensor in _leaves(given))

    def written(self) -> None:
        """Compute the value, or copy its inputs: either is written into next."""
        operand: Any = self.operand
        if self.quantized and self.is_here() and not (self.viewed or self.is_view) and hasattr(operand, "copied"):
            # A linear took it, and perhaps nobody reads it again: copying the inputs takes less than the value.
            self.operand = operand.copied()
            self._call, self._kwargs = (lambda operand, dtype: operand.value().to(dtype)), {}
            self._args = self.operand, self.dtype
        else:
            self.value()


class _Tracking(threading.local):
    """The current forward of each thread; None outside of one."""

    forward: Any = None


tracking = _Tracking()


class _Seen(torch.Tensor):
    """A tensor whose calls the current forward sees."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if torch.compiler.is_dynamo_compiling():  # a function in a forward; no guard can be on the latter
            with function_modes.unseen_as_subclass():
                return func(*args, **(kwargs or {}))
        forward, kwargs = tracking.forward, kwargs or {}
        if forward is not None:
            return forward.called(func, types, args, kwargs)
        result = called_on_values(func, args, kwargs)
        forget_form((*args, *kwargs.values()))
        return result

    def _plain(self) -> torch.Tensor:
        with hidden_calls():
            return self.as_subclass(torch.Tensor)

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """The same, shown to the forward: PyTorch shows this write to nobody."""
        return self.__torch_function__(torch.Tensor.set_, (type(self),), (self, *args), kwargs)

    ndim = property(lambda self: len(self.shape))  # pyright: ignore[reportAssignmentType]
    is_cuda = property(lambda self: self.device.type == "cuda")  # pyright: ignore[reportAssignmentType]

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return len(self.shape)

    ndimension = dim

    def numel(self) -> int:
        return self.shape.numel()

    nelement = numel

    def get_device(self) -> int:
        index = self.device.index
        return -1 if index is None else index

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        return self.shape[0]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._plain().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict) -> torch.Tensor:
        return copy.deepcopy(self._plain(), memo)


_FORM = ("shape", "dtype", "device", "is_cuda")


def _asked_once(name: str) -> Any:
    """A cached property that asks PyTorch for a tensor's attribute."""

    def ask(tensor: torch.Tensor) -> Any:
        with hidden_calls():
            return getattr(torch.Tensor, name).__get__(tensor)

    return functools.cached_property(ask)


class Tracked(_Seen):
    """The output of a linear of this pack, or a view or a sum of one. Outside of its forward it is any tensor."""

    shape, dtype, device, is_cuda = map(_asked_once, _FORM)  # pyright: ignore[reportAssignmentType]

    def detach(self) -> "Tracked":
        """The same of this type, which PyTorch asks for where it makes a Parameter of a tensor."""
        with hidden_calls():
            return super().detach().as_subclass(Tracked)


def forget_form(values: Iterable[Any]) -> None:
    """Drop what is cached of the form of tensors among these: a call may have changed it."""
    for value in values:
        if type(value) is Tracked:
            own: Any = value.__dict__
            for name in _FORM:
                own.pop(name, None)
        elif type(value) is Deferred:
            note, now = value.note, value.note.value()
            note.shape, note.dtype = now.shape, now.dtype
        elif isinstance(value, (list, tuple)):
            forget_form(value)


read_as_plain(Tracked)
MEMORY = (torch.Tensor, Tracked)
"""The types of activations in memory."""


def as_tracked(x: Any) -> Any:
    """Return a tracked tensor in the same memory, in a forward in which work is deferred; else the tensor itself."""
    if tracking.forward is None or type(x) is not torch.Tensor or not x.is_floating_point():
        return x
    return x.as_subclass(Tracked)


class Deferred(_Seen):
    """A tensor without memory. Its `note` has its form and computes its value."""

    note: Note

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return called_on_values(func, args, kwargs or {})

    shape = property(lambda self: self.note.shape)  # pyright: ignore[reportAssignmentType]
    dtype = property(lambda self: self.note.dtype)  # pyright: ignore[reportAssignmentType]
    device = property(lambda self: self.note.device)  # pyright: ignore[reportAssignmentType]
    requires_grad = False  # pyright: ignore[reportAssignmentType]

    def _plain(self) -> torch.Tensor:
        return self.note.value()

    def stride(self, *args: Any, **kwargs: Any) -> Any:
        """The value's, in whose memory this tensor lies from then on: functions in C++ that PyTorch does not see, such
        as SageAttention's, are given the tensor next, and read its address without a call."""
        value = self.note.value()
        function_modes.give_memory(self, value)
        return value.stride(*args, **kwargs)


def deferred(note: Note) -> Deferred:
    """Return a deferred tensor of a note."""
    tensor = function_modes.without_memory(Deferred, note.shape, dtype=note.dtype, device=note.device)
    tensor.note = note
    return tensor


def called_on_values(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Call one of PyTorch's functions on the values of deferred arguments."""
    with hidden_calls():
        return func(*map(values_of, args), **{name: values_of(value) for name, value in kwargs.items()})


def values_of(value: Any, read: Callable[[Note], torch.Tensor] = Note.value) -> Any:
    """Replace deferred tensors and notes by their values, also in lists, tuples and dicts."""
    kind = type(value)
    if kind is Deferred:
        return read(value.note)
    if kind is Note:
        return read(value)
    if kind in (list, tuple):
        return kind([values_of(part, read) for part in value])
    if kind is dict:
        return {name: values_of(part, read) for name, part in value.items()}
    return value


def storage_of(tensor: torch.Tensor) -> int:
    """Return the address at which a tensor's memory begins."""
    return tensor.untyped_storage().data_ptr()


def _leaves(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in memory that a value, an argument or an operand consists of."""
    if type(value) is Deferred:
        value = value.note
    if type(value) is Note:  # a view lies where that lies of which it is one
        value = value._args if value.is_view and value.computed is None else value.computed
    if type(value) is Norm:
        value = value.weight, value.bias
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _leaves(part)
