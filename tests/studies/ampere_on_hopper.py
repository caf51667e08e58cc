"""Ranks configurations of the Ampere path on a Hopper card, the shipped ones among many others.

How fast a consumer Ampere card is cannot be told from it.

    python tests/studies/ampere_on_hopper.py [--json FILE] [--out DIR]

Leaves the table in ampere_on_hopper.md.
"""

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterable
from dataclasses import asdict, replace
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS.parent), str(TESTS)]  # as a script, only this folder is there

from kernels.benchmark import describe_machine, markdown, title
from kernels.triton_kernels.tiles import ARCHITECTURES, GemmConfig, gemm_candidates
from support.ampere_kernel import RESERVED_SHARED, AmpereKernel, prebuild

SHIPPED = tuple(ARCHITECTURES["Ampere"].rates)
_SM86_SHARED = 100 << 10


def _try_prebuild(config: GemmConfig):
    try:
        return config, prebuild(config)
    except Exception as error:  # a configuration that cannot be built is one that cannot be shipped
        return config, str(error)[:100]


def prebuild_all(configs: Iterable[GemmConfig]) -> dict[GemmConfig, tuple[bytes, str, int]]:
    """The builds of those that can be built; what shares a kernel is built once."""
    configs = list(configs)
    with multiprocessing.get_context("spawn").Pool() as pool:
        built = dict(pool.imap_unordered(_try_prebuild, dict.fromkeys(config.kernel for config in configs)))
    return {config: built[config.kernel] for config in configs if not isinstance(built[config.kernel], str)}


def explored() -> list[GemmConfig]:
    """The shipped configurations and their neighbours, as far as the shared memory of sm_86 allows."""
    configs = list(SHIPPED)
    for block_m, block_n in ((128, 128), (128, 256), (256, 128)):
        for block_k in (64, 128):
            for stages in (2, 3, 4):
                for group in (4, 8, 16):
                    if (block_m + block_n) * block_k * stages <= 96 * 1024:
                        warps = block_m * block_n // 4096
                        configs.append(GemmConfig(block_m, block_n, block_k, group, warps, stages, "ring"))
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
    by_shared = _SM86_SHARED // (prebuilt[2] + RESERVED_SHARED)
    return max(1, min(by_shared, 48 // config.num_warps))


def short(config: GemmConfig) -> str:
    """A configuration in one word."""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}/{config.num_warps}w/{config.num_stages}s"
    pipeline = "" if config.pipeline == "pointers" else f"/{config.pipeline}"
    return f"{tile}{pipeline}/g{config.group_m}" + (f"/split {config.split_k}" if config.split_k > 1 else "")


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
    parser.add_argument("--out", type=Path, default=TESTS / "studies" / "results")
    arguments = parser.parse_args()
    shapes = [(m, n, k) for m in (2560, 4352) for n, k in ((13824, 4608), (4608, 4608), (12288, 4608), (4608, 12288))]
    prebuilt = prebuild_all(explored())
    results, rows = [], []
    for limited in (False, True):
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
            ranked = sorted(times, key=times.__getitem__)
            best = times[ranked[0]]
            shipped = next(config for config in ranked if config in SHIPPED)
            # Whose groups are cut to the tiles.
            likeliest = replace(gemm_candidates((8, 6), 82, m, n, k)[0], group_m=1, split_k=1)
            first = next(config for config in SHIPPED if replace(config, group_m=1) == likeliest)
            rows.append(
                [
                    "as on sm_86" if limited else "as many as fit",
                    f"{m} x {n} x {k}",
                    f"{best:.4f} ms, {2 * m * n * k / best / 1e9:.0f} TOPS",
                    short(ranked[0]),
                    f"{times[shipped] / best:.3f} ({short(shipped)})",
                    f"{times[first] / best:.3f} ({short(first)})",
                ]
            )
            print(*rows[-1], sep=" | ", flush=True)
            results += [
                {"m": m, "n": n, "k": k, "limited": limited, "config": asdict(config), "milliseconds": time}
                for config, time in times.items()
            ]
    columns = [
        "blocks per multiprocessor",
        "M x N x K",
        "best of all",
        "which",
        "best shipped",
        "first that is offered",
    ]
    note = f"Of {len(prebuilt)} configurations: time of the best, and of others relative to it."
    heading = f"{title(describe_machine(torch.device('cuda')))}. sm_80 code, assembled for this card."
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "ampere_on_hopper.md").write_text(f"{heading}\n\n{note}\n\n{markdown(columns, rows)}\n")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
