"""What a block was when it was looked at, and whether its fused forward knows all of its parts."""

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from ...kernels import native_computes, runs_fused
from ..comfyui.attention import PREFERENCE
from ..comfyui.classes import NORM_MODULES, PACKAGE
from ..comfyui.layers import is_linear, weight_functions
from .call import Flags
from .steps import InputForm, input_form

_ACTIVATIONS = (torch.nn.SiLU, torch.nn.GELU, torch.nn.Identity, torch.nn.Dropout)
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList)
_NODES = __name__.removesuffix(".blocks.plan")
_NORMS = (*NORM_MODULES, f"{_NODES}.loading.operations")

Part = tuple[str, Any, type]
"""A part's path in its block, the module, and the class that it has in use."""


def is_fused_block(patch: Any) -> bool:
    """Whether an object patch of a MODEL is the class of a fused block."""
    return getattr(patch, "fuses_block", False) is True


def unknown_part(block: type, parts: Iterable[Part]) -> str | None:
    """What a fused forward does not know of a block, in words, or None. `parts`: all, each after those that hold it.

    It knows linears, norms and activations. What else ComfyUI's own code computes it replaces, and the first call
    shows whether it does the same; weights that it would not read there are beyond it. It passes on what a layer
    prefers its attention to be computed with.
    """
    classes = {"": block}
    for path, part, cls in parts:
        classes[path] = cls
        holder = path.rpartition(".")[0]
        if not (is_linear(part) or _is_known(path, part, cls)):
            return f"unknown part {cls.__qualname__} of {classes.get(holder, block).__qualname__}"
    return None


def _is_known(path: str, part: torch.nn.Module, cls: Any) -> bool:
    if isinstance(part, (torch.nn.RMSNorm, torch.nn.LayerNorm)):
        return cls.forward.__module__ in _NORMS
    if cls in _ACTIVATIONS or cls in _CONTAINERS:
        return True
    if any(tensor is not None for tensor in (*part._parameters.values(), *part._buffers.values())):
        return False
    if path.rpartition(".")[2] == PREFERENCE or is_fused_block(cls):
        return True
    computes = cls.forward is not torch.nn.Module.forward and cls.forward.__module__
    return cls.__module__.startswith(PACKAGE) and (not computes or computes.startswith((PACKAGE, "torch.nn.")))


class Findings:
    """Whether fused forwards agree with ComfyUI's own, for blocks of one build: True, or in words why not."""

    def __init__(self) -> None:
        self._plain: dict[tuple, bool | str] = {}
        self._under: WeakKeyDictionary[Any, dict[tuple, bool | str]] = WeakKeyDictionary()

    def under(self, override: Callable[..., Any] | None) -> dict[tuple, bool | str] | None:
        """Those with attention calls replaced by `override`; None for one that cannot be recognised."""
        if override is None:
            return self._plain
        try:
            return self._under.setdefault(override, {})
        except TypeError:  # it has no hash, or no weak reference
            return None

    def agreed(self, own: Callable[..., Any], form: tuple, replaced: bool) -> Flags:
        """For calls of one form, with any override or with none: options with the values at which all agree."""
        found: dict[tuple, set[bool | str]] = defaultdict(set)
        for findings in list(self._under.values()) if replaced else [self._plain]:
            for (forward, its, settings), finding in findings.items():
                if forward is own and its == form:
                    flags = zip(form[-1], settings, strict=True)
                    found[tuple((name, value) for name, value in flags if isinstance(value, bool))].add(finding)
        return tuple(flags for flags, findings in found.items() if findings == {True})

    def all(self) -> list[bool | str]:
        """Of all calls, the earliest first."""
        return [finding for findings in (self._plain, *self._under.values()) for finding in findings.values()]


class Plan:
    """What a block was when it was looked at, to be recognised in few microseconds: so all loops here run in C.

    Attributes:
        unknown: what its fused forward does not know of it, in words, or None.
        findings: one for all blocks built like it.
    """

    def __init__(self, block: torch.nn.Module, memory: dict[tuple, Findings]) -> None:
        named = list(block.named_modules())
        everything = [module for _, module in named]
        parts = everything[1:]
        self._families: list[dict[str, Any]] = [module._modules for module in everything]
        self._children = self._children_now()
        self._parts, self._classes = parts, list(map(type, parts))
        self._dicts: list[dict[str, Any]] = [module.__dict__ for module in parts]
        self._distinct = list(set(self._classes))
        self._forwards = list(map(_forward_of, self._distinct))

        self._linears: list[Any] = [module for module in parts if is_linear(module)]
        self._patched = self._patched_now()
        self.unknown = unknown_part(type(block), ((name, module, type(module)) for name, module in named[1:]))
        linears = [(name, module, input_form(module)) for name, module in named[1:] if is_linear(module)]
        forms = {name: form for name, _, form in linears if form is not None}
        self._questions = tuple({question(module, form) for _, module, form in linears if form is not None})
        build = tuple((name, _forward_of(type(module)), *_variant(module, forms.get(name))) for name, module in named)
        self.findings = memory.setdefault(build, Findings())

    def _children_now(self) -> list[tuple]:
        return list(map(tuple, map(dict.values, self._families)))

    def _patched_now(self) -> list[bool]:
        """Of which linears the weight is patched in use."""
        return list(map(bool, map(weight_functions, self._linears)))

    def holds(self) -> bool:
        """Whether the block is still made of the same parts."""
        return (
            list(map(type, self._parts)) == self._classes
            and self._children_now() == self._children
            and list(map(_forward_of, self._distinct)) == self._forwards
            and self._patched_now() == self._patched
        )

    def may_run(self, device: torch.device) -> bool:
        """Whether the fused forward has kernels there, and no one watches or replaces the call of a part."""
        return (
            self.unknown is None
            and self._questions != ()
            and all(runs_fused(device, *question) for question in self._questions)
            and not any(map(_hooks_of, self._dicts))
            and not any(map(_pre_hooks_of, self._dicts))
            and not any(map(operator.contains, self._dicts, itertools.repeat("forward")))
        )


def question(layer: Any, form: InputForm, cls: Any = None) -> tuple[str, int, int, bool]:
    """What `runs_fused` wants to know of an INT8 linear, beside the device; `cls` if it has another class in use."""
    native = native_computes(form.transform.smooth, form.activation_bits)
    return (cls or layer).int8_kernel, layer.out_features, layer.in_features, native


def _variant(module: torch.nn.Module, form: InputForm | None) -> tuple:
    """What modules of one class may differ in, so that a forward takes another path."""
    if form is not None:
        return form.transform.smooth is None, form.transform.rotation_group, form.activation_bits
    if is_linear(module) or isinstance(module, (torch.nn.RMSNorm, torch.nn.LayerNorm)):
        return ()  # these hold notes of ComfyUI's about themselves
    return tuple((name, value) for name, value in vars(module).items() if isinstance(value, (bool, float, NoneType)))


_forward_of = operator.attrgetter("forward")
_hooks_of = operator.itemgetter("_forward_hooks")
_pre_hooks_of = operator.itemgetter("_forward_pre_hooks")
