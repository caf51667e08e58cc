"""Launching a Triton kernel many times over: what the first launch found out about its arguments is not asked again."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import triton
from triton.compiler import CompiledKernel

Prepared = TypeVar("Prepared")


class RepeatedLaunch:
    """A kernel on one grid with fixed constants. Triton's own launch takes tens of microseconds of the host's time to
    classify each argument; all launches but the first go straight to the compiled kernel.

    Triton compiles for what it sees in the first call: all later ones must pass the same integers, tensors of the same
    dtypes, and tensors that begin on 16 bytes where the first ones did.

    Args:
        kernel: a `triton.jit` function whose constants come after all other parameters.
        grid: two numbers of programs.
        constants: the kernel's constants in the order of its parameters.
        options: compilation options such as num_warps.
    """

    def __init__(self, kernel, grid: tuple[int, int], constants: Mapping[str, object], options: Mapping[str, object]):
        self._kernel = kernel
        self._grid = grid
        self._constants = dict(constants)
        self._options = dict(options)
        self._launch = None
        self._appended = ()

    @property
    def is_new(self) -> bool:
        """Whether the next launch is Triton's own, which looks at its arguments to compile for them."""
        return self._launch is None

    def __call__(self, *arguments: object) -> None:
        """Launch on the current device and stream; `arguments` are the parameters before the constants."""
        if self._launch is not None:
            self._launch(*arguments, *self._appended)
            return
        compiled = self._kernel[self._grid](*arguments, **self._constants, **self._options)
        if isinstance(compiled, CompiledKernel):  # not so under the interpreter, or while compiling in the background
            # Triton before 3.3 launches compiled kernels without the constants. One count too many or too few is no
            # error in all versions, so the number of parameters decides.
            takes_constants = len(compiled.src.signature) > len(arguments)
            self._appended = tuple(self._constants.values()) if takes_constants else ()
            self._launch = _direct_launch(compiled, self._grid)


def _direct_launch(compiled: CompiledKernel, grid: tuple[int, int]) -> Callable[..., None]:
    """A compiled kernel's launch on the device on which it was launched first, without the hooks of Triton's profiler:
    asking for them takes longer than the launch."""
    driver: Any = triton.runtime.driver.active
    device, stream_of = driver.get_current_device(), driver.get_current_stream
    run: Any = compiled.run
    function, metadata = compiled.function, compiled.packed_metadata

    def launch(*arguments: object) -> None:
        run(*grid, 1, stream_of(device), function, metadata, None, None, None, *arguments)

    return launch


def on_device(device: torch.device) -> AbstractContextManager:
    """A context in which `device` is the current one. Costs next to nothing where it already is, and on a CPU."""
    if device.type != "cuda" or torch.cuda.current_device() == device.index:
        return nullcontext()
    return torch.cuda.device(device)


def remembered(
    launches: dict[tuple, Prepared], key: tuple, tensors: Iterable[torch.Tensor], prepare: Callable[[], Prepared]
) -> Prepared:
    """The launch kept under `key`, which `prepare` makes the first time. The key stands for tensors that begin on 16
    bytes, as nearly all do and Triton compiles for; any others get a launch of their own each time."""
    if any(tensor.data_ptr() % 16 for tensor in tensors):
        return prepare()
    launch = launches.get(key)
    if launch is None:
        launch = launches[key] = prepare()
    return launch
