"""Which linears a forward calls, and whose weights ComfyUI multiplies by without calling them."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any


@dataclass
class CalledLinears:
    """Linears by path: those whose forwards were called, and those of which only the weights were read."""

    called: set[str] = field(default_factory=set)
    past: list[str] = field(default_factory=list)


class _Parameters(dict):
    """The parameters of a module, and whether one was read to be computed with."""

    read = False

    def __getitem__(self, name: str) -> Any:
        frame: Any = sys._getframe(1)
        # These modules read parameters for their callers; the one below reads those of a block only to move them.
        while frame.f_back is not None and frame.f_globals.get("__name__") in ("torch.nn.modules.module", "comfy.ops"):
            frame = frame.f_back
        self.read = self.read or frame.f_globals.get("__name__") != "comfy.model_prefetch"
        return super().__getitem__(name)


def _noted(product: Callable[..., Any], note: Callable[[], object]) -> Callable[..., Any]:
    """Wrap a function to note its calls."""

    def call(*args: Any, **kwargs: Any) -> Any:
        note()
        return product(*args, **kwargs)

    return call


@contextmanager
def linears_called(linears: Mapping[str, Any]) -> Iterator[CalledLinears]:
    """Record inside the context which linears are called, and at its end which were only read. A cache of whole steps,
    such as ComfyUI's EasyCache, may leave out all."""
    found, undo = CalledLinears(), []
    for name, linear in linears.items():
        note, product = partial(found.called.add, name), linear._forward
        undo.append(linear.register_forward_pre_hook(lambda *_, note=note: note()).remove)
        vars(linear).update(_parameters=_Parameters(linear._parameters), _forward=_noted(product, note))
    try:
        yield found
    finally:
        for remove in undo:
            remove()
        for name, linear in linears.items():
            parameters = linear._parameters
            if getattr(parameters, "read", False) and name not in found.called:
                found.past.append(name)
            vars(linear).update(_parameters=dict(parameters))
            vars(linear).pop("_forward", None)
