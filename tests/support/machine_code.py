"""Builds the fused GEMM for Ampere and Ada without a GPU and reports what is in the machine code, as JSON.

Run as a script, in a process of its own: the tests' process may run Triton's interpreter, which cannot compile.
"""

import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.pop("TRITON_INTERPRET", None)

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels.fused.gemm_kernel import compile_options, int8_gemm_kernel, kernel_constants
from kernels.fused.tiles import ARCHITECTURES, GemmConfig

POINTERS = {
    "a": "*i8",
    "b": "*i8",
    "a_scale": "*fp32",
    "b_scale": "*fp32",
    "bias": "*bf16",
    "out": "*bf16",
    "partial_sums": "*i32",
    "arrivals": "*i32",
}
SIZES = ("M", "N", "K", "stride_am", "stride_bn", "stride_om")


def build(config: GemmConfig, even_k: bool, capability: int = 86):
    """Compile one configuration as the launcher would for any M, with N, K and the strides multiples of 16."""
    constants = kernel_constants(config, has_bias=True, even_k=even_k)
    signature = {**POINTERS, **dict.fromkeys(SIZES, "i32"), **dict.fromkeys(constants, "constexpr")}
    names = int8_gemm_kernel.arg_names
    divisible = {(names.index(name),): [["tt.divisibility", 16]] for name in (*POINTERS, *SIZES) if name != "M"}
    source = ASTSource(
        int8_gemm_kernel, signature, {(names.index(name),): value for name, value in constants.items()}, divisible
    )
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=compile_options(config))


def _tool(name: str) -> str:
    return str(Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name)


def report(compiled) -> dict:
    """Instruction counts of the SASS, and the resources the assembler recorded."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        sass = subprocess.run(
            [_tool("cuobjdump"), "-sass", file.name], capture_output=True, text=True, check=True
        ).stdout
        usage = subprocess.run(
            [_tool("cuobjdump"), "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    mnemonics = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z0-9]+)", sass)
    count = {name: mnemonics.count(name) for name in ("IMMA", "HMMA", "LDGSTS", "LDSM", "LDL", "STL")}
    return {
        **count,
        "registers": int(re.search(r"REG:(\d+)", usage).group(1)),
        "stack": int(re.search(r"STACK:(\d+)", usage).group(1)),
        "local": int(re.search(r"LOCAL:(\d+)", usage).group(1)),
        "shared": compiled.metadata.shared,
        "target": re.search(r"\.target\s+(\w+)", compiled.asm["ptx"]).group(1),
    }


def variants() -> list[tuple[GemmConfig, bool, int]]:
    """(configuration, whether K is a multiple of its block, compute capability) of everything that is built."""
    configs = list(ARCHITECTURES["Ampere"].rates)
    everywhere = [(config, True, capability) for capability in (86, 80, 89) for config in configs]
    ragged = [(config, False, 86) for config in configs]
    split = [(replace(config, split_k=3), True, 86) for config in configs]
    return everywhere + ragged + split


def _build_and_report(variant: tuple[GemmConfig, bool, int]) -> dict:
    config, even_k, capability = variant
    described = {"config": repr(config), "warps": config.num_warps, "even_k": even_k, "capability": capability}
    return {**described, **report(build(config, even_k, capability))}


if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        json.dump(pool.map(_build_and_report, variants(), chunksize=1), sys.stdout)
