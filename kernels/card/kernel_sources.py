"""Which kernels a measurement was made with."""

import functools
import hashlib
from pathlib import Path

# Named one by one: a file that moves away is an error here, and not a hash that no longer follows it.
_NAMES = ("gemm_kernel.py", "ring_gemm_kernel.py", "gemm.py")
MEASURED_SOURCES = tuple(Path(__file__).parents[1] / "triton_kernels" / name for name in _NAMES)


@functools.cache
def kernel_source_hash() -> str:
    """SHA-256 over the GEMM's kernels and their launcher: what was measured with others says nothing about these."""
    digest = hashlib.sha256()
    for source in MEASURED_SOURCES:
        digest.update(f"{source.name}\n{source.read_text(encoding='utf-8')}\n".encode())
    return digest.hexdigest()
