"""Main loops of GEMM kernels, read from their machine code."""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# One instruction: its address, its name with modifiers, its operands.
_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;\n]*)")
_TENSOR_CORE = re.compile(r"I(?:MMA\.(16)(8)(32)|GMMA\.(\d+)x(\d+)x(\d+))\b")


@dataclass(frozen=True)
class MainLoop:
    """The loop over K of an INT8 GEMM."""

    tensor: int  # its tensor core instructions
    instructions: int  # all its instructions
    operations: int  # multiplications and additions that one tensor core instruction does


@dataclass(frozen=True)
class AttentionLoop:
    """The loop over keys of an attention kernel for an Ampere or Ada GeForce card, of one warp."""

    tensor: int  # its tensor core instructions
    # In which these occupy a quarter of a multiprocessor: 16 for m16n8k32 of int8 and m16n8k16 with fp16 sums, 32 for
    # m16n8k16 with float32 sums.
    cycles: int
    exponentials: int  # instructions of the unit for special functions, which takes 8 cycles for each
    instructions: int  # all its instructions


def attention_loop(sass: str) -> AttentionLoop:
    """That of the one kernel in the output of `cuobjdump -sass`: the shortest with products of two kinds, or of one."""
    found = [body for body in loops(sass) if any(name.startswith("HMMA") for name in body)]
    body = min(found, key=len)
    cycles = {"IMMA": 16, "HMMA.16816.F16": 16, "HMMA.16816.F32": 32}
    tensor = [name for name in body if name.startswith(("IMMA", "HMMA"))]
    taken = sum(next(taken for start, taken in cycles.items() if name.startswith(start)) for name in tensor)
    return AttentionLoop(len(tensor), taken, sum(name.startswith("MUFU") for name in body), len(body))


def cuobjdump(*arguments: str | Path, folder: Path | None = None) -> str:
    """What the `cuobjdump` of Triton's wheel prints, run in `folder`."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def main_loops(sass: str) -> Iterator[tuple[str, MainLoop]]:
    """Name and main loop of each kernel in the output of `cuobjdump -sass` that multiplies int8 in a loop: of its loops
    with tensor core instructions the shortest."""
    for function in re.split(r"^\s*Function : ", sass, flags=re.MULTILINE)[1:]:
        found = [loop for body in loops(function) if (loop := _main_loop(body))]
        if found:
            yield function.partition("\n")[0].strip(), min(found, key=lambda loop: loop.instructions)


def loops(function: str) -> Iterator[list[str]]:
    """The names of each loop's instructions in the machine code of one kernel."""
    instructions = [(int(at, 16), name, operands) for at, name, operands in _INSTRUCTION.findall(function)]
    for at, name, operands in instructions:
        target = re.search(r"\b0x([0-9a-f]+)", operands) if name.startswith("BRA") else None
        # A branch to itself is the padding behind a kernel.
        if target and int(target[1], 16) < at:
            yield [name for place, name, _ in instructions if int(target[1], 16) <= place <= at]


def _main_loop(names: list[str]) -> MainLoop | None:
    shapes = [match for name in names if (match := _TENSOR_CORE.match(name))]
    if not shapes:
        return None
    m, n, k = (int(size) for size in shapes[0].groups() if size)
    return MainLoop(len(shapes), len(names), 2 * m * n * k)
