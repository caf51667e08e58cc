"""Triton's runtime: its driver, what it raises, where it keeps files, and a compiled kernel launched past it."""

import inspect
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton

from .insides import COMPILING_ALONE, DIRECT_LAUNCH, LAUNCHER, holds


def _optional(module: str, name: str) -> Any:
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return None


TensorDescriptor = _optional("triton.tools.tensor_descriptor", "TensorDescriptor")  # Triton 3.4 and newer
HAS_DESCRIPTORS = TensorDescriptor is not None
CompiledKernel = _optional("triton.compiler", "CompiledKernel")
triton_key = _optional("triton.runtime.cache", "triton_key")  # not Triton 3.3, and perhaps not newer ones

# Triton's own errors of a kernel that does not run on a card. It raises plain RuntimeErrors for failed compiler passes:
# those are told apart from errors of the launch by their text.
_UNFIT_ERRORS = {"OutOfResources", "CompilationError", "PTXASError"}


def is_unfit(error: Exception) -> bool:
    """Whether it says that a kernel needs more than the card has, or that Triton cannot compile it for the card."""
    if type(error) is RuntimeError:
        return "PassManager::run failed" in str(error)
    kinds = type(error).__mro__
    return any(kind.__name__ in _UNFIT_ERRORS and kind.__module__.startswith("triton.") for kind in kinds)


def unspecialized(kernel: Any) -> frozenset[int]:
    """Return the places of the parameters that a kernel is not specialized for; none where Triton does not say."""
    named = getattr(kernel, "do_not_specialize", None) or ()
    return frozenset(place if isinstance(place, int) else kernel.arg_names.index(place) for place in named)


def check_driver() -> None:
    """Create Triton's driver, and ask it for the device; raises whatever Triton does."""
    driver: Any = triton.runtime.driver.active
    driver.get_current_device()


def triton_cache_folder() -> str:
    """Return where Triton keeps compiled kernels."""
    knobs = getattr(triton, "knobs", None)
    if knobs is not None:
        return knobs.cache.dir
    # Triton 3.3 does not say.
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~")
    return os.environ.get("TRITON_CACHE_DIR", "").strip() or os.path.join(home, ".triton", "cache")


_MOST_DESCRIPTORS = 4096


class MatrixBlocks:
    """Tensor descriptors of matrices like one, for Hopper's copy engine: all but their address.

    Args:
        matrix: one of them; another one has its shape, its strides and its dtype.
        block_shape: of the blocks that are copied.
    """

    def __init__(self, matrix: torch.Tensor, block_shape: tuple[int, int]) -> None:
        # The checks of Triton's constructor take longer than a launch. So it makes one descriptor, and the others are
        # copies of that, with all fields that this Triton's launch reads.
        descriptor = TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), list(block_shape))
        self._fields = {name: value for name, value in vars(descriptor).items() if name != "base"}
        self._cache: dict[int, Sequence[object]] = {}

    def of(self, base: object) -> object:
        """Return the descriptor of the matrix that begins where `base` does, on 16 bytes."""
        descriptor = object.__new__(TensorDescriptor)
        descriptor.__dict__ = {**self._fields, "base": base}
        return descriptor

    def at(self, address: int, expand: "Expand") -> Sequence[object]:
        """Return the arguments of a direct launch for the matrix that begins at an address, always by one `expand`.

        They take the host 3 us to make, and depend on the address alone: weights stay where they are, and PyTorch hands
        out the memory of activations again. So they are cached, and no tensor with them.
        """
        arguments = self._cache.get(address)
        if arguments is None:
            if len(self._cache) >= _MOST_DESCRIPTORS:
                self._cache.clear()
            base = SimpleNamespace(data_ptr=lambda: address)
            arguments = self._cache[address] = expand(self.of(base))
        return arguments


COMPILES_ALONE = holds(COMPILING_ALONE)
"""Whether a thread may compile a kernel that nobody launches yet, while others launch and compile."""

hashing = threading.Lock()
"""Held while Triton hashes itself, 400 MB, in a third of a second: all threads would do that at once, and the calls
beside them wait."""


def hash_itself() -> None:
    """Let Triton compute the prefix of the names of compiled kernels, once."""
    if triton_key is not None:
        with hashing:
            triton_key()


def compile_alone(kernel: Any, arguments: Sequence[object], named: Mapping[str, object]) -> object:
    """Compile a kernel for a launch with such arguments on the current device, without a launch.

    Tensors may be anything with a dtype and a data_ptr(). Raises what Triton does.
    """
    hash_itself()
    return kernel.warmup(*arguments, grid=(1, 1), **named)


_launchers: set[tuple[str, ...]] = set()  # by their parameters, whatever pointers point to


def compile_launcher(compiled: Any) -> None:
    """Let the host's C compiler make the launcher of such parameters, which takes as long as the kernel; once.

    Triton finds it on disk then. Raises what Triton does.
    """
    words = tuple(["*" if str(word).startswith("*") else str(word) for word in compiled.src.signature.values()])
    make: Any = getattr(triton.runtime.driver.active, "launcher_cls", None)
    if make is not None and words not in _launchers:
        _launchers.add(words)
        make(compiled.src, compiled.metadata)


Expand = Callable[[object], Sequence[object]]
"""descriptor -> the kernel's arguments for it."""


def direct_launch(
    compiled: object, constants: Mapping[str, object]
) -> tuple[Sequence[Expand] | None, Callable[..., None] | None]:
    """Return how a direct launch expands descriptors, and a function that launches what a first launch compiled.

    The function launches on the device of the first launch. It takes the grid, two numbers of programs, and the
    arguments before the constants: a tensor, or the address where it begins, which spares a question to the driver; in
    place of a descriptor what its expansion returns. The expansions are None where it takes descriptors as they are. It
    calls no hooks of Triton's profiler: asking for them takes longer than the launch. Both are None where Triton itself
    has to launch.

    Args:
        compiled: what the first launch returned.
        constants: the constants in the order of the kernel's parameters.
    """
    # It is no CompiledKernel under the interpreter, or while compiling in the background.
    if CompiledKernel is None or not isinstance(compiled, CompiledKernel) or not holds(DIRECT_LAUNCH):
        return None, None
    driver: Any = triton.runtime.driver.active
    device, stream_of = driver.get_current_device(), driver.get_current_stream
    kernel: Any = compiled
    run, settings, expansions = kernel.run, (), None
    is_known = holds(LAUNCHER) and type(run).__name__ == "CudaLauncher"
    if is_known and not (run.global_scratch_size or run.profile_scratch_size):  # or it allocates memory
        settings = run.launch_cooperative_grid, run.launch_pdl, None, None
        run, expansions = _c_launch(run)
    # The launcher's arguments between the stream and the kernel's.
    fixed = kernel.function, *settings, kernel.packed_metadata, None, None, None
    appended = tuple(constants.values())

    def launch(columns: int, rows: int, *given: object) -> None:
        run(columns, rows, 1, stream_of(device), *fixed, *given, *appended)

    return expansions, launch


def _c_launch(launcher: Any) -> tuple[Callable[..., None], Sequence[Expand]]:
    """Return the function in C that Triton's launcher calls, and how it expands descriptors."""
    launch = launcher.launch
    if not inspect.isfunction(launch):
        return launch, ()
    held, triton_driver = inspect.getclosurevars(launch).nonlocals, inspect.getmodule(type(launcher))
    make = getattr(triton_driver, "make_tensordesc_arg")  # noqa: B009

    def expansion(metadata: object) -> Expand:
        return lambda descriptor: tuple(make(descriptor, metadata))

    return held["launcher"], [expansion(metadata) for metadata in held["tensordesc_meta"]]
