"""Many prompts in one ComfyUI server: does memory stay flat, and is every image of a seed the same?

    python tests/studies/long_run.py --comfyui PATH [--prompts 1000] [--stock] [--out FILE]

Two INT8 models and a LoRA take turns, in prompts of their own and together in one. The server computes on the GPU
where there is one, else on the CPU. A round is every kind of prompt with every seed, 20 prompts. Memory is compared
from the second round on: the first fills caches. ComfyUI's history is cleared after each prompt, since it grows
whatever a prompt does. `--stock` runs the same with ComfyUI's own loader. Exits with 1 when a bar is missed.
"""

import argparse
import hashlib
import itertools
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

sys.path += [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]  # as a script, only this folder is there

from kernels.benchmark import describe_machine, markdown, title
from support import adapters, workflows
from support.environment import Environment
from support.server import GLYPH_MODEL, ComfyServer, serve
from support.workflows import Link, Prompt, link

RESULT = Path(__file__).resolve().parent / "results" / "long_run.md"
TEXT, STEPS, SEEDS = "IN", 2, range(5)
LORA = "long_run_lora.safetensors"
MOST_GROWTH_MIB = 20
"""Of the median of the last round's memory over that of the second round."""
ROWS = 10

Loader = Callable[[Prompt, str], Link]


@dataclass(frozen=True)
class Models:
    """Two models, and how they are loaded."""

    load: Loader
    first: str
    second: str


@dataclass(frozen=True)
class Sample:
    """What is known after a prompt: memory in MiB, and how long it took."""

    host: float
    gpu: float | None  # None without one
    seconds: float


def together(prompt: Prompt, models: Models, seed: int) -> list[Link]:
    first, second = models.load(prompt, models.first), models.load(prompt, models.second)
    latents = [_sampled(prompt, model, seed) for model in (first, second, _patched(prompt, second))]
    return [*latents, _sampled(prompt, first, seed + len(SEEDS))]  # the first one's turn again


KINDS: dict[str, Callable[[Prompt, Models, int], list[Link]]] = {
    "first model": lambda prompt, models, seed: [_sampled(prompt, models.load(prompt, models.first), seed)],
    "second model": lambda prompt, models, seed: [_sampled(prompt, models.load(prompt, models.second), seed)],
    "first model, LoRA": lambda prompt, models, seed: [
        _sampled(prompt, _patched(prompt, models.load(prompt, models.first)), seed)
    ],
    "all in one": together,
}


def _patched(prompt: Prompt, model: Link) -> Link:
    return link(prompt.add("LoraLoaderModelOnly", model=model, lora_name=LORA, strength_model=1.0))


def _sampled(prompt: Prompt, model: Link, seed: int) -> Link:
    return workflows.glyph_latents(prompt, model, text=TEXT, steps=STEPS, seed=seed)


def prepare(server: ComfyServer, stock: bool) -> Models:
    """Write the LoRA and the INT8 file; the second model is quantized whenever it is loaded."""
    weights = load_file(GLYPH_MODEL)
    layers = [f"joint_blocks.{block}.x_block.mlp.{layer}" for block in range(3) for layer in ("fc1", "fc2")]
    (server.base / "models" / "loras").mkdir(parents=True, exist_ok=True)
    lora = adapters.lora({layer: weights[f"{layer}.weight"] for layer in layers}, scale=0.3)
    save_file(lora, server.base / "models" / "loras" / LORA)
    prompt = Prompt()
    base = workflows.stock_model(prompt)
    if stock:  # it reads no smoothed file
        quantized = workflows.uncalibrated_model(prompt, base)
    else:
        quantized = workflows.calibrated_model(prompt, base, text=TEXT, steps=STEPS, protect_layers=0)
    save = workflows.save_model(prompt, quantized)
    name = server.saved_path(server.queue(prompt)[save]).name
    return Models(workflows.stock_model if stock else workflows.int8_model, name, GLYPH_MODEL.name)


def memory(server: ComfyServer) -> tuple[float, float | None]:
    """MiB that the server's process has resident, and MiB in use on the GPU; None without one."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    (resident,) = (int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
    (device,) = server.system_stats()["devices"]
    used = None if device["type"] == "cpu" else (device["vram_total"] - device["vram_free"]) / 2**20
    return resident / 1024, used


def run(server: ComfyServer, models: Models, prompts: int) -> tuple[list[Sample], dict[tuple, set[str]]]:
    """A sample for each prompt, and the hashes that the images of each kind and seed had."""
    samples, hashes = [], defaultdict(set)
    turns = itertools.cycle((seed, kind) for seed in SEEDS for kind in KINDS)
    for number, (seed, kind) in enumerate(itertools.islice(turns, prompts), start=1):
        prompt = Prompt()
        saving = [workflows.save_latents(prompt, latents) for latents in KINDS[kind](prompt, models, seed)]
        start = time.monotonic()
        results = server.queue(prompt)
        seconds = time.monotonic() - start
        for place, node in enumerate(saving):
            path = server.saved_path(results[node], "latents")
            latents = load_file(path)["latent_tensor"]
            hashes[kind, place, seed].add(hashlib.sha256(latents.numpy().tobytes()).hexdigest())
            path.unlink()  # a result out of ComfyUI's cache would have no file
        server.clear_history()
        samples.append(Sample(*memory(server), seconds))
        if number % 100 == 0:
            print(f"{number} prompts, {samples[-1].host:.0f} MiB", flush=True)
    return samples, hashes


def growth(values: list[float]) -> float:
    """The median of the last round less that of the second."""
    length = len(SEEDS) * len(KINDS)
    return statistics.median(values[-length:]) - statistics.median(values[length : 2 * length])


def table(samples: list[Sample]) -> str:
    """Medians of the prompts up to each number."""
    columns = {"host MiB": ("host", ".1f"), "GPU MiB": ("gpu", ".1f"), "s per prompt": ("seconds", ".2f")}
    if samples[0].gpu is None:
        del columns["GPU MiB"]
    rows, length = [], max(1, len(samples) // ROWS)
    for start in range(0, len(samples), length):
        part = samples[start : start + length]
        medians = [
            format(statistics.median(getattr(sample, name) for sample in part), digits)
            for name, digits in columns.values()
        ]
        rows.append([f"{start + 1} to {start + len(part)}", *medians])
    return markdown(["prompts", *columns], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--comfyui", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1000)
    parser.add_argument("--stock", action="store_true", help="ComfyUI's own loader")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    if arguments.prompts < 3 * len(SEEDS) * len(KINDS):
        parser.error("three rounds are the least")
    gpu = torch.cuda.is_available()
    with (
        tempfile.TemporaryDirectory() as base,
        serve(Environment(Path(sys.executable), arguments.comfyui.resolve()), Path(base), cpu=not gpu) as server,
    ):
        version = server.system_stats()["system"]["comfyui_version"]
        samples, hashes = run(server, prepare(server, arguments.stock), arguments.prompts)

    grown = {"host": growth([sample.host for sample in samples])}
    if gpu:
        grown["GPU"] = growth([sample.gpu for sample in samples])
    different = [name for name, found in hashes.items() if len(found) > 1]
    machine = title(describe_machine(torch.device("cuda" if gpu else "cpu")))
    loader = "ComfyUI's own loader" if arguments.stock else "this pack"
    command = f"python tests/studies/long_run.py --comfyui PATH --prompts {arguments.prompts}"
    heading = f"{machine}, ComfyUI {version}, {loader}, `{command}{' --stock' if arguments.stock else ''}`"
    found = [f"{name} memory grew by {mib:.1f} MiB" for name, mib in grown.items()]
    found.append(f"of {len(hashes)} images, each sampled again and again, {len(different)} differed")
    text = "\n\n".join([heading, f"From the second round of prompts to the last {'; '.join(found)}.", table(samples)])
    print(text)
    arguments.out.write_text(text + "\n")
    return 1 if different or max(grown.values()) > MOST_GROWTH_MIB else 0


if __name__ == "__main__":
    sys.exit(main())
