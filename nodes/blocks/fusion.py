"""How many of a MODEL's blocks run fused, and why others do not."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...kernels import runs_fused
from ..comfyui.layers import is_linear
from ..comfyui.patcher import DIFFUSION_MODEL, ModelPatcher, object_patches, options_of
from .call import inside_patch
from .plan import is_fused_block, question, unknown_part
from .steps import input_form


@dataclass(frozen=True)
class Fusion:
    """The blocks of one class in a MODEL.

    Attributes:
        block: their class.
        fused: how many of them run fused, as far as their parts and the calls so far tell.
        blocks: how many there are.
        why: the reasons why others do not, in words.
    """

    block: str
    fused: int
    blocks: int
    why: tuple[str, ...]


def fusion_of(model: ModelPatcher) -> list[Fusion]:
    """The outermost blocks of a MODEL that have a fused forward, by class."""
    patches = object_patches(model)
    reasons: Mapping[str, list[str | None]] = defaultdict(list)
    outer = ""
    for name, block in model.model.diffusion_model.named_modules(prefix=DIFFUSION_MODEL.rstrip(".")):
        cls = patches.get(f"{name}.__class__", type(block))
        if is_fused_block(cls) and not (outer and name.startswith(f"{outer}.")):
            outer = name
            reasons[cls.__qualname__].append(_why_not(name, block, cls, patches, model.load_device))
    if inside := inside_patch(options_of(model)):
        reasons = {name: [inside] * len(known) for name, known in reasons.items()}
    return [
        Fusion(name, known.count(None), len(known), tuple(dict.fromkeys(why for why in known if why is not None)))
        for name, known in reasons.items()
    ]


def _why_not(
    name: str, block: torch.nn.Module, cls: Any, patches: Mapping[str, Any], device: torch.device
) -> str | None:
    """Why a block, its class and its parts as the MODEL has them in use, does not run fused, in words; else None."""
    parts = []
    for path, own in block.named_modules(prefix=name):
        part: Any = patches.get(path, own)
        if path != name:
            parts.append((path.removeprefix(f"{name}."), part, patches.get(f"{path}.__class__", type(part))))
    forms = [(part, input_form(part, own), own) for _, part, own in parts if is_linear(part)]
    unknown = unknown_part(cls, parts)
    if unknown is not None:
        return unknown
    replaced = next((key for key in patches if key.startswith(f"{name}.") and key.endswith(".forward")), None)
    if replaced is not None:
        return f"{replaced.removeprefix(DIFFUSION_MODEL)} is replaced"
    questions = {question(part, form, own) for part, form, own in forms if form is not None}
    if not questions or not all(runs_fused(device, *asked) for asked in questions):
        return "its linears do not all run fused INT8" if questions else "none of its linears is INT8"
    return cls.block_memory.why_not(block)


def in_words(blocks: Sequence[Fusion]) -> str:
    """The same as a part of a line, such as "34 of 34 blocks fused"."""
    fused, total = sum(kind.fused for kind in blocks), sum(kind.blocks for kind in blocks)
    why = next((why for kind in blocks for why in kind.why), None)
    return f"{fused} of {total} blocks fused{'' if why is None else f' ({why})'}"
