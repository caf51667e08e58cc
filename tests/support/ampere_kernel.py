"""The Ampere path of the fused GEMM on a Hopper card: the same source built for sm_80, assembled for sm_90."""

import subprocess
import tempfile
from pathlib import Path

import torch
import triton

from kernels.fused.tiles import GemmConfig

from .machine_code import Build, compiled

HOPPER = "sm_90"
# Bytes of shared memory of a multiprocessor, and what each block takes of it beyond what it asks for.
HOPPER_SHARED, RESERVED_SHARED = 228 << 10, 1 << 10


def assemble(kernel) -> bytes:
    """The PTX of a build as a cubin for this card."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(kernel.asm["ptx"])
        subprocess.run([ptxas, f"-arch={HOPPER}", "-o", cubin, ptx], check=True, capture_output=True)
        return cubin.read_bytes()


class AmpereKernel:
    """One configuration, built for sm_80 with a bf16 output and bias, ready to be launched on a Hopper card."""

    def __init__(
        self,
        config: GemmConfig,
        even_k: bool = True,
        prebuilt: tuple[bytes, str, int] | None = None,
        blocks_per_multiprocessor: int | None = None,
    ) -> None:
        """With `blocks_per_multiprocessor` the kernel asks for so much shared memory that no more reside at once."""
        import cupy

        self.config = config
        cubin, name, self._shared = prebuilt or prebuild(config, even_k)
        if blocks_per_multiprocessor is not None:
            self._shared = max(self._shared, HOPPER_SHARED // blocks_per_multiprocessor - RESERVED_SHARED)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            module = cupy.RawModule(path=file.name)
            self._kernel = module.get_function(name)
        self._kernel.max_dynamic_shared_size_bytes = self._shared

    def __call__(self, out, q, q_scale, weight, weight_scale, bias) -> None:
        """out bf16 [M, N] = epilogue(q int8 [M, K] . weight int8 [N, K]^T), N, K and row strides multiples of 16."""
        import cupy
        import numpy

        config = self.config
        (m, k), n = q.shape, weight.shape[0]
        tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
        partial_sums = arrivals = out
        if config.split_k > 1:
            sums = tiles * config.split_k * config.block_m * config.block_n
            partial_sums = torch.empty(sums, dtype=torch.int32, device=q.device)
            arrivals = torch.zeros(tiles, dtype=torch.int32, device=q.device)
        pointers = (q, weight, q_scale, weight_scale, bias, out, partial_sums, arrivals)
        sizes = (m, n, k, q.stride(0), weight.stride(0), out.stride(0))
        scratch = (numpy.uint64(0), numpy.uint64(0))
        arguments = (*(numpy.uint64(p.data_ptr()) for p in pointers), *(numpy.int32(s) for s in sizes), *scratch)
        with cupy.cuda.Stream.from_external(torch.cuda.current_stream()):
            self._kernel((tiles, config.split_k), (32 * config.num_warps,), arguments, shared_mem=self._shared)


def prebuild(config: GemmConfig, even_k: bool = True) -> tuple[bytes, str, int]:
    """The cubin of a configuration, the kernel's name in it, and the shared memory it needs in bytes."""
    kernel = compiled(Build(config, 80, even_k))
    return assemble(kernel), kernel.metadata.name, kernel.metadata.shared
