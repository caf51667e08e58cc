"""Launching Triton kernels, again and again, with little of the host's time.

Each kernel has one `Launcher`, beside it:

    _ATTENTION = Launcher(attention_kernel, attention_constants)
    _ATTENTION((tiles, width, ...), (programs, 1), (q, k, v, ...), (heads, tokens, ...))

The arguments are the form, the grid, the tensors and the numbers. `attention_constants(*form)` returns the constants
and options; a form is hashable and holds no tensor. The kernel's parameters are the tensors, the numbers and the
constants, in this order. In place of a missing tensor any other is passed, and the form says that it is missing.

Launches are cached by form, device, dtypes, and by what Triton specializes a kernel for: which tensors begin on 16
bytes, and which numbers are 1 or divisible by 16. So another number of tokens finds the same launch. A parameter that
varies from prompt to prompt should be in the kernel's `do_not_specialize` where that costs no instructions: T of the
fused ops and the GEMM's M are.
"""

import functools
import operator
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass
from typing import Any

import torch

from ..call_cache import CACHE, store
from ..internals.function_modes import without_memory
from ..internals.torch_functions import current_device
from ..internals.triton_runtime import (
    COMPILES_ALONE,
    Expand,
    compile_alone,
    compile_launcher,
    direct_launch,
    hashing,
    is_unfit,
    unspecialized,
)
from ..operators import Result, Tensors
from .background import Background, beside_loading, foreground

Grid = tuple[int, int]
Build = tuple[Mapping[str, object], Mapping[str, object]]
"""A kernel's constants, in the order of its parameters, and its compilation options."""


def built(kernel: Any, *values: object, **options: object) -> Build:
    """Return a kernel's constants, which are its last parameters in this order, and the options."""
    return dict(zip(kernel.arg_names[-len(values) :], values, strict=True)), options


class StandIn(torch.Tensor):
    """A tensor without data, for compiling: contiguous, on 16 bytes, with views of other shapes or dtypes."""

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, given: Sequence[Any], named: Any = None) -> "StandIn":
        x, *others = given
        like = op(torch.empty(x.shape, dtype=x.dtype, device="meta"), *others, **(named or {}))
        return cls(like.shape, like.dtype, x.device)

    @staticmethod
    def __new__(cls, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> "StandIn":
        return without_memory(cls, shape, dtype=dtype, device=device)

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "StandIn":
        """Return a stand-in for a tensor."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    def data_ptr(self) -> int:
        return 0


class Launch:
    """A kernel with its constants, as Triton compiles it for the tensors and numbers of its first launch.

    Triton's own launch takes tens of microseconds of the host's time to classify each argument. `direct` goes straight
    to the compiled kernel; it and `expansions` are those of `direct_launch`, None before the first launch.
    `is_compiled` says whether a first launch has only to load the kernel.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, object], options: Mapping[str, object]) -> None:
        self._kernel, self._constants, self._options = kernel, dict(constants), dict(options)
        self.direct: Callable[..., None] | None = None
        self.expansions: Sequence[Expand] | None = None
        self.is_compiled = self._is_asked_for = False
        self._unfit: Exception | None = None
        self._lock = threading.Lock()

    def first(self, grid: Grid, *arguments: object) -> None:
        """Launch by Triton, on the current device; `arguments` are the tensors and the numbers."""
        with foreground.waiting(), self._lock:  # it compiles the kernel, or waits for the thread that does
            if self._unfit is not None:
                raise self._unfit
            with hashing:  # or this thread would hash Triton, too
                pass
            compiled = self._kernel[grid](*arguments, **self._constants, **self._options)
            # The second is set last: a thread that finds it reads the first.
            self.expansions, self.direct = direct_launch(compiled, self._constants)
            self.is_compiled = True

    def compile_by(self, threads: Background, rank: float, device: torch.device, *arguments: object) -> None:
        """Compile the kernel in background threads for launches on `device`, once, where Triton can do that.

        `arguments` are those of a launch, with a `StandIn` for each tensor.
        """
        if COMPILES_ALONE and not (self.is_compiled or self._is_asked_for):
            self._is_asked_for = True
            threads.submit(rank, functools.partial(self._compile, device, arguments))

    def _compile(self, device: torch.device, arguments: tuple) -> None:
        with self._lock, torch.cuda.device(device):
            if self.is_compiled:
                return
            try:
                compiled = compile_alone(self._kernel, arguments, {**self._constants, **self._options})
            except Exception as error:
                if not is_unfit(error):  # the launch will meet it again
                    raise
                self._unfit = error
            else:
                compile_launcher(compiled)
            finally:
                self.is_compiled = True

    def __call__(self, grid: Grid, *arguments: object) -> None:
        """Launch on the current device. What Triton specializes for is as at the first launch."""
        if self.direct is None:
            self.first(grid, *arguments)
        else:
            self.direct(*grid, *arguments)


class Launcher:
    """The cached launches of a `triton.jit` kernel; see above."""

    def __init__(self, kernel: Any, build: Callable[..., Build]) -> None:
        self.kernel, self.build = kernel, build
        self._unspecialized = unspecialized(kernel)

    def __call__(
        self, form: tuple, grid: Grid, tensors: Sequence[torch.Tensor], numbers: tuple[float, ...] = ()
    ) -> None:
        """Launch on the tensors' device and its current stream; the tensors are on one device, which is not checked."""
        pointers = [tensor.data_ptr() for tensor in tensors]
        with on_device(tensors[0].device):
            launch = self.prepared(form, tensors, numbers, pointers)
            launch(grid, *(tensors if launch.direct is None else pointers), *numbers)

    def prepared(
        self,
        form: tuple,
        tensors: Sequence[torch.Tensor],
        numbers: tuple[float, ...] = (),
        pointers: list[int] | None = None,
    ) -> Launch:
        """Return the launch for tensors and numbers like these; `pointers` are where the tensors begin."""
        begin = begin_on_16([tensor.data_ptr() for tensor in tensors] if pointers is None else pointers)
        dtypes = tuple([tensor.dtype for tensor in tensors])
        specialized = _specialized(numbers, len(tensors), self._unspecialized)
        key = (self, tensors[0].get_device(), form, dtypes, begin, specialized)
        return CACHE.get(key) or store(key, Launch(self.kernel, *self.build(*form)))


def constant_launcher(kernel: Any, **options: object) -> Launcher:
    """Return a Launcher of a kernel whose form is its constants and, behind them, the number of warps."""
    return Launcher(kernel, lambda *form: built(kernel, *form[:-1], num_warps=form[-1], **options))


@dataclass(eq=False)
class Layout:
    """A kernel's launch, as a Launcher is called, on tensors of one layout, wherever they begin."""

    launcher: Launcher
    form: tuple
    grid: Grid
    numbers: tuple[float, ...]
    tensors: InitVar[Tensors]  # like those of all launches, None for a missing one
    as_read: Callable[[Tensors], Tensors]  # tensors -> the kernel's arguments, such as contiguous copies

    def __post_init__(self, tensors: Tensors) -> None:
        read = self.as_read(tensors)
        # Then all such tensors are read as they are, if they begin on 16 bytes.
        self._as_they_are = len(read) == len(tensors) and all(map(operator.is_, read, tensors))
        self._aligned: Launch | None = None  # that of tensors which all begin on 16 bytes

    @property
    def direct(self) -> Callable[..., None] | None:
        """The direct launch on addresses that are multiples of 16; None where that is not known."""
        return None if self._aligned is None else self._aligned.direct

    def operands(self, tensors: Tensors, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the kernel's arguments, the first tensor in place of a missing one."""
        read = self.as_read(tensors)
        first: Any = read[0]
        return [*[first if tensor is None else tensor for tensor in read], *results]

    def __call__(self, tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
        """Launch on the tensors to fill the results behind them."""
        launch = self._aligned
        if launch is not None and launch.direct is not None and self._as_they_are:
            first = tensors[0].data_ptr()
            pointers = [first if tensor is None else tensor.data_ptr() for tensor in (*tensors, *results)]
            if begin_on_16(pointers) is None:
                with on_device(results[0].device):
                    launch.direct(*self.grid, *pointers, *self.numbers)
                return
        operands = self.operands(tensors, results)
        pointers = [tensor.data_ptr() for tensor in operands]
        aligned = begin_on_16(pointers) is None
        with on_device(operands[0].device):
            if launch is None or not aligned:
                launch = self.launcher.prepared(self.form, operands, self.numbers, pointers)
                self._aligned = launch if aligned else self._aligned
            launch(self.grid, *(operands if launch.direct is None else pointers), *self.numbers)

    def compile_by(self, threads: Background, rank: float, tensors: Tensors, results: Sequence[torch.Tensor]) -> Launch:
        """Compile the kernel in background threads; the tensors are `StandIn`s. Returns the launch."""
        operands = self.operands(tensors, results)
        launch = self.launcher.prepared(self.form, operands, self.numbers)
        launch.compile_by(threads, rank, operands[0].device, *operands, *self.numbers)
        return launch

    def need_not_wait(self, tensors: Tensors, results: Sequence[Result]) -> bool:
        """Whether the launch is compiled, or has to compile itself. If not, background threads compile it."""
        if not (COMPILES_ALONE and tensors[0].is_cuda):
            return True
        stand_ins = [None if tensor is None else StandIn.of(tensor) for tensor in tensors]
        made = [StandIn(shape, dtype, tensors[0].device) for shape, dtype in results]
        return self.compile_by(beside_loading, 0, stand_ins, made).is_compiled


def contiguous(tensors: Tensors) -> Tensors:
    """Return each tensor contiguous."""
    return [tensor if tensor is None else tensor.contiguous() for tensor in tensors]


def dense(tensors: Tensors) -> Tensors:
    """Return each tensor with a stride of 1 along its last axis, copied only where it has another."""
    return [tensor if tensor is None or tensor.stride(-1) == 1 else tensor.contiguous() for tensor in tensors]


def begin_on_16(pointers: list[int]) -> tuple[bool, ...] | None:
    """Return which do; None for all, as nearly always."""
    together = 0
    for pointer in pointers:
        together |= pointer
    return tuple([pointer % 16 == 0 for pointer in pointers]) if together % 16 else None


@functools.lru_cache(4096)
def _specialized(numbers: tuple[float, ...], first: int, unspecialized: frozenset[int]) -> tuple[tuple[bool, ...], ...]:
    """Return what Triton specializes for of numbers, the parameters from `first` on: whether each fits 32 bits and,
    unless it is unspecialized, is 1 or divisible by 16."""
    return tuple(
        (number < 2**31,) if place in unspecialized else (number < 2**31, number == 1, number % 16 == 0)
        for place, number in enumerate(numbers, first)
    )


_NO_CHANGE = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager:
    """Return a context in which `device` is the current one; nearly free where it already is, and on a CPU."""
    return _NO_CHANGE if device.type != "cuda" or current_device() == device.index else torch.cuda.device(device)
