"""The Ampere path of the fused GEMM on a Hopper card: the same source built for sm_80, assembled for sm_90."""

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import torch
import triton

from kernels.linear.tiles import GemmConfig

from .machine_code import Build, compiled

HOPPER = "sm_90"
# Bytes of shared memory of a multiprocessor, and what each block takes of it beyond what it asks for.
HOPPER_SHARED, RESERVED_SHARED = 228 << 10, 1 << 10
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES


def assemble(kernel) -> bytes:
    """The PTX of a build as a cubin for this card."""
    ptxas = triton.knobs.nvidia.ptxas.path  # which Inductor replaces by PyTorch's, and the PTX is for that
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(kernel.asm["ptx"])
        done = subprocess.run([ptxas, f"-arch={HOPPER}", "-o", cubin, ptx], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"ptxas ended with {done.returncode}: {done.stderr or done.stdout}")
        return cubin.read_bytes()


@functools.cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _driver(name: str, *arguments) -> None:
    """Call a function of the CUDA driver; RuntimeError names it and its error code."""
    error = getattr(_library(), name)(*arguments)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")


class AmpereKernel:
    """One configuration, built for sm_80 with a bf16 output and bias, ready to be launched on a Hopper card."""

    def __init__(
        self,
        config: GemmConfig,
        even_k: bool = True,
        prebuilt: tuple[bytes, str, int] | None = None,
        blocks_per_multiprocessor: int | None = None,
        passes: int = 1,
    ) -> None:
        """With `blocks_per_multiprocessor` the kernel asks for so much shared memory that no more reside at once.

        `passes` is how often it walks K: twice for activations of 16 bits.
        """
        self.config = config
        self._arrivals: torch.Tensor | None = None
        cubin, name, self._shared = prebuilt or prebuild(config, even_k, passes)
        if blocks_per_multiprocessor is not None:
            self._shared = max(self._shared, HOPPER_SHARED // blocks_per_multiprocessor - RESERVED_SHARED)
        torch.cuda.synchronize()  # which makes PyTorch's context the one that the driver loads into
        module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        _driver("cuModuleLoadData", ctypes.byref(module), cubin)
        _driver("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())
        _driver("cuFuncSetAttribute", self._function, _MAX_DYNAMIC_SHARED, self._shared)

    def __call__(self, out, q, q_scale, weight, weight_scale, bias) -> None:
        """out bf16 [M, N] = epilogue(q int8 [M, K] . weight int8 [N, K]^T), N, K and row strides multiples of 16.

        A kernel of two passes takes q [M, 2K].
        """
        config = self.config
        m, (n, k) = q.shape[0], weight.shape
        tiles, parts = config.tiles(m, n), config.split_k
        shared = config.shared_tiles(tiles, torch.cuda.get_device_properties(q.device).multi_processor_count)
        partial_sums = arrivals = out
        if shared:
            sums = shared * parts * config.block_m * config.block_n
            partial_sums = torch.empty(sums, dtype=torch.int32, device=q.device)
            arrivals = self._arrivals_of(shared)
        pointers = (q, weight, q_scale, weight_scale, bias, out, partial_sums, arrivals)
        sizes, grid = (m, n, k, q.stride(0), weight.stride(0), out.stride(0)), (tiles, parts, 1)
        if config.pipeline == "ring":
            grid, sizes = (tiles + shared * (parts - 1), 1, 1), (*sizes, tiles - shared, parts)
        sizes = (*sizes, config.group_m)
        # Triton's kernels end with two pointers to scratch memory, which this one does not use.
        arguments = [*(ctypes.c_uint64(p.data_ptr()) for p in pointers), *map(ctypes.c_int32, sizes)]
        arguments += [ctypes.c_uint64(), ctypes.c_uint64()]
        addresses = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        block = (32 * config.num_warps, 1, 1)
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        _driver("cuLaunchKernel", self._function, *grid, *block, self._shared, stream, addresses, None)

    def _arrivals_of(self, tiles: int) -> torch.Tensor:
        """Zeros, which each launch leaves behind."""
        if self._arrivals is None or len(self._arrivals) < tiles:
            self._arrivals = torch.zeros(max(tiles, 4096), dtype=torch.int32, device="cuda")
        return self._arrivals


def prebuild(config: GemmConfig, even_k: bool = True, passes: int = 1) -> tuple[bytes, str, int]:
    """The cubin of a configuration, the kernel's name in it, and the shared memory it needs in bytes."""
    kernel = compiled(Build(config, 80, even_k, passes=passes))
    return assemble(kernel), kernel.metadata.name, kernel.metadata.shared
