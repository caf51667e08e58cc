"""GPU memory of a step, and whether anything that is kept across steps grows, with a few full-width blocks.

    python tests/studies/step_memory.py --comfyui PATH [--family NAME] [--steps 1000] [--out DIR]

Needs an NVIDIA card with 8 GB of memory; `--steps 4 --blocks 1 --pixels 32 48` tries the script out on a CPU. A step of
Ideogram 4 is one conditional and one unconditional forward, of others one forward; resolutions take turns. After each
round the allocated memory is noted, and now and then the host's and the sizes of all containers and caches of this
pack's modules.
"""

import gc
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.frame import Rows, Study, markdown, number, synchronize, wall_and_host

VARIANTS = ("bf16", "native", "unfused", "pack", "codes")
ROUNDS_BEFORE = 3  # compile and tune
ROUNDS_BETWEEN_STATES = 50


def cache_sizes() -> dict[str, int]:
    """Lengths of what this pack's modules hold things in: containers, caches, and their objects' containers."""
    sizes = {}
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.partition(".")[0] == "int8_dit":
            for key, value in list(vars(module).items()):
                if key.startswith("__"):
                    continue
                sizes |= _sizes_in(f"{name.removeprefix('int8_dit.')}.{key}", value)
    return sizes


def _sizes_in(name: str, value: object) -> dict[str, int]:
    if callable(getattr(value, "cache_info", None)):
        return {name: value.cache_info().currsize}
    if isinstance(value, dict | list | set):
        return {name: len(value)}
    if type(value).__module__.partition(".")[0] == "int8_dit" and hasattr(value, "__dict__"):
        held = vars(value).items()
        return {f"{name}.{key}": len(inner) for key, inner in held if isinstance(inner, dict | list | set)}
    return {}


def state(device: torch.device) -> dict[str, object]:
    """What is taken now."""
    gc.collect()
    return {
        "allocated_bytes": torch.cuda.memory_allocated() if device.type == "cuda" else 0,
        "reserved_bytes": torch.cuda.memory_reserved() if device.type == "cuda" else 0,
        "host_bytes": psutil.Process().memory_info().rss,
        "objects": len(gc.get_objects()),
        "caches": cache_sizes(),
    }


def peaks(random, pixels: list[int], name: str) -> dict:
    """GB that a step takes at most beyond the weights, and milliseconds of it, at each resolution, for a MODEL loaded
    alone."""
    from studies.variants import VARIANTS, Step, inputs_of
    from support.random_models import weights_on_device

    figures = {}
    with weights_on_device():
        model = VARIANTS[name].build(random)
        for side in pixels:
            step = Step(model, inputs_of(random, side))
            for _ in range(2):  # is compared, and tuned
                step.run()
            if random.device.type == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                step.run()
                figures[f"peak_gb_{side}"] = (torch.cuda.max_memory_allocated() - before) / 1e9
            figures |= {f"{key}_{side}": ms for key, ms in wall_and_host(step.run, random.device, 5).items()}
    return figures


def run_steps(random, pixels: list[int], steps: int) -> dict:
    """The allocated bytes after each round of all resolutions; whole states of the first, the last and some between."""
    from studies.variants import Step, inputs_of
    from support.random_models import weights_on_device

    with weights_on_device():
        model = random.int8_model()
        runs = [Step(model, inputs_of(random, side)).run for side in pixels]
        rounds = -(-steps // len(pixels))
        states, allocated, begin = [], [], time.perf_counter()
        for round_ in range(-ROUNDS_BEFORE, rounds + 1):
            for run in runs:
                run()
            synchronize(random.device)
            if round_ >= 0:
                allocated.append(torch.cuda.memory_allocated() if random.device.type == "cuda" else 0)
            if round_ == rounds or (round_ >= 0 and round_ % ROUNDS_BETWEEN_STATES == 0):
                states.append(state(random.device))
    took = time.perf_counter() - begin
    return {"rounds": rounds, "took": took, "states": states, "allocated": allocated}


def growth_table(measured: dict) -> str:
    """First, last and largest of what was noted, and the caches that changed."""
    states, mib = measured["states"], 1 << 20
    noted = {
        "allocated, MiB": [each["allocated_bytes"] / mib for each in states],
        "reserved, MiB": [each["reserved_bytes"] / mib for each in states],
        "host's memory, MiB": [each["host_bytes"] / mib for each in states],
        "allocated, all rounds, MiB": [value / mib for value in measured["allocated"]],
        "Python objects": [each["objects"] for each in states],
        f"entries in {len(states[-1]['caches'])} containers and caches of this pack's": [
            sum(each["caches"].values()) for each in states
        ],
    }
    lines = [
        [name, *(f"{value:.2f}" if "MiB" in name else str(value) for value in (values[0], values[-1], max(values)))]
        for name, values in noted.items()
    ]
    first, last = states[0]["caches"], states[-1]["caches"]
    changed = [f"- {name}: {first.get(name, 0)} to {size}" for name, size in last.items() if first.get(name, 0) != size]
    grown = "\n".join(["Containers that grew:", "", *changed]) if changed else "No container grew."
    return f"{markdown(['', 'first round', 'last round', 'most'], lines)}\n\n{grown}"


def main() -> None:
    study = Study(__doc__, "step_memory")
    study.option("--family", default="Ideogram 4", help='such as "Wan 14 B", with --pixels 480')
    study.option("--blocks", type=int, default=2)
    study.option("--steps", type=int, default=1000)
    study.option("--pixels", type=int, nargs="+", default=[768, 896, 1024])
    study.tuning(2.0)
    arguments = study.start()
    from studies.variants import VARIANTS as TITLES
    from support.random_models import FAMILIES, RandomModel

    random, sides = (
        RandomModel(FAMILIES[arguments.family], study.device, {"num_layers": arguments.blocks}),
        arguments.pixels,
    )
    rows = Rows()
    for name in VARIANTS:
        run = partial(peaks, random, sides, name)
        rows.measure({"name": name, "variant": TITLES[name].title}, run, 60.0)
    figures = [*((f"peak_gb_{side}", ".3f") for side in sides), *((f"ms_{side}", ".1f") for side in sides)]
    lines = [[row["variant"], *(number(row, *each) for each in figures), row.get("failed", "")] for row in rows]
    columns = ["peak beyond the weights, GB", *(f"{side} px" for side in sides)]
    columns += [*(f"{side} px, ms of a step" for side in sides), ""]
    measured = run_steps(random, sides, arguments.steps)
    steps = measured["rounds"] * len(sides)
    states = measured.pop("states")
    study.write(
        f", {arguments.blocks} blocks of {arguments.family} with random weights.",
        markdown(columns, lines),
        f"{steps} steps of this pack, {len(sides)} resolutions in turn, {measured['took']:.0f} s:",
        growth_table({**measured, "states": states}),
        peaks=rows,
        **measured,
        first=states[0],
        last=states[-1],
    )


if __name__ == "__main__":
    main()
