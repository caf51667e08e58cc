"""Launching a Triton kernel many times over: what the first launch found out about its arguments is not asked again."""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

import torch

from ..internals.triton_runtime import direct_launch

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

    def __call__(self, *arguments: object) -> None:
        """Launch on the current device and stream; `arguments` are the parameters before the constants."""
        if self._launch is not None:
            self._launch(*arguments)
            return
        compiled = self._kernel[self._grid](*arguments, **self._constants, **self._options)
        self._launch = direct_launch(compiled, self._grid, len(arguments), self._constants)


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
