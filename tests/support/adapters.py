"""Random weight adapters of the kinds that LoRA files hold. No ComfyUI is needed here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch

Tensors = Mapping[str, torch.Tensor]


Random = Callable[..., torch.Tensor]
Adapter = tuple[dict[str, torch.Tensor], torch.Tensor]
"""The tensors of one layer, and the difference that they make to its weight. The first tensor scales the difference."""


def lora(weights: Tensors, scale: float = 0.05, rank: int = 4) -> dict[str, torch.Tensor]:
    """The tensors of a LoRA file that changes each weight by `scale` of its norm; `weights` by layer, [N, K]."""

    def make(n: int, k: int, random: Random) -> Adapter:
        up, down = random(n, rank), random(rank, k)
        return {"lora_up.weight": up, "lora_down.weight": down}, up @ down

    return _adapters(weights, scale, make)


def loha(weights: Tensors, scale: float = 0.05, rank: int = 4) -> dict[str, torch.Tensor]:
    """The same as a LoHa: the elementwise product of two low-rank matrices."""

    def make(n: int, k: int, random: Random) -> Adapter:
        a1, b1, a2, b2 = random(n, rank), random(rank, k), random(n, rank), random(rank, k)
        return {"hada_w1_a": a1, "hada_w1_b": b1, "hada_w2_a": a2, "hada_w2_b": b2}, (a1 @ b1) * (a2 @ b2)

    return _adapters(weights, scale, make)


def lokr(weights: Tensors, scale: float = 0.05, factor: int = 4) -> dict[str, torch.Tensor]:
    """The same as a LoKr: the Kronecker product of a [factor, factor] matrix and a large one."""

    def make(n: int, k: int, random: Random) -> Adapter:
        small, large = random(factor, factor), random(n // factor, k // factor)
        return {"lokr_w1": small, "lokr_w2": large}, torch.kron(small, large)

    return _adapters(weights, scale, make)


def with_delta(state_dict: Tensors, lora_tensors: Tensors) -> dict[str, torch.Tensor]:
    """The weights a LoRA makes, computed here and in float32."""
    changed = dict(state_dict)
    for key, up in lora_tensors.items():
        match = re.fullmatch(r"diffusion_model\.(.*)\.lora_up\.weight", key)
        if match:
            weight, down = f"{match[1]}.weight", lora_tensors[key.replace("lora_up", "lora_down")]
            changed[weight] = state_dict[weight].float() + up @ down
    return changed


def _adapters(weights: Tensors, scale: float, make: Callable[[int, int, Random], Adapter]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    state_dict = {}
    for layer, weight in weights.items():
        tensors, difference = make(*weight.shape, lambda *shape: torch.randn(*shape, generator=generator))
        next(iter(tensors.values())).mul_(scale * weight.float().norm() / difference.norm())
        state_dict |= {f"diffusion_model.{layer}.{name}": tensor for name, tensor in tensors.items()}
    return state_dict
