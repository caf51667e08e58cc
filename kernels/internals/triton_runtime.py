"""Triton's runtime: its driver, what it raises, where it keeps files, and a compiled kernel launched past it."""

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import triton

from .insides import COMPILING_ALONE, DIRECT_LAUNCH, LAUNCHER, holds

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


_MOST_PLACES = 4096  # of matrices whose descriptors are kept


class _Address:
    """What is asked of a matrix that a descriptor is of, but for its dtype: where it begins."""

    def __init__(self, address: int) -> None:
        self.data_ptr = lambda: address


class MatrixBlocks:
    """Tensor descriptors of matrices like one, for Hopper's copy engine: all but their address.

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
        self._given: dict[int, Sequence[object]] = {}

    def of(self, base: object) -> object:
        """The descriptor of the matrix that begins where `base` does, on 16 bytes."""
        descriptor: Any = object.__new__(TensorDescriptor)  # pyright: ignore[reportArgumentType]
        descriptor.__dict__ = {**self._fields, "base": base}
        return descriptor

    def at(self, address: int, expand: "Expand") -> Sequence[object]:
        """What a direct launch is given for the matrix that begins at an address, always by the same `expand`.

        It takes the host 3 us to make, and is a function of the address alone: weights stay where they are, and PyTorch
        hands out the memory of activations again. So it is kept, and no tensor with it.
        """
        given = self._given.get(address)
        if given is None:
            if len(self._given) >= _MOST_PLACES:
                self._given.clear()
            given = self._given[address] = expand(self.of(_Address(address)))
        return given


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


Expand = Callable[[object], Sequence[object]]
"""What a kernel is given for a descriptor."""


class _Launcher(NamedTuple):
    """What Triton's launcher of a kernel calls in C, the settings that this takes, and what becomes of descriptors."""

    launch: Callable[..., None]
    settings: tuple[object, ...]
    expansions: tuple[Expand, ...]


def _launcher_of(kernel: Any) -> _Launcher | None:
    """Triton's launcher without its Python; None where it has memory to make for the kernel, or is another one."""
    run = kernel.run
    if not holds(LAUNCHER) or type(run).__name__ != "CudaLauncher":
        return None
    if run.global_scratch_size or run.profile_scratch_size:
        return None
    launch, expansions = run.launch, ()
    if inspect.isfunction(launch):  # it makes arguments of descriptors first
        held, triton_driver = inspect.getclosurevars(launch).nonlocals, inspect.getmodule(type(run))
        launch, make = held["launcher"], getattr(triton_driver, "make_tensordesc_arg")  # noqa: B009
        expansions = tuple(partial(_expanded, make, metadata) for metadata in held["tensordesc_meta"])
    return _Launcher(launch, (run.launch_cooperative_grid, run.launch_pdl, None, None), expansions)


def _expanded(make: Callable[..., Sequence[object]], metadata: object, descriptor: object) -> Sequence[object]:
    return tuple(make(descriptor, metadata))


def descriptor_expansions(compiled: object) -> tuple[Expand, ...] | None:
    """How a direct launch is given each of a kernel's descriptors, in their order; None where it is given them as they
    are."""
    launcher = _launcher_of(compiled) if _launches_directly(compiled) else None
    return None if launcher is None else launcher.expansions


def _launches_directly(compiled: object) -> bool:
    # It is none under the interpreter, or while compiling in the background.
    return CompiledKernel is not None and isinstance(compiled, CompiledKernel) and holds(DIRECT_LAUNCH)


def direct_launch(compiled: object, arguments: int, constants: Mapping[str, object]) -> Callable[..., None] | None:
    """What launches again what a first launch compiled, on the device of that launch; None where that is Triton's task.

    It takes the grid, two numbers of programs, and the arguments before the constants: a tensor, or the address where
    it begins, which spares the driver's question where that is; of a descriptor what `descriptor_expansions` make of
    it. It does without the hooks of Triton's profiler: asking for them takes longer than the launch.

    Args:
        compiled: what the first launch returned.
        arguments: how many arguments the kernel has before its constants.
        constants: the constants in the order of the kernel's parameters.
    """
    if not _launches_directly(compiled):
        return None
    driver: Any = triton.runtime.driver.active
    device, stream_of = driver.get_current_device(), driver.get_current_stream
    kernel: Any = compiled
    launcher = _launcher_of(kernel)
    run, settings = (kernel.run, ()) if launcher is None else (launcher.launch, launcher.settings)
    # What comes before the arguments, and behind the stream.
    fixed = kernel.function, *settings, kernel.packed_metadata, None, None, None
    # Triton before 3.3 launches compiled kernels without the constants. One count too many or too few is no error in
    # all versions, so the number of parameters decides.
    appended = tuple(constants.values()) if len(kernel.src.signature) > arguments else ()

    def launch(columns: int, rows: int, *given: object) -> None:
        run(columns, rows, 1, stream_of(device), *fixed, *given, *appended)

    return launch
