"""What a MODEL's attention computes with: ComfyUI's own, the fastest exact way, or INT8 where that applies.

Where ComfyUI's layers have preferences of their own, a call that INT8 attention does not take is left to them.
"""

import functools
from collections.abc import Collection
from typing import Any

import torch

from ..comfyui.attention import OVERRIDE
from ..comfyui.patcher import DIFFUSION_MODEL, ModelPatcher, WrappersMP, object_patches, options_of
from .attention_kinds import AS_COMFYUI, ATTENTION_KINDS, KEEPS_EXACT
from .attention_override import AttentionOverride

_KEY = "int8_dit_attention"


def check_attention(choice: str, device: torch.device) -> None:
    """Raise ValueError for what is none of ATTENTION_KINDS, RuntimeError where `device` cannot do what it says."""
    if choice not in ATTENTION_KINDS:
        raise ValueError(f"attention must be one of {', '.join(ATTENTION_KINDS)}; got {choice!r}")
    obstacle = ATTENTION_KINDS[choice].obstacle(device)
    if obstacle is not None:
        raise RuntimeError(
            f"attention is set to {choice}, but {obstacle}. The alternative is attention set to {AS_COMFYUI}"
        )


def set_attention(model: ModelPatcher, choice: str, exact_blocks: Collection[str] = ()) -> None:
    """Let a MODEL's attention compute as the choice says. ComfyUI's own leaves the MODEL as it is, and so does an exact
    one where an earlier node has chosen.

    An override that another node gave the MODEL stays: this attention then takes the place of the function which that
    override calls. INT8 attention leaves out `exact_blocks`, which are paths in the diffusion model. Raises what
    `check_attention` raises.
    """
    device = model.load_device
    check_attention(choice, device)
    kind, options = ATTENTION_KINDS[choice], options_of(model)
    there = options.get(OVERRIDE)
    own = there if isinstance(there, AttentionOverride) else None
    if kind.ways(device) and (own is None or (kind.in_int8 and own.kind is not kind)):
        own = AttentionOverride(kind, device, there if own is None else own.outer)
        options[OVERRIDE] = own
        own.put_before_choices(model)
        model.remove_wrappers_with_key(WrappersMP.APPLY_MODEL, _KEY)
        model.add_wrapper_with_key(WrappersMP.APPLY_MODEL, _KEY, own.watch)
    _keep_exact(model, exact_blocks if own is not None and own.kind.in_int8 else ())


def _keep_exact(model: ModelPatcher, blocks: Collection[str]) -> None:
    """Let these blocks of a MODEL, and no others, say in their attention calls that these stay exact."""
    classes: dict[type, type] = {}
    for name, _ in model.model.diffusion_model.named_modules():
        patch = f"{DIFFUSION_MODEL}{name}.__class__"
        own: Any = model.get_model_object(patch) if name in blocks else object_patches(model).get(patch)
        if own is None or (name in blocks) == keeps_exact(own):
            continue
        # ComfyUI puts a class in place with the MODEL and takes it away with it; a compiler tells classes apart.
        other = own.own_class if keeps_exact(own) else classes.get(own) or classes.setdefault(own, _exact_class(own))
        model.add_object_patch(patch, other)


def keeps_exact(patch: Any) -> bool:
    """Whether an object patch of a MODEL is the class of a block whose attention INT8 leaves out."""
    return getattr(patch, "keeps_exact_attention", False) is True


def exact_blocks_of(model: ModelPatcher) -> int:
    """How many blocks of a MODEL INT8 attention leaves out."""
    return sum(map(keeps_exact, object_patches(model).values()))


def _exact_class(own: Any) -> type:
    """A class of blocks like `own` that tells its attention calls to stay exact."""

    class ExactAttentionBlock(own):
        keeps_exact_attention, own_class = True, own

        @functools.wraps(own.forward)
        def forward(self, *args, **kwargs):
            args = tuple(_marked(argument, isinstance(argument, dict) and OVERRIDE in argument) for argument in args)
            kwargs = {name: _marked(argument, name == "transformer_options") for name, argument in kwargs.items()}
            return super().forward(*args, **kwargs)

    # What asks for a block's class by name finds it.
    for name in ("__name__", "__qualname__", "__module__"):
        setattr(ExactAttentionBlock, name, getattr(own, name))
    return ExactAttentionBlock


def _marked(argument: Any, is_options: bool) -> Any:
    return {**argument, KEEPS_EXACT: True} if is_options and isinstance(argument, dict) else argument
