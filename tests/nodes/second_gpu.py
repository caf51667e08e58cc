"""Samples the glyph model on two GPUs, in turn and split between them, in ComfyUI's ordinary and in its dynamic VRAM
mode, and prints what came out, as JSON.

Run as a script with ComfyUI's folder as its argument, like memory_modes.py.
"""

import json
import sys
import traceback
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [sys.argv[1], str(TESTS)]

import comfy_aimdo.control

comfy_aimdo.control.init()

import comfy.model_management
import comfy.sample
import comfy.samplers
from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode, SelectModelDeviceNode

from glyphs import conditioning, latents
from glyphs.alphabet import ALPHABET
from support.launches import count_launches
from support.pack import import_pack, use_dynamic_vram

import_pack()
import int8_dit.kernels.linear.gemm as gemm
import int8_dit.nodes.deferred.mode as mode
from support import glyph_dit as dit

STEPS = 4

launches = count_launches(gemm)
mode.NOTE_SECONDS = 0  # the glyph model's layers are small
# One GPU computes the two prompts one by one, as two GPUs do: other batches are rounded otherwise.
comfy.samplers.can_concat_cond = lambda one, other: one is other


def sample(model) -> torch.Tensor:
    """The latent of two different prompts with CFG, as a KSampler node makes it."""
    prompts = []
    for text in (ALPHABET, ALPHABET[::-1]):
        context, pooled = conditioning.encode(text)
        prompts.append([[context, {"pooled_output": pooled}]])
    empty = torch.zeros(len(ALPHABET), latents.CHANNELS, latents.SIDE, latents.SIDE)
    noise = comfy.sample.prepare_noise(empty, 1)
    launches.clear()
    latent = comfy.sample.sample(model, noise, STEPS, 2.0, "euler", "simple", *prompts, empty, seed=1)
    return latent.float().cpu()


def on_gpu(model, index: int):
    return SelectModelDeviceNode.execute(model, f"gpu:{index}").result[0]


def split(model):
    return MultiGPUCFGSplitNode.execute(model, 2).result[0]


@torch.inference_mode()  # as ComfyUI runs nodes; the threads of two GPUs are outside
def run() -> dict:
    """One mode."""
    report = {}

    def compare(name: str, model, expected: torch.Tensor) -> None:
        report[name] = {}
        try:
            latent = sample(model)
        except Exception:  # the others are still worth knowing
            report[name]["failed"] = traceback.format_exc()
            return
        report[name] = {
            "device": str(model.load_device),
            "launches": {str(index): count for index, count in sorted(launches.items())},
            "error": dit.relative_error(latent, expected),
            "equal": torch.equal(latent, expected),
            "current": torch.cuda.current_device(),
        }

    # Libraries may choose other routines in a process's first calls. That is neither the second GPU nor this pack.
    stock = dit.stock()
    compare("ComfyUI's own, again", stock, sample(stock))

    lora = dit.lora(dit.LINEARS)
    first = dit.load()
    plain = sample(first)
    compare("first, again", first, plain)
    patched = sample(dit.with_lora(first, lora))
    report["patcher"], report["finite"] = type(first).__name__, bool(torch.isfinite(plain).all())
    report["lora_effect"] = dit.relative_error(patched, plain)

    second = on_gpu(first, 1)
    for turn in range(2):
        compare(f"first, turn {turn}", first, plain)
        compare(f"second, turn {turn}", second, plain)
    compare("LoRA on the first", dit.with_lora(first, lora), patched)
    compare("LoRA on the second", dit.with_lora(second, lora), patched)
    compare("second without LoRA", second, plain)
    both = split(first)
    compare("split", both, plain)
    compare("LoRA on split", dit.with_lora(both, lora), patched)
    compare("split without LoRA", both, plain)

    compare("ComfyUI's own, split", split(stock), sample(stock))
    there = on_gpu(stock, 1)
    expected = sample(dit.quantize(stock, **dit.calibration(stock)))
    quantized = dit.quantize(there, **dit.calibration(there))
    compare("quantized on the second", quantized, expected)
    compare("quantized on the second, then split", split(quantized), expected)
    compare("split, then quantized", dit.quantize(split(stock), **dit.calibration(stock)), expected)
    comfy.model_management.unload_all_models()
    return report


reports = {"ordinary": run()}
use_dynamic_vram()
reports["dynamic"] = run()
print(json.dumps(reports))
