"""Runs the Ampere path of the fused GEMM on a Hopper card: the same source built for sm_80, assembled for sm_90.

What `mma.s8` and cp.async compute can be proven there, and configurations of that path can be ranked. How fast a consumer
Ampere card is cannot be told from it.

`python tests/studies/ampere_on_hopper.py [--json FILE]` ranks the shipped configurations among many others.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS.parent), str(TESTS)]  # as a script, only this folder is there

import torch
import triton

from kernels.fused.tiles import ARCHITECTURES, GemmConfig
from support.machine_code import build

SHIPPED = tuple(ARCHITECTURES["Ampere"].rates)
HOPPER = "sm_90"
# Bytes of shared memory of a multiprocessor, and what each block takes of it beyond what it asks for.
_HOPPER_SHARED, _SM86_SHARED, _RESERVED_SHARED = 228 << 10, 100 << 10, 1 << 10


def assemble(compiled) -> bytes:
    """The PTX of a build as a cubin for this card."""
    ptxas = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        ptx, cubin = Path(folder) / "kernel.ptx", Path(folder) / "kernel.cubin"
        ptx.write_text(compiled.asm["ptx"])
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
            self._shared = max(self._shared, _HOPPER_SHARED // blocks_per_multiprocessor - _RESERVED_SHARED)
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
    compiled = build(config, even_k, capability=80)
    return assemble(compiled), compiled.metadata.name, compiled.metadata.shared


def _try_prebuild(config: GemmConfig):
    try:
        return config, prebuild(config)
    except Exception as error:  # a configuration that cannot be built is one that cannot be shipped
        return config, str(error)[:100]


def explored() -> list[GemmConfig]:
    """The shipped configurations and their neighbours, as far as the shared memory of sm_86 allows."""
    configs = list(SHIPPED)
    for block_m, block_n in ((128, 128), (128, 256), (256, 128), (64, 256), (256, 64), (128, 64), (64, 128), (64, 64)):
        for block_k in (64, 128):
            for stages in (2, 3, 4, 5):
                for warps in (4, 8):
                    for group in (8, 16):
                        if (block_m + block_n) * block_k * stages <= 99 * 1024 and block_m * block_n // warps <= 8192:
                            configs.append(GemmConfig(block_m, block_n, block_k, group, warps, stages))
    return list(dict.fromkeys(configs))


def residency_on_sm86(prebuilt: tuple[bytes, str, int], config: GemmConfig) -> int:
    """How many blocks of a kernel one multiprocessor of sm_86 holds, as its shared memory limits them."""
    by_shared = _SM86_SHARED // (prebuilt[2] + _RESERVED_SHARED)
    return max(1, min(by_shared, 48 // config.num_warps))


def milliseconds(kernel: AmpereKernel, m: int, n: int, k: int, weights: list[torch.Tensor]) -> float:
    """Time of one launch, from many in a row over weights that do not fit the L2 together."""
    q = torch.randint(-127, 128, (m, k), dtype=torch.int8, device="cuda")
    q_scale, weight_scale = torch.rand(m, device="cuda"), torch.rand(n, device="cuda")
    bias = torch.zeros(n, dtype=torch.bfloat16, device="cuda")
    out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")
    times = []
    for _ in range(4):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for weight in weights:
            kernel(out, q, q_scale, weight, weight_scale, bias)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / len(weights))
    return min(times[1:])


def main() -> None:
    """Command line of the ranking."""
    parser = argparse.ArgumentParser(description="Ranks configurations of the Ampere path on a Hopper card.")
    parser.add_argument("--json", help="write all times to this file")
    arguments = parser.parse_args()
    shapes = [(m, n, k) for m in (2560, 4352) for n, k in ((13824, 4608), (4608, 4608), (12288, 4608), (4608, 12288))]
    with multiprocessing.get_context("spawn").Pool() as pool:
        prebuilt = dict(pool.imap_unordered(_try_prebuild, explored()))
    prebuilt = {config: result for config, result in prebuilt.items() if not isinstance(result, str)}
    results = []
    for limited in (False, True):
        print("blocks per multiprocessor as on sm_86" if limited else "as many blocks per multiprocessor as fit")
        kernels = {
            config: AmpereKernel(
                config,
                prebuilt=result,
                blocks_per_multiprocessor=residency_on_sm86(result, config) if limited else None,
            )
            for config, result in prebuilt.items()
        }
        for m, n, k in shapes:
            copies = max(4, -(-(200 << 20) // (n * k)))
            weights = [torch.randint(-127, 128, (n, k), dtype=torch.int8, device="cuda") for _ in range(copies)]
            times = {config: milliseconds(kernel, m, n, k, weights) for config, kernel in kernels.items()}
            best = min(times.values())
            print(f"{m} x {n} x {k}: best {best:.4f} ms, {2 * m * n * k / best / 1e9:.0f} TOPS; times over it")
            ranked = sorted(times, key=times.__getitem__)
            for config in ranked[:6] + [config for config in ranked[6:] if config in SHIPPED]:
                mark = "*" if config in SHIPPED else " "
                sizes = "x".join(str(size) for size in (config.block_m, config.block_n, config.block_k))
                warps = f"{config.num_warps} warps, {config.num_stages} stages, groups of {config.group_m}"
                print(f" {mark} {times[config] / best:.3f}  {sizes}, {warps}")
            results += [
                {"m": m, "n": n, "k": k, "limited": limited, "config": asdict(config), "milliseconds": time}
                for config, time in times.items()
            ]
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
