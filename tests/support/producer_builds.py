"""Builds the kernels of rows without a GPU and reports what is in the machine code, as JSON.

Run as a script, in a process of its own, as machine_code.py, whose reports these are.
"""

import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import triton
from machine_code import report
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.fused import activations, column_rounding, gates, gguf, gguf_low_rank, grouped_codes, norms, rope
from kernels.gguf.formats import GGUF_FORMATS

# Hidden and inner widths: Flux and Qwen-Image, Z-Image, Ideogram 4, Wan.
WIDTHS, INNER = (3072, 3840, 4608, 5120), (10240, 12288, 13824)
HEADS = ((256, 18, "heads", "halves"), (128, 24, "heads", "neighbours"), (128, 30, "heads", "neighbours"))
HEADS = (*HEADS, (128, 40, "all", "neighbours"))


@dataclass(frozen=True)
class Build:
    """What is compiled.

    Attributes:
        kernel: name of the kernel.
        channels: length of the rows; of the rope kernel the head's.
        group: channels of a rotation, 1 for none.
        activation_bits: 8 or 16.
        dtype: of activations and modulations, in Triton's words.
        kind: what distinguishes kernels of one length; of GGUF's kernels the format, of codes their bits.
        capability: compute capability of the card, as in sm_86.
    """

    kernel: str
    channels: int
    group: int = 1
    activation_bits: int = 8
    dtype: str = "bf16"
    kind: str = ""
    capability: int = 86
    options: dict = field(default_factory=dict)


# The first parameter behind the tensors.
SIZES = ("K", "T", "N", "count", "FORMAT", "QUADS")
# The tensors that are not of a build's dtype.
TYPES = {"q": "*i8", "q_scale": "*fp32", "scale": "*fp32", "smooth": "*fp32", "freqs": "*fp32", "blocks": "*u8"}
FLOATS = {("norm_quantize", "scale"), ("norm_rope", "q")}  # of a build's dtype all the same


def _parts(build: Build):
    """The kernel, its constants and its options."""
    channels, group, bits, kind = build.channels, build.group, build.activation_bits, build.kind
    if build.kernel == "norm_quantize":
        layer = kind == "layer"
        given = (not layer, False, True, layer, group > 1)
        return norms.norm_quantize_kernel, norms.norm_quantize_constants(channels, kind, group, bits, False, *given)
    if build.kernel == "gated_residual":
        norm = "rms" if kind == "tanh" else "none"
        constants = norms.gated_residual_constants(channels, norm, kind, kind == "tanh", False, False)
        return norms.gated_residual_kernel, constants
    if build.kernel == "activate_quantize":
        activation, beside = kind.removesuffix(" beside"), kind.endswith(" beside")
        given = (activation == "silu", beside, group > 1)
        constants = gates.activate_quantize_constants(channels, activation, group, bits, False, *given)
        return gates.activate_quantize_kernel, constants
    if build.kernel == "quantize":
        return activations.quantize_rows_kernel, activations.quantize_rows_constants(
            channels, group > 1, bits == 16, group, False
        )
    if build.kernel == "round_columns":
        return column_rounding.round_columns_kernel, column_rounding.round_columns_constants(channels)
    if build.kernel in ("expand", "dequantize", "scales"):
        form = GGUF_FORMATS[kind]
        row_blocks = channels // form.weights
        kernel, constants = {
            "expand": (gguf.expand_kernel, gguf.expander_constants(kind, form, row_blocks, False)),
            "dequantize": (gguf.dequantize_kernel, gguf.decoder_constants(kind, form)),
            "scales": (gguf.scales_kernel, gguf.scales_constants(kind, form, row_blocks)),
        }[build.kernel]
        return kernel, (constants, gguf.OPTIONS)
    if build.kernel == "expand_with_low_rank":
        constants = gguf_low_rank.low_rank_constants(kind, GGUF_FORMATS[kind], False)
        return gguf_low_rank.expand_with_low_rank_kernel, (constants, gguf_low_rank.OPTIONS)
    if build.kernel.startswith("expand_codes"):
        form = (channels, int(kind[0]), 16, kind.endswith("codebook"))
        if build.kernel == "expand_codes":
            return grouped_codes.expand_codes_kernel, (grouped_codes.expander_constants(*form), grouped_codes.OPTIONS)
        constants = grouped_codes.low_rank_constants(*form, interpreted=False)
        return grouped_codes.expand_codes_with_low_rank_kernel, (constants, grouped_codes.LOW_RANK_OPTIONS)
    heads, extent, pairs = kind.split()
    given = ((int(heads),) * 2, channels, (extent, extent), (True, True), pairs == "neighbours")
    return rope.norm_rope_kernel, rope.norm_rope_constants(*given)


def compiled(build: Build):
    """One build as the launcher would make it for any number of tokens, with sizes and strides multiples of 16."""
    kernel, (constants, options) = _parts(build)
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32")
    tensors = names[: names.index(next(name for name in names if name in SIZES))]
    types |= dict.fromkeys(tensors, f"*{build.dtype}")
    types |= {name: TYPES[name] for name in tensors if name in TYPES and (build.kernel, name) not in FLOATS}
    types |= {name: "fp32" for name in names if name.endswith("eps")}
    types |= {"out": "*i8"} if build.kernel.startswith("expand") else {}
    if build.kernel.startswith("expand_codes"):  # whose output is words, and whose scales are FP8's bytes
        types |= {"out": "*i32", "codes": "*u8", "scale": "*u8", "codebook": "*fp32"}
        types |= {"channel_scale": "*fp32", "larger": "*fp32"} if "channel_scale" in names else {}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if types[name] not in ("constexpr", "fp32") and name not in ("T", "N")]
    source = ASTSource(
        kernel,
        types,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {**options, **build.options}
    return triton.compile(source, target=GPUTarget("cuda", build.capability, 32), options=options), options


def _build_and_report(build: Build) -> dict:
    kernel, options = compiled(build)
    return {**asdict(build), "warps": options["num_warps"], **report(kernel)}


def builds() -> list[Build]:
    """Each kernel at the row lengths of models on the consumer Ampere card, and some on the other cards."""
    ampere = [
        *(Build("norm_quantize", channels, kind=kind) for channels in WIDTHS for kind in ("rms", "layer")),
        *(Build("norm_quantize", channels, group, 16, "fp32", "rms") for channels in WIDTHS for group in (1, 256)),
        Build("norm_quantize", 4608, 64, kind="rms"),
        *(Build("gated_residual", channels, kind=kind) for channels in WIDTHS for kind in ("plain", "tanh")),
        *(Build("activate_quantize", channels, group, kind="silu") for channels in INNER for group in (1, 256)),
        *(Build("activate_quantize", channels, 1, 16, kind="gelu_tanh beside") for channels in (15360,)),
        *(Build("activate_quantize", 15360, group, kind="gelu_tanh beside") for group in (1, 256)),
        *(Build("activate_quantize", channels, 256, 16, "fp32", "gelu") for channels in INNER),
        *(Build("quantize", channels, group, 16) for channels in (4608, 12288) for group in (1, 256)),
        Build("round_columns", 128, dtype="fp32"),
        *(Build("norm_rope", width, kind=f"{heads} {extent} {pairs}") for width, heads, extent, pairs in HEADS),
    ]
    expand = [Build("expand", 4608, kind=name) for name in GGUF_FORMATS]
    others = ("expand_with_low_rank", "dequantize", "scales")
    ampere += [*expand, *(replace(build, kernel=kernel) for kernel in others for build in expand)]
    ampere += [replace(build, kernel="expand_with_low_rank", dtype="fp32") for build in expand]
    codes = [Build("expand_codes", 4608, kind=kind) for kind in ("4", "4 codebook", "6")]
    ampere += [*codes, *(replace(build, kernel="expand_codes_with_low_rank") for build in codes)]
    ampere += [replace(build, kernel="expand_codes_with_low_rank", dtype="fp32") for build in codes]
    elsewhere = [build for build in ampere if build.channels in (128, 4608, 12288) and build.activation_bits == 8]
    elsewhere = [build for build in elsewhere if build.kernel not in ("dequantize", "scales")]
    return [*ampere, *(replace(build, capability=card) for card in (80, 89, 90) for build in elsewhere)]


def all_reports() -> list[dict]:
    """What `report` says of all builds, each beside a description of its build."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        return pool.map(_build_and_report, builds(), chunksize=1)


if __name__ == "__main__":
    json.dump(all_reports(), sys.stdout)
