"""Builds the fused GEMM without a GPU and reports what is in the machine code, as JSON.

Run as a script, in a process of its own: the tests' process may run Triton's interpreter, which cannot compile.
"""

import json
import multiprocessing
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

sys.path[:0] = [str(folder) for folder in Path(__file__).resolve().parents[2:0:-1]]
os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.internals.gluon import HAS_GLUON
from kernels.linear.gemm_kernel import gemm_build, int8_gemm_kernel
from kernels.linear.tiles import ARCHITECTURES, GemmConfig, walks_twice
from support.sass import cuobjdump, loops, main_loops

if HAS_GLUON:
    from triton.experimental.gluon._runtime import GluonASTSource

    from kernels.linear.ring_gemm_kernel import ring_build, ring_gemm_kernel

# INT8 and fp16 tensor cores of Ampere and of Hopper, copies into shared memory of both, loads from it, spills.
COUNTED = ("IMMA", "IGMMA", "HMMA", "HGMMA", "LDGSTS", "UTMALDG", "LDSM", "LDL", "STL")
SIZES = ("M", "N", "K", "stride_am", "stride_bn", "stride_om")
TAIL = ("whole", "parts", "group")  # further numbers, which it is compiled for all of; the last one alone is no ring's


@dataclass(frozen=True)
class Build:
    """What is compiled."""

    config: GemmConfig  # the configuration
    capability: int = 86  # compute capability of the card, as in sm_86
    even_k: bool = True  # whether K is a multiple of the configuration's block
    store_blocks: bool = False  # whether Hopper's copy engine writes the output
    out: str = "bf16"  # dtype of the output in Triton's words; i32 is the accumulator
    passes: int = 1  # how often K is walked: twice for activations of 16 bits


def compiled(build: Build):
    """One build as the launcher would make it for any M, with a bias, and with N, K and the strides multiples of 16."""
    config, descriptors = build.config, build.config.pipeline == "descriptors"

    def operand(dtype: str, rows: int, columns: int, described: bool) -> str:
        return f"tensordesc<{dtype}[{rows}, {columns}]>" if described else f"*{dtype}"

    types = {
        "a": operand("i8", config.block_m, config.block_k, descriptors),
        "b": operand("i8", config.block_n, config.block_k, descriptors),
        "a_scale": "*fp32",
        "b_scale": "*fp32",
        "bias": "*bf16",
        "out": operand(build.out, config.block_m, config.block_n, build.store_blocks),
        "partial_sums": "*i32",
        "arrivals": "*i32",
        **dict.fromkeys((*SIZES, *TAIL), "i32"),
    }
    aligned = [name for name, kind in types.items() if kind.startswith("*") or (name in SIZES and name != "M")]
    if config.pipeline == "ring":
        kernel, kind, (constants, options) = ring_gemm_kernel, GluonASTSource, ring_build(config, True)
    else:
        kernel, kind = int8_gemm_kernel, ASTSource
        constants, options = gemm_build(config, True, build.even_k, descriptors, build.store_blocks, build.passes)
    return built(kernel, types, constants, aligned, options, build.capability, kind)


def built(kernel, types: dict, constants: dict, aligned: Iterable[str], options: dict, capability: int, kind=ASTSource):
    """A kernel compiled for sm_<capability>, by the types of its parameters, its constants, and which numbers and
    addresses are multiples of 16."""
    names = kernel.arg_names
    source = kind(
        kernel,
        {name: "constexpr" if name in constants else types[name] for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def dumped(kernel, what: str) -> str:
    """What `cuobjdump` says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return cuobjdump(what, file.name)


def report(kernel) -> dict:
    """Instruction counts of the SASS, and the resources the assembler recorded."""
    sass, usage = dumped(kernel, "-sass"), dumped(kernel, "-res-usage")
    mnemonics = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", sass)
    return {
        "loop": next(((loop.tensor, loop.instructions) for _, loop in main_loops(sass)), None),
        **{name: mnemonics.count(name) for name in COUNTED},
        "spills_in_loops": sum(name.startswith(("LDL", "STL")) for body in loops(sass) for name in body),
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "local": int(re.search(r"LOCAL:(\d+)", usage).group(1)),
        "shared": kernel.metadata.shared,
        "target": re.search(r"\.target\s+(\w+)", kernel.asm["ptx"]).group(1),
    }


def _reported(compiled: Callable, build) -> dict:
    kernel = compiled(build)
    return {**vars(build), "warps": kernel.metadata.num_warps, **report(kernel)}


def print_reports(compiled: Callable, builds: list) -> None:
    """What `report` says of all that `compiled` makes of builds, each beside a description of its build, as JSON."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        json.dump(pool.map(partial(_reported, compiled), builds, chunksize=1), sys.stdout, default=repr)


def builds() -> list[Build]:
    """Every shipped configuration on every card that it is shipped for and that can be built for here; on the consumer
    Ampere card also with a ragged K and with K split, on Hopper also with K split and with blocks stored; all that
    can walk K twice also so. A ring is one kernel with K split and not, without a ragged K, and on that card also with
    outputs of 4 bytes."""
    ampere, hopper = (list(ARCHITECTURES[name].rates) for name in ("Ampere", "Hopper"))
    rings = list(dict.fromkeys(config.kernel for config in ampere if config.pipeline == "ring")) if HAS_GLUON else []
    ampere = [config for config in ampere if config.pipeline != "ring"]
    twice = [config for config in ampere if walks_twice(config)]
    return [
        *(Build(config, capability) for capability in (86, 80, 89) for config in (*ampere, *rings)),
        *(Build(config, out=out) for out in ("fp32", "i32") for config in rings),
        *(Build(config, even_k=False) for config in ampere),
        *(Build(replace(config, split_k=3)) for config in ampere),
        *(Build(config, 90) for config in hopper),
        *(Build(replace(config, split_k=3), 90) for config in hopper),
        *(Build(config, 90, store_blocks=True) for config in hopper if config.pipeline == "descriptors"),
        *(Build(config, capability, passes=2) for capability in (86, 80, 89) for config in twice),
        *(Build(config, even_k=False, passes=2) for config in twice),
        *(Build(config, 90, passes=2) for config in hopper),
        *(Build(config, 90, store_blocks=True, passes=2) for config in hopper if config.pipeline == "descriptors"),
    ]


if __name__ == "__main__":
    print_reports(compiled, builds())
