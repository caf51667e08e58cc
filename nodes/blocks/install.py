"""Fused forwards under a MODEL's blocks: where they are put, and the calls in which they run.

They run only where nothing asks for what the block's own forward does beside computing: hooks, patches, gradients.
Anywhere else, and for a block that turns out to compute something else, its own forward runs. A compiler gets the fused
one of blocks that agreed in an eager call.
"""

import logging
import sys
import weakref
from functools import partial
from typing import Any

import torch

from ...kernels import all_modules_hooked
from ..comfyui import memory as devices
from ..comfyui.classes import full_name
from ..comfyui.compiling import compare_before_compiling
from ..comfyui.patcher import ModelPatcher
from .call import Call, Flags, has_flags, read_call, settings_of
from .first_call import Failed, attempt, compare_first_call
from .plan import Findings, Plan, is_fused_block
from .table import BLOCKS, BlockKind

_DIFFUSION_MODEL = "diffusion_model"

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


class Memory:
    """What the blocks of one class in one MODEL are known to be."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._plans: weakref.WeakKeyDictionary[torch.nn.Module, Plan] = weakref.WeakKeyDictionary()
        self._findings: dict[tuple, Findings] = {}
        self._told: set[str] = set()

    def plan(self, block: torch.nn.Module) -> Plan:
        """What a block is now."""
        plan = self._plans.get(block)
        if plan is None or not plan.holds():
            plan = self._plans[block] = Plan(block, self._findings)
        return plan

    def why_not(self, block: torch.nn.Module) -> str | None:
        """What the calls of a block and of those like it showed against its fused forward, in words; else None."""
        plan = self._plans.get(block)
        findings = [] if plan is None else plan.findings.all()
        return None if True in findings else next((why for why in findings if isinstance(why, str)), None)

    def tell(self, why: str) -> None:
        """Log, once for each reason, that ComfyUI's own forward runs."""
        if why not in self._told:
            self._told.add(why)
            logger.warning("INT8: %s runs ComfyUI's own forward, which is slower: %s", self._name, why)


def _watched() -> bool:
    """Whether something wants ComfyUI's own modules to be called, in whatever block."""
    return torch.is_grad_enabled() or devices.is_training() or all_modules_hooked()


def fused_class(own: Any, kind: BlockKind) -> type:
    """A class of blocks like `own`, one of ComfyUI's, that runs the fused forward where it may."""
    memory, core = Memory(own.__qualname__), sys.modules[own.__module__]

    class FusedBlock(own):
        fuses_block = True
        block_kind, block_memory = kind, memory

        def forward(self, *args, **kwargs):
            call = read_call(kind, args, kwargs)
            if torch.compiler.is_compiling():
                known = self.known_calls(call.override is not None, call.form) if isinstance(call, Call) else ()
                if has_flags(kind, kwargs, known):
                    output = kind.forward(self, core, *args, **kwargs)
                    if output is not NotImplemented:
                        return output
                return super().forward(*args, **kwargs)
            if isinstance(call, str):
                memory.tell(call)
                return super().forward(*args, **kwargs)
            plan = memory.plan(self)
            if plan.unknown is not None:
                memory.tell(plan.unknown)
            findings = plan.findings.under(call.override)
            if findings is None or _watched() or not plan.may_run(call.device):
                return super().forward(*args, **kwargs)
            key, fused = (own.forward, call.form, settings_of(kind, kwargs)), partial(kind.forward, self, core)
            finding = findings.get(key)
            if finding is True:
                try:
                    output = attempt(fused, *args, **kwargs)
                    return super().forward(*args, **kwargs) if output is NotImplemented else output
                except Failed as failure:
                    finding, output = str(failure), super().forward(*args, **kwargs)
            elif finding is not None or (call.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
                return super().forward(*args, **kwargs)
            else:
                output, finding = compare_first_call(super().forward, fused, kind.streams, *args, **kwargs)
            if finding is not None:
                findings[key] = finding
            if isinstance(finding, str):
                memory.tell(finding)
            return output

        @torch.compiler.assume_constant_result
        def known_calls(self, replaced: bool, form: tuple) -> Flags:
            """At which values of options the fused forward may run and has agreed in eager calls, as a compiler finds
            it; `replaced` where attention calls are."""
            plan = memory.plan(self)
            return () if _watched() or not plan.may_run(form[0]) else plan.findings.agreed(own.forward, form, replaced)

    # What asks for a block's class by name finds it.
    FusedBlock.__name__, FusedBlock.__qualname__, FusedBlock.__module__ = own.__name__, own.__qualname__, own.__module__
    return FusedBlock
