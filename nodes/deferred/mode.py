"""One forward of a model in which work is deferred: which calls of PyTorch's functions are seen, and by whom.

Tensors that the pack's linears give are Tracked: what is called with one is seen here, and so is what is called with a
deferred one. As long as a note waits, a mode shows all other calls too, since one may write into what the note reads.
"""

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ...kernels import FLOAT_DTYPES, function_modes, memory_rate
from .comparisons import Comparisons
from .notes import Deferred, Note, Tracked, called_on_values, deferred, forget_form, outside, tracking, valued
from .writes import HANDED_OUT, storages, written_arguments

Handler = Callable[["Deferring", Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""What a function of PyTorch's becomes: its result, perhaps deferred; NotImplemented where its values are wanted."""

HANDLERS: dict[Any, Handler] = {}
"""By function: those that are asked where an argument is tracked or deferred."""

OF_DEFERRED: dict[Any, Handler] = {}
"""By function: those that are asked only where an argument is deferred."""

TRACKED: set[Any] = set()
"""The functions whose results are tracked where an argument is."""

LEAST_ROWS = 8
"""Fewer rows, such as the vectors that modulations are made of, are computed at once: a note costs more."""

NOTE_SECONDS = 8.5e-6
"""What a note costs the host, about. A tensor on a GPU that is read and written faster, such as a prompt's beside an
image, is not worth one: of 2 million numbers on an RTX 3090, of 10 million on an H200."""


def are_enough(shape: torch.Size, is_cuda: bool) -> bool:
    """Whether a tensor of a shape, on a GPU or not, has enough rows of channels for work on it to wait."""
    if len(shape) < 2 or shape[-1] < 2:
        return False
    numbers = shape.numel()
    return numbers >= LEAST_ROWS * shape[-1] and (not is_cuda or 4 * numbers >= NOTE_SECONDS * memory_rate())


@functools.lru_cache(4096)
def _known(func: Any) -> tuple[Handler | None, Handler | None, bool, bool]:
    """A function's entries: its handlers, whether it may write into arguments, and whether its results are tracked."""
    return HANDLERS.get(func), OF_DEFERRED.get(func), written_arguments(func) is not None, func in TRACKED


_MANY = 64  # notes, after which those that are gone are forgotten


class Deferring(TorchFunctionMode):
    """A context: one forward of a model. As a mode it is on while notes wait.

    Args:
        checking: whether this forward also computes values as the model itself does, and compares what fused ops take
            with them.
    """

    def __init__(self, checking: bool = False) -> None:
        super().__init__()
        self._comparisons = Comparisons() if checking else None
        self._notes: list[weakref.ref[Note]] = []
        self._waiting_notes = 0
        self._is_on = False
        self._handed_out: set[int] = set()  # host memory that something else than PyTorch may write into
        self.turned: weakref.ref[Note] | None = None  # rotary positions that wait for the next ones
        self._rows: dict[tuple, torch.Tensor] = {}

    def __enter__(self) -> "Deferring":
        self._before, tracking.forward = tracking.forward, self
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        tracking.forward = self._before
        self._stop_watching(everywhere=True)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if types:
            return self.called(func, types, args, kwargs or {})
        if _known(func)[2] or (kwargs and "out" in kwargs):
            self.before_writes_of(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)

    def called(self, func: Any, types: Sequence[type], args: Any, kwargs: Mapping[str, Any]) -> Any:
        """A call with a tracked or a deferred argument."""
        with outside():
            handler, of_deferred, writes, is_tracked = _known(func)
            some_deferred = Deferred in types
            if handler is None and some_deferred:
                handler = of_deferred
            if handler is not None and args and "out" not in kwargs and not torch.is_grad_enabled():
                result = handler(self, func, args, kwargs)
                if result is not NotImplemented:
                    return result
            writes = writes or "out" in kwargs
            if writes:
                self.before_writes_of(func, args, kwargs)
            result = called_on_values(func, args, kwargs) if some_deferred else func(*args, **kwargs)
            if writes:  # a call may have given them another form
                forget_form((*args, *kwargs.values()))
            if func is torch.Tensor.__setitem__:  # parts that a model's stream is put together of
                self.tracked(args[0])
            return self.tracked(result) if is_tracked else result

    def tracked(self, result: Any) -> Any:
        """Track a result where it has enough rows of channels, and return it."""
        kind = type(result)
        if kind is torch.Tensor:
            shape, dtype, is_cuda = result.shape, result.dtype, result.is_cuda
            if dtype in FLOAT_DTYPES and are_enough(shape, is_cuda):
                result.__class__ = Tracked
                known = result.__dict__  # what was asked here need not be asked again
                known["shape"], known["dtype"], known["is_cuda"] = shape, dtype, is_cuda
        elif kind in (tuple, list):
            for part in result:
                self.tracked(part)
        return result

    def before_writes_of(self, func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> None:
        """Compute what reads memory that a call writes into."""
        written = written_arguments(func)
        if written is not None:
            self.before_write(written(args, kwargs))
            if getattr(func, "__name__", "") in HANDED_OUT:
                self._handed_out.update(storages(args[:1]))
        if "out" in kwargs:
            self.before_write((kwargs["out"],))

    def before_write(self, targets: Any) -> None:
        """Compute what reads memory that is written into now."""
        if not self._notes:
            return
        with outside():
            found = set(storages(targets))
            # The latest first: what it was made of is gone with it, if nobody else has that.
            for reference in reversed(self._notes):
                _write_into(found, reference())
            self._notes = [note for note in self._notes if getattr(note(), "operand", None) is not None]

    def note(
        self,
        like: Any,
        operand: Any,
        call: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any] = {},
        shape: torch.Size | None = None,
        dtype: torch.dtype | None = None,
        is_view: bool = False,
    ) -> Deferred:
        """A deferred tensor of the form of `like`, if no other is named. Its value is `call` of `args`: with what a
        deferred tensor among them is now, or for a view with what that is when the value is read."""
        if not is_view:
            args = [argument.note if type(argument) is Deferred else argument for argument in args]
        like = like.note if type(like) is Deferred else like
        form = shape or like.shape, dtype or like.dtype, like.device
        note = Note(form, operand, (call, args, kwargs), self, is_view)
        if self._handed_out and note.is_in(self._handed_out):
            note.written()
            return deferred(note)
        if self._comparisons is not None:
            note.kinds = self._comparisons.kinds(call, args, kwargs)
            if not self._comparisons.are_enough_of(note.kinds):
                note.expect(partial(self._comparisons.add, note.kinds))
        self._waiting_notes += 1
        if len(self._notes) >= _MANY:
            self._notes = list(map(weakref.ref, self._alive()))
        self._notes.append(weakref.ref(note))
        if not self._is_on:
            self._is_on = True
            function_modes.push(self)
        return deferred(note)

    def waits_no_more(self) -> None:
        """Count one waiting note less; at zero leave the mode. A note waits until it is computed, gone or released."""
        self._waiting_notes -= 1
        if not self._waiting_notes:
            self._stop_watching()

    def _stop_watching(self, everywhere: bool = False) -> None:
        """End the mode if it is the last one; where it is not, it goes with the next note, or with the forward."""
        if self._is_on and function_modes.remove(self, everywhere):
            self._is_on = False

    def settle(self) -> None:
        """End the mode if no note waits, at a place where modes may end."""
        if self._is_on and not self._waiting_notes:
            self._stop_watching()

    def rows_of(self, each: int, tokens: int, device: torch.device) -> torch.Tensor:
        """Which row of a modulation each token has, of groups of `each`: int32 [tokens]."""
        key = each, tokens, device
        if key not in self._rows:
            self._rows[key] = torch.arange(tokens, dtype=torch.int32, device=device) // each
        return self._rows[key]

    def _alive(self) -> list[Note]:
        return [note for reference in self._notes if (note := reference()) is not None]

    def compare(
        self, results: Sequence[torch.Tensor], func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Compare what a fused op gave with what the model's own call gives, in a forward that does so."""
        if self._comparisons is None:
            return
        kinds = self._comparisons.kinds(func, args, kwargs)
        if not self._comparisons.are_enough_of(kinds):
            plain = called_on_values(func, args, kwargs)
            for result, its in zip(results, [plain] if isinstance(plain, torch.Tensor) else plain, strict=True):
                self._comparisons.add(kinds, result, its)

    def agreed(self) -> bool | None:
        """Whether all that was compared differs by rounding at most; None where there are no numbers to tell."""
        return True if self._comparisons is None else self._comparisons.agree()

    def finish(self, output: Any) -> Any:
        """A forward's output in values and in plain tensors; what outlives the forward is computed now."""
        for note in self._alive():
            note.value()
            note.let_go()
        return _plain(valued(output))


def _write_into(storages: set[int], note: Note | None) -> None:
    if note is not None and note.is_in(storages):
        note.written()


def _plain(output: Any) -> Any:
    kind = type(output)
    if kind is Tracked:
        forget_form((output,))
        output.__class__ = torch.Tensor
    elif kind in (tuple, list):
        for part in output:
            _plain(part)
    elif kind is dict:
        for part in output.values():
            _plain(part)
    return output
