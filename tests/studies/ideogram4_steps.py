"""The steps of ideogram4_benchmark.py: a table of variants of a full Ideogram 4, an entry a variant.

Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import comfy.model_management
import torch
from comfy.model_patcher import ModelPatcher

from int8_dit.kernels import ChannelTransform
from int8_dit.kernels.benchmark import markdown
from int8_dit.kernels.card.timing import median_milliseconds
from int8_dit.nodes.patching.attention_kinds import AUTO, INT8, KITCHEN_INT8
from support.kitchen_blocks import ROTATION_GROUP, with_kitchen_blocks
from support.measuring import PARTS, Row, Rows, by_part, graph_counts, kernel_times, number, ratio, row_of
from support.random_models import (
    FAMILIES,
    Forward,
    Held,
    RandomModel,
    attending,
    compiled,
    load,
    plain,
    unfused,
    weights_on_device,
)
from support.tensors import relative_error

PROTECTED = 17
_COMPILED_TAKE = 2  # times as long, at most


@dataclass(frozen=True)
class Variant:
    """How a MODEL is made of the random weights, and how its row is named. A compiled one runs at the largest size."""

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
    """One conditional and one unconditional forward of a loaded MODEL, as DualModelGuider runs them."""

    def __init__(self, model: ModelPatcher, inputs: Sequence[Mapping[str, object]]) -> None:
        self._forwards = [Forward(model, each) for each in inputs]

    def run(self) -> None:
        for forward in self._forwards:
            forward()

    def velocities(self) -> torch.Tensor:
        return torch.cat([forward.velocity() for forward in self._forwards])


def measure_steps(
    blocks: int, pixels: Sequence[int], repetitions: int, names: Sequence[str], profiled: Sequence[str], seconds: float
) -> Rows:
    """A row for each variant in `names`, of one process; those in `profiled` with the times of their kernels.

    `seconds` is the most that a row may take, building and tuning included.
    """
    device = comfy.model_management.get_torch_device()
    model = RandomModel(FAMILIES["Ideogram 4"], device, {"num_layers": blocks})
    inputs = {side: [model.inputs(side), model.inputs(side, text=False)] for side in pixels}
    expected: dict[int, torch.Tensor] = {}

    def measure(name: str) -> Row:
        variant, figures = VARIANTS[name], {}
        with weights_on_device():
            patcher = variant.build(model)
            load(patcher)
            figures["weights_gb"] = comfy.model_management.module_size(patcher.model) / 1e9
            for side in (max(pixels),) if variant.compiles else pixels:
                step = Step(patcher, inputs[side])
                output = step.velocities()
                figures[f"error_{side}"] = relative_error(output, expected.setdefault(side, output))
                del output
                if device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                figures[f"ms_{side}"] = median_milliseconds(step.run, device, repetitions)
                if device.type == "cuda":
                    figures[f"peak_gb_{side}"] = torch.cuda.max_memory_allocated() / 1e9
            if variant.compiles:
                figures |= graph_counts()
            if name in profiled:
                figures["kernels"] = kernel_times(step.run, device)
        return figures

    rows = Rows()
    for name in names:
        variant = VARIANTS[name]
        most = seconds * _COMPILED_TAKE if variant.compiles else seconds
        rows.measure({"name": name, "variant": variant.title}, partial(measure, name), most)
    return rows


def steps_table(rows: Sequence[Row], pixels: Sequence[int]) -> str:
    """Times, and how many times as fast as bf16 and as native INT8; memory; errors."""
    bf16, native = row_of(rows, name="bf16"), row_of(rows, name="native")
    columns = ["variant"]
    for side in pixels:
        columns += [f"{side} px ms (vs bf16)", f"{side} px vs native INT8"]
    columns += [*(f"{side} px peak GB" for side in pixels), "weights GB", "rel. error"]
    cells = []
    for row in rows:
        cell = [str(row["variant"])]
        for side in pixels:
            milliseconds = number(row, f"ms_{side}", ".1f")
            cell.append("-" if milliseconds == "-" else f"{milliseconds} ({ratio(row, bf16, f'ms_{side}')})")
            cell.append(ratio(row, native, f"ms_{side}"))
        cell += [number(row, f"peak_gb_{side}", ".1f") for side in pixels]
        errors = [row[f"error_{side}"] for side in pixels if f"error_{side}" in row]
        cell += [number(row, "weights_gb", ".1f"), f"{max(errors):.3f}" if errors else "-"]
        cells.append(cell)
    failed = [f"- {row['variant']}: {row['failed']}" for row in rows if "failed" in row]
    graphs = [
        f"- {row['variant']}: {row['graphs']} graphs, {row['graph_breaks']} graph breaks, {row['took_s']:.0f} s with "
        "compilation"
        for row in rows
        if "graphs" in row
    ]
    lists = (("Compiled:", graphs), ("Not measured:", failed))
    return "\n\n".join([markdown(columns, cells), *("\n".join([head, "", *list_]) for head, list_ in lists if list_)])


def parts_table(rows: Sequence[Row]) -> str:
    """Milliseconds of a step's kernels by part, a column a profiled variant; empty where there is none."""
    profiled = [row for row in rows if "kernels" in row]
    parts = [by_part(row["kernels"]) for row in profiled]
    if not parts:
        return ""
    lines = [[part, *(f"{each[part]:.1f}" for each in parts)] for part in PARTS]
    lines.append(["all kernels", *(f"{sum(each.values()):.1f}" for each in parts)])
    return markdown(["GPU time, ms", *(str(row["variant"]) for row in profiled)], lines)
