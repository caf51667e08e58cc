"""The host's time for one linear inside ComfyUI: bf16, native INT8 and this pack's, and the bare operators beside.

    python tests/studies/linear_host_time.py --comfyui PATH [--profile] [--out DIR]

Needs an NVIDIA card with 8 GB of memory; `--rounds 1 --calls 2` tries the script out on a CPU. The linear is Ideogram
4's attention output, K = N = 4608, of a loaded MODEL that nothing patches. "issue" is the host's time for a call when
nobody waits for the GPU, "back to back" the clock for a call among many, "alone" that of a call from an idle GPU until
it is done. Methods take turns; medians count.
"""

import argparse
import cProfile
import io
import logging
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack

RESULTS = Path(__file__).resolve().parent / "results" / "linear_host_time"
TOKENS = (77, 4352)
PACK = "this pack, in ComfyUI"
# The host issues so many before the GPU is waited for: fewer than a queue holds.
CALLS = 100
PROFILED_CALLS = 2000


def linears_of_models(device: torch.device) -> tuple[dict[str, torch.nn.Module], list]:
    """The same linear of three loaded MODELs, and what must stay alive meanwhile."""
    from support.random_models import FAMILIES, RandomModel, load, weights_on_device

    random = RandomModel(FAMILIES["Ideogram 4"], device, {"num_layers": 1})
    with weights_on_device():
        models = {
            "bf16, in ComfyUI": random.bf16_model(),
            "native INT8, in ComfyUI": random.native_model(),
            PACK: random.int8_model(),
        }
        for model in models.values():
            load(model)
    linears = {name: model.model.diffusion_model.layers[0].attention.o for name, model in models.items()}
    return linears, list(models.values())


def methods(
    linears: dict[str, torch.nn.Module], dtype: torch.dtype
) -> dict[str, Callable[[torch.Tensor], torch.Tensor]]:
    """What is timed, each a function of the input."""
    import comfy_kitchen

    from int8_dit.kernels import int8_linear

    weight = linears["bf16, in ComfyUI"].weight.data.to(dtype)
    held = linears[PACK].weight
    q, scale = held._qdata, held._params.scale
    return {
        **linears,
        "bf16, torch.nn.functional.linear": lambda x: torch.nn.functional.linear(x, weight),
        "native INT8, comfy_kitchen.int8_linear": lambda x: comfy_kitchen.int8_linear(x, q, scale, None, x.dtype),
        "this pack, int8_linear": lambda x: int8_linear(x, q, scale),
        "this pack, torch.ops.int8_dit.int8_linear": lambda x: torch.ops.int8_dit.int8_linear(x, q, scale),
    }


def microseconds(run: Callable[[], object], device: torch.device, calls: int) -> dict[str, float]:
    """A call's time in one round: issued, among others, and alone."""
    from support.measuring import synchronize

    synchronize(device)
    begin = time.perf_counter()
    for _ in range(calls):
        run()
    issued = time.perf_counter() - begin
    synchronize(device)
    done = time.perf_counter() - begin
    alone = []
    for _ in range(calls):
        begin = time.perf_counter()
        run()
        synchronize(device)
        alone.append(time.perf_counter() - begin)
    return {"issue": issued / calls * 1e6, "back to back": done / calls * 1e6, "alone": sorted(alone)[calls // 2] * 1e6}


@torch.inference_mode()
def measure(timed: dict, device: torch.device, dtype: torch.dtype, rounds: int, calls: int) -> list[dict]:
    """A row for each method and number of tokens: medians over the rounds."""
    from support.measuring import Rows

    rows = Rows()
    for tokens in TOKENS:
        x = torch.randn(1, tokens, 4608, device=device, dtype=dtype)
        found: dict[str, list[dict[str, float]]] = {}
        failures: dict[str, str] = {}
        for round_ in range(rounds + 1):  # the first compiles and tunes
            for name, method in timed.items():
                if name in failures:
                    continue
                try:
                    times = microseconds(lambda method=method, x=x: method(x), device, calls)
                except Exception as error:  # the others can be measured
                    failures[name] = f"{type(error).__name__}: {error}"
                    continue
                if round_:
                    found.setdefault(name, []).append(times)
        for name in timed:
            row = {"method": name, "tokens": tokens}
            for key in ("issue", "back to back", "alone"):
                values = sorted(times[key] for times in found.get(name, []))
                row |= {key: values[len(values) // 2]} if values else {}
            row |= {"failed": failures[name]} if name in failures else {}
            print(row, flush=True)
            rows.append(row)
    return rows


@torch.inference_mode()
def profile(linear: torch.nn.Module, device: torch.device, dtype: torch.dtype, calls: int, lines: int = 30) -> str:
    """Where the host's time of this pack's linear goes, by functions' own time."""
    x = torch.randn(1, TOKENS[0], 4608, device=device, dtype=dtype)
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(calls):
        linear(x)
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(lines)
    return text.getvalue()


def table(rows: list[dict]) -> str:
    """A line a method, microseconds."""
    from int8_dit.kernels.benchmark import markdown
    from support.measuring import number, row_of

    kinds = ("issue", "back to back", "alone")
    columns = ["linear", *(f"M = {tokens}: {kind}" for tokens in TOKENS for kind in kinds)]
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        found = [row_of(rows, method=name, tokens=tokens) or {} for tokens in TOKENS]
        lines.append([name, *(number(row, kind, ".1f") for row in found for kind in kinds)])
    failed = [f"- {row['method']}, M = {row['tokens']}: {row['failed']}" for row in rows if "failed" in row]
    return "\n\n".join([markdown(columns, lines), *(["\n".join(failed)] if failed else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=CALLS, help="in a round")
    parser.add_argument("--profile", action="store_true", help="where the host's time goes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for linear_host_time.md and .json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title
    from support.measuring import limit_tuning, write_results

    limit_tuning(2.0)
    device = comfy.model_management.get_torch_device()
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    machine = describe_machine(device)
    linears, _alive = linears_of_models(device)
    rows = measure(methods(linears, dtype), device, dtype, arguments.rounds, arguments.calls)
    text = f"{title(machine)}, ComfyUI {comfyui_version}. Microseconds of a call, K = N = 4608.\n\n{table(rows)}\n"
    data = {"environment": machine, "comfyui": comfyui_version, "rows": rows}
    write_results(arguments.out, "linear_host_time", text, data)
    if arguments.profile:
        calls = PROFILED_CALLS if device.type == "cuda" else arguments.calls
        print(profile(linears[PACK], device, dtype, calls))


if __name__ == "__main__":
    main()
