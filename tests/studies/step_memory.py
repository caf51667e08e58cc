"""GPU memory of a step, and whether anything that is kept across steps grows, with a few full-width blocks.

    python tests/studies/step_memory.py --comfyui PATH [--family NAME] [--steps 1000] [--out DIR]

Needs an NVIDIA card with 8 GB of memory; `--steps 4 --blocks 1 --pixels 32 48` tries the script out on a CPU. A step of
Ideogram 4 is one conditional and one unconditional forward, of others one forward; resolutions take turns. After each
round the allocated memory is noted, and now and then the host's and the sizes of all containers and caches of this
pack's modules.
"""

import argparse
import gc
import logging
import sys
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import psutil
import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack

RESULTS = Path(__file__).resolve().parent / "results" / "step_memory"
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


def peaks(random, pixels: list[int], variant: str, texts: tuple[bool, ...]) -> dict:
    """GB that a step takes at most beyond the weights, and milliseconds of its first forward, at each resolution, for a
    MODEL loaded alone."""
    from support.measuring import wall_and_host
    from support.random_models import Forward, load, unfused, weights_on_device

    builders = {
        "bf16": random.bf16_model,
        "native INT8": random.native_model,
        "this pack": random.int8_model,
        "this pack, blocks unfused": lambda: unfused(random.int8_model()),
        "this pack, W4A8": random.coded_model,
    }
    figures = {}
    with weights_on_device():
        model = builders[variant]()
        load(model)
        for side in pixels:
            forwards = [Forward(model, random.inputs(side, text=text)) for text in texts]
            for forward in forwards:
                for _ in range(2):  # is compared, and tuned
                    forward()
            if random.device.type == "cuda":
                before = torch.cuda.memory_allocated()
                torch.cuda.reset_peak_memory_stats()
                for forward in forwards:
                    forward()
                figures[f"peak_gb_{side}"] = (torch.cuda.max_memory_allocated() - before) / 1e9
            figures |= {f"{key}_{side}": ms for key, ms in wall_and_host(forwards[0], random.device, 5).items()}
    return figures


def run_steps(random, pixels: list[int], steps: int, texts: tuple[bool, ...]) -> dict:
    """The allocated bytes after each round of all resolutions; whole states of the first, the last and some between."""
    from support.measuring import synchronize
    from support.random_models import Forward, load, weights_on_device

    with weights_on_device():
        model = random.int8_model()
        load(model)
        forwards = [Forward(model, random.inputs(side, text=text)) for side in pixels for text in texts]
        rounds = -(-steps // len(pixels))
        states, allocated, begin = [], [], time.perf_counter()
        for round_ in range(-ROUNDS_BEFORE, rounds + 1):
            for forward in forwards:
                forward()
            synchronize(random.device)
            if round_ >= 0:
                allocated.append(torch.cuda.memory_allocated() if random.device.type == "cuda" else 0)
            if round_ == rounds or (round_ >= 0 and round_ % ROUNDS_BETWEEN_STATES == 0):
                states.append(state(random.device))
    took = time.perf_counter() - begin
    return {"rounds": rounds, "took": took, "states": states, "allocated": allocated}


def growth_table(measured: dict) -> str:
    """First, last and largest of what was noted, and the caches that changed."""
    from int8_dit.kernels.benchmark import markdown

    states = measured["states"]
    lines = []
    for key, unit in (("allocated_bytes", 1 << 20), ("reserved_bytes", 1 << 20), ("host_bytes", 1 << 20)):
        values = [each[key] / unit for each in states]
        name = key.partition("_")[0].replace("host", "host's memory")
        lines.append([f"{name}, MiB", *(f"{value:.2f}" for value in (values[0], values[-1], max(values)))])
    values = [value / (1 << 20) for value in measured["allocated"]]
    lines.append(["allocated, all rounds, MiB", *(f"{value:.2f}" for value in (values[0], values[-1], max(values)))])
    objects = [each["objects"] for each in states]
    lines.append(["Python objects", *(f"{value}" for value in (objects[0], objects[-1], max(objects)))])
    totals = [sum(each["caches"].values()) for each in states]
    held = f"entries in {len(states[-1]['caches'])} containers and caches of this pack's"
    lines.append([held, *(f"{value}" for value in (totals[0], totals[-1], max(totals)))])
    first, last = states[0]["caches"], states[-1]["caches"]
    changed = [f"- {name}: {first.get(name, 0)} to {size}" for name, size in last.items() if first.get(name, 0) != size]
    return "\n\n".join(
        [
            markdown(["", "first round", "last round", "most"], lines),
            "\n".join(["Containers that grew:", "", *changed]) if changed else "No container grew.",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--family", default="Ideogram 4", help='such as "Wan 14 B", with --pixels 480')
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--pixels", type=int, nargs="+", default=[768, 896, 1024])
    parser.add_argument("--row-seconds", type=float, default=60.0, help="the most for a variant's peaks")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for step_memory.md and step_memory.json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, markdown, title
    from support.measuring import Rows, limit_tuning, number, write_results
    from support.random_models import FAMILIES, RandomModel

    limit_tuning(2.0)
    device = comfy.model_management.get_torch_device()
    machine = describe_machine(device)
    random = RandomModel(FAMILIES[arguments.family], device, {"num_layers": arguments.blocks})
    texts = (True, False) if arguments.family == "Ideogram 4" else (True,)
    rows = Rows()
    for variant in ("bf16", "native INT8", "this pack, blocks unfused", "this pack", "this pack, W4A8"):
        run = partial(peaks, random, arguments.pixels, variant, texts)
        rows.measure({"variant": variant}, run, arguments.row_seconds)
    lines = [
        [
            row["variant"],
            *(number(row, f"peak_gb_{side}", ".3f") for side in arguments.pixels),
            *(number(row, f"ms_{side}", ".1f") for side in arguments.pixels),
            row.get("failed", ""),
        ]
        for row in rows
    ]
    columns = ["peak beyond the weights, GB", *(f"{side} px" for side in arguments.pixels)]
    columns += [*(f"{side} px, ms of a forward" for side in arguments.pixels), ""]
    measured = run_steps(random, arguments.pixels, arguments.steps, texts)
    steps = measured["rounds"] * len(arguments.pixels)
    model = f"{arguments.blocks} blocks of {arguments.family} with random weights"
    parts = [
        f"{title(machine)}, ComfyUI {comfyui_version}, {model}.",
        markdown(columns, lines),
        f"{steps} steps of this pack, {len(arguments.pixels)} resolutions in turn, {measured['took']:.0f} s:",
        growth_table(measured),
    ]
    states = measured.pop("states")
    data = {"environment": machine, "comfyui": comfyui_version, "peaks": rows, **measured}
    data |= {"first": states[0], "last": states[-1]}
    write_results(arguments.out, "step_memory", "\n\n".join(parts) + "\n", data)


if __name__ == "__main__":
    main()
