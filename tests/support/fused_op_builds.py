"""Builds the kernels of rows without a GPU and reports what is in the machine code, as JSON.

Run as a script, in a process of its own, as machine_code.py, whose reports these are.
"""

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[2::-1]]

import torch
from machine_code import built, print_reports
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels.gguf.formats import GGUF_FORMATS
from kernels.reference.grouped_codes import GroupedCodes
from kernels.triton_kernels import activations, column_rounding, gguf, grouped_codes
from support.fused_op_cases import CASES


@dataclass(frozen=True)
class Build:
    """What is compiled.

    Attributes:
        kernel: name of the kernel.
        channels: length of the rows.
        group: channels of a rotation, 1 for none.
        activation_bits: 8 or 16.
        dtype: of activations and modulations, in Triton's words.
        kind: what distinguishes kernels of one length; of GGUF's kernels the format, of codes their bits.
        capability: compute capability of the card, as in sm_86.
        model: which of its models' forms it is, of a fused op.
    """

    kernel: str
    channels: int
    group: int = 1
    activation_bits: int = 8
    dtype: str = "bf16"
    kind: str = ""
    capability: int = 86
    model: int = 0


# The first parameter behind the tensors.
SIZES = ("K", "N", "count", "FORMAT", "QUADS")
# The tensors that are not of a build's dtype.
TYPES = {"q": "*i8", "scale": "*fp32", "smooth": "*fp32", "blocks": "*u8"}
WORDS = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int8: "i8", torch.int32: "i32"}


def _parts(build: Build):
    """The kernel, its constants and its options."""
    launcher, form = _launch(build)
    return launcher.kernel, launcher.build(*form)


def _launch(build: Build):
    """What launches the kernel, and its form."""
    channels, kind = build.channels, build.kind
    if build.kernel == "quantize":
        rounding = "remainder" if build.activation_bits == 16 else "nearest"
        return activations.QUANTIZER, (channels, build.group > 1, rounding, build.group, False)
    if build.kernel == "round_columns":
        return column_rounding.ROUNDING, column_rounding.rounding_form(channels)
    if build.kernel == "round_to_codes":
        return column_rounding.CODE_ROUNDING, column_rounding.code_rounding_form(channels)
    if build.kernel.startswith("expand_codes"):
        codes, scales = torch.empty(1, channels * int(kind[0]) // 8), torch.empty(1, channels // 16)
        weight = GroupedCodes(codes, scales, scales if kind.endswith("codebook") else None, 16)
        if build.kernel == "expand_codes":
            return grouped_codes.EXPANDER, grouped_codes.expander_form(weight)
        return grouped_codes.LOW_RANK_EXPANDER, grouped_codes.low_rank_form(weight, False)
    form = GGUF_FORMATS[kind]
    row_blocks = channels // form.weights
    return {
        "expand": (gguf.DECODER, gguf.decoder_form(kind, form, row_blocks)),
        "dequantize": (gguf.DECODER, gguf.decoder_form(kind, form)),
        "scales": (gguf.SCALES, gguf.scales_form(kind, form, row_blocks)),
        "expand_with_low_rank": (gguf.LOW_RANK_EXPANDER, gguf.low_rank_form(kind, form, False)),
    }[build.kernel]


def _of_op(build: Build):
    """The kernel of a fused op, its constants and options, and the types of its parameters: as it would be launched on
    a model's tensors. A number that Triton specializes on is a multiple of 16."""
    case = CASES[build.kernel]
    form = case.models[build.model]
    with FakeTensorMode():
        arguments = case.call(lambda *shape, dtype=form.dtype: torch.empty(shape, dtype=dtype, device="cuda"), form)
        flat = case.op.flat(arguments)
        layout = case.op.launch(*flat)
        results = case.op._fake(*flat)
        operands = layout.operands(case.op._tensors(flat), results if isinstance(results, tuple) else (results,))
    launcher = layout.launcher
    words = [f"*{WORDS[tensor.dtype]}" for tensor in operands]
    words += ["fp32" if isinstance(number, float) else "i32" for number in layout.numbers]
    assert all(number % 16 == 0 for number in layout.numbers if isinstance(number, int))
    return launcher.kernel, launcher.build(*layout.form), dict(zip(launcher.kernel.arg_names, words, strict=False))


def compiled(build: Build):
    """One build as the launcher would make it for any number of tokens, with sizes and strides multiples of 16."""
    if build.kernel in CASES:
        kernel, (constants, options), types = _of_op(build)
        names = kernel.arg_names
    else:
        kernel, (constants, options) = _parts(build)
        names = kernel.arg_names
        types = dict.fromkeys(names, "i32")
        tensors = names[: names.index(next(name for name in names if name in SIZES))]
        types |= dict.fromkeys(tensors, f"*{build.dtype}")
        types |= {name: TYPES[name] for name in tensors if name in TYPES}
    types |= {"out": "*i8"} if build.kernel.startswith("expand") else {}
    if build.kernel.startswith("expand_codes"):  # whose output is words, and whose scales are FP8's bytes
        types |= {"out": "*i32", "codes": "*u8", "scale": "*u8", "codebook": "*fp32"}
        types |= {"channel_scale": "*fp32", "larger": "*fp32"} if "channel_scale" in names else {}
    if build.kernel == "round_to_codes":
        types["codes"] = "*u8"
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if types[name] not in ("constexpr", "fp32") and name not in ("T", "N")]
    return built(kernel, types, constants, aligned, options, build.capability)


def builds() -> list[Build]:
    """Each kernel at the row lengths of models on the consumer Ampere card, and some on the other cards."""
    ampere = [
        *(
            Build(name, form.channels, form.group, form.activation_bits, WORDS[form.dtype], form.kind, model=number)
            for name, case in CASES.items()
            for number, form in enumerate(case.models)
        ),
        *(Build("quantize", channels, group, 16) for channels in (4608, 12288) for group in (1, 256)),
        Build("round_columns", 128, dtype="fp32"),
        Build("round_to_codes", 128, dtype="fp32"),
    ]
    expand = [Build("expand", 4608, kind=name) for name in GGUF_FORMATS]
    others = ("expand_with_low_rank", "dequantize", "scales")
    ampere += [*expand, *(replace(build, kernel=kernel) for kernel in others for build in expand)]
    ampere += [replace(build, kernel="expand_with_low_rank", dtype="fp32") for build in expand]
    codes = [Build("expand_codes", 4608, kind=kind) for kind in ("4", "4 codebook", "6")]
    ampere += [*codes, *(replace(build, kernel="expand_codes_with_low_rank") for build in codes)]
    ampere += [replace(build, kernel="expand_codes_with_low_rank", dtype="fp32") for build in codes]
    elsewhere = [build for build in ampere if build.channels in (128, 4608, 12288) or build.kernel == "norm_rope"]
    elsewhere = [build for build in elsewhere if build.activation_bits == 8]
    elsewhere = [build for build in elsewhere if build.kernel not in ("dequantize", "scales")]
    return [*ampere, *(replace(build, capability=card) for card in (80, 89, 90) for build in elsewhere)]


if __name__ == "__main__":
    print_reports(compiled, builds())
