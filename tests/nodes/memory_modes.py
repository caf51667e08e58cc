"""Samples the glyph model on a GPU in ComfyUI's ordinary and in its dynamic VRAM mode and prints what came out, as
JSON.

Run as a script with ComfyUI's folder as its argument: the mode is chosen for a whole process, and the other node tests
run on the CPU. The steps are those of a user: quantize, save, load, sample, with and without a LoRA.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [sys.argv[1], str(TESTS)]

import comfy_aimdo.control

comfy_aimdo.control.init()

import comfy.lora
import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
from comfy_extras.nodes_lora_extract import LORAType, calc_lora_model

from glyphs import conditioning, latents
from glyphs.alphabet import ALPHABET
from glyphs.matching import recognise
from support.file_formats import FORMATS
from support.launches import count_launches
from support.pack import import_pack, use_dynamic_vram
from support.tensors import relative_error

MODEL = str(TESTS / "data" / "glyph_dit.safetensors")
TEXT = ALPHABET * 2
STEPS = 12


import_pack()
import int8_dit.kernels.linear.gemm as gemm
import int8_dit.nodes.deferred.mode as mode
import int8_dit.nodes.loading.load_plan as load_plan
from int8_dit.kernels import Protection
from int8_dit.nodes.linears.apply_kernel import apply_fused_kernel
from int8_dit.nodes.loading.load import load_int8_model
from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model
from int8_dit.nodes.quantization.recorder import CalibrationRun
from int8_dit.nodes.saving.save import save_int8_model
from support.glyph_dit import LINEARS

launches = count_launches(gemm)
load_plan.SMALLEST_STORED = mode.NOTE_SECONDS = 0  # the glyph model's layers are small


def sampling(model) -> dict:
    """What a user would connect: conditioning of TEXT, Euler, twelve steps."""
    context, pooled = conditioning.encode(TEXT)
    return {
        "positive": [[context, {"pooled_output": pooled}]],
        "sampler": comfy.samplers.sampler_object("euler"),
        "sigmas": comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", STEPS),
        "latent": {"samples": torch.zeros(len(TEXT), latents.CHANNELS, latents.SIDE, latents.SIDE)},
    }


def sample(model) -> tuple[torch.Tensor, dict]:
    """The latent, and how many glyphs can be read and INT8 GEMMs were launched."""
    launches.clear()
    user = sampling(model)
    guider = comfy.samplers.CFGGuider(model)
    guider.inner_set_conds({"positive": user["positive"]})
    guider.set_cfg(1.0)
    empty = user["latent"]["samples"]
    noise = comfy.sample.prepare_noise(empty, 1)
    latent = guider.sample(noise, empty, user["sampler"], user["sigmas"], disable_pbar=True, seed=1).float().cpu()
    read = recognise(latents.model_to_image(latents.node_to_model(latent)).clamp(0, 1))
    return latent, {"read": sum(a == b for a, b in zip(read, TEXT, strict=True)), "launches": launches.total()}


def with_lora(model):
    """A clone with a random rank-4 LoRA on the feed-forward of every block."""
    generator = torch.Generator().manual_seed(3)
    factors = {}
    for block in range(3):
        name = f"diffusion_model.joint_blocks.{block}.x_block.mlp.fc1"
        factors[f"{name}.lora_up.weight"] = torch.randn(768, 4, generator=generator) * 0.05
        factors[f"{name}.lora_down.weight"] = torch.randn(4, 192, generator=generator) * 0.05
    patched = model.clone()
    patched.add_patches(comfy.lora.load_lora(factors, comfy.lora.model_lora_keys_unet(model.model, {})), 1.0)
    return patched


def run() -> dict:
    """One mode."""
    base = comfy.sd.load_diffusion_model(MODEL)
    original, figures = sample(base)
    original_lora, _ = sample(with_lora(base))
    report = {"patcher": type(base).__name__, "original": figures}

    user = sampling(base)

    def quantize():
        """As the user would, calibration included."""
        run = CalibrationRun([user["positive"]], None, 1.0, user["sampler"], user["sigmas"], user["latent"], seed=5)
        settings = QuantizationSettings(protection=Protection("number", 2))
        return quantize_model(base, settings, "fused int8", run)[0]

    quantized = quantize()
    int8, report["int8"] = sample(quantized)
    report["int8"]["error"] = relative_error(int8, original)
    with tempfile.TemporaryDirectory() as folder:
        save_int8_model(quantized, f"{folder}/int8.safetensors", {})
        save_int8_model(quantize(), f"{folder}/again.safetensors", {})
        files = [Path(folder, f"{name}.safetensors").read_bytes() for name in ("int8", "again")]
        report["same_file"] = files[0] == files[1]
        loaded = load_int8_model(f"{folder}/int8.safetensors", "fused int8")
        report["reloaded_equal"] = torch.equal(sample(loaded)[0], int8)
        patched = with_lora(loaded)
        int8_lora, report["lora"] = sample(patched)
        report["lora"] |= {
            "error": relative_error(int8_lora, original_lora),
            "effect": relative_error(original_lora, original),
        }
        report["removed_equal"] = torch.equal(sample(loaded)[0], int8)
        save_int8_model(patched, f"{folder}/lora.safetensors", {})
        baked, report["baked"] = sample(load_int8_model(f"{folder}/lora.safetensors", "fused int8"))
        report["baked"]["error"] = relative_error(baked, original_lora)
        report["copy_equal"] = torch.equal(sample(quantized.clone(disable_dynamic=True))[0], int8)
        bf16, report["bf16"] = sample(load_int8_model(f"{folder}/int8.safetensors", "bf16"))
        report["bf16"]["error"] = relative_error(bf16, original)
        report |= run_in_codes(folder)
        report |= run_applied(folder, original_lora)
        comfy.model_management.unload_all_models()
    return report


def run_in_codes(folder: str) -> dict:
    """A file in 6 bits, held as INT8 and as stored."""
    tensors = {name: tensor.float() for name, tensor in load_file(MODEL).items()}
    path = f"{folder}/codes.safetensors"
    save_file(FORMATS["W6A8"](tensors, LINEARS).tensors, path)
    report, latents_of = {}, {}
    for memory in ("INT8", "as stored"):
        model = load_int8_model(path, "fused int8", memory=memory)
        patched = with_lora(model)
        latents_of[memory], report[f"codes, {memory}"] = sample(model)
        latents_of["LoRA", memory], report[f"codes, {memory}, LoRA"] = sample(patched)
        report[f"codes removed equal, {memory}"] = torch.equal(sample(model)[0], latents_of[memory])
    report["codes equal"] = torch.equal(latents_of["INT8"], latents_of["as stored"])
    report["codes, as stored, LoRA"]["error"] = relative_error(
        latents_of["LoRA", "as stored"], latents_of["LoRA", "INT8"]
    )
    return report


def run_applied(folder: str, original_lora: torch.Tensor) -> dict:
    """A native file of ComfyUI's own loader behind Apply Fused INT8 Kernel: beside Load INT8 DiT, with a LoRA, and as
    ComfyUI extracts a LoRA of the difference to the model without it."""
    path = f"{folder}/native.safetensors"
    save_file(FORMATS["native"]({name: t.float() for name, t in load_file(MODEL).items()}, LINEARS).tensors, path)
    loaded, stock = load_int8_model(path, "fused int8"), comfy.sd.load_diffusion_model(path)
    applied = apply_fused_kernel(stock, "fused int8")
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
