"""The function mode of one forward in which work is deferred: it sees calls of PyTorch's functions.

Calls with a tracked tensor, as the pack's linears return them, or with a deferred one are always seen. While a note
waits, the mode sees all other calls too, since one may write into what the note reads.
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
from .notes import (
    Deferred,
    Note,
    Tracked,
    called_on_values,
    deferred,
    forget_form,
    hidden_calls,
    tracking,
    values_of,
)
from .writes import HANDED_OUT, storages, written_arguments

Handler = Callable[["Deferring", Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]
"""Returns the result of a function of PyTorch's, perhaps deferred; NotImplemented where values are to be computed."""

HANDLERS: dict[Any, tuple[Handler, bool]] = {}
"""By function: a handler of calls with a tracked or a deferred argument, and whether one must be deferred."""

TRACKED: set[Any] = set()
"""Functions whose results are tracked where an argument is."""

LEAST_ROWS = 8
"""Tensors of fewer rows, such as vectors of modulations, are computed at once: a note costs more."""

NOTE_SECONDS = 8.5e-6
"""Host time of a note, about. Tensors that a GPU reads and writes faster, such as a prompt's beside an image, get none:
those below 2 million numbers on an RTX 3090, below 10 million on an H200."""


def are_enough(shape: torch.Size, is_cuda: bool) -> bool:
    """Whether a tensor of this shape, on a GPU or not, has enough rows of channels for work on it to wait."""
    if len(shape) < 2 or shape[-1] < 2:
        return False
    numbers = shape.numel()
    return numbers >= LEAST_ROWS * shape[-1] and (not is_cuda or 4 * numbers >= NOTE_SECONDS * memory_rate())


@functools.lru_cache(4096)
def _known(func: Any) -> tuple[Handler | None, bool, Any, bool]:
    """Look up a function: its entry of HANDLERS, its `written_arguments`, and whether its results are tracked."""
    handler, of_deferred = HANDLERS.get(func, (None, False))
    return handler, of_deferred, written_arguments(func), func in TRACKED


_MANY = 64  # notes, after which references to those that are gone are dropped


class Deferring(TorchFunctionMode):
    """A context for one forward of a model. As a function mode it is on while notes wait. With `checking` it also
    computes values as the model does, and compares operands with them."""

    def __init__(self, checking: bool = False) -> None:
        super().__init__()
        self._comparisons = Comparisons() if checking else None
        self._notes: list[weakref.ref[Note]] = []
        self._waiting_notes = 0
        self._is_on = False
        self._handed_out: set[int] = set()  # storages that something else than PyTorch may write into
        self.turned: weakref.ref[Note] | None = None  # queries that wait for keys at the same rotary positions
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
        """Handle a call with a tracked or a deferred argument."""
        with hidden_calls():
            handler, of_deferred, written, is_tracked = _known(func)
            some_deferred = Deferred in types
            if handler is not None and (some_deferred or not of_deferred) and args and "out" not in kwargs:
                result = NotImplemented if torch.is_grad_enabled() else handler(self, func, args, kwargs)
                if result is not NotImplemented:
                    return result
            writes = written or "out" in kwargs
            if writes:
                self.before_writes_of(func, args, kwargs)
            result = called_on_values(func, args, kwargs) if some_deferred else func(*args, **kwargs)
            if writes:
                forget_form((*args, *kwargs.values()))
            if func is torch.Tensor.__setitem__:  # a model's stream, filled part by part
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
        written = _known(func)[2]
        if written is not None:
            self.before_write(written(args, kwargs))
            if getattr(func, "__name__", "") in HANDED_OUT:
                self._handed_out.update(storages(args[:1]))
        if "out" in kwargs:
            self.before_write((kwargs["out"],))

    def before_write(self, targets: Any) -> None:
        """Compute what reads the memory of `targets`, which is written into next."""
        if not self._notes:
            return
        with hidden_calls():
            found = set(storages(targets))
            # The latest first: a value that is computed drops the notes that only it reads.
            for reference in reversed(self._notes):
                note = reference()
                if note is not None and note.is_in(found):
                    note.written()
                del note
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
        """Return a deferred tensor of the form of `like`, or of `shape` and `dtype`. Its value is `call` of `args`, of
        deferred ones as they are now; for a view as they are when it is read."""
        if not is_view:
            args = [argument.note if type(argument) is Deferred else argument for argument in args]
        like = like.note if type(like) is Deferred else like
        form = shape or like.shape, dtype or like.dtype, like.device
        note = Note(form, operand, (call, args, kwargs), self, is_view)
        if self._handed_out and note.is_in(self._handed_out):
            note.forward = None  # it does not wait, and is not counted
            note.written()
            return deferred(note)
        if self._comparisons is not None:
            note.kinds = self._comparisons.kinds(call, args, kwargs)
            if not self._comparisons.are_enough_of(note.kinds):
                note.check, note.expected = partial(self._comparisons.add, note.kinds), note.plain()
        self._waiting_notes += 1
        if len(self._notes) >= _MANY:
            self._notes = [reference for reference in self._notes if reference() is not None]
        self._notes.append(weakref.ref(note))
        if not self._is_on:
            self._is_on = True
            function_modes.push(self)
        return deferred(note)

    def waits_no_more(self) -> None:
        """Count one waiting note fewer; at zero leave the mode. A note waits until it is computed, gone or released."""
        self._waiting_notes -= 1
        if not self._waiting_notes:
            self._stop_watching()

    def _stop_watching(self, everywhere: bool = False) -> None:
        """Leave the mode if it is the innermost one; else the next note, or the end of the forward, leaves it."""
        if self._is_on and function_modes.remove(self, everywhere):
            self._is_on = False

    def settle(self) -> None:
        """Leave the mode if no note waits. Call it where no other mode has begun since."""
        if self._is_on and not self._waiting_notes:
            self._stop_watching()

    def rows_of(self, each: int, tokens: int, device: torch.device) -> torch.Tensor:
        """Return int32 [tokens], the row of a modulation that each token has, in groups of `each`."""
        key = each, tokens, device
        if key not in self._rows:
            self._rows[key] = torch.arange(tokens, dtype=torch.int32, device=device) // each
        return self._rows[key]

    def compare(self, results: Sequence[torch.Tensor], func: Any, args: Sequence, kwargs: Mapping[str, Any]) -> None:
        """Compare results of a fused op with those of the model's own call, in a forward that compares."""
        if self._comparisons is None:
            return
        kinds = self._comparisons.kinds(func, args, kwargs)
        if not self._comparisons.are_enough_of(kinds):
            plain = called_on_values(func, args, kwargs)
            for result, its in zip(results, [plain] if isinstance(plain, torch.Tensor) else plain, strict=True):
                self._comparisons.add(kinds, result, its)

    def agreed(self) -> bool | None:
        """Whether all that was compared differs by rounding at most; None if all of it is NaN."""
        return True if self._comparisons is None else self._comparisons.agree()

    def finish(self, output: Any) -> Any:
        """Compute all notes that are alive, and return the forward's output in plain tensors."""
        for note in [reference() for reference in self._notes]:
            if note is not None:
                note.value()
        return _plain(values_of(output))


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
