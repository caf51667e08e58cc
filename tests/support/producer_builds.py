"""Builds the kernels of rows without a GPU and reports what is in the machine code, as JSON.

Run as a script, in a process of its own, as machine_code.py, whose reports these are.
"""

import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parent)]

import triton
from machine_code import report
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.fused import norms

CAPABILITIES = (86, 80, 89, 90)


@dataclass(frozen=True)
class Build:
    """What is compiled.

    Attributes:
        kernel: name of the kernel.
        channels: length of the rows.
        group: channels of a rotation, 1 for none.
        activation_bits: 8 or 16.
        dtype: of activations and modulations, in Triton's words.
        kind: what distinguishes kernels of one length.
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


# Of each kernel: what it is, constants and options of a build, and the tensors that are not of its dtype.
QUANTIZED = {"q": "*i8", "q_scale": "*fp32", "smooth": "*fp32"}


def _parts(build: Build):
    channels, group, bits = build.channels, build.group, build.activation_bits
    if build.kernel == "norm_quantize":
        layer = build.kind == "layer"
        given = (not layer, False, True, layer, build.group > 1)
        return norms.norm_quantize_kernel, norms.norm_quantize_constants(
            channels, build.kind or "rms", group, bits, False, *given
        )
    return norms.gated_residual_kernel, norms.gated_residual_constants(
        channels, "rms" if build.kind else "none", build.kind or "plain", bool(build.kind), False, False
    )


def compiled(build: Build):
    """One build as the launcher would make it for any number of tokens, with sizes and strides multiples of 16."""
    kernel, (constants, options) = _parts(build)
    names = kernel.arg_names
    types = dict.fromkeys(names, "i32")
    tensors = names[: names.index("T")]
    types |= {name: QUANTIZED.get(name, f"*{build.dtype}") for name in tensors}
    types |= {"eps": "fp32"} if "eps" in names else {}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [name for name in names if types[name] not in ("constexpr", "fp32") and name != "T"]
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
    """Each kernel at the row lengths of models, on the consumer Ampere card; the widest also on the other cards."""
    made = []
    for channels in (3072, 3840, 4608, 5120):
        made += [Build("norm_quantize", channels, kind=kind) for kind in ("rms", "layer")]
        made += [Build("norm_quantize", channels, 256, 16, "fp32"), Build("norm_quantize", channels, 64)]
        made += [Build("gated_residual", channels, kind=kind) for kind in ("", "tanh")]
    return made


def all_reports() -> list[dict]:
    """What `report` says of all builds, each beside a description of its build."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        return pool.map(_build_and_report, builds(), chunksize=1)


if __name__ == "__main__":
    json.dump(all_reports(), sys.stdout)
