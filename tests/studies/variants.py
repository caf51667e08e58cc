"""The ways of one model that studies compare, an entry a variant, and a step of a MODEL.

Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from comfy.model_patcher import ModelPatcher

from int8_dit.nodes.attention.attention_kinds import AUTO, INT8, KITCHEN_INT8
from support.kitchen_blocks import ROTATION_GROUP, with_kitchen_blocks
from support.random_models import Forward, RandomModel, attending, compiled, load, unfused


@dataclass(frozen=True)
class Variant:
    """How a MODEL is made of the random weights, how its row is named, and whether it compiles, which takes longer."""

    title: str
    build: Callable[[RandomModel], ModelPatcher]
    compiles: bool = False


def _kitchen(model: RandomModel) -> ModelPatcher:
    return attending(with_kitchen_blocks(model.native_model(ROTATION_GROUP)), KITCHEN_INT8)


# What is compared with one another comes one after the other: a card's clocks drift.
VARIANTS = {
    "bf16": Variant("bf16", RandomModel.bf16_model),
    "bf16-exact": Variant("bf16 + the fastest exact attention", lambda m: attending(m.bf16_model(), AUTO)),
    "native": Variant("native INT8", RandomModel.native_model),
    "kitchen-attention": Variant("native INT8 ConvRot, comfy-kitchen's fusions and INT8 attention", _kitchen),
    "unfused": Variant("this pack, blocks unfused", lambda m: unfused(m.int8_model())),
    "kitchens": Variant(
        "this pack + comfy-kitchen's INT8 attention", lambda m: attending(m.int8_model(), KITCHEN_INT8)
    ),
    "pack": Variant("this pack, native INT8 file", RandomModel.int8_model),
    "exact": Variant("this pack + the fastest exact attention", lambda m: attending(m.int8_model(), AUTO)),
    "attention": Variant("this pack + INT8 attention", lambda m: attending(m.int8_model(), INT8)),
    "rotated": Variant("this pack, smoothed and rotated file", lambda m: m.rotated_model(ROTATION_GROUP)),
    "codes": Variant("this pack, weights of 4 bits (W4A8)", RandomModel.coded_model),
    "compiled-bf16": Variant("bf16, torch.compile", lambda m: compiled(m.bf16_model()), compiles=True),
    "compiled-pack": Variant("this pack, torch.compile", lambda m: compiled(m.int8_model()), compiles=True),
}


class Step:
    """The forwards of a step of a MODEL, which is loaded first: Ideogram 4 has one without text too, as DualModelGuider
    runs them."""

    def __init__(self, model: ModelPatcher, inputs: Sequence[Mapping[str, object]]) -> None:
        load(model)
        self.model, self._forwards = model, [Forward(model, each) for each in inputs]

    def run(self) -> None:
        for forward in self._forwards:
            forward()

    def velocities(self) -> torch.Tensor:
        return torch.cat([forward.velocity() for forward in self._forwards])


def inputs_of(random: RandomModel, pixels: int | None = None) -> list[dict[str, object]]:
    """Those of each forward of a step."""
    texts = (True, False) if random.family.kind == "Ideogram4" else (True,)
    return [random.inputs(pixels, text=text) for text in texts]
