"""Which linears of a diffusion model read the same input, so that it is quantized once for all of them."""

import torch

from ..kernels import InputPlace, InputReader
from .int8_weight import is_int8

# Attribute names under one parent, in the order of the calls, as in ComfyUI's models. It does no harm that the q of a
# cross attention reads another tensor than k and v: only the very same one is shared.
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


def share_inputs(model: torch.nn.Module) -> None:
    """Let the INT8 linears of `model` that read the same input quantize it once.

    To be called when all weights are loaded, since only linears that quantize alike can share.
    """
    place = InputPlace()
    for parent in model.modules():
        children = dict(parent.named_children())
        for names in _GROUPS:
            linears = [children[name] for name in names if is_int8(getattr(children.get(name), "weight", None))]
            while linears:
                alike = [linear for linear in linears if _quantize_alike(linear, linears[0])]
                linears = [linear for linear in linears if linear not in alike]
                if len(alike) > 1:
                    for linear, reader in zip(alike, InputReader.group_of(place, len(alike)), strict=True):
                        linear.input_reader = reader


def _quantize_alike(a: torch.nn.Module, b: torch.nn.Module) -> bool:
    """Whether two INT8 linears turn the same input into the same int8 tensor."""
    a, b = a.weight._params, b.weight._params
    if a.rotation_group != b.rotation_group or a.orig_shape[1] != b.orig_shape[1]:
        return False
    if a.smooth is None or b.smooth is None:
        return a.smooth is b.smooth
    return torch.equal(a.smooth, b.smooth)
