"""Which linears of a diffusion model read the same input: smoothed alike, and quantized once."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch

from .weight_form import InputForm, weight_form

# Attribute names under one parent, in the order of the calls, as in ComfyUI's models. The q of a cross attention reads
# another tensor than k and v. That does no harm: linears share the quantization of one deferred tensor, and calibration
# tells them apart.
_GROUPS = (
    ("w1", "w3"),  # Lumina, Z-Image, Ideogram 4, HiDream
    ("gate_proj", "up_proj"),  # Flux 2, Ernie, ACE-Step
    ("gate", "up"),  # Krea 2
    ("linear_1", "linear_3"),  # OmniGen 2
    ("layer1", "linear_gate"),  # Cosmos
    ("proj_in_gate", "proj_in"),  # SeedVR
    ("c_fc1", "c_fc2"),  # AuraFlow
    ("q", "k", "v"),  # Wan, CogVideoX
    ("k_img", "v_img"),  # Wan
    ("wq", "wk", "wv", "gate"),  # Krea 2
    ("q_proj", "k_proj", "v_proj"),  # Cosmos Predict 2, Anima, ACE-Step
    ("to_q", "to_k", "to_v"),  # Qwen-Image, Ernie, LTX-Video, ACE-Step
    ("add_q_proj", "add_k_proj", "add_v_proj"),  # Qwen-Image
    ("to_q_t", "to_k_t", "to_v_t"),  # HiDream
    ("to_query", "to_key", "to_value"),  # Kandinsky 5
    ("img_to_q", "img_to_k", "img_to_v"),  # Boogu
    ("instruct_to_q", "instruct_to_k", "instruct_to_v"),  # Boogu
    ("w1q", "w1k", "w1v"),  # AuraFlow
    ("w2q", "w2k", "w2v"),  # AuraFlow
)


def same_input_groups(names: Iterable[str], alike: Callable[[str, str], bool]) -> list[list[str]]:
    """The groups of two or more linears that read the same input, going by their names and by `alike`.

    Args:
        names: dotted module paths of the linears that count.
        alike: an equivalence that splits what the names put together: whether two linears belong to one group.

    Returns:
        Lists of `names`, each in the order of the calls.
    """
    children: dict[str, set[str]] = {}
    for name in names:
        parent, dot, child = name.rpartition(".")
        children.setdefault(parent + dot, set()).add(child)
    groups = []
    for prefix, present in children.items():
        for group in _GROUPS:
            rest = [prefix + child for child in group if child in present]
            while rest:
                members = [name for name in rest if alike(name, rest[0])]
                rest = [name for name in rest if name not in members]
                if len(members) > 1:
                    groups.append(members)
    return groups


def group_inputs(model: torch.nn.Module) -> None:
    """Tell the INT8 linears of `model` that read the same input, and quantize it alike, from each other: those of a
    group get one object as their `input_group`. A deferred input is quantized once for such a group.

    To be called when all weights are loaded, since factors are compared by value.
    """
    readers: dict[str, Any] = {name: module for name, module in model.named_modules() if hasattr(module, "input_group")}

    @functools.cache
    def input_of(name: str) -> tuple[int, InputForm] | None:
        """The width of a linear's input, and how it is quantized."""
        weight = readers[name].weight
        form = weight_form(weight, readers[name])
        return None if form is None else (weight.shape[1], form.input_form(weight))

    def alike(a: str, b: str) -> bool:
        """Whether two linears turn the same input into the same int8 tensor."""
        one, other = input_of(a), input_of(b)
        if one is None or other is None:
            return a == b
        (width, (transform, bits)), (other_width, (others, other_bits)) = one, other
        return width == other_width and bits == other_bits and transform.same_as(others)

    for names in same_input_groups(readers, alike):
        group = object()
        for name in names:
            readers[name].input_group = group
