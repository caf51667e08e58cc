"""Small MODELs of ComfyUI's own classes and loader in which several linears read the same input.

Imported only once ComfyUI and the pack can be. Everything is float32 on the CPU.
"""

from __future__ import annotations

import comfy.ldm.ideogram4.model
import comfy.ldm.wan.model
import comfy.model_management
import comfy.ops
import comfy.samplers
import comfy.sd
import comfy.supported_models
import pytest
import torch
from comfy.model_patcher import ModelPatcher
from int8_dit.nodes.calibration import Calibration
from int8_dit.nodes.calibration_run import calibrate

TEXT = 4096  # ComfyUI takes no other width for Wan
IDEOGRAM_SIZES = {
    "num_attention_heads": 2,
    "attention_head_dim": 64,
    "intermediate_size": 256,
    "adaln_dim": 64,
    "llm_features_dim": TEXT,
    "rope_theta": 10000,
    "mrope_section": (16, 8, 8),
    "norm_eps": 1e-5,
}
WAN_SIZES = {"dim": 128, "ffn_dim": 256, "num_heads": 1, "num_layers": 2, "model_type": "t2v"}


def ideogram4(monkeypatch: pytest.MonkeyPatch) -> ModelPatcher:
    """Two blocks, each with w1 and w3 of one input. ComfyUI knows only its real size, so `monkeypatch` sets it."""
    monkeypatch.setattr(comfy.supported_models.Ideogram4, "unet_extra_config", IDEOGRAM_SIZES)
    return _load(comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel, num_layers=2, **IDEOGRAM_SIZES)


def ideogram4_again(model: ModelPatcher) -> ModelPatcher:
    """A second MODEL of the same weights, as Ideogram 4 has two of one architecture."""
    tensors = {name: tensor.clone() for name, tensor in model.model.diffusion_model.state_dict().items()}
    return comfy.sd.load_diffusion_model_state_dict(tensors)


def wan() -> ModelPatcher:
    """Two blocks with separate q, k and v: of one tensor in self_attn, of two in cross_attn."""
    return _load(comfy.ldm.wan.model.WanModel, **WAN_SIZES)


def _load(model_class: type, **sizes: object) -> ModelPatcher:
    model = model_class(**sizes, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    generator = torch.Generator().manual_seed(0)
    return comfy.sd.load_diffusion_model_state_dict(
        {
            # Columns of different size, so that every layer has smoothing factors of its own.
            name: torch.randn(tensor.shape, generator=generator)
            / max(1, tensor[0].numel()) ** 0.5
            * (0.25 + torch.rand(tensor.shape[-1], generator=generator))
            for name, tensor in model.state_dict().items()
        }
    )


def calibration(model: ModelPatcher) -> dict[str, object]:
    """Calibration inputs of the quantize node: two Euler steps on a latent of 4 x 4, or a video of one such frame."""
    latents = model.model.latent_format
    frames = (1,) * (latents.latent_dimensions - 2)
    return {
        "positive": {"positive_0": [[_randn(1, 6, TEXT, seed=1), {}]]},
        "sampler": comfy.samplers.sampler_object("euler"),
        "sigmas": comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", 2),
        "latent_image": {"samples": torch.zeros(1, latents.latent_channels, *frames, 4, 4)},
        "seed": 0,
    }


def recorded(model: ModelPatcher) -> Calibration:
    """What the quantize node sees in its calibration with these inputs."""
    inputs = calibration(model)
    inputs |= {"prompts": list(inputs.pop("positive").values()), "latent": inputs.pop("latent_image")}
    return calibrate(model, negative=None, cfg=1.0, **inputs)


def output(model: ModelPatcher) -> torch.Tensor:
    """One forward of the diffusion model on fixed inputs."""
    inputs = calibration(model)
    comfy.model_management.load_models_gpu([model])
    x = _randn(*inputs["latent_image"]["samples"].shape, seed=2)
    with torch.inference_mode():
        return model.model.apply_model(x, torch.full((1,), 0.7), c_crossattn=inputs["positive"]["positive_0"][0][0])


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
