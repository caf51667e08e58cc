"""Two full Ideogram 4 models on a card with little memory: milliseconds a step, load time and error, ours in INT8 and
in GGUF's blocks beside ComfyUI's own INT8, in both of its memory modes, with and without a LoRA.

    python tests/studies/small_cards.py --comfyui PATH [--free 24 16 12] [--modes ordinary dynamic] [--out DIR]

Needs an NVIDIA card with 44 GB of memory, 100 GB of host memory and 25 GB of disk. Another process holds all of the
card's memory but `--free` GiB. Weights are random; the LoRA has rank 16 on every INT8 linear of both models. A step is
one of DualModelGuider's: a conditional forward (256 text tokens) and an unconditional one. Errors are those of the
latents against bf16 models with the same LoRA. With `--folder` a study can be measured in parts: the table has all
rows of that folder, and a part that is measured again replaces its own.
"""

import argparse
import itertools
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from studies.ideogram4_benchmark import TEXT_FEATURES, TEXT_TOKENS
from support.pack import import_comfyui, import_pack, use_dynamic_vram
from support.tensors import relative_error

RANK = 16
LORA_SIZE = 0.06  # of a weight's norm
SIDES = ("conditional", "unconditional")
GGUF = "Q4_K"
CASE = ("free", "mode", "lora", "loader")
"""What tells one row from another."""
HOLD = (
    "import sys, torch; free = torch.cuda.mem_get_info()[0]; "
    "kept = torch.empty(free - int(float(sys.argv[1]) * 2**30), dtype=torch.uint8, device='cuda'); "
    "print('held', flush=True); sys.stdin.read()"
)


def start_comfyui(path: Path, mode: str) -> None:
    """Import ComfyUI and the pack with a memory mode, which holds for the whole process."""
    sys.path.insert(0, str(path))
    import comfy_aimdo.control

    comfy_aimdo.control.init()
    import_comfyui(path, cpu=not torch.cuda.is_available())
    import_pack()
    if mode == "dynamic":
        use_dynamic_vram()


def sample(models: list, steps: int, pixels: int) -> tuple[torch.Tensor, list[float]]:
    """Latents of a fixed seed, and the seconds of each step."""
    import comfy.sample
    import comfy.samplers
    from comfy_extras.nodes_custom_sampler import Guider_DualModel

    generator = torch.Generator().manual_seed(2)
    context = torch.randn(1, TEXT_TOKENS, TEXT_FEATURES, generator=generator)
    guider = Guider_DualModel(*models)
    guider.inner_set_conds({"positive": [[context, {}]], "negative": [[None, {}]]})
    guider.set_cfg(3.0)
    empty = torch.zeros(1, 128, pixels // 16, pixels // 16)
    sigmas = comfy.samplers.calculate_sigmas(models[0].get_model_object("model_sampling"), "simple", steps)
    noise = comfy.sample.prepare_noise(empty, 3)
    ticks: list[float] = []

    def tick(*_: object) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        ticks.append(time.perf_counter())

    sampler = comfy.samplers.sampler_object("euler")
    latents = guider.sample(noise, empty, sampler, sigmas, callback=tick, disable_pbar=True, seed=3)
    return latents.float().cpu(), [after - before for before, after in itertools.pairwise(ticks)]


def with_lora(models: list, folder: Path) -> list:
    """The MODELs of ComfyUI's LoRA loader node."""
    import comfy.sd
    import comfy.utils

    files = [comfy.utils.load_torch_file(str(folder / f"{side}-lora.safetensors")) for side in SIDES]
    return [comfy.sd.load_lora_for_models(m, None, lora, 1.0, 0.0)[0] for m, lora in zip(models, files, strict=True)]


def prepare(folder: Path, blocks: int, steps: int, pixels: int) -> None:
    """Write both models as native INT8 files, both LoRAs, and the latents of bf16."""
    import comfy.model_management
    import comfy.sd
    from safetensors.torch import save_file

    from int8_dit.nodes.saving.save_gguf import save_gguf_model
    from support.random_models import FAMILIES, RandomModel

    device = comfy.model_management.get_torch_device()
    models = []
    for index, side in enumerate(SIDES):
        random = RandomModel(FAMILIES["Ideogram 4"], device, {"num_layers": blocks}, seed=index)
        save_file({name: tensor.cpu() for name, tensor in random.native().items()}, folder / f"{side}.safetensors")
        lora = {}
        generator = torch.Generator(device).manual_seed(10 + index)
        for name in random.layers:
            outputs, channels = random.shapes[f"{name}.weight"]
            up = torch.randn(outputs, RANK, generator=generator, device=device)
            down = torch.randn(RANK, channels, generator=generator, device=device)
            # |up down| is about sqrt(N K RANK), and |weight| sqrt(N): entries have a variance of 1 / K.
            up *= LORA_SIZE / (RANK * channels) ** 0.5
            lora |= {f"diffusion_model.{name}.lora_{end}.weight": t.cpu() for end, t in (("up", up), ("down", down))}
        save_file(lora, folder / f"{side}-lora.safetensors")
        tensors = {name: random.tensor(name).cpu() for name in random.shapes}
        models.append(comfy.sd.load_diffusion_model_state_dict(tensors))
        save_gguf_model(models[-1], str(folder / f"{side}.gguf"), {}, GGUF)
    save_file(
        {"none": sample(models, steps, pixels)[0], "lora": sample(with_lora(models, folder), steps, pixels)[0]},
        folder / "bf16.st",
    )


def load_stock(path: Path):
    """ComfyUI's own loader."""
    import comfy.sd

    return comfy.sd.load_diffusion_model(str(path.with_suffix(".safetensors")))


def load_ours(path: Path):
    """This pack's."""
    from int8_dit.nodes.loading.load import load_int8_model

    return load_int8_model(str(path.with_suffix(".safetensors")), "fused int8")


def load_gguf(path: Path):
    """This pack's, of a GGUF file whose blocks stay as they are."""
    from int8_dit.nodes.loading.load import AS_STORED, load_int8_model

    return load_int8_model(str(path.with_suffix(".gguf")), "fused int8", memory=AS_STORED)


LOADERS = {"stock": load_stock, "this pack": load_ours, f"this pack, {GGUF} as stored": load_gguf}


def measure(folder: Path, loaders: list[str], mode: str, free: float, steps: int, pixels: int) -> list[dict]:
    """Each loader in this process, without and with the LoRA."""
    import gc

    import comfy.model_management
    from safetensors.torch import load_file

    expected = load_file(folder / "bf16.st")
    rows = []
    for name in loaders:
        load, paths = LOADERS[name], [folder / side for side in SIDES]
        load(paths[0])  # what is imported or started once
        begin = time.perf_counter()
        models = [load(path) for path in paths]
        load_seconds = time.perf_counter() - begin
        sample(models, 1, pixels)
        ready_seconds = time.perf_counter() - begin
        for lora, variants in (("none", models), ("lora", with_lora(models, folder))):
            sample(variants, 2, pixels)  # compiles and tunes
            latents, seconds = sample(variants, steps, pixels)
            rows.append(
                {
                    "free": free,
                    "mode": mode,
                    "loader": name,
                    "lora": lora,
                    "ms": 1000 * sorted(seconds)[len(seconds) // 2],
                    "all_ms": [round(1000 * second, 1) for second in seconds],
                    "error": relative_error(latents, expected[lora]),
                    "load_seconds": load_seconds,
                    "ready_seconds": ready_seconds,  # with the first step
                    "resident_gb": [model.loaded_size() / 1e9 for model in variants],
                    "reserved_gb": torch.cuda.memory_reserved() / 1e9,
                }
            )
            print(json.dumps(rows[-1]), flush=True)
        del models, variants
        comfy.model_management.unload_all_models()
        gc.collect()
        comfy.model_management.soft_empty_cache()
    return rows


def table(rows: list[dict], effect: float) -> str:
    """A line for each amount of memory, mode, loader and LoRA."""
    from int8_dit.kernels.benchmark import markdown

    lines = []
    for row in rows:
        same = ("free", "mode", "lora")
        stock = next((r for r in rows if r["loader"] == "stock" and all(r[key] == row[key] for key in same)), None)
        lines.append(
            [
                f"{row['free']:g} GiB",
                row["mode"],
                "no" if row["lora"] == "none" else "yes",
                row["loader"],
                f"{row['ms']:.0f}",
                f"{row['ms'] / stock['ms']:.2f}" if stock else "-",
                f"{row['error']:.3f}",
                f"{row['load_seconds']:.2f}",
                f"{row['ready_seconds']:.1f}",
            ]
        )
    columns = ["free", "memory mode", "LoRA", "loader", "ms", "of stock", "error", "loaded s", "first step done s"]
    return markdown(columns, lines) + f"\n\nThe LoRA's own effect is {effect:.3f}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=34)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--free", type=float, nargs="+", default=[24, 16, 12], help="GiB")
    parser.add_argument("--modes", nargs="+", default=["ordinary", "dynamic"])
    parser.add_argument("--loaders", nargs="+", choices=list(LOADERS), default=list(LOADERS))
    parser.add_argument("--folder", type=Path, help="where models and rows are kept for another run")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--part", choices=("prepare", "measure"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        start_comfyui(arguments.comfyui, arguments.modes[0])
        if arguments.part == "prepare":
            prepare(arguments.folder, arguments.blocks, arguments.steps, arguments.pixels)
        else:
            sizes = arguments.steps, arguments.pixels
            measure(arguments.folder, arguments.loaders, arguments.modes[0], arguments.free[0], *sizes)
        return

    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        options = ["--comfyui", arguments.comfyui, "--blocks", arguments.blocks, "--steps", arguments.steps]
        options += ["--pixels", arguments.pixels, "--loaders", *arguments.loaders]
        command = [sys.executable, __file__, *map(str, options), "--folder", str(folder)]
        if not (folder / "bf16.st").exists():
            subprocess.run([*command, "--modes", "ordinary", "--part", "prepare"], check=True)
        kept = folder / "rows.json"
        rows: list[dict] = json.loads(kept.read_text()) if kept.exists() else []
        for free in arguments.free:
            holder = subprocess.Popen(
                [sys.executable, "-c", HOLD, str(free)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            assert holder.stdout is not None
            holder.stdout.readline()
            for mode in arguments.modes:
                part = ["--modes", mode, "--free", str(free), "--part", "measure"]
                with subprocess.Popen([*command, *part], stdout=subprocess.PIPE, text=True) as process:
                    assert process.stdout is not None
                    for line in process.stdout:
                        print(line, end="", flush=True)
                        if line.startswith("{"):
                            row = json.loads(line)
                            rows = [other for other in rows if any(other[key] != row[key] for key in CASE)] + [row]
                            kept.write_text(json.dumps(rows))
            holder.kill()
            holder.wait()
        rows.sort(
            key=lambda row: (-row["free"], row["mode"], row["lora"] != "none", list(LOADERS).index(row["loader"]))
        )
        start_comfyui(arguments.comfyui, "ordinary")
        from comfyui_version import __version__ as comfyui_version
        from safetensors.torch import load_file

        from int8_dit.kernels.benchmark import describe_machine, title

        expected = load_file(folder / "bf16.st")
        effect = relative_error(expected["lora"], expected["none"])
        machine = title(describe_machine(torch.device("cuda")))
        text = f"{machine}, ComfyUI {comfyui_version}, {arguments.blocks} blocks.\n\n{table(rows, effect)}\n"
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "small_cards.md").write_text(text)
        (arguments.out / "small_cards.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
