"""Fused forwards under a MODEL's blocks: where they are put, and the calls in which they run.

They run only where nothing asks for what the block's own forward does beside computing: hooks, patches, gradients.
Anywhere else, and for a block that turns out to compute something else, its own forward runs. A compiler gets the fused
one of blocks that agreed in an eager call.
"""

import itertools
import logging
import operator
import sys
import weakref
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ...kernels import FLOAT_DTYPES, all_modules_hooked, native_computes, runs_fused
from ..comfyui import memory as devices
from ..comfyui.classes import NORM_MODULES, full_name
from ..comfyui.compiling import compare_before_compiling
from ..comfyui.layers import is_linear, weight_functions
from ..comfyui.patcher import ModelPatcher
from .first_call import Failed, attempt, compare
from .steps import InputForm, input_form
from .table import BLOCKS, BlockKind

_DIFFUSION_MODEL = "diffusion_model"
_ACTIVATIONS = (torch.nn.SiLU, torch.nn.GELU, torch.nn.Identity, torch.nn.Dropout)
_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList)
_NODES = __name__.removesuffix(".blocks.install")
_NORMS = (*NORM_MODULES, f"{_NODES}.model.operations")

logger = logging.getLogger(__name__)


def fuse_blocks(model: ModelPatcher) -> None:
    """Let the blocks of a MODEL that have a fused forward run it wherever it may stand for their own."""
    classes: dict[type, type] = {}
    for name, _ in model.model.diffusion_model.named_modules(prefix=_DIFFUSION_MODEL):
        patch = f"{name}.__class__"
        own: Any = model.get_model_object(patch)
        kind = None if is_fused_block(own) else BLOCKS.get(full_name(own))
        if kind is not None:
            # ComfyUI puts it in place with the MODEL and takes it away with it, as it does with any patch.
            model.add_object_patch(patch, classes.get(own) or classes.setdefault(own, fused_class(own, kind)))
    if classes:
        compare_before_compiling(model)


def fuse_in_place(block: torch.nn.Module) -> None:
    """The same for a block that belongs to no MODEL."""
    for module in block.modules():
        kind = BLOCKS.get(full_name(type(module)))
        if kind is not None:
            module.__class__ = fused_class(type(module), kind)


def is_fused_block(patch: Any) -> bool:
    """Whether an object patch of a MODEL is the class of a fused block."""
    return getattr(patch, "fuses_block", False) is True


class _Plan:
    """What a block was when it was looked at, to be recognised in few microseconds: so all loops here run in C.

    Attributes:
        verdicts: by its own forward and the dtype whether the fused one agrees with it; one for all blocks like it.
    """

    def __init__(self, block: torch.nn.Module, kind: BlockKind, memory: dict[tuple, dict[tuple, bool]]) -> None:
        everything = list(block.modules())
        parts = everything[1:]
        self._families: list[dict[str, Any]] = [module._modules for module in everything]
        self._children = self._children_now()
        self._parts, self._classes = parts, list(map(type, parts))
        self._dicts: list[dict[str, Any]] = [module.__dict__ for module in parts]
        self._distinct = list(set(self._classes))
        self._forwards = list(map(_forward_of, self._distinct))

        self._linears: list[Any] = [module for module in parts if is_linear(module)]
        self._patched = self._patched_now()
        forms = [input_form(layer) for layer in self._linears]
        int8 = [(layer, form) for layer, form in zip(self._linears, forms, strict=True) if form is not None]
        known = all(is_linear(module) or _is_known(module, kind) for module in parts)
        like = tuple(
            form and (form.transform.smooth is None, form.transform.rotation_group, form.activation_bits)
            for form in forms
        )
        self._questions = tuple({_question(layer, form) for layer, form in int8}) if known else ()
        self.verdicts = memory.setdefault(like, {})

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
            self._questions != ()
            and all(runs_fused(device, *question) for question in self._questions)
            and not any(map(_hooks_of, self._dicts))
            and not any(map(_pre_hooks_of, self._dicts))
            and not any(map(operator.contains, self._dicts, itertools.repeat("forward")))
        )


def _question(layer: Any, form: InputForm) -> tuple[str, int, int, bool]:
    """What `runs_fused` wants to know of an INT8 linear, beside the device."""
    native = native_computes(form.transform.smooth, form.activation_bits)
    return layer.int8_kernel, layer.out_features, layer.in_features, native


_forward_of = operator.attrgetter("forward")
_hooks_of = operator.itemgetter("_forward_hooks")
_pre_hooks_of = operator.itemgetter("_forward_pre_hooks")


@dataclass
class _Memory:
    """What the blocks of one class in one MODEL are known to be."""

    plans: weakref.WeakKeyDictionary = field(default_factory=weakref.WeakKeyDictionary)
    verdicts: dict[tuple, dict[tuple, bool]] = field(default_factory=dict)

    def plan(self, block: torch.nn.Module, kind: BlockKind) -> _Plan:
        plan = self.plans.get(block)
        if plan is None or not plan.holds():
            plan = self.plans[block] = _Plan(block, kind, self.verdicts)
        return plan


def _is_known(module: torch.nn.Module, kind: BlockKind) -> bool:
    cls = type(module)
    if isinstance(module, (torch.nn.RMSNorm, torch.nn.LayerNorm)):
        return cls.forward.__module__ in _NORMS
    return cls in _ACTIVATIONS or cls in _CONTAINERS or full_name(cls) in kind.parts


def _watched() -> bool:
    """Whether something wants ComfyUI's own modules to be called, in whatever block."""
    return torch.is_grad_enabled() or devices.is_training() or all_modules_hooked()


def _patched(options: dict[str, Any]) -> bool:
    """Whether a MODEL's options replace blocks, or change what attention reads or gives."""
    patches = options.get("patches")
    replaced = options.get("patches_replace")
    return bool(patches and any(name.startswith("attn") for name in patches)) or bool(
        replaced and any(replaced.values())
    )


def fused_class(own: Any, kind: BlockKind) -> type:
    """A class of blocks like `own`, one of ComfyUI's, that runs the fused forward where it may."""
    memory, core, told = _Memory(), sys.modules[own.__module__], set()
    axes = (3,) if kind.streams else (2, 3)

    class FusedBlock(own):
        fuses_block = True

        def forward(self, *args, **kwargs):
            options = kwargs.get("transformer_options") if kind.streams else {}
            if options is None or _patched(options):
                return super().forward(*args, **kwargs)
            x: Any = args[0] if args else kwargs.get(kind.streams[-1] if kind.streams else "x")
            if not isinstance(x, torch.Tensor) or x.ndim not in axes or x.dtype not in FLOAT_DTYPES:
                return super().forward(*args, **kwargs)
            if torch.compiler.is_compiling():
                if self.is_known(x.dtype, x.device):
                    output = kind.forward(self, core, *args, **kwargs)
                    if output is not NotImplemented:
                        return output
                return super().forward(*args, **kwargs)
            plan = memory.plan(self, kind)
            if _watched() or not plan.may_run(x.device):
                return super().forward(*args, **kwargs)
            agreed = plan.verdicts.get((own.forward, x.dtype))
            fused = partial(kind.forward, self, core)
            if agreed:
                try:
                    output = attempt(fused, *args, **kwargs)
                    return super().forward(*args, **kwargs) if output is NotImplemented else output
                except Failed:
                    agreed, output = False, super().forward(*args, **kwargs)
            elif agreed is False or (x.is_cuda and torch.cuda.is_current_stream_capturing()):
                return super().forward(*args, **kwargs)
            else:
                output, agreed = compare(super().forward, fused, kind.streams, *args, **kwargs)
            if agreed is not None:
                plan.verdicts[own.forward, x.dtype] = agreed
            if agreed is False and not told:
                told.add(own)
                text = "INT8: %s runs ComfyUI's own forward, which is slower: the fused one does not do the same here"
                logger.info(text, own.__qualname__)
            return output

        @torch.compiler.assume_constant_result
        def is_known(self, dtype: torch.dtype, device: torch.device) -> bool:
            """Whether the fused forward may run and has agreed in an eager call, as a compiler finds it."""
            plan = memory.plan(self, kind)
            return not _watched() and plan.may_run(device) and plan.verdicts.get((own.forward, dtype), False)

    # What asks for a block's class by name finds it.
    FusedBlock.__name__, FusedBlock.__qualname__, FusedBlock.__module__ = own.__name__, own.__qualname__, own.__module__
    return FusedBlock
