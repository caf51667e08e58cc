"""Triton's runtime: its driver, what it raises, where it keeps files, and a compiled kernel launched past it."""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton

from .assumptions import COMPILING_ALONE, DIRECT_LAUNCH, holds

try:  # Triton 3.4 and newer
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None
HAS_DESCRIPTORS = TensorDescriptor is not None

try:
    from triton.compiler import CompiledKernel
except ImportError:
    CompiledKernel = None

try:
    from triton.runtime.cache import triton_key
except ImportError:  # Triton 3.3 and older, and perhaps newer ones
    triton_key = None

# Triton's own errors of a kernel that does not run on a card. Before 3.3 it raises plain RuntimeErrors for ptxas, and
# in all versions for failed compiler passes; those are told apart from errors of the launch by their text.
_UNFIT_ERRORS = {"OutOfResources", "CompilationError", "PTXASError"}
_UNFIT_TEXTS = ("ptxas", "PassManager::run failed")


def is_unfit(error: Exception) -> bool:
    """Whether it says that a kernel needs more than the card has, or that Triton cannot compile it for the card."""
    if type(error) is RuntimeError:
        return any(text in str(error) for text in _UNFIT_TEXTS)
    kinds = type(error).__mro__
    return any(kind.__name__ in _UNFIT_ERRORS and kind.__module__.startswith("triton.") for kind in kinds)


def unspecialized(kernel: Any) -> frozenset[int]:
    """Places of the parameters for whose values a kernel is not compiled; none where this Triton does not say so."""
    named = getattr(kernel, "do_not_specialize", None) or ()
    return frozenset(place if isinstance(place, int) else kernel.arg_names.index(place) for place in named)


def check_driver() -> None:
    """Make what Triton launches kernels with, and ask it for the device; raises whatever Triton does."""
    driver: Any = triton.runtime.driver.active
    driver.get_current_device()


def triton_cache_folder() -> str:
    """Where Triton keeps compiled kernels: from 3.4 on it says so itself."""
    knobs = getattr(triton, "knobs", None)
    if knobs is not None:
        return knobs.cache.dir
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return os.environ.get("TRITON_CACHE_DIR", "").strip() or os.path.join(home, ".triton", "cache")


class MatrixBlocks:
    """What Hopper's copy engine is told of matrices like one: all but their address.

    Args:
        matrix: one of them; another one has its shape, its strides and its dtype.
        block_shape: of the blocks that are copied.
    """

    def __init__(self, matrix: torch.Tensor, block_shape: tuple[int, int]) -> None:
        assert TensorDescriptor is not None
        # Triton's constructor checks more than a launch takes. So it makes one, and the others are copies of that, with
        # whatever fields this Triton's launch reads of them.
        descriptor = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block_shape))
        self._fields = {name: value for name, value in vars(descriptor).items() if name != "base"}

    def of(self, base: torch.Tensor) -> object:
        """The descriptor of the matrix that begins where `base` does, on 16 bytes."""
        descriptor: Any = object.__new__(TensorDescriptor)  # pyright: ignore[reportArgumentType]
        descriptor.__dict__ = {**self._fields, "base": base}
        return descriptor


COMPILES_ALONE = holds(COMPILING_ALONE)
"""Whether a thread may compile a kernel that nobody launches yet, while others launch and compile."""


hashing = threading.Lock()
"""Held while Triton hashes itself, 400 MB, in a third of a second: all threads would do that at once, and the calls
beside them wait."""


def hash_itself() -> None:
    """Let Triton find out what the names of compiled kernels begin with, as the first of them has to; once."""
    if triton_key is not None:
        with hashing:
            triton_key()


def compile_alone(kernel: Any, arguments: Sequence[object], named: Mapping[str, object]) -> object:
    """Compile a kernel for a launch with such arguments on the current device, which does not see it.

    Tensors may be anything with a dtype and a data_ptr(). Raises what Triton does.
    """
    hash_itself()
    return kernel.warmup(*arguments, grid=(1, 1), **named)


_launchers: set[tuple[str, ...]] = set()  # of which parameters they are, but for what pointers point to


def compile_launcher(compiled: Any) -> None:
    """Let the host's C compiler make what launches such parameters, which takes as long as the kernel; once.

    Triton finds that on disk then. Raises what Triton does.
    """
    words = tuple(["*" if str(word).startswith("*") else str(word) for word in compiled.src.signature.values()])
    make: Any = getattr(triton.runtime.driver.active, "launcher_cls", None)
    if make is not None and words not in _launchers:
        _launchers.add(words)
        make(compiled.src, compiled.metadata)


def direct_launch(compiled: object, arguments: int, constants: Mapping[str, object]) -> Callable[..., None] | None:
    """What launches again what a first launch compiled, on the device of that launch; None where that is Triton's task.

    It takes the grid, two numbers of programs, and the arguments before the constants: a tensor, or the address where
    it begins, which spares the driver's question where that is. It does without the hooks of Triton's profiler: asking
    for them takes longer than the launch.

    Args:
        compiled: what the first launch returned.
        arguments: how many arguments the kernel has before its constants.
        constants: the constants in the order of the kernel's parameters.
    """
    # It is none under the interpreter, or while compiling in the background.
    if CompiledKernel is None or not isinstance(compiled, CompiledKernel) or not holds(DIRECT_LAUNCH):
        return None
    driver: Any = triton.runtime.driver.active
    device, stream_of = driver.get_current_device(), driver.get_current_stream
    kernel: Any = compiled
    run, function, metadata = kernel.run, kernel.function, kernel.packed_metadata
    # Triton before 3.3 launches compiled kernels without the constants. One count too many or too few is no error in
    # all versions, so the number of parameters decides.
    appended = tuple(constants.values()) if len(kernel.src.signature) > arguments else ()

    def launch(columns: int, rows: int, *given: object) -> None:
        run(columns, rows, 1, stream_of(device), function, metadata, None, None, None, *given, *appended)

    return launch
