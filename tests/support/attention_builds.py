"""Builds the attention kernels without a GPU and reports what is in the machine code, as JSON.

Run as a script, in a process of its own, as machine_code.py, whose reports these are.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[2::-1]]

from machine_code import built, dumped, print_reports

from kernels.reference.attention import padded_width
from kernels.triton_kernels import attention, attention_operands
from support.sass import AttentionLoop, attention_loop

# By name; every number but these is a multiple of 16.
TYPES = dict.fromkeys(("q8", "k8"), "*i8") | {"v16": "*fp16", "factor": "fp32", "count": "fp32"}
TYPES |= dict.fromkeys(("q_scale", "k_scale", "v_scale", "k_sum", "v_max"), "*fp32")
TYPES |= dict.fromkeys(("q_factor", "k_factor"), "fp32")
RAGGED = ("TQ", "TK", "STEP", "H", "HK", "B", "GROUP")


@dataclass(frozen=True)
class Build:
    """What is compiled.

    Attributes:
        kernel: "int8", "float", "operands" or "statistics".
        width: channels of a head.
        capability: compute capability of the card, as in sm_86.
        mask: "none", "bool" or "float", and of how many rows it is, as `mask_kind` says.
        half_sums: whether a tile's products are summed in fp16.
        fills: whether the call has work for all of the card.
    """

    kernel: str
    width: int
    capability: int = 86
    mask: tuple[str, str] = ("none", "one")
    half_sums: bool = False
    fills: bool = False


def _parts(build: Build):
    """The kernel, its constants and options, and the types of tensors that depend on the build."""
    width, padded = build.width, padded_width(build.width)
    call = ((1, 1 << 20), 1) if build.fills else ()
    tiles = attention.tiles_for(divmod(build.capability, 10), padded, build.mask, *call)
    if build.kernel in ("int8", "float"):
        int8 = build.kernel == "int8"
        if not int8:
            tiles = attention.float_tiles_for(divmod(build.capability, 10), build.mask)
        form = (int8, width, build.mask, True, build.half_sums, build.half_sums)
        made = attention.attention_constants(tiles, *form)
        return attention.attention_kernel, made, {"q": "*i8", "k": "*i8", "v": "*fp16"} if int8 else {}
    if build.kernel == "operands":
        made = attention_operands.attention_operands_constants(16, True, "bfloat16", width)
        return attention_operands.attention_operands_kernel, made, {}
    made = attention_operands.attention_statistics_constants(True, True, width)
    return attention_operands.attention_statistics_kernel, made, {}


def compiled(build: Build):
    """One build as the launcher would make it on a model's bf16 tensors."""
    kernel, (constants, options), own = _parts(build)
    names = kernel.arg_names
    tensors = names[: next(place for place, name in enumerate(names) if name in ("H", "HK", "B"))]
    types = dict.fromkeys(names, "i32") | dict.fromkeys(tensors, "*bf16")
    types |= {name: word for name, word in TYPES.items() if name in names} | own
    types |= {"mask": "*i1" if build.mask[0] == "bool" else "*bf16"} if "mask" in names else {}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if types[name] not in ("constexpr", "fp32") and name not in RAGGED]
    return built(kernel, types, constants, aligned, options, build.capability)


def main_loop(build: Build) -> AttentionLoop:
    """The main loop of a build for an Ampere or Ada card."""
    return attention_loop(dumped(compiled(build), "-sass"))


def builds() -> list[Build]:
    """Each kernel for each card, at widths of models."""
    cards = ((80, False), (86, True), (89, True), (90, False))
    none, keys, many = ("none", "one"), ("bool", "one"), ("float", "many")
    wide = [(width, mask) for width in (40, 64, 128, 256) for mask in (none, keys, ("bool", "many"), many)]
    return [
        *(Build("int8", width, card, mask, half) for card, half in cards for width, mask in wide),
        Build("int8", 128, 90, fills=True),
        *(Build("float", width, card, mask) for card, _ in cards for width, mask in wide[-4:]),
        *(Build(name, width, 86) for name in ("operands", "statistics") for width in (40, 64, 128, 256)),
        Build("operands", 256, 90),
    ]


if __name__ == "__main__":
    print_reports(compiled, builds())
