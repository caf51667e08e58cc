"""The ways of one model that studies compare, an entry a variant, and a step of a MODEL.

Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from comfy.model_patcher import ModelPatcher

from int8_dit.kernels import ChannelTransform
from int8_dit.nodes.attention.attention_kinds import AUTO, INT8, KITCHEN_INT8
from support.kitchen_blocks import ROTATION_GROUP, with_kitchen_blocks
from support.random_models import Forward, Held, RandomModel, attending, compiled, load, plain, unfused

PROTECTED = 17


@dataclass(frozen=True)
class Variant:
    """How a MODEL is made of the random weights, how its row is named, and whether it compiles, which takes longer."""

    title: str
    build: Callable[[RandomModel], ModelPatcher]
    compiles: bool = False


def _smoothed(model: RandomModel, group: int | None = None) -> ModelPatcher:
    def plan(name: str, channels: int) -> Held:
        return Held(ChannelTransform(model.factors(name, channels), group))

    return model.int8_model(plan)


def _protecting(model: RandomModel, how: Held | None) -> ModelPatcher:
    """Some of the down projections held as `how` says."""
    down = [name for name in model.layers if name.endswith(".w2")]
    number_of = min(PROTECTED, max(1, len(down) // 2))
    protected = {down[index * len(down) // number_of] for index in range(number_of)}
    return model.int8_model(lambda name, channels: how if name in protected else plain(name, channels))


def _kitchen(model: RandomModel) -> ModelPatcher:
    return with_kitchen_blocks(model.native_model(ROTATION_GROUP))


# What is compared with one another comes one after the other: a card's clocks drift.
VARIANTS = {
    "bf16": Variant("bf16", RandomModel.bf16_model),
    "bf16-exact": Variant("bf16 + the fastest exact attention", lambda m: attending(m.bf16_model(), AUTO)),
    "native": Variant("native INT8", RandomModel.native_model),
    "kitchen": Variant("native INT8 ConvRot, every fusion of comfy-kitchen's", _kitchen),
    "kitchen-attention": Variant("the same + its INT8 attention", lambda m: attending(_kitchen(m), KITCHEN_INT8)),
    "unfused": Variant("this pack, blocks unfused", lambda m: unfused(m.int8_model())),
    "kitchens": Variant(
        "this pack + comfy-kitchen's INT8 attention", lambda m: attending(m.int8_model(), KITCHEN_INT8)
    ),
    "protected-bf16": Variant(f"this pack, {PROTECTED} w2 in bf16", partial(_protecting, how=None)),
    "protected-16": Variant(
        f"this pack, {PROTECTED} w2 with 16-bit activations", partial(_protecting, how=Held(activation_bits=16))
    ),
    "pack": Variant("this pack, native INT8 file", RandomModel.int8_model),
    "exact": Variant("this pack + the fastest exact attention", lambda m: attending(m.int8_model(), AUTO)),
    "attention": Variant("this pack + INT8 attention", lambda m: attending(m.int8_model(), INT8)),
    "smoothed": Variant("this pack, smoothed file", _smoothed),
    "rotated": Variant("this pack, smoothed and rotated file", partial(_smoothed, group=ROTATION_GROUP)),
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
