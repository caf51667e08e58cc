"""A full Ideogram 4 in GGUF: saved, loaded as INT8 and as stored, and a step of each beside ComfyUI-GGUF's.

    python tests/studies/gguf_models.py --comfyui PATH [--gguf-pack PATH] [--types Q8_0 Q4_K] [--out DIR]

Needs an NVIDIA card with 60 GB of memory, 60 GB of host memory and 20 GB of disk. Weights are random. A step is a
conditional forward (256 text tokens) and an unconditional one. Errors are those of what the model predicts, against
bf16. `--gguf-pack` is a checkout of ComfyUI-GGUF, which dequantizes to bf16 in front of each product. Leaves
gguf_models.json and gguf_models.md in --out. `--blocks 1 --pixels 64` tries it out.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).resolve().parents[1]))  # as a script, only this folder is there

from support.pack import import_comfyui, import_pack, import_package
from support.tensors import relative_error


def load_by_gguf_pack(path: str):
    """The MODEL of ComfyUI-GGUF's node."""
    import comfy.sd
    from comfyui_gguf.loader import gguf_sd_loader
    from comfyui_gguf.nodes import GGUFModelPatcher
    from comfyui_gguf.ops import GGMLOps

    options = {"custom_operations": GGMLOps()}
    return GGUFModelPatcher.clone(comfy.sd.load_diffusion_model_state_dict(gguf_sd_loader(path), model_options=options))


def load_ours(memory: str) -> Callable[[str], object]:
    """This pack's loader."""
    from int8_dit.nodes.loading.load import load_int8_model

    return lambda path: load_int8_model(path, "fused int8", memory=memory)


@contextmanager
def alone() -> Iterator[None]:
    """Nothing of a MODEL that was measured stays on the card."""
    import comfy.model_management

    yield
    comfy.model_management.unload_all_models()
    gc.collect()
    comfy.model_management.soft_empty_cache()


def step_of(model, inputs: list, expected: torch.Tensor | None, repetitions: int) -> tuple[dict, torch.Tensor]:
    """Milliseconds of a step, the memory that weights and step take, and the error."""
    from int8_dit.kernels.card.timing import median_milliseconds
    from studies.ideogram4_steps import Step
    from support.random_models import load

    device = inputs[0]["x"].device
    figures = {}
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    load(model)
    if device.type == "cuda":
        torch.cuda.synchronize()
        figures["weights_gb"] = (torch.cuda.memory_allocated() - before) / 1e9
        torch.cuda.reset_peak_memory_stats()
    step = Step(model, inputs)
    output = step.velocities().cpu()
    figures["ms"] = median_milliseconds(step.run, device, repetitions)
    if device.type == "cuda":
        figures["peak_gb"] = (torch.cuda.max_memory_allocated() - before) / 1e9
    figures["error"] = relative_error(output, output if expected is None else expected)
    return figures, output


def measure(arguments: argparse.Namespace, folder: Path) -> list[dict]:
    """A row for bf16 and for each way to load each file."""
    import comfy.model_management

    from int8_dit.nodes.saving.save_gguf import save_gguf_model
    from support.random_models import FAMILIES, RandomModel

    device = comfy.model_management.get_torch_device()
    random = RandomModel(FAMILIES["Ideogram 4"], device, {"num_layers": arguments.blocks})
    inputs = [random.inputs(arguments.pixels), random.inputs(arguments.pixels, text=False)]
    rows: list[dict] = []

    def add(**row: object) -> None:
        rows.append(row)
        print(json.dumps(row), flush=True)

    with alone():
        model = random.bf16_model()
        figures, expected = step_of(model, inputs, None, arguments.repetitions)
        add(file="bf16", loaded="bf16", **figures)
        for kind in arguments.types:
            begin = time.perf_counter()
            path = save_gguf_model(model, str(folder / f"{kind}.gguf"), {}, kind)
            add(file=kind, saved_s=time.perf_counter() - begin, file_gb=os.path.getsize(path) / 1e9)
        del model
    ways = {"INT8": load_ours("INT8"), "as stored": load_ours("as stored")}
    if arguments.gguf_pack:
        import_package("comfyui_gguf", arguments.gguf_pack)
        ways["ComfyUI-GGUF"] = load_by_gguf_pack
    for kind in arguments.types:
        for name, load in ways.items():
            with alone():
                begin = time.perf_counter()
                model = load(str(folder / f"{kind}.gguf"))
                seconds = time.perf_counter() - begin
                figures, _ = step_of(model, inputs, expected, arguments.repetitions)
                add(file=kind, loaded=name, load_s=seconds, **figures)
                del model
    return rows


def table(rows: list[dict]) -> str:
    """A line for each way to load each file; what is compared comes from the same run."""
    from int8_dit.kernels.benchmark import markdown

    files = {row["file"]: row for row in rows if "saved_s" in row}
    lines = []
    for row in (row for row in rows if "ms" in row):
        int8 = next((r for r in rows if r["file"] == row["file"] and r.get("loaded") == "INT8"), row)
        file = files.get(row["file"])
        lines.append(
            [
                row["file"],
                row["loaded"],
                f"{file['file_gb']:.2f}" if file else "-",
                f"{file['saved_s']:.0f}" if file else "-",
                f"{row['load_s']:.1f}" if "load_s" in row else "-",
                f"{row['weights_gb']:.2f}" if "weights_gb" in row else "-",
                f"{row['peak_gb']:.2f}" if "peak_gb" in row else "-",
                f"{row['ms']:.1f}",
                f"{row['ms'] / int8['ms']:.3f}",
                f"{row['error']:.4f}",
            ]
        )
    columns = ["file", "loaded", "file GB", "saved s", "loaded s", "weights on the card GB", "peak GB", "step ms"]
    return markdown([*columns, "of the INT8 step", "rel. error"], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--gguf-pack", type=Path)
    parser.add_argument("--types", nargs="+", default=["Q8_0", "Q4_K"])
    parser.add_argument("--blocks", type=int, default=34)
    parser.add_argument("--pixels", type=int, default=1024)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    sys.path.insert(0, str(arguments.comfyui))
    import_comfyui(arguments.comfyui, cpu=not torch.cuda.is_available())
    import_pack()
    import comfy.model_management
    from comfyui_version import __version__ as comfyui_version

    from int8_dit.kernels.benchmark import describe_machine, title

    with tempfile.TemporaryDirectory() as folder:
        rows = measure(arguments, Path(folder))
    machine = title(describe_machine(comfy.model_management.get_torch_device()))
    about = f"{machine}, ComfyUI {comfyui_version}, {arguments.blocks} blocks, {arguments.pixels} px."
    text = f"{about}\n\n{table(rows)}\n"
    print(text)
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "gguf_models.md").write_text(text)
        (arguments.out / "gguf_models.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
