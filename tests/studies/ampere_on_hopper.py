"""The Ampere path of this pack's GEMM on a Hopper card: its configurations ranked, or beside comfy-kitchen's CUTLASS.

    python tests/studies/ampere_on_hopper.py [--beside-cutlass] [--out DIR]

How fast a consumer Ampere card is cannot be told from it. Alone it ranks the shipped configurations among many others,
and leaves ampere_on_hopper.md. Beside comfy-kitchen's kernels, which must be installed, both get the same operands;
that leaves ampere_beside_cutlass/. `--loops` needs no card: it prints comfy-kitchen's main loops.
"""

import argparse
import ctypes
import importlib
import json
import math
import multiprocessing
import re
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path += [str(TESTS.parent), str(TESTS)]  # as a script, only this folder is there

from kernels.benchmark import describe_machine, markdown, title
from kernels.benchmark.shape_results import IDEOGRAM4_SHAPES
from kernels.card.timing import CallSeries, GraphPool, sustained_milliseconds
from kernels.linear.tiles import ARCHITECTURES, GemmConfig, gemm_candidates
from support.ampere_kernel import RESERVED_SHARED, AmpereKernel, prebuild
from support.sass import MainLoop, cuobjdump, main_loops
from support.tensors import relative_error

RESULTS = TESTS / "studies" / "results"
TOKENS = (2560, 4352)
SHIPPED = tuple(ARCHITECTURES["Ampere"].rates)
_SM86_SHARED = 100 << 10
BLOCK_SHAPES = [shape for shape in IDEOGRAM4_SHAPES if shape.tokens is None]
TUNED, UNTUNED, LIKE_SM86, CUTLASS = "pack", "pack, untuned", "pack, blocks as on sm_86", "comfy-kitchen"
# comfy-kitchen's own numbers of its tiles for K that 16 divides, in M x N x K; the last two share out K ("stream-K").
CUTLASS_TILES = {
    **dict(enumerate(("128x256x64", "128x128x64", "64x128x64", "64x256x64", "32x256x64", "32x128x64", "16x128x64"))),
    **{7: "64x128x128", 8: "128x64x128", 12: "128x128x64 stream-K", 13: "128x256x64 stream-K"},
}
# Of so many kernels the best configuration by short runs is run as long as in the comparison.
_FINALISTS, _FINAL_ROUNDS, _ROUNDS = 3, 3, 5
_BF16 = 2  # comfy-kitchen's code for it
# Both sides multiply exactly and round to bf16 once; the one that fuses an addition may round the other way.
_MOST_DIFFERENCE = 2.0**-8


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


def cutlass_loops(library: Path, architecture: str) -> dict[str, MainLoop]:
    """Main loops of comfy-kitchen's INT8 GEMM kernels with bf16 output for one architecture (sm_80), by tile."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cuobjdump("-xelf", architecture, library.resolve(), folder=folder)
        for cubin in sorted(folder.glob("*.cubin")):
            if b"DefaultGemmWithVisitorIa" not in cubin.read_bytes():
                continue
            for function, loop in main_loops(cuobjdump("-sass", cubin)):
                tile = cutlass_tile(function)
                if tile:
                    found.setdefault(tile, loop)
    return found


def cutlass_tile(function: str) -> str | None:
    """The tile of a kernel by its mangled name; None for another one than a plain int8 linear with bf16 output."""
    is_linear = "DefaultGemmWithVisitorIa" in function and "E0ELi16Ea" in function and "bfloat16_t" in function
    shape = re.search(r"GemmShapeILi(\d+)ELi(\d+)ELi(\d+)E", function)
    if not is_linear or "AuxLoad" in function or shape is None:
        return None
    return "x".join(shape.groups()) + (" stream-K" if "StreamK" in function else "")


def loops_table(library: Path) -> str:
    """The main loops that the wheel holds for an RTX 30, and those that run on a Hopper card."""
    ampere, hopper = (cutlass_loops(library, architecture) for architecture in ("sm_80", "sm_90"))
    rows = [[tile, in_words(ampere[tile]), in_words(hopper[tile])] for tile in sorted(ampere)]
    return markdown(["comfy-kitchen's tile", "IMMA of the main loop's instructions, sm_80", "sm_90"], rows)


def in_words(loop: MainLoop) -> str:
    """64 of 152."""
    return f"{loop.tensor} of {loop.instructions}"


def own_loop(prebuilt: tuple[bytes, str, int]) -> str:
    """The main loop of one of this pack's kernels, in words."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(prebuilt[0])
        file.flush()
        ((_, loop),) = main_loops(cuobjdump("-sass", file.name))
    return in_words(loop)


class Operands:
    """What both sides get: int8 operands, float32 scales and a bf16 bias, with copies of the weight that together do
    not fit the L2."""

    def __init__(self, m: int, n: int, k: int) -> None:
        generator = torch.Generator("cuda").manual_seed(0)

        def integers(*shape: int) -> torch.Tensor:
            return torch.randint(-127, 128, shape, dtype=torch.int8, device="cuda", generator=generator)

        self.m, self.n, self.k = m, n, k
        self.q = integers(m, k)
        self.weights = [integers(n, k) for _ in range(max(4, -(-(200 << 20) // (n * k))))]
        self.q_scale = torch.rand(m, device="cuda", generator=generator) / 100
        self.weight_scale = torch.rand(n, device="cuda", generator=generator) / 100
        self.bias = torch.randn(n, device="cuda", generator=generator).bfloat16()
        self.out = torch.empty((m, n), dtype=torch.bfloat16, device="cuda")

    def pack(self, kernel: AmpereKernel) -> Callable[[int], torch.Tensor]:
        """A call of this pack's kernel."""

        def run(copy: int) -> torch.Tensor:
            kernel(self.out, self.q, self.q_scale, self.weights[copy], self.weight_scale, self.bias)
            return self.out

        return run

    def cutlass(self) -> Callable[[int], torch.Tensor]:
        """A call of comfy-kitchen's kernel, on the tile that it chooses.

        RuntimeError when it refuses the shape.
        """
        from comfy_kitchen.backends import cuda

        def run(copy: int) -> torch.Tensor:
            tensors = (self.q, self.weights[copy], self.q_scale[:, None], self.weight_scale, self.bias, self.out)
            wrapped = map(cuda._wrap_for_dlpack, tensors)
            if not cuda._C.cutlass_int8_dequant(*wrapped, _BF16, torch.cuda.current_stream().cuda_stream):
                raise RuntimeError("comfy-kitchen has no CUTLASS kernel for this shape")
            return self.out

        return run

    def cutlass_tiles(self) -> tuple[str, dict[str, float]]:
        """The tile that comfy-kitchen chooses, and milliseconds of every tile by its own benchmark, without bias."""
        from comfy_kitchen.backends import cuda

        fixed = (self.q_scale[:, None], self.weight_scale, self.out)
        times = {}
        for number, tile in CUTLASS_TILES.items():
            series = []
            for weight in (self.weights[0], *self.weights):
                wrapped = map(cuda._wrap_for_dlpack, (self.q, weight, *fixed))
                stream = torch.cuda.current_stream().cuda_stream
                series.append(cuda._C.benchmark_cutlass_int8_dequant_config(*wrapped, _BF16, number, 1, stream))
            if min(series) > 0:
                times[tile] = statistics.median(series[1:])
        selected = ctypes.CDLL(cuda._C.__file__).cutlass_int8_selected_config
        return CUTLASS_TILES[selected(*map(ctypes.c_int64, (self.m, self.n, self.k)))], times


def quick_milliseconds(run: Callable[[int], torch.Tensor], copies: int) -> float:
    """Time of one call among as many as there are weights, the better of two series."""
    times = []
    for _ in range(3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for copy in range(copies):
            run(copy)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / copies)
    return min(times[1:])


def geometric_mean(ratios: list[float]) -> float:
    """Of positive numbers."""
    return math.exp(statistics.fmean(map(math.log, ratios)))


def offered(m: int, n: int, k: int) -> list[GemmConfig]:
    """What the pack's tuning would choose from on an Ampere card with as many multiprocessors as this one.

    Of the configurations without a ring those that do not split K, which these shapes do not need.
    """
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    candidates = gemm_candidates((8, 0), multiprocessors, m, n, k)
    return [config for config in candidates if config.split_k == 1 or config.pipeline == "ring"]


def sustained(
    operands: Operands, runs: Mapping[str, Callable[[int], torch.Tensor]], rounds: int
) -> tuple[dict[str, list[float]], list[str]]:
    """Milliseconds of each run by rounds in which they take turns, and which of them ran as a loop in place of a CUDA
    graph."""
    pool, device = GraphPool(), torch.device("cuda", 0)
    series = {name: CallSeries(run, len(operands.weights), device, pool) for name, run in runs.items()}
    times = sustained_milliseconds(series, rounds)
    return times, [name for name, calls in series.items() if calls.looped]


def measure(operands: Operands, kernels: dict[tuple[GemmConfig, bool], AmpereKernel]) -> dict:
    """One shape: median milliseconds of each method, which configurations ran, and how far the results are apart."""
    sizes = operands.m, operands.n, operands.k
    configs = offered(*sizes)

    def fastest(limited: bool) -> GemmConfig:
        quick = {c: quick_milliseconds(operands.pack(kernels[c, limited]), len(operands.weights)) for c in configs}
        best_of: dict[GemmConfig, GemmConfig] = {}
        for config in sorted(quick, key=quick.__getitem__):
            best_of.setdefault(config.kernel, config)
        finalists = {short(config): config for config in list(best_of.values())[:_FINALISTS]}
        runs = {name: operands.pack(kernels[config, limited]) for name, config in finalists.items()}
        times, _ = sustained(operands, runs, _FINAL_ROUNDS)
        return finalists[min(times, key=lambda name: statistics.median(times[name]))]

    chosen = {TUNED: (fastest(False), False), UNTUNED: (configs[0], False), LIKE_SM86: (fastest(True), True)}
    runs = {name: operands.pack(kernels[key]) for name, key in chosen.items()} | {CUTLASS: operands.cutlass()}
    results = {name: run(0).float() for name, run in runs.items()}
    differences = {name: relative_error(result, results[CUTLASS]) for name, result in results.items()}
    if max(differences.values()) > _MOST_DIFFERENCE:
        raise RuntimeError(f"the results for {sizes} differ: {differences}")
    times, looped = sustained(operands, runs, _ROUNDS)
    tile, tiles = operands.cutlass_tiles()
    return {
        "shape": sizes,
        "milliseconds": {name: statistics.median(values) for name, values in times.items()},
        "rounds": times,
        "configurations": {name: short(config) for name, (config, _) in chosen.items()},
        "looped": looped,
        "difference": max(differences.values()),
        "tile": tile,
        "tiles": tiles,
    }


def best_tile(result: dict) -> tuple[str, float]:
    """comfy-kitchen's fastest tile, and its time relative to the one it chooses, both by its own benchmark."""
    tiles = result["tiles"]
    fastest = min(tiles, key=tiles.__getitem__)
    return fastest, tiles[fastest] / tiles[result["tile"]]


def document(results: list[dict], heading: str) -> str:
    """The table, its geometric means and how to read them."""
    columns = ["M x N x K", CUTLASS, "its tile (IMMA of main loop)", TUNED, "its configuration (IMMA of main loop)"]
    columns += [*(f"{name} is" for name in (TUNED, UNTUNED, LIKE_SM86)), "comfy-kitchen's best tile would be"]
    rows = []
    for result in results:
        ms = result["milliseconds"]
        tile, share = best_tile(result)
        rows.append(
            [
                " x ".join(map(str, result["shape"])),
                f"{ms[CUTLASS]:.4f} ms",
                f"{result['tile']} ({result['loops'][CUTLASS]})",
                f"{ms[TUNED]:.4f} ms",
                f"{result['configurations'][TUNED]} ({result['loops'][TUNED]})",
                *(f"{ms[CUTLASS] / ms[name]:.3f} x" for name in (TUNED, UNTUNED, LIKE_SM86)),
                f"{1 / share:.3f} x ({tile})",
            ]
        )
    ratios = {
        name: geometric_mean([result["milliseconds"][CUTLASS] / result["milliseconds"][name] for result in results])
        for name in (TUNED, UNTUNED, LIKE_SM86)
    }
    best = geometric_mean([1 / best_tile(result)[1] for result in results])
    worst = min(result["milliseconds"][CUTLASS] / result["milliseconds"][TUNED] for result in results)
    means = ", ".join(f"{name} {ratio:.3f} x" for name, ratio in ratios.items())
    return (
        f"{heading}\n\nGeometric mean of the speed relative to comfy-kitchen's: {means}; comfy-kitchen itself with its "
        f"best tile {best:.3f} x. The pack's worst shape: {worst:.3f} x.\n\n{markdown(columns, rows)}\n\n"
        "The pack's kernels are its sm_80 builds, assembled for this card. comfy-kitchen's are the CUTLASS templates "
        "that an RTX 30 runs as sm_80 code; on this card its library runs the same templates built for sm_90, since it "
        "holds sm_80 machine code but no sm_80 PTX. Both sides use `IMMA` alone. Same int8 operands, scales and bias; "
        f"the weight is out of cache. The pack runs what it offers and what was fastest before: of {_FINALISTS} "
        "kernels the best group and split by short runs, and of these one by runs as long as the comparison's. "
        "*Untuned* is the first configuration that the pack offers. *As on sm_86* is the "
        "pack alone, held to as many blocks per multiprocessor as an RTX 30 has room for. The last column is "
        "comfy-kitchen's own benchmark, without bias.\n"
    )


def built(configs: Iterable[GemmConfig]) -> tuple[dict, dict[tuple[GemmConfig, bool], AmpereKernel]]:
    """What was built, and its kernels: as they are, and held to as many blocks as on sm_86."""
    prebuilt = prebuild_all(configs)
    kernels = {}
    for config, made in prebuilt.items():
        for limited in (False, True):
            blocks = residency_on_sm86(made, config) if limited else None
            kernels[config, limited] = AmpereKernel(config, prebuilt=made, blocks_per_multiprocessor=blocks)
    return prebuilt, kernels


def rank(shapes: list[tuple[int, int, int]], heading: str) -> None:
    """Every configuration that can be built on every shape."""
    prebuilt, kernels = built(explored())
    rows = []
    for limited in (False, True):
        for m, n, k in shapes:
            operands = Operands(m, n, k)
            copies = len(operands.weights)
            times = {c: quick_milliseconds(operands.pack(kernels[c, limited]), copies) for c in prebuilt}
            ranked = sorted(times, key=times.__getitem__)
            best, shipped = times[ranked[0]], next(config for config in ranked if config in SHIPPED)
            # Whose groups are cut to the tiles.
            likeliest = replace(gemm_candidates((8, 6), 82, m, n, k)[0], group_m=1, split_k=1)
            first = next(config for config in SHIPPED if replace(config, group_m=1) == likeliest)
            rows.append(
                [
                    "as on sm_86" if limited else "as many as fit",
                    f"{m} x {n} x {k}",
                    f"{best:.4f} ms, {2 * m * n * k / best / 1e9:.0f} TOPS",
                    short(ranked[0]),
                    *(f"{times[config] / best:.3f} ({short(config)})" for config in (shipped, first)),
                ]
            )
            print(*rows[-1], sep=" | ", flush=True)
    columns = ["blocks per multiprocessor", "M x N x K", "best of all", "which", "best shipped"]
    note = f"Of {len(prebuilt)} configurations: time of the best, and of others relative to it."
    text = f"{heading}\n\n{note}\n\n{markdown([*columns, 'first that is offered'], rows)}\n"
    (RESULTS / "ampere_on_hopper.md").write_text(text)


def compare(shapes: list[tuple[int, int, int]], out: Path) -> None:
    """This pack's kernels and comfy-kitchen's."""
    configs = list(dict.fromkeys(config for shape in shapes for config in offered(*shape)))
    prebuilt, kernels = built(configs)
    if missing := [short(config) for config in configs if config not in prebuilt]:
        raise RuntimeError(f"not built: {missing}")
    results = []
    for shape in shapes:
        results.append(measure(Operands(*shape), kernels))
        print(json.dumps(results[-1]), flush=True)
        torch.cuda.empty_cache()
    own = {short(config): own_loop(made) for config, made in prebuilt.items()}
    library = Path(importlib.import_module("comfy_kitchen.backends.cuda")._C.__file__)
    theirs = {tile: in_words(loop) for tile, loop in cutlass_loops(library, "sm_90").items()}
    for result in results:
        result["loops"] = {TUNED: own[result["configurations"][TUNED]], CUTLASS: theirs[result["tile"]]}
    text = document(results, title(describe_machine(torch.device("cuda", 0))))
    out.mkdir(parents=True, exist_ok=True)
    (out / "ampere_beside_cutlass.md").write_text(text)
    (out / "ampere_beside_cutlass.json").write_text(json.dumps(results))
    print(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--beside-cutlass", action="store_true", help="beside comfy-kitchen's kernels")
    parser.add_argument("--out", type=Path, default=RESULTS / "ampere_beside_cutlass", help="the folder of that")
    parser.add_argument("--loops", type=Path, help="only print the main loops in this _C.abi3.so of comfy-kitchen")
    arguments = parser.parse_args()
    shapes = [(m, shape.n, shape.k) for m in TOKENS for shape in BLOCK_SHAPES]
    if arguments.loops:
        print(loops_table(arguments.loops))
    elif arguments.beside_cutlass:
        compare(shapes, arguments.out)
    else:
        heading = title(describe_machine(torch.device("cuda")))
        rank(shapes, f"{heading}. sm_80 code, assembled for this card.")


if __name__ == "__main__":
    main()
