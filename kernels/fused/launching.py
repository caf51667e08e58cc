"""Launching Triton kernels, again and again, with little of the host's time: the one cache of what was launched.

A room of kernels makes a `Launcher` of each, once, beside it, and calls that:

    _QUANTIZER = Launcher(quantize_rows_kernel, quantize_rows_constants)
    _QUANTIZER((channels, has_smooth, ...), (rows, 1), (x, smooth, q, scale), (channels, stride))

The first argument is the form: what `quantize_rows_constants(*form)` makes the constants and options of, all hashable,
none a tensor. Then come the grid, the tensors and the numbers; a kernel's parameters stand in that order, its constants
last. A missing tensor is any other, and the form says that it is missing.

A launch is found again by form, device, dtypes, and by what Triton compiles for: which tensors begin on 16 bytes, and
which numbers are 1 or divisible by 16. So another number of tokens finds the same one. Parameters that vary from prompt
to prompt (M, T) should be in the kernel's `do_not_specialize`, so that Triton does not compile for them either.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from ..internals.triton_runtime import direct_launch

Grid = tuple[int, int]
Build = tuple[Mapping[str, object], Mapping[str, object]]
"""A kernel's constants, in the order of its parameters, and its compilation options."""

# Shapes of many models would otherwise add up.
MOST_KEPT = 2048
_kept: dict[tuple, Any] = {}


def kept(key: tuple, make: Callable[[], Any]) -> Any:
    """What is kept under `key`, which `make` makes the first time. It must hold no tensors."""
    value = _kept.get(key)
    if value is None:
        value = make()
        if len(_kept) >= MOST_KEPT:
            _kept.clear()
        _kept[key] = value
    return value


def forget_launches() -> None:
    """Begin anew, as a new process does."""
    _kept.clear()


class Launch:
    """A kernel with its constants, as Triton compiles it for the tensors and numbers of its first launch.

    Triton's own launch takes tens of microseconds of the host's time to classify each argument. `direct` goes straight
    to the compiled kernel; it is None until the first launch, and where Triton has to launch it each time.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, object], options: Mapping[str, object]) -> None:
        self._kernel, self._constants, self._options = kernel, dict(constants), dict(options)
        self.direct: Callable[..., None] | None = None

    def first(self, grid: Grid, *arguments: object) -> None:
        """Launch on the current device by Triton; `arguments` are the tensors and the numbers."""
        compiled = self._kernel[grid](*arguments, **self._constants, **self._options)
        self.direct = direct_launch(compiled, len(arguments), self._constants)

    def __call__(self, grid: Grid, *arguments: object) -> None:
        """Launch on the current device. All that Triton compiles for is as at the first launch."""
        if self.direct is None:
            self.first(grid, *arguments)
        else:
            self.direct(*grid, *arguments)


class Launcher:
    """A kernel's launches; see above.

    Args:
        kernel: a `triton.jit` function whose parameters are tensors, then numbers, then constants.
        build: form -> the kernel's constants, in the order of its parameters, and its compilation options.
    """

    def __init__(self, kernel: Any, build: Callable[..., Build]) -> None:
        self._kernel, self._build = kernel, build

    def __call__(
        self, form: tuple, grid: Grid, tensors: Sequence[torch.Tensor], numbers: tuple[float, ...] = ()
    ) -> None:
        """Launch on the tensors' device and its current stream; the tensors are on one device, which is not checked."""
        with on_device(tensors[0].device):
            pointers = [tensor.data_ptr() for tensor in tensors]
            launch = self._prepared(form, tensors, pointers, numbers)
            if launch.direct is None:
                launch.first(grid, *tensors, *numbers)
            else:
                launch.direct(*grid, *pointers, *numbers)

    def prepared(self, form: tuple, tensors: Sequence[torch.Tensor], numbers: tuple[float, ...] = ()) -> Launch:
        """The launch for tensors and numbers like these."""
        return self._prepared(form, tensors, [tensor.data_ptr() for tensor in tensors], numbers)

    def _prepared(
        self, form: tuple, tensors: Sequence[torch.Tensor], pointers: list[int], numbers: tuple[float, ...]
    ) -> Launch:
        dtypes = tuple([tensor.dtype for tensor in tensors])
        key = (self, tensors[0].get_device(), form, dtypes, _begin_on_16(pointers), _specialized(numbers))
        launch = _kept.get(key)
        return kept(key, lambda: Launch(self._kernel, *self._build(*form))) if launch is None else launch


def _begin_on_16(pointers: list[int]) -> tuple[bool, ...] | None:
    """Which do; None for all, as nearly always."""
    together = 0
    for pointer in pointers:
        together |= pointer
    return tuple([pointer % 16 == 0 for pointer in pointers]) if together % 16 else None


@functools.lru_cache(4096)
def _specialized(numbers: tuple[float, ...]) -> tuple[tuple[bool, bool, bool], ...]:
    """What Triton compiles for of numbers: whether they are 1, divisible by 16, and in how many bits."""
    return tuple((number == 1, number % 16 == 0, number < 2**31) for number in numbers)


def on_device(device: torch.device) -> AbstractContextManager:
    """A context in which `device` is the current one. Costs next to nothing where it already is, and on a CPU."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


class RepeatedLaunch:
    """A Launch on one grid; for rooms that make no Launcher yet."""

    def __init__(self, kernel, grid: tuple[int, int], constants: Mapping[str, object], options: Mapping[str, object]):
        self._grid, self._launch = grid, Launch(kernel, constants, options)

    def __call__(self, *arguments: object) -> None:
        self._launch(self._grid, *arguments)


def remembered(launches: dict, key: tuple, tensors: Sequence[torch.Tensor], prepare: Callable[[], Any]) -> Any:
    """The launch kept under `key` for tensors that begin on 16 bytes; any others get one of their own each time."""
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        return prepare()
    launch = launches.get(key)
    if launch is None:
        launch = launches[key] = prepare()
    return launch
