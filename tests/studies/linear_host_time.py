"""The host's time for one linear inside ComfyUI: bf16, native INT8 and this pack's, and the bare operators beside.

    python tests/studies/linear_host_time.py --comfyui PATH [--out DIR]

Needs an NVIDIA card with 8 GB of memory; `--rounds 1 --calls 2` tries the script out on a CPU. The linear is Ideogram
4's attention output, K = N = 4608, of a loaded MODEL that nothing patches. "issue" is the host's time for a call when
nobody waits for the GPU, "back to back" the clock for a call among many, "alone" that of a call from an idle GPU until
it is done. Methods take turns; medians count.
"""

import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.frame import Rows, Study, failures, markdown, number, row_of, synchronize

TOKENS = (77, 4352)
KINDS = ("issue", "back to back", "alone")
PACK = "this pack, in ComfyUI"


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
    }


def microseconds(run: Callable[[], object], device: torch.device, calls: int) -> dict[str, float]:
    """A call's time in one round: issued, among others, and alone."""
    from int8_dit.kernels import settle

    settle(run, device)
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
    return {"issue": issued / calls * 1e6, "back to back": done / calls * 1e6, "alone": median(alone) * 1e6}


@torch.inference_mode()
def measure(timed: dict, device: torch.device, dtype: torch.dtype, rounds: int, calls: int) -> list[dict]:
    """A row for each method and number of tokens: medians over the rounds."""
    rows = Rows()
    for tokens in TOKENS:
        x = torch.randn(1, tokens, 4608, device=device, dtype=dtype)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in timed}
        failed: dict[str, str] = {}
        for _ in range(rounds + 1):
            for name, method in timed.items():
                if name not in failed:
                    try:
                        found[name].append(microseconds(lambda method=method, x=x: method(x), device, calls))
                    except Exception as error:  # the others can be measured
                        failed[name] = f"{type(error).__name__}: {error}"
        for name in timed:
            times = found[name][1:]  # the first round compiles and tunes
            row = {"method": name, "tokens": tokens} | ({"failed": failed[name]} if name in failed else {})
            rows.append(row | {kind: median(each[kind] for each in times) for kind in KINDS if times})
            print(rows[-1], flush=True)
    return rows


def table(rows: list[dict]) -> str:
    """A line a method, microseconds."""
    lines = []
    for name in dict.fromkeys(row["method"] for row in rows):
        found = [row_of(rows, method=name, tokens=tokens) or {} for tokens in TOKENS]
        lines.append([name, *(number(row, kind, ".1f") for row in found for kind in KINDS)])
    return markdown(["linear", *(f"M = {tokens}: {kind}" for tokens in TOKENS for kind in KINDS)], lines)


def main() -> None:
    study = Study(__doc__, "linear_host_time")
    study.option("--rounds", type=int, default=9)
    study.option("--calls", type=int, default=100, help="in a round: fewer than a queue of launches holds")
    study.tuning(2.0)
    arguments = study.start()
    dtype = torch.bfloat16 if study.device.type == "cuda" else torch.float32
    linears, _alive = linears_of_models(study.device)
    rows = measure(methods(linears, dtype), study.device, dtype, arguments.rounds, arguments.calls)
    study.write(". Microseconds of a call, K = N = 4608.", table(rows), failures(rows, "method", "tokens"), rows=rows)


if __name__ == "__main__":
    main()
