"""Wall clock of one forward of full-width blocks of other families, with random weights, in ComfyUI: bf16, native INT8
and this pack's, eager and compiled.

    python tests/studies/families.py --comfyui PATH [--families NAME ...] [--variants NAME ...] [--out DIR]

Needs an NVIDIA card with 60 GB of memory; `--tiny --pixels 64` tries the script out on a CPU. "ms" is the clock from an
idle GPU until all is done, "host" until the last launch returns, "busy" the sum of all kernels, and "of it no
attention" what of that is left without the attention itself. A family's variants (those of variants.py) are loaded
together, and take turns on the clock; all clocks are read before anything is profiled.
"""

import json
import sys
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.frame import (
    Rows,
    Study,
    by_part,
    compiled_graphs,
    failures,
    graph_counts,
    kernel_times,
    markdown,
    number,
    ratio,
    release,
    row_of,
    walls_and_hosts,
)


def prepare(random, name: str, pixels: int | None, expected: dict, ready: dict) -> dict:
    """A row's figures but those of clocks and kernels. `ready` gets the step of the MODEL, warmed up."""
    import comfy.model_management

    from studies.variants import VARIANTS, Step
    from support.random_models import weights_on_device
    from support.tensors import relative_error

    with weights_on_device():
        step = Step(VARIANTS[name].build(random), [random.inputs(pixels)])
    output = step.velocities()
    step.run()
    ready[name] = step
    return {
        "weights_gb": comfy.model_management.module_size(step.model.model) / 1e9,
        "dtype": str(step.model.model.get_dtype_inference()).removeprefix("torch."),
        "error": relative_error(output, expected.setdefault("velocity", output)),
        **(graph_counts() if VARIANTS[name].compiles else {}),
    }


def measure_kernels(random, name: str, pixels: int | None) -> dict:
    """The figures of a row's kernels, with the variant alone on the device."""
    from studies.variants import VARIANTS, Step
    from support.random_models import weights_on_device

    with weights_on_device():
        step = Step(VARIANTS[name].build(random), [random.inputs(pixels)])
        for _ in range(2):  # compiles, and compares
            step.run()
        times = kernel_times(step.run, random.device)
    busy = sum(times.values())
    return {"busy_ms": busy, "without_attention_ms": busy - by_part(times)["attention"]}


def table(rows: list[dict]) -> str:
    """A line a row."""
    columns = ["family", "variant", "ms", "vs bf16", "vs native INT8", "busy ms", "of it no attention", "vs bf16"]
    columns += ["host ms", "rel. error"]
    lines = []
    for row in rows:
        bases = [row_of(rows, family=row["family"], name=name) for name in ("bf16", "native")]
        lines.append(
            [
                row["family"],
                row["variant"],
                number(row, "ms", ".1f"),
                *(ratio(row, base, "ms") for base in bases),
                *(number(row, key, ".1f") for key in ("busy_ms", "without_attention_ms")),
                ratio(row, bases[0], "without_attention_ms"),
                number(row, "host_ms", ".1f"),
                number(row, "error", ".3f"),
            ]
        )
    return markdown(columns, lines)


def main() -> None:
    study = Study(__doc__, "families")
    study.option("--families", nargs="+", metavar="NAME", help="all but Ideogram 4 by default")
    study.option("--variants", nargs="+", metavar="NAME", default=["bf16", "native", "pack"])
    study.option("--repetitions", type=int, default=15)
    study.option("--row-seconds", type=float, default=120.0, help="the most for a row; twice if it compiles")
    study.tuning(1.5)
    study.option("--tiny", action="store_true", help="one block of each kind")
    study.option("--pixels", type=int, help="a side of the image, instead of each family's own")
    arguments = study.start()
    from studies.variants import VARIANTS
    from support.random_models import FAMILIES, RandomModel, weights_on_device

    names = study.known(arguments.families or [name for name in FAMILIES if name != "Ideogram 4"], FAMILIES)
    study.known(arguments.variants, VARIANTS)

    def made(name: str) -> RandomModel:
        family = FAMILIES[name]
        return RandomModel(family, study.device, family.tiny if arguments.tiny else {})

    rows, kernels = Rows(), Rows()
    for family in names:
        random, expected, ready = made(family), {}, {}
        for name in arguments.variants:
            run = partial(prepare, random, name, arguments.pixels, expected, ready)
            labels = {"family": family, "name": name, "variant": VARIANTS[name].title}
            rows.attempt(labels, run, arguments.row_seconds * (1 + VARIANTS[name].compiles))
        with weights_on_device():
            runs = {name: step.run for name, step in ready.items()}
            clocks = walls_and_hosts(runs, study.device, arguments.repetitions)
        print(family, json.dumps(clocks), flush=True)
        for row in rows[-len(arguments.variants) :]:
            row |= clocks.get(row["name"], {})
        del ready, runs
        release()
    for row in (row for row in rows if "failed" not in row):
        run = partial(measure_kernels, made(row["family"]), row["name"], arguments.pixels)
        found = kernels.measure({"family": row["family"], "name": row["name"]}, run, arguments.row_seconds * 2)
        row |= {name: value for name, value in found.items() if name != "took_s"}
    of_row = "family", "variant"
    about = ", random weights. Milliseconds of one forward."
    study.write(about, table(rows), failures(rows, *of_row), compiled_graphs(rows, *of_row), rows=rows)


if __name__ == "__main__":
    main()
