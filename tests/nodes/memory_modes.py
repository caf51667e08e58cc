"""Samples the glyph model on a GPU in ComfyUI's ordinary and in its dynamic VRAM mode and prints what came out, as
JSON.

Run as a script with ComfyUI's folder as its argument: the mode is chosen for a whole process, and the other node tests
run on the CPU. The steps are those of a user: quantize, save, load, sample, with and without a LoRA.
"""

import gc
import json
import sys
import tempfile
from pathlib import Path

import torch

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [sys.argv[1], str(TESTS)]

import comfy_aimdo.control

comfy_aimdo.control.init()

import comfy.hooks
import comfy.lora
import comfy.model_management
from comfy_extras.nodes_lora_extract import LORAType, calc_lora_model

from glyphs import latents
from glyphs.alphabet import ALPHABET
from glyphs.matching import recognise
from support.launches import count_launches
from support.pack import import_pack, use_dynamic_vram
from support.tensors import relative_error

TEXT = ALPHABET * 2
STEPS = 12
PAGE = 32 << 20  # bytes; dynamic VRAM takes memory of the card by such pages


import_pack()
import int8_dit.kernels.linear.gemm as gemm
import int8_dit.nodes.deferred.mode as mode
import int8_dit.nodes.loading.memory_choice as memory_choice
from int8_dit.nodes.benchmark.forward import measure_forward
from int8_dit.nodes.comfyui.lazy_tensors import lazy_pieces
from support import glyph_dit as dit

launches = count_launches(gemm)
memory_choice.SMALLEST_STORED = mode.NOTE_SECONDS = 0  # the glyph model's layers are small


def sample(model) -> tuple[torch.Tensor, dict]:
    """The latent, and how many glyphs can be read and INT8 GEMMs were launched."""
    launches.clear()
    latent = dit.sample(model, TEXT, STEPS, seed=1).float().cpu()
    read = recognise(latents.model_to_image(latents.node_to_model(latent)).clamp(0, 1))
    return latent, {"read": sum(a == b for a, b in zip(read, TEXT, strict=True)), "launches": launches.total()}


def with_lora(model):
    """A clone with a random rank-4 LoRA on the feed-forward of every block."""
    layers = [f"joint_blocks.{block}.x_block.mlp.fc1" for block in range(3)]
    return dit.with_lora(model, dit.lora(layers, 0.2))


def run() -> dict:
    """One mode."""
    base = dit.stock()
    original, figures = sample(base)
    original_lora, _ = sample(with_lora(base))
    report = {"patcher": type(base).__name__, "original": figures}

    def quantize():
        """As the user would, calibration included."""
        inputs = dit.calibration(base, TEXT, STEPS, seed=5)
        return dit.quantize(base, 2, protected_in="INT8 with 16-bit activations", **inputs)

    quantized = quantize()
    int8, report["int8"] = sample(quantized)
    report["int8"]["error"] = relative_error(int8, original)
    with tempfile.TemporaryDirectory() as folder:
        dit.save(quantized, f"{folder}/int8.safetensors")
        dit.save(quantize(), f"{folder}/again.safetensors")
        files = [Path(folder, f"{name}.safetensors").read_bytes() for name in ("int8", "again")]
        report["same_file"] = files[0] == files[1]
        loaded = dit.load(f"{folder}/int8.safetensors")
        report["reloaded_equal"] = torch.equal(sample(loaded)[0], int8)
        patched = with_lora(loaded)
        int8_lora, report["lora"] = sample(patched)
        report["lora"] |= {
            "error": relative_error(int8_lora, original_lora),
            "effect": relative_error(original_lora, original),
        }
        report["removed_equal"] = torch.equal(sample(loaded)[0], int8)
        dit.save(patched, f"{folder}/lora.safetensors")
        baked, report["baked"] = sample(dit.load(f"{folder}/lora.safetensors"))
        report["baked"]["error"] = relative_error(baked, original_lora)
        report["copy_equal"] = torch.equal(sample(quantized.clone(disable_dynamic=True))[0], int8)
        bf16, report["bf16"] = sample(dit.load(f"{folder}/int8.safetensors", "bf16"))
        report["bf16"]["error"] = relative_error(bf16, original)
        report["stored"] = {kind: run_stored(Path(folder), kind) for kind in ("W6A8", "Q8_0")}
        report |= run_applied(Path(folder), original_lora)
        report["hooked"] = run_hooked(Path(folder))
        report["benchmarked_equal"] = [is_equal_after_a_benchmark(model) for model in (base, loaded)]
        comfy.model_management.unload_all_models()
    return report


def is_equal_after_a_benchmark(model) -> bool:
    """Whether a MODEL computes as before, in memory of its own, after Kernel Benchmark measured a forward of it."""
    before, _ = sample(model)
    inputs = dit.calibration(model, TEXT, STEPS, seed=5)
    (positive,) = inputs["positive"].values()
    measure_forward(model, positive, inputs["latent_image"])
    gc.collect()
    return torch.equal(sample(model)[0], before) and model.loaded_size() <= model.model_size() + PAGE


def run_stored(folder: Path, kind: str) -> dict:
    """A file in fewer bits, held as INT8 and as stored, with a LoRA and without; as INT8 also saved."""
    path, report, latents_of = dit.write_as(folder, kind), {}, {}
    for memory in ("INT8", "as stored"):
        model = dit.load(path, memory=memory)
        patched = with_lora(model)
        latents_of[memory], report[memory] = sample(model)
        latents_of["LoRA", memory], report[f"{memory}, LoRA"] = sample(patched)
        report[f"removed equal, {memory}"] = torch.equal(sample(model)[0], latents_of[memory])
        if memory == "INT8":
            report["lazy"] = len(lazy_pieces(model.model.diffusion_model))
            saved = dit.load(dit.save(model, folder / f"{kind}.saved.safetensors"))
            report["saved equal"] = torch.equal(sample(saved)[0], latents_of[memory])
            baked, _ = sample(dit.load(dit.save(patched, folder / f"{kind}.lora.safetensors")))
            report["baked error"] = relative_error(baked, latents_of["LoRA", memory])
    report["equal"] = torch.equal(latents_of["INT8"], latents_of["as stored"])
    report["as stored, LoRA"]["error"] = relative_error(latents_of["LoRA", "as stored"], latents_of["LoRA", "INT8"])
    return report


def run_hooked(folder: Path) -> dict[str, list[float]]:
    """Errors under a LoRA hook where ComfyUI pins and streams every weight, against ComfyUI's own model with the LoRA:
    twice, since the memory that a hook left is used again, and then of a sampling without it against the one before."""
    lora = dit.lora(dit.LINEARS, 0.2)
    expected = dit.sample(dit.with_lora(dit.stock(), lora), TEXT, STEPS, seed=1)
    before, errors = comfy.model_management.vram_state, {}
    comfy.model_management.vram_state = comfy.model_management.VRAMState.NO_VRAM
    try:
        for name, memory in {"floats": None, "INT8": "INT8", "Q8_0": "as stored", "W4A8": "as stored"}.items():
            path = dit.write_as(folder, "floats" if name == "INT8" else name)
            model = dit.load(path, memory=memory) if memory else dit.stock(path)
            plain = dit.sample(model, TEXT, STEPS, seed=1)
            hooks = comfy.hooks.create_hook_lora(lora, 1.0, 0.0)
            hooked = [dit.sample(model, TEXT, STEPS, seed=1, hooks=hooks) for _ in range(2)]
            errors[name] = [relative_error(latent, expected) for latent in hooked]
            errors[name].append(relative_error(dit.sample(model, TEXT, STEPS, seed=1), plain))
            comfy.model_management.unload_all_models()
    finally:
        comfy.model_management.vram_state = before
    return errors


def run_applied(folder: Path, original_lora: torch.Tensor) -> dict:
    """A native file of ComfyUI's own loader behind Apply Fused INT8 Kernel: beside Load INT8 DiT, with a LoRA, and as
    ComfyUI extracts a LoRA of the difference to the model without it."""
    path = dit.write_as(folder, "native")
    loaded, applied = dit.load(path), dit.apply(dit.stock(path))
    latent, figures = sample(applied)
    equal = torch.equal(latent, sample(loaded)[0])
    patched, lora = sample(with_lora(applied))
    lora["error"] = relative_error(patched, original_lora)
    difference = with_lora(applied)
    for key, patch in applied.get_key_patches("diffusion_model.").items():
        difference.add_patches({key: patch}, -1.0, 1.0)
    made = calc_lora_model(difference, 4, "diffusion_model.", "diffusion_model.", {}, LORAType.FULL_DIFF)
    again = applied.clone()
    linears = {key: tensor for key, tensor in made.items() if ".mlp.fc1." in key}
    again.add_patches(comfy.lora.load_lora(linears, comfy.lora.model_lora_keys_unet(again.model, {})), 1.0)
    extracted = relative_error(sample(again)[0], original_lora)
    removed = torch.equal(sample(applied)[0], latent)
    return {
        "applied": figures,
        "applied, LoRA": lora,
        "applied, extracted": extracted,
        "applied equal": equal and removed,
    }


reports = {"ordinary": run()}
use_dynamic_vram()
reports["dynamic"] = run()
print(json.dumps(reports))
