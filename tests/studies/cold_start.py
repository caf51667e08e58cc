"""Seconds from the load of a model file to its eighth step, in processes that have compiled and tuned nothing yet, and
in later ones: this pack's loader beside ComfyUI's own.

    python tests/studies/cold_start.py --comfyui PATH [--forms int8 codes gguf] [--modes ordinary dynamic] [--out DIR]

Needs an NVIDIA card with about 30 GB of memory, and 10 GB for a file; `--blocks 1 --pixels 64 96 --row-seconds 900`
tries the script out on a CPU, in minutes a row. A model with random weights is written to a file in each form. Each row
is a process of its own, with folders of its own for what Triton compiles and what the tuner finds: empty ones, then the
same ones again. It loads the file, takes the steps, takes two at another resolution, and then many at the first one.
What Python imports is not in the times, nor what the pack does while a server starts, nor the search for garbage in
that: 0.2 s of a step, any of them, with all that ComfyUI has imported. The first process of all is no row: it reads
Triton and the compilers from a disk that nothing has read yet. Of ComfyUI's memory modes the one of dynamic VRAM needs
comfy-aimdo, and is its default on NVIDIA cards.
"""

import gc
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.frame import Row, Rows, Study, failures, markdown, number, synchronize
from support.pack import import_comfyui, import_pack, use_dynamic_vram

STEPS, MORE_STEPS, LAST_STEPS = 8, 20, 10
VARIANTS = {"pack": "this pack", "stored": "this pack, as stored", "native": "ComfyUI's loader"}
MODES = {"ordinary": "ordinary", "dynamic": "dynamic VRAM"}
FIGURES = (
    *(("load_s", "load"), ("first_s", "first step"), ("second_s", "second step"), ("all_s", f"load to step {STEPS}")),
    *(("other_first_s", "other size, first step"), ("other_second_s", "its second"), ("steady_ms", "steady step, ms")),
    *(("kernels", "kernels compiled"), ("kernels_s", "their seconds"), ("launchers", "C modules compiled")),
    *(("launchers_s", "their seconds"), ("late_kernels", "kernels compiled later")),
)
COUNTS = ("kernels", "launchers", "late_kernels")


class Form(NamedTuple):
    """A file: what it holds, how its name ends, what writes a RandomModel to it, and which of VARIANTS load it."""

    title: str
    ending: str
    write: Callable[[Any, str], object]
    variants: Sequence[str]


def _tensors_to(make: str) -> Callable[[Any, str], object]:
    """A writer of the tensors that a method of a RandomModel makes."""

    def write(random: Any, file: str) -> None:
        from safetensors.torch import save_file

        tensors = {name: tensor.cpu().contiguous() for name, tensor in getattr(random, make)().items()}
        save_file(tensors, file, random.family.metadata())

    return write


def _in_blocks(random: Any, file: str) -> None:
    from int8_dit.nodes.saving.save import save_gguf_model
    from support.random_models import weights_on_device

    with weights_on_device():
        save_gguf_model(random.bf16_model(), file, {}, "Q4_K")


FORMS = {
    "int8": Form("INT8", "safetensors", _tensors_to("native"), ("pack", "native")),
    "codes": Form("W4A8", "safetensors", _tensors_to("coded"), tuple(VARIANTS)),
    "gguf": Form("GGUF Q4_K", "gguf", _in_blocks, ("pack", "stored")),
}


class Compiled:
    """What Triton compiles in this process: kernels, and C modules by the host's compiler, with their seconds."""

    def __init__(self) -> None:
        import triton
        from triton.runtime import build

        self.kernels: list[float] = []
        self.launchers: list[float] = []
        own = build._build

        def timed(*args, **kwargs):
            begin = time.perf_counter()
            try:
                return own(*args, **kwargs)
            finally:
                self.launchers.append(time.perf_counter() - begin)

        def listener(*, times, cache_hit, **_):
            if not cache_hit:
                self.kernels.append(times.total / 1e6)

        build._build, triton.knobs.compilation.listener = timed, listener

    def figures(self) -> Row:
        found = {"kernels": self.kernels, "launchers": self.launchers}
        return {name: len(times) for name, times in found.items()} | {f"{name}_s": sum(t) for name, t in found.items()}


def random_model(device: torch.device, blocks: int):
    from support.random_models import FAMILIES, RandomModel

    return RandomModel(FAMILIES["Ideogram 4"], device, {"num_layers": blocks} if blocks else {})


def run(variant: str, file: str, blocks: int, pixels: Sequence[int]) -> Row:
    """The figures of a process that has just begun."""
    import comfy.model_management
    import comfy.sd

    from int8_dit.kernels.ahead.calls_ahead import prepare
    from int8_dit.nodes.loading.load import load_int8_model
    from int8_dit.nodes.loading.memory_choice import AS_STORED, INT8
    from studies.variants import Step, inputs_of

    device = comfy.model_management.get_torch_device()
    random = random_model(device, blocks)
    inputs = [inputs_of(random, side) for side in pixels]
    torch.ones(4096, 4096, device=device).matmul(torch.ones(4096, 4096, device=device))  # the context, and cuBLAS
    synchronize(device)
    prepare(device)
    compiled, seconds = Compiled(), []
    gc.collect()
    gc.freeze()

    def timed(work):
        begin = time.perf_counter()
        result = work()
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        return result

    def load():
        memory = AS_STORED if variant == "stored" else INT8
        native = variant == "native"
        model = comfy.sd.load_diffusion_model(file) if native else load_int8_model(file, "fused int8", memory=memory)
        return Step(model, inputs[0])

    step = timed(load)
    for _ in range(STEPS):
        timed(step.run)
    figures = {"load_s": seconds[0], "first_s": seconds[1], "second_s": seconds[2], "all_s": sum(seconds)}
    figures |= {"steps_s": seconds[1:], **compiled.figures()}
    other = Step(step.model, inputs[1])
    for name in ("other_first_s", "other_second_s"):
        timed(other.run)
        figures[name] = seconds[-1]
    for _ in range(MORE_STEPS + LAST_STEPS):
        timed(step.run)
    figures["steady_ms"] = 1e3 * statistics.median(seconds[-LAST_STEPS:])
    return figures | {"late_kernels": len(compiled.kernels) - figures["kernels"]}


def in_process(arguments, variant: str, mode: str, file: str, folder: str) -> Row:
    """The same, of a process that keeps in `folder` what it compiles and tunes."""
    kept = {"TRITON_CACHE_DIR": f"{folder}/triton", "INT8_DIT_TUNING_CACHE": f"{folder}/tuning"}
    command = [sys.executable, __file__, "--comfyui", str(arguments.comfyui), "--variant", variant, "--file", file]
    command += ["--blocks", str(arguments.blocks), "--pixels", *map(str, arguments.pixels), "--mode", mode]
    began = time.perf_counter()
    child = subprocess.run(command, env={**os.environ, **kept}, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        raise RuntimeError(f"the process ended with {child.returncode}")
    return json.loads(child.stdout.splitlines()[-1]) | {"process_s": time.perf_counter() - began}


def write_file(form: str, file: str, blocks: int) -> None:
    """Write the model; in a process of its own, whose memory on the card goes with it."""
    FORMS[form].write(random_model(torch.device("cuda" if torch.cuda.is_available() else "cpu"), blocks), file)


def main() -> None:
    study = Study(__doc__, "cold_start")
    study.option("--blocks", type=int, default=0, help="0 for all")
    study.option("--pixels", type=int, nargs=2, default=[1024, 768])
    study.option("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    study.option("--modes", nargs="+", choices=MODES, default=list(MODES), help="ComfyUI's memory modes")
    study.option("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    study.option("--row-seconds", type=float, default=150.0, help="the most for a process")
    study.option("--variant", help="of this process, in which that is measured")
    study.option("--mode", help="that of this process")
    study.option("--form", help="of the file that this process writes")
    study.option("--file", default="", help="what it loads, or writes")
    arguments = study.parser.parse_args()
    if arguments.file:
        dynamic = arguments.variant and arguments.mode == "dynamic"
        if dynamic:
            import comfy_aimdo.control

            comfy_aimdo.control.init()
        import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
        import_pack()
        if dynamic:
            use_dynamic_vram()
        if arguments.variant:
            print(json.dumps(run(arguments.variant, arguments.file, arguments.blocks, arguments.pixels)))
        else:
            write_file(arguments.form, arguments.file, arguments.blocks)
        return
    rows = Rows()
    with tempfile.TemporaryDirectory() as folder:
        for form in arguments.forms:
            file = f"{folder}/model.{FORMS[form].ending}"
            subprocess.run([sys.executable, *sys.argv, "--form", form, "--file", file], check=True)
            if form == arguments.forms[0]:
                in_process(arguments, "pack", arguments.modes[0], file, f"{folder}/first")
            for mode, variant in itertools.product(arguments.modes, arguments.variants):
                if variant not in FORMS[form].variants:
                    continue
                for caches in ("full",) if variant == "native" else ("empty", "full"):
                    labels = {"form": form, "mode": mode, "variant": variant, "caches": caches}
                    kept = f"{folder}/{form}-{mode}-{variant}"
                    process = partial(in_process, arguments, variant, mode, file, kept)
                    rows.attempt(labels, process, arguments.row_seconds)
            os.remove(file)
    study.start(arguments)
    forms = [(key, "d" if key in COUNTS else ".2f") for key, _ in FIGURES]
    lines = []
    for row in rows:
        what = (FORMS[row["form"]].title, MODES[row["mode"]], VARIANTS[row["variant"]], row["caches"])
        lines.append([*what, *(number(row, *form) for form in forms)])
    table = markdown(["file", "memory", "loaded by", "caches", *(title for _, title in FIGURES)], lines)
    first, second = arguments.pixels
    said = f", Ideogram 4 with random weights, {first} px, then {second} px."
    study.write(said, table, failures(rows, "form", "mode", "variant", "caches"), rows=rows)


if __name__ == "__main__":
    main()
