"""The table of what the kernels assume of the insides of other packages, and the check whether it holds here.

What may be missing without harm is looked up where it is used.
"""

import functools
import importlib.util
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, eq=False)
class Assumption:
    """Something that another package promises nobody."""

    what: str
    instead: str  # what the pack does where it does not hold; both for the log
    # A file of a package -> regular expressions that its text matches where the assumption holds. The text is read and
    # nothing is imported: a driver's context takes memory on the card.
    sources: Mapping[str, tuple[str, ...]]
    # A file that came with it; where there is none, the package is older and nothing is missing.
    as_new_as: str | None = None


DIRECT_LAUNCH = Assumption(
    "how Triton launches a compiled kernel",
    "each launch is Triton's own, which takes the host tens of microseconds longer",
    {
        # The arguments of `CompiledKernel.run`.
        "triton/runtime/jit.py": (
            r"kernel\.run\(grid_0, grid_1, grid_2, stream, kernel\.function, kernel\.packed_metadata,\s+launch_",
        ),
        "triton/compiler/compiler.py": (r"^class CompiledKernel\b",),
    },
)
LAUNCHER = Assumption(
    "what Triton's launcher does before it launches",
    "each launch takes the host some microseconds longer, on Hopper up to 15",
    {
        "triton/backends/nvidia/driver.py": (
            r"^class CudaLauncher\(object\):",
            r"self\.launch\(gridX, gridY, gridZ, stream, function, self\.launch_cooperative_grid, self\.launch_pdl,"
            r"\s+global_scratch, profile_scratch, \*args\)",
            r"^def make_tensordesc_arg\(arg, metadata\):",
            r"final_args\.extend\(make_tensordesc_arg\(arg, tensordesc_meta\[tensordesc_idx\]\)\)",
            r"return launcher\(\*final_args\)",
        ),
    },
)
COMPILING_ALONE = Assumption(
    "how Triton compiles a kernel without a launch",
    "kernels are compiled at their first launch, and of the GEMM's tiles the rule's run",
    {
        "triton/runtime/jit.py": (
            r"^    def run\(self, \*args, grid, warmup, \*\*kwargs\):",
            r"^        with self\._hash_lock:",  # other threads compile too
        ),
    },
    as_new_as="triton/runtime/_async_compile.py",
)
_GLUON_LANGUAGE = "triton/experimental/gluon/language"
_GLUON_NAMES = """NVMMADistributedLayout DotOperandLayout SwizzledSharedLayout allocate_shared_memory convert_layout
    (?:thread_)?barrier exp2 fma"""
GLUON = Assumption(
    "Gluon, Triton's language with layouts",
    "the GEMM and INT8 attention of RTX 30 and 40 run by Triton's own pipeline, which is slower",
    {
        "triton/experimental/gluon/_runtime.py": (r"^class GluonJITFunction\b", r"^def jit\("),
        f"{_GLUON_LANGUAGE}/__init__.py": tuple([rf"^\s+{name}," for name in _GLUON_NAMES.split()]),
        f"{_GLUON_LANGUAGE}/nvidia/ampere/__init__.py": (r"\bmma_v2\b",),
        f"{_GLUON_LANGUAGE}/nvidia/ampere/async_copy.py": (
            r"^def (?:async_load|async_copy_global_to_shared)\b",
            r"^def commit_group\b",
            r"^def wait_group\b",
        ),
    },
    as_new_as=f"{_GLUON_LANGUAGE}/nvidia/ampere/__init__.py",
)

_CAPSULES = "x_int8", "weight_int8", r"x_scale_arg\.reshape\(m, 1\)", "ws_cutlass", "bias_arg", "output"
KITCHEN_GEMM = Assumption(
    "what comfy-kitchen's GEMM takes",
    "it is not tried beside the pack's own kernels",
    {
        "comfy_kitchen/backends/cuda/__init__.py": (
            r"_C\.cutlass_int8_dequant\(\s+"
            + "".join(rf"_wrap_for_dlpack\({capsule}\),\s+" for capsule in _CAPSULES)
            + r"DTYPE_TO_CODE\[out_dtype\],\s+torch\.cuda\.current_stream\(x_int8\.device\)\.cuda_stream,\s+\)",
        )
    },
    as_new_as="comfy_kitchen/gated_delta.py",
)

ASSUMPTIONS = DIRECT_LAUNCH, COMPILING_ALONE, GLUON, KITCHEN_GEMM
"""Those that the log names: without LAUNCHER a user loses nothing noticeable."""


@functools.cache
def holds(assumption: Assumption) -> bool:
    """Whether the installed packages are as assumed."""
    return all(_matches(file, patterns) for file, patterns in assumption.sources.items())


def missing() -> list[tuple[str, str]]:
    """Return the assumptions on installed packages that do not hold, each with what the pack does instead."""
    return [
        (assumption.what, assumption.instead)
        for assumption in ASSUMPTIONS
        if all(_folder(file) is not None for file in assumption.sources)
        and (assumption.as_new_as is None or _matches(assumption.as_new_as, ()))
        and not holds(assumption)
    ]


def _matches(file: str, patterns: tuple[str, ...]) -> bool:
    folder = _folder(file)
    try:
        text = "" if folder is None else (folder / file).read_text(encoding="utf-8")
    except OSError:
        return False
    return all(re.search(pattern, text, re.MULTILINE) for pattern in patterns)


@functools.cache
def _folder(file: str) -> Path | None:
    """Return the folder of a file's package, without importing it; None where it is not installed."""
    spec = importlib.util.find_spec(file.partition("/")[0])
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent
