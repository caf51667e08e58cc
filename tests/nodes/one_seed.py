"""Samples MODELs seven times each from one seed, in ComfyUI's ordinary and in its dynamic VRAM mode, and prints what
each sampling gave, as JSON: by mode and MODEL, a list of digests of the latents.

Run as a script with ComfyUI's folder as its argument, like memory_modes.py. Nothing waits for kernels that compile and
tiles that are tried beside the samplings.
"""

import gc
import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [sys.argv[1], str(TESTS)]

import comfy_aimdo.control

comfy_aimdo.control.init()

import comfy.model_management

from support.pack import import_pack, use_dynamic_vram

import_pack()
import int8_dit.nodes.deferred.mode as mode
import int8_dit.nodes.loading.memory_choice as memory_choice
from int8_dit.nodes.attention.attention_kinds import AS_COMFYUI, AUTO, INT8
from studies.variants import VARIANTS
from support import glyph_dit as dit
from support.file_formats import FORMATS
from support.gguf_files import linears_in, write_gguf
from support.random_models import FAMILIES, Forward, RandomModel, attending, load

SAMPLINGS, STEPS, TEXT = 7, 4, "ONE SEED, ONE IMAGE".replace(" ", "").replace(",", "")
SMALLER = {"Ideogram 4": {"num_layers": 2}, "Flux.1": {"depth": 1, "depth_single_blocks": 2}}
PIXELS = 512
memory_choice.SMALLEST_STORED = mode.NOTE_SECONDS = 0  # the glyph model's layers are small

folder = Path(tempfile.mkdtemp())
device = torch.device("cuda", torch.cuda.current_device())


def in_format(name: str):
    """The glyph model from a file of a format."""
    file = FORMATS[name](dit.tensors(), dit.LINEARS)
    return dit.write(folder / f"{name}.safetensors", file.tensors, file.metadata)


def in_gguf(kind: str) -> str:
    return write_gguf(folder / f"{kind}.gguf", dit.tensors(), linears_in(kind))


GLYPHS: dict[str, Callable] = {
    "plain": dit.load,
    "LoRA": lambda: dit.with_lora(dit.load(), dit.lora(dit.LINEARS)),
    "ConvRot": lambda: dit.load(in_format("native, ConvRot")),
    "smoothed": lambda: dit.load(in_format("smoothed")),
    "GGUF Q8_0": lambda: dit.load(in_gguf("Q8_0")),
    "GGUF Q8_0 as stored": lambda: dit.load(in_gguf("Q8_0"), memory="as stored"),
    "W4A8 as stored": lambda: dit.load(in_format("W4A8"), memory="as stored"),
    "attention auto": lambda: attending(dit.load(), AUTO),
    "attention INT8": lambda: attending(dit.load(), INT8),
}
"""MODELs of the glyph model, which are small."""

RANDOM = [
    *((family, file, kind) for family in SMALLER for file in ("pack", "rotated") for kind in (AS_COMFYUI, AUTO, INT8)),
    ("Ideogram 4", "codes", AS_COMFYUI),
]
"""MODELs with random weights and full-width blocks: their family, what their file is of the studies' variants, and
their attention."""


def digest(latent: torch.Tensor) -> str:
    return hashlib.sha256(latent.float().cpu().numpy().tobytes()).hexdigest()[:16]


def samplings_of_glyphs(name: str) -> Callable[[], torch.Tensor]:
    model = GLYPHS[name]()
    return lambda: dit.sample(model, TEXT, STEPS, seed=1)


def samplings_of_random(family: str, variant: str, kind: str) -> Callable[[], torch.Tensor]:
    random, path = RandomModel(FAMILIES[family], device, SMALLER[family]), folder / f"{family}, {variant}.safetensors"
    if not path.exists():
        dit.save(VARIANTS[variant].build(random), path)
    model = attending(dit.load(path, memory="as stored" if variant == "codes" else "INT8"), kind)
    load(model)
    return Forward(model, random.inputs(PIXELS))


@torch.inference_mode()
def run() -> dict[str, list[str]]:
    """One mode."""
    found = {}
    for name in GLYPHS:
        sample = samplings_of_glyphs(name)
        found[name] = [digest(sample()) for _ in range(SAMPLINGS)]
    for family, variant, kind in RANDOM:
        sample = samplings_of_random(family, variant, kind)
        found[f"{family}, {variant}, {kind}"] = [digest(sample()) for _ in range(SAMPLINGS)]
    del sample
    gc.collect()  # ComfyUI cannot unload a MODEL that the collector takes meanwhile
    comfy.model_management.unload_all_models()
    return found


reports = {"ordinary": run()}
use_dynamic_vram()
reports["dynamic"] = run()
print(json.dumps(reports))
