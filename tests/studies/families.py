"""Wall clock of one forward of full-width blocks of other families, with random weights, in ComfyUI: bf16, native INT8
and this pack's, eager and compiled.

    python tests/studies/families.py --comfyui PATH [--families NAME ...] [--variants NAME ...] [--out DIR]

Needs an NVIDIA card with 60 GB of memory; `--tiny --pixels 64` tries the script out on a CPU. "ms" is the clock from an
idle GPU until all is done, "host" until the last launch returns, "busy" the sum of all kernels, and "of it no
attention" what of that is left without the attention itself. A family's variants are loaded together, and take turns on
the clock; all clocks are read before anything is profiled.
"""

import argparse
import json
import logging
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack

RESULTS = Path(__file__).resolve().parent / "results" / "families"
# A name and whether torch.compile is in it.
VARIANTS = {
    **dict.fromkeys(("bf16", "bf16-exact", "native", "unfused", "pack", "pack-exact", "pack-int8"), False),
    **dict.fromkeys(("compiled-bf16", "compiled-pack"), True),
}
# What its end says of attention; without, it is ComfyUI's.
ATTENTION = {"exact": "auto", "int8": "INT8"}
TITLES = {
    "bf16": "bf16",
    "bf16-exact": "bf16 + the fastest exact attention",
    "native": "native INT8",
    "unfused": "this pack, blocks unfused",
    "pack": "this pack",
    "pack-exact": "this pack + the fastest exact attention",
    "pack-int8": "this pack + INT8 attention",
    "compiled-bf16": "bf16, torch.compile",
    "compiled-pack": "this pack, torch.compile",
}


def running(random, variant: str, pixels: int | None):
    """A loaded MODEL of a variant, and one forward of it. The MODEL is to be held as long as that."""
    from support.random_models import Forward, attending, compiled, load, unfused

    builders = {
        "bf16": random.bf16_model,
        "native": random.native_model,
        "unfused": lambda: unfused(random.int8_model()),
        "pack": random.int8_model,
    }
    kind, _, attention = variant.removeprefix("compiled-").partition("-")
    model = builders[kind]()
    model = attending(model, ATTENTION[attention]) if attention else model
    model = compiled(model) if VARIANTS[variant] else model
    load(model)
    return model, Forward(model, random.inputs(pixels))


def prepare(random, variant: str, pixels: int | None, expected: dict, ready: dict) -> dict:
    """A row's figures but those of clocks and kernels. `ready` gets the MODEL and its forward, warmed up."""
    import comfy.model_management

    from support.measuring import graph_counts
    from support.random_models import weights_on_device
    from support.tensors import relative_error

    with weights_on_device():
        model, forward = running(random, variant, pixels)
    figures = {
        "weights_gb": comfy.model_management.module_size(model.model) / 1e9,
        "dtype": str(model.model.get_dtype_inference()).removeprefix("torch."),
    }
    output = forward.velocity()
    figures["error"] = relative_error(output, expected.setdefault("velocity", output))
    forward()
    figures |= graph_counts() if VARIANTS[variant] else {}
    ready[variant] = model, forward
    return figures


def measure_kernels(random, variant: str, pixels: int | None) -> dict:
    """The figures of a row's kernels, with the variant alone on the device."""
    from support.measuring import by_part, kernel_times
    from support.random_models import weights_on_device

    with weights_on_device():
        _model, forward = running(random, variant, pixels)
        for _ in range(2):  # compiles, and compares
            forward()
        times = kernel_times(forward, random.device)
    busy = sum(times.values())
    return {"busy_ms": busy, "without_attention_ms": busy - by_part(times)["attention"]}


def table(rows: list[dict]) -> str:
    """A line a row."""
    from int8_dit.kernels.benchmark import markdown
    from support.measuring import number, ratio, row_of

    columns = ["family", "variant", "ms", "vs bf16", "vs native INT8", "busy ms", "of it no attention", "vs bf16"]
    columns += ["host ms", "rel. error"]
    lines = []
    for row in rows:
        bases = [row_of(rows, family=row["family"], name=name) for name in ("bf16", "native")]
        lines.append(
            [
                row["family"],
                TITLES[row["name"]],
                number(row, "ms", ".1f"),
                *(ratio(row, base, "ms") for base in bases),
                *(number(row, key, ".1f") for key in ("busy_ms", "without_attention_ms")),
                ratio(row, bases[0], "without_attention_ms"),
                number(row, "host_ms", ".1f"),
                number(row, "error", ".3f"),
            ]
        )
    notes = [f"- {row['family']}, {TITLES[row['name']]}: {row['failed']}" for row in rows if "failed" in row]
    notes += [
        f"- {row['family']}, {TITLES[row['name']]}: {row['graphs']} graphs, {row['graph_breaks']} graph breaks"
        for row in rows
        if "graphs" in row
    ]
    return "\n\n".join([markdown(columns, lines), *(["\n".join(notes)] if notes else [])])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--families", nargs="+", metavar="NAME", help="all but Ideogram 4 by default")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["bf16", "native", "pack"])
    parser.add_argument("--repetitions", type=int, default=15)
    parser.add_argument("--row-seconds", type=float, default=120.0, help="the most for a row; twice if it compiles")
    parser.add_argument("--tuning-seconds", type=float, default=1.5, help="for a shape of the GEMM; 0 for no tuning")
    parser.add_argument("--tiny", action="store_true", help="one block of each kind")
    parser.add_argument("--pixels", type=int, help="a side of the image, instead of each family's own")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for families.md and families.json")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    logging.getLogger("int8_dit").setLevel(logging.INFO)  # says where a block does not run fused
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title
    from support.measuring import Rows, limit_tuning, release, walls_and_hosts, write_results
    from support.random_models import FAMILIES, RandomModel, weights_on_device

    names = arguments.families or [name for name in FAMILIES if name != "Ideogram 4"]
    if unknown := set(names) - FAMILIES.keys():
        parser.error(f"no families: {', '.join(unknown)}; there are {', '.join(FAMILIES)}")
    limit_tuning(arguments.tuning_seconds)
    device = comfy.model_management.get_torch_device()
    machine = describe_machine(device)
    rows, kernels = Rows(), Rows()
    for name in names:
        family, expected, ready = FAMILIES[name], {}, {}
        random = RandomModel(family, device, family.tiny if arguments.tiny else {})
        for variant in arguments.variants:
            run = partial(prepare, random, variant, arguments.pixels, expected, ready)
            seconds = arguments.row_seconds * (2 if VARIANTS[variant] else 1)
            rows.attempt({"family": name, "name": variant}, run, seconds)
        with weights_on_device():
            forwards = {variant: forward for variant, (_, forward) in ready.items()}
            clocks = walls_and_hosts(forwards, device, arguments.repetitions)
        print(name, json.dumps(clocks), flush=True)
        for row in rows[-len(arguments.variants) :]:
            row |= clocks.get(row["name"], {})
        del ready, forwards
        release()
    for row in (row for row in rows if "failed" not in row):
        family = FAMILIES[row["family"]]
        random = RandomModel(family, device, family.tiny if arguments.tiny else {})
        run = partial(measure_kernels, random, row["name"], arguments.pixels)
        found = kernels.measure({"family": row["family"], "name": row["name"]}, run, arguments.row_seconds * 2)
        row |= {name: value for name, value in found.items() if name != "took_s"}
    text = (
        f"{title(machine)}, ComfyUI {comfyui_version}, random weights. Milliseconds of one forward.\n\n{table(rows)}\n"
    )
    write_results(arguments.out, "families", text, {"environment": machine, "comfyui": comfyui_version, "rows": rows})


if __name__ == "__main__":
    main()
