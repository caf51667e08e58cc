"""Models on a card with little memory: milliseconds a step, memory, load time and error, in INT8, in W4A8 and in GGUF's
blocks, ours beside ComfyUI's own and ComfyUI-GGUF's, in both of ComfyUI's memory modes, with and without a LoRA.

    python tests/studies/small_cards.py --comfyui PATH [--free 24 16 12] [--modes ordinary dynamic] [--out DIR]
    python tests/studies/small_cards.py --comfyui PATH --no-errors --free 8 12 --steps 4 --loaders "stock, W4A8" "this
        pack, W4A8 as stored" "this pack, Q4_K as stored"
    python tests/studies/small_cards.py --comfyui PATH --no-errors --model "Wan 14 B" --free 12 --steps 3
    python tests/studies/small_cards.py --comfyui PATH --no-errors --modes dynamic --loras none --free 8 12 16 24
        --loaders "this pack, W4A8 as INT8" "this pack, W4A8 as stored" "this pack, Q4_K as stored" --answers

Needs an NVIDIA card with 44 GB of memory, 100 GB of host memory and 40 GB of disk. `--model "Wan 14 B" --tiny --blocks
1 --pixels 64` tries the script out on a CPU. Another process holds all of the card's memory but `--free` GiB. Weights
are random; the LoRA has rank 16 on every INT8 linear. A step of Ideogram 4 is one of DualModelGuider's, with two
models: a conditional forward (256 text tokens) and an unconditional one. A step of Wan is one forward, of 81 frames of
832 x 480. Errors are those of the latents against bf16 models with the same LoRA. With `--no-errors` no bf16 model
computes, and the second model of Ideogram 4 is a copy of the first one's file. W4A8 needs a ComfyUI and a comfy-kitchen
that know it. With `--folder` a model's study can be measured in parts: the table has all rows of that folder, and a
part that is measured again replaces its own. `--answers` asks Kernel Benchmark on each card what to load, and sets its
predictions beside what was measured. Host memory is that of the process, which measures all loaders of a memory mode:
give one at a time for rows of their own.
"""

import argparse
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.frame import Study, end_node, markdown, number, release
from support.pack import import_package, use_dynamic_vram
from support.tensors import relative_error

RANK = 16
LORA_SIZE = 0.06  # of a weight's norm
GGUF = "Q4_K"
CASE = ("free", "mode", "lora", "loader")
"""What tells one row from another."""
HOLD = (
    "import sys, torch; free = torch.cuda.mem_get_info()[0]; "
    "kept = torch.empty(free - int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device='cuda'); "
    "print('held', flush=True); sys.stdin.read()"
)


class Sides(NamedTuple):
    """What is loaded together: a file for each of `sides`, of so many blocks. `tiny` are sizes to try it out."""

    sides: tuple[str, ...]
    blocks: int
    tiny: dict[str, int]


STUDIES = {
    "Ideogram 4": Sides(("conditional", "unconditional"), 34, {}),
    "Wan 14 B": Sides(("video",), 40, {"dim": 256, "ffn_dim": 512, "num_heads": 2}),
}


def load_stock(path: str):
    """ComfyUI's own loader."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(path)


def load_ours(path: str, **options: str):
    """This pack's."""
    from int8_dit.nodes.loading.load import load_int8_model

    return load_int8_model(path, "fused int8", **options)


def load_by_gguf_pack(path: str):
    """The MODEL of ComfyUI-GGUF's node."""
    import comfy.sd
    from comfyui_gguf.loader import gguf_sd_loader
    from comfyui_gguf.nodes import GGUFModelPatcher
    from comfyui_gguf.ops import GGMLOps

    options = {"custom_operations": GGMLOps()}
    return GGUFModelPatcher.clone(comfy.sd.load_diffusion_model_state_dict(gguf_sd_loader(path), model_options=options))


class Loader(NamedTuple):
    """How a MODEL is made of a file's path, and which files it reads: those whose names end so."""

    load: Callable
    file: str


INT8_FILE, CODES_FILE, GGUF_FILE = "INT8.safetensors", "W4A8.safetensors", f"{GGUF}.gguf"
LOADERS = {
    "stock": Loader(load_stock, INT8_FILE),
    "this pack": Loader(load_ours, INT8_FILE),
    "stock, W4A8": Loader(load_stock, CODES_FILE),
    "this pack, W4A8 as INT8": Loader(partial(load_ours, memory="INT8"), CODES_FILE),
    "this pack, W4A8 as stored": Loader(partial(load_ours, memory="as stored"), CODES_FILE),
    "this pack, W4A8 auto": Loader(partial(load_ours, memory="auto"), CODES_FILE),
    f"ComfyUI-GGUF, {GGUF}": Loader(load_by_gguf_pack, GGUF_FILE),
    f"this pack, {GGUF} as INT8": Loader(partial(load_ours, memory="INT8"), GGUF_FILE),
    f"this pack, {GGUF} as stored": Loader(partial(load_ours, memory="as stored"), GGUF_FILE),
    f"this pack, {GGUF} auto": Loader(partial(load_ours, memory="auto"), GGUF_FILE),
}
FIRST = ("stock", "this pack", f"this pack, {GGUF} as stored")
"""The loaders that are measured where none are named."""
PREDICTED = {
    "INT8": "this pack, W4A8 as INT8",
    "W4A8 as stored": "this pack, W4A8 as stored",
    f"GGUF {GGUF} as stored": f"this pack, {GGUF} as stored",
}
"""The loader of each form that Kernel Benchmark predicts."""


def start(study: Study, arguments: argparse.Namespace, mode: str) -> None:
    """Import ComfyUI and the pack with a memory mode, which holds for the whole process."""
    sys.path.insert(0, str(arguments.comfyui))
    import comfy_aimdo.control

    comfy_aimdo.control.init()
    study.start(arguments)
    if mode == "dynamic":
        use_dynamic_vram()
    if arguments.gguf_pack:
        import_package("comfyui_gguf", arguments.gguf_pack)


def sample(models: list, family, steps: int, pixels: int) -> tuple[torch.Tensor, list[float]]:
    """Latents of a fixed seed, and the seconds of each step."""
    import comfy.sample
    import comfy.samplers
    from comfy_extras.nodes_custom_sampler import Guider_DualModel

    generator = torch.Generator().manual_seed(2)
    text = [[torch.randn(family.context, generator=generator), {}]]
    if len(models) == 2:
        guider = Guider_DualModel(*models)
        guider.inner_set_conds({"positive": text, "negative": [[None, {}]]})
        guider.set_cfg(3.0)
    else:
        guider = comfy.samplers.CFGGuider(*models)
        guider.inner_set_conds({"positive": text})
        guider.set_cfg(1.0)
    empty = torch.zeros(family.latent(pixels))
    sigmas = comfy.samplers.calculate_sigmas(models[0].get_model_object("model_sampling"), "simple", steps)
    noise = comfy.sample.prepare_noise(empty, 3)
    ticks: list[float] = []

    def tick(*_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ticks.append(time.perf_counter())

    sampler = comfy.samplers.sampler_object("euler")
    latents = guider.sample(noise, empty, sampler, sigmas, callback=tick, disable_pbar=True, seed=3)
    end_node()
    return latents.float().cpu(), [after - before for before, after in itertools.pairwise(ticks)]


def with_lora(models: list, folder: Path, sides: tuple[str, ...]) -> list:
    """The MODELs of ComfyUI's LoRA loader node."""
    import comfy.sd
    import comfy.utils

    files = [comfy.utils.load_torch_file(str(folder / f"{side}-lora.safetensors")) for side in sides]
    return [comfy.sd.load_lora_for_models(m, None, lora, 1.0, 0.0)[0] for m, lora in zip(models, files, strict=True)]


def write_lora(random, seed: int, path: Path) -> None:
    """A LoRA on every INT8 linear of a model."""
    from safetensors.torch import save_file

    lora = {}
    generator = torch.Generator(random.device).manual_seed(seed)
    for name in random.layers:
        outputs, channels = random.shapes[f"{name}.weight"]
        up = torch.randn(outputs, RANK, generator=generator, device=random.device)
        down = torch.randn(RANK, channels, generator=generator, device=random.device)
        # |up down| is about sqrt(N K RANK), and |weight| sqrt(N): entries have a variance of 1 / K.
        up *= LORA_SIZE / (RANK * channels) ** 0.5
        lora |= {f"diffusion_model.{name}.lora_{end}.weight": t.cpu() for end, t in (("up", up), ("down", down))}
    save_file(lora, path)


def write_files(random, folder: Path, side: str, wanted: set[str]) -> None:
    """Those of the wanted files of one model that are not there."""
    from safetensors.torch import save_file

    from int8_dit.nodes.saving.save import save_gguf_model
    from support.random_models import weights_on_device

    for file in sorted(name for name in wanted if not (folder / f"{side}-{name}").exists()):
        begin, path = time.perf_counter(), folder / f"{side}-{file}"
        if file == GGUF_FILE:
            with weights_on_device():
                save_gguf_model(random.bf16_model(), str(path), {}, GGUF)
            release()
        else:
            tensors = random.native() if file == INT8_FILE else random.coded()
            save_file({name: tensor.cpu() for name, tensor in tensors.items()}, path)
        print(f"{path.name}: {time.perf_counter() - begin:.0f} s", flush=True)


def prepare(folder: Path, model: str, size: dict, wanted: set[str], steps: int, pixels: int, errors: bool) -> None:
    """Write the wanted files of a study's models, their LoRAs and, for errors, the latents of bf16."""
    import comfy.model_management
    import comfy.sd
    from safetensors.torch import save_file

    from support.random_models import FAMILIES, RandomModel

    device, family, sides = comfy.model_management.get_torch_device(), FAMILIES[model], STUDIES[model].sides
    models, errors_known = [], errors or (folder / "bf16.st").exists()
    for index, side in enumerate(sides):
        if index and not errors_known:  # times do not depend on what the weights are
            for name in (*wanted, "lora.safetensors"):
                shutil.copy(folder / f"{sides[0]}-{name}", folder / f"{side}-{name}")
            continue
        random = RandomModel(family, device, size, seed=index)
        write_files(random, folder, side, wanted)
        write_lora(random, 10 + index, folder / f"{side}-lora.safetensors")
        if errors:
            tensors = {name: random.tensor(name).cpu() for name in random.shapes}
            models.append(comfy.sd.load_diffusion_model_state_dict(tensors))
    if errors:
        latents = {
            "none": sample(models, family, steps, pixels)[0],
            "lora": sample(with_lora(models, folder, sides), family, steps, pixels)[0],
        }
        save_file(latents, folder / "bf16.st")


def measure(arguments: argparse.Namespace, pixels: int) -> None:
    """Print a row for each loader without and with the LoRA; for one that fails a row that says why."""
    labels = {"free": arguments.free[0], "mode": arguments.modes[0]}
    for name in arguments.loaders:
        try:
            measure_loader(arguments, name, labels, pixels)
        except Exception as error:  # whatever it is, the next loader can be measured
            traceback.print_exc(limit=-4)
            said = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            print(json.dumps({**labels, "loader": name, "lora": "any", "failed": said}), flush=True)
        release()
    if arguments.answers:
        print(json.dumps({**labels, "loader": "Kernel Benchmark", "lora": "none", **answered(arguments)}), flush=True)


def answered(arguments: argparse.Namespace) -> dict:
    """What Kernel Benchmark answers for the first model, and what it predicts of each form."""
    from int8_dit.kernels.benchmark.what_to_load import answer
    from int8_dit.nodes.benchmark.run import KEEP, run

    file = next(name for name in (CODES_FILE, INT8_FILE, GGUF_FILE) if list(arguments.folder.glob(f"*-{name}")))
    model = load_ours(str(arguments.folder / f"{STUDIES[arguments.model].sides[0]}-{file}"), memory="auto")
    outcome = run(model, 4352, [], None, None, KEEP)
    forms = [form._asdict() for form in outcome.to_load]
    return {"answer": answer(outcome.to_load), "remarks": outcome.remarks, "forms": forms}


def measure_loader(arguments: argparse.Namespace, name: str, labels: dict, pixels: int) -> None:
    """One loader's rows, one for each of `loras`. Of the card's memory they say what tensors take at most during the
    steps that are timed, and what the process holds behind them: weights that stay, tensors and what is kept for the
    next ones."""
    from safetensors.torch import load_file

    from int8_dit.kernels import settle
    from int8_dit.nodes.loading.memory_choice import memory_choice
    from support.random_models import FAMILIES

    folder, model, steps = arguments.folder, arguments.model, arguments.steps
    family, sides, (load, file) = FAMILIES[model], STUDIES[model].sides, LOADERS[name]
    paths = [str(folder / f"{side}-{file}") for side in sides]
    expected = load_file(folder / "bf16.st") if (folder / "bf16.st").exists() else None
    on_card = torch.cuda.is_available()
    free = torch.cuda.mem_get_info()[0] if on_card else 0
    load(paths[0])  # what is imported or started once
    begin = time.perf_counter()
    models = [load(path) for path in paths]
    load_seconds = time.perf_counter() - begin
    sample(models, family, 1, pixels)
    ready_seconds = time.perf_counter() - begin
    for lora in arguments.loras:
        variants = models if lora == "none" else with_lora(models, folder, sides)
        sample(variants, family, 2, pixels)
        settle(partial(sample, variants, family, 2, pixels), variants[0].load_device)
        if on_card:
            torch.cuda.reset_peak_memory_stats()
        latents, seconds = sample(variants, family, steps, pixels)
        row = {
            **labels,
            "loader": name,
            "lora": lora,
            "held": memory_choice(models[0]).why,
            "ms": 1000 * sorted(seconds)[len(seconds) // 2],
            "all_ms": [round(1000 * second, 1) for second in seconds],
            "error": None if expected is None else relative_error(latents, expected[lora]),
            "load_seconds": load_seconds,
            "ready_seconds": ready_seconds,  # with the first step
            "weights_gb": sum(model.model_size() for model in variants) / 1e9,
            "resident_gb": [model.loaded_size() / 1e9 for model in variants],
            "tensors_gb": torch.cuda.max_memory_allocated() / 1e9 if on_card else 0.0,
            "taken_gb": (free - torch.cuda.mem_get_info()[0]) / 1e9 if on_card else 0.0,
        }
        print(json.dumps(row | host_memory()), flush=True)


def host_memory() -> dict[str, float]:
    """What this process holds of the host's memory, in GB: what no file backs, that at most with files, and pinned."""
    import comfy.model_management

    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    anonymous, most = (int(status[key].split()[0]) * 1024 / 1e9 for key in ("RssAnon", "VmHWM"))
    pinned = comfy.model_management.TOTAL_PINNED_MEMORY / 1e9
    return {"anonymous_gb": anonymous, "most_gb": most, "pinned_gb": pinned}


def table(rows: list[dict]) -> str:
    """A line for each amount of memory, mode, loader and LoRA; ratios are to stock's loader of the same file, where
    that was measured, or of INT8."""
    lines = []
    for row in rows:
        kind = row["loader"].partition(", ")[2].partition(" ")[0]
        rivals = ("stock, W4A8",) if kind == "W4A8" else ("stock",)
        alike = [other for other in rows if all(other[key] == row[key] for key in ("free", "mode", "lora"))]
        stock = next((other for other in alike if other["loader"] in rivals and "ms" in other), None)
        lines.append(
            [
                f"{row['free']:g} GiB",
                row["mode"],
                {"none": "no", "lora": "yes"}.get(row["lora"], "-"),
                row["loader"] + (f": {row['held']}" if row.get("held") else ""),
                number(row, "ms", ".0f"),
                f"{row['ms'] / stock['ms']:.2f}" if stock and "ms" in row else "-",
                f"{sum(row['resident_gb']):.1f} of {row['weights_gb']:.1f}" if "ms" in row else row["failed"],
                number(row, "tensors_gb", ".2f"),
                number(row, "taken_gb", ".2f"),
                number(row, "error", ".3f"),
                number(row, "load_seconds", ".2f"),
                number(row, "ready_seconds", ".1f"),
                *(number(row, key, ".2f") for key in ("anonymous_gb", "most_gb", "pinned_gb")),
            ]
        )
    columns = ["free", "memory mode", "LoRA", "loader", "ms", "of stock", "weights on the card GB", "tensors GB"]
    columns += ["taken GB", "error", "loaded s", "first step done s", "host GB", "host at most GB", "pinned GB"]
    return markdown(columns, lines)


def answers_table(rows: list[dict], answers: list[dict]) -> str:
    """A line for each card and form: what Kernel Benchmark predicted, beside the median step of the loader's row, and
    beside its fastest one, which a busy host delays least."""
    measured = {(row["free"], row["loader"]): row for row in rows if row["lora"] == "none" and "ms" in row}
    lines = []
    for each in answers:
        for form in each["forms"]:
            row = measured.get((each["free"], PREDICTED[form["name"]]))
            if row is not None:
                predicted, times = form["milliseconds"], (row["ms"], min(row["all_ms"]))
                lines.append(
                    [
                        f"{each['free']:g} GiB",
                        form["name"],
                        f"{predicted:.0f}",
                        *itertools.chain(*((f"{ms:.0f}", f"{predicted / ms:.2f}") for ms in times)),
                        f"{form['peak'] / 1e9:.1f}",
                        f"{row['taken_gb']:.1f}",
                    ]
                )
    columns = ["free", "form", "predicted ms", "median ms", "ratio", "fastest ms", "ratio", "predicted peak GB"]
    columns.append("taken GB")
    said = [f"{each['free']:g} GiB: {each['answer']}." for each in answers]
    return "\n\n".join([markdown(columns, lines), *said])


def measured_rows(command: list[str], free: float, modes: list[str]) -> Iterator[dict]:
    """The rows of all loaders with so much memory, each mode in a process of its own."""
    holder = None
    if torch.cuda.is_available():
        hold = [sys.executable, "-c", HOLD, str(free)]
        holder = subprocess.Popen(hold, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert holder.stdout is not None
        holder.stdout.readline()
    for mode in modes:
        part = ["--modes", mode, "--free", str(free), "--part", "measure"]
        with subprocess.Popen([*command, *part], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            for line in process.stdout:
                print(line, end="", flush=True)
                if line.startswith("{"):
                    yield json.loads(line)
    if holder is not None:
        holder.kill()
        holder.wait()


def replaced(rows: list[dict], row: dict) -> list[dict]:
    """The rows with one more, without what it replaces: a loader's first row replaces all of its earlier run."""
    keys = [key for key in CASE if key != "lora" or row["lora"] != "none"]
    return [other for other in rows if any(other[key] != row[key] for key in keys)] + [row]


def main() -> None:
    study = Study(__doc__, "small_cards")
    study.option("--model", choices=list(STUDIES), default="Ideogram 4")
    study.option("--blocks", type=int, help="all of the model's where it is not given")
    study.option("--steps", type=int, default=6)
    study.option("--pixels", type=int, help="the model's own where it is not given")
    study.option("--free", type=float, nargs="+", default=[24, 16, 12], help="GiB")
    study.option("--modes", nargs="+", default=["ordinary", "dynamic"])
    study.option("--loaders", nargs="+", choices=list(LOADERS), default=list(FIRST))
    study.option("--loras", nargs="+", choices=("none", "lora"), default=["none", "lora"])
    study.option("--gguf-pack", type=Path, help="a checkout of ComfyUI-GGUF, for the loader of that name")
    study.option("--no-errors", action="store_true", help="no bf16 model computes what errors are against")
    study.option("--answers", action="store_true", help="ask Kernel Benchmark on each card what to load")
    study.tuning(2.0)
    study.option("--tiny", action="store_true", help="a narrow Wan, to try it out on a CPU with few blocks")
    study.option("--folder", type=Path, help="where files and rows are kept for another run")
    study.option("--part", choices=("prepare", "measure"), help=argparse.SUPPRESS)
    arguments = study.parser.parse_args()
    chosen = STUDIES[arguments.model]
    blocks = arguments.blocks or chosen.blocks
    wanted = {LOADERS[name].file for name in arguments.loaders}
    if arguments.part:
        start(study, arguments, arguments.modes[0])
        from support.random_models import FAMILIES

        pixels = arguments.pixels or FAMILIES[arguments.model].pixels
        if arguments.part == "prepare":
            size = {"num_layers": blocks, **(chosen.tiny if arguments.tiny else {})}
            errors = not arguments.no_errors
            prepare(arguments.folder, arguments.model, size, wanted, arguments.steps, pixels, errors)
        else:
            measure(arguments, pixels)
        return

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        # A later option replaces an earlier one.
        command = [sys.executable, __file__, *sys.argv[1:], "--folder", str(folder)]
        files = {f"{side}-{file}" for side in chosen.sides for file in wanted}
        files |= set() if arguments.no_errors else {"bf16.st"}
        if not all((folder / file).exists() for file in files):
            subprocess.run([*command, "--modes", "ordinary", "--part", "prepare"], check=True)
        kept = folder / "rows.json"
        rows: list[dict] = json.loads(kept.read_text()) if kept.exists() else []
        for free in arguments.free:
            for row in measured_rows(command, free, arguments.modes):
                rows = replaced(rows, row)
                kept.write_text(json.dumps(rows))
        answers, rows = [row for row in rows if "forms" in row], [row for row in rows if "forms" not in row]
        rows.sort(
            key=lambda row: (-row["free"], row["mode"], row["lora"] != "none", list(LOADERS).index(row["loader"]))
        )
        start(study, arguments, "ordinary")
        from safetensors.torch import load_file

        effect = ""
        if (folder / "bf16.st").exists():
            expected = load_file(folder / "bf16.st")
            effect = f"The LoRA's own effect is {relative_error(expected['lora'], expected['none']):.3f}."
    answered = answers_table(rows, answers) if answers else ""
    study.write(f", {blocks} blocks of {arguments.model}.", table(rows), effect, answered, rows=rows + answers)


if __name__ == "__main__":
    main()
