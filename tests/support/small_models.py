"""Small MODELs of ComfyUI's own classes and loader: each of architectures.py, and some to calibrate and sample.

Imported only once ComfyUI and the pack can be. Everything is float32 on the CPU.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import comfy.ldm.anima.model
import comfy.ldm.audio.dit
import comfy.ldm.audio.embedders
import comfy.ldm.ideogram4.model
import comfy.ldm.lightricks.model
import comfy.ldm.lumina.model
import comfy.ldm.modules.diffusionmodules.mmdit
import comfy.ldm.modules.diffusionmodules.openaimodel
import comfy.ldm.wan.model
import comfy.model_detection
import comfy.model_management
import comfy.ops
import comfy.samplers
import comfy.sd
import comfy.supported_models
import comfy.utils
import pytest
import torch
from comfy.ldm.anima.model import LLMAdapter
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from int8_dit.kernels import ChannelTransform, Protection, quantize_weight
from int8_dit.nodes.linears.int8_weight import LAYOUT, format_of_weight, int8_weight, is_int8
from int8_dit.nodes.linears.layer_selection import quantizable_linears
from int8_dit.nodes.quantization.calibration import Calibration
from int8_dit.nodes.quantization.quantize import QuantizationSettings, quantize_model
from int8_dit.nodes.quantization.recorder import CalibrationRun
from support.architectures import ARCHITECTURES, Architecture
from support.file_formats import int8

TEXT = 4096  # ComfyUI takes no other width for Wan
IDEOGRAM_SIZES = {
    name: size for name, size in ARCHITECTURES["Ideogram 4"].sizes.items() if name not in ("in_channels", "num_layers")
} | {"llm_features_dim": TEXT}
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


def in_comfyuis_int8(model: ModelPatcher) -> ModelPatcher:
    """A MODEL of ComfyUI's own loader with the same weights in native INT8."""
    tensors = model.model.diffusion_model.state_dict()
    return comfy.sd.load_diffusion_model_state_dict(dict(int8(tensors, quantizable_linears(model)).tensors))


def ltx_video(**config: object) -> ModelPatcher:
    """An LTX-Video whose file says in its metadata how its positions are embedded, which is in no tensor."""
    metadata = {"config": json.dumps({"transformer": config})}
    sizes = {"num_layers": 2, "attention_head_dim": 8, "cross_attention_dim": 256, "caption_channels": TEXT}
    # Large queries and keys, so that attention depends on positions.
    sharp = {
        f"transformer_blocks.{block}.attn1.{part}_norm.weight": torch.full((256,), 3.0)
        for block in range(2)
        for part in "qk"
    }
    return _load(comfy.ldm.lightricks.model.LTXVModel, metadata, sharp, **sizes)


def marked_unet(monkeypatch: pytest.MonkeyPatch, marks: dict[str, torch.Tensor]) -> ModelPatcher:
    """A narrow SDXL whose checkpoint says by marks, beside the UNet's tensors, how it predicts."""
    sizes = comfy.supported_models.SDXL.unet_config | {"model_channels": 32, "transformer_depth": [0, 0, 1, 1, 1, 1]}
    monkeypatch.setattr(comfy.supported_models.SDXL, "unet_config", sizes)
    return _load(
        comfy.ldm.modules.diffusionmodules.openaimodel.UNetModel,
        extra=marks,
        image_size=32,
        in_channels=4,
        model_channels=32,
        out_channels=4,
        num_res_blocks=[2, 2, 2],
        channel_mult=[1, 2, 4],
        num_head_channels=32,
        use_spatial_transformer=True,
        transformer_depth=[0, 0, 1, 1, 1, 1],
        transformer_depth_output=[0, 0, 0, 1, 1, 1, 1, 1, 1],
        transformer_depth_middle=1,
        context_dim=2048,
        num_classes="sequential",
        adm_in_channels=2816,
        use_linear_in_transformer=True,
        legacy=False,
    )


def wide_mmdit_tensors() -> dict[str, torch.Tensor]:
    """A file of the glyph model's kind, four blocks of a width that GGUF's K-quants divide."""
    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 64, "out_features": 256}}
    model = comfy.ldm.modules.diffusionmodules.mmdit.OpenAISignatureMMDITWrapper(
        in_channels=16,
        patch_size=2,
        depth=4,
        input_size=None,
        adm_in_channels=64,
        context_embedder_config=embedder,
        qk_norm="rms",
        dtype=torch.float32,
        device="cpu",
        operations=comfy.ops.disable_weight_init,
    )
    return _random_tensors(model)


def _load(
    model_class: type,
    metadata: dict[str, str] | None = None,
    extra: dict[str, torch.Tensor] | None = None,
    **sizes: object,
) -> ModelPatcher:
    model = model_class(**sizes, dtype=torch.float32, device="cpu", operations=comfy.ops.disable_weight_init)
    return comfy.sd.load_diffusion_model_state_dict(_random_tensors(model) | (extra or {}), metadata=metadata)


def _random_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        # Columns of different size, so that every layer has smoothing factors of its own.
        name: torch.randn(tensor.shape, generator=generator)
        / max(1, tensor.shape[1:].numel()) ** 0.5
        * (0.25 + torch.rand(tensor.shape[-1:], generator=generator))
        for name, tensor in model.state_dict().items()
    }


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
    return CalibrationRun(negative=None, cfg=1.0, **inputs).calibrate(model)


def output(model: ModelPatcher, attention_mask: torch.Tensor | None = None, **options: object) -> torch.Tensor:
    """One forward of the diffusion model on fixed inputs, with the MODEL's own transformer_options and these."""
    inputs = calibration(model)
    comfy.model_management.load_models_gpu([model])
    x, text = _randn(*inputs["latent_image"]["samples"].shape, seed=2), inputs["positive"]["positive_0"][0][0]
    given = {"c_crossattn": text, **({} if attention_mask is None else {"attention_mask": attention_mask})}
    given["transformer_options"] = model.model_options["transformer_options"] | {"wrappers": model.wrappers} | options
    with torch.inference_mode():
        return model.model.apply_model(x, torch.full((1,), 0.7), **given)


@contextmanager
def known_to_comfyui(architecture: Architecture, counted: Collection[str] = ()) -> Iterator[None]:
    """Let ComfyUI know its small sizes. Most it reads from the tensors, the others it takes from tables. What is
    `counted` of them stays as ComfyUI counts it."""
    kind, sizes = _kind(architecture), architecture.sizes
    detect = comfy.model_detection.detect_unet_config

    def detect_small(*args: object, **options: object) -> dict[str, object] | None:
        detected = detect(*args, **options)
        own = {name: value for name, value in sizes.items() if name not in counted}
        return None if detected is None else {**detected, **own}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_detection, "detect_unet_config", detect_small)
        for table in ("unet_config", "unet_extra_config"):
            patch.setattr(kind, table, {name: sizes.get(name, value) for name, value in getattr(kind, table).items()})
        if architecture.diffusers:
            names = getattr(comfy.utils, architecture.diffusers)
            patch.setattr(
                comfy.utils, architecture.diffusers, lambda config, **options: names({**sizes, **config}, **options)
            )
        # The one part whose sizes are no arguments of its diffusion model.
        adapter = {"source_dim": 64, "target_dim": 64, "model_dim": 64, "num_layers": 1, "num_heads": 1}
        patch.setattr(comfy.ldm.anima.model, "LLMAdapter", partial(LLMAdapter, **adapter))
        yield


def tensors_of(architecture: Architecture) -> dict[str, torch.Tensor]:
    """Random tensors of a file of it, the same at each call."""
    beside = {name: _randn(*shape, seed=index) for index, (name, shape) in enumerate(architecture.beside.items())}
    with known_to_comfyui(architecture):
        kind = _kind(architecture)
        config = kind({**kind.unet_config, **architecture.sizes})
        config.set_inference_dtype(torch.float32, None)
        model = config.get_model(dict(beside), "", device="cpu")
    return _random_tensors(model.diffusion_model) | beside


def stock_of(architecture: Architecture, tensors: Mapping[str, torch.Tensor] | None = None) -> ModelPatcher:
    """The MODEL of ComfyUI's own loader of a file of it with these tensors, which stay as they are."""
    with known_to_comfyui(architecture):
        tensors = tensors_of(architecture) if tensors is None else tensors
        return comfy.sd.load_diffusion_model_state_dict({name: tensor.clone() for name, tensor in tensors.items()})


def int8_of(architecture: Architecture, kind: str = "plain", dtype: torch.dtype = torch.float32) -> ModelPatcher:
    """A MODEL of it that computes in a dtype, its linears INT8: "plain", "smoothed", "rotated", with "16 bits", or
    each third one in floats ("protected")."""
    with known_to_comfyui(architecture), pytest.MonkeyPatch.context() as patch:
        patch.setattr(comfy.model_management, "unet_manual_cast", lambda *args, **options: None)
        tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(architecture).items()}
        stock = comfy.sd.load_diffusion_model_state_dict(tensors, model_options={"dtype": dtype})
        settings = QuantizationSettings(protection=Protection("number", 0))
        model, *_ = quantize_model(stock, settings, "fused int8", None)
    layers = [layer for layer in model.model.diffusion_model.modules() if is_int8(getattr(layer, "weight", None))]
    for number, layer in enumerate(layers if kind != "plain" else ()):
        if kind == "protected" and number % 3 == 0:
            hold(layer, layer.weight.dequantize().to(dtype))
            continue
        channels = layer.weight.shape[1]
        smooth = torch.linspace(0.5, 2.0, channels) if kind == "smoothed" else None
        group = next((group for group in (64, 16, 4) if channels % group == 0), None)
        hold_int8(layer, smooth, group if kind == "rotated" else None, 16 if kind == "16 bits" else 8)
    return model


def hold_int8(
    layer: torch.nn.Module, smooth: torch.Tensor | None = None, group: int | None = None, bits: int = 8
) -> None:
    """Let a linear of the pack hold its weight INT8, quantized anew."""
    weight, transform = layer.weight.detach(), ChannelTransform(smooth, group)
    floats = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
    hold(layer, int8_weight(*quantize_weight(floats.float(), transform), weight.dtype, transform, bits))


def hold(layer: torch.nn.Module, weight: torch.Tensor) -> None:
    """Let a linear of the pack hold a weight, INT8 or in floats."""
    layer.weight = torch.nn.Parameter(weight, requires_grad=False)
    layer.layout_type, layer.quant_format = (LAYOUT, format_of_weight(weight)) if is_int8(weight) else (None, None)


def output_of(architecture: Architecture, model: ModelPatcher, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """One forward of its diffusion model, unpatched, on fixed inputs, with the MODEL's own transformer_options. Several
    outputs are joined."""

    def made(value: object, seed: int) -> object:
        if isinstance(value, list) and isinstance(value[0], tuple):
            return [made(shape, seed) for shape in value]
        return _randn(*value, seed=seed).to(dtype) if isinstance(value, tuple) else value

    inputs = {"timestep": torch.full((1,), 0.7)}
    inputs |= {name: made(value, index) for index, (name, value) in enumerate(architecture.inputs.items())}
    if options := model.model_options["transformer_options"]:
        inputs["transformer_options"] = options
    with torch.inference_mode():
        outputs = model.model.diffusion_model(inputs.pop("x"), inputs.pop("timestep"), **inputs)
        return outputs if isinstance(outputs, torch.Tensor) else torch.cat([output.flatten() for output in outputs])


def named_by_diffusers(
    architecture: Architecture, tensors: dict[str, torch.Tensor], layers: Collection[str]
) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors, and the names of these linears, as Diffusers has them: fused ones in parts, swapped ones swapped."""
    named, targets = {}, {}
    for name, place in getattr(comfy.utils, architecture.diffusers)(architecture.sizes).items():
        target, part, function = (place, None, None) if isinstance(place, str) else (*place, torch.clone)[:3]
        # Of several names for one tensor the first is Diffusers' own.
        if target in tensors and (part or target not in targets.values()):
            tensor = tensors[target].narrow(*part) if part else tensors[target]
            named[name], targets[name] = (function or torch.clone)(tensor), target
    assert set(targets.values()) == tensors.keys()
    weights = {f"{layer}.weight" for layer in layers}
    return named, [name.removesuffix(".weight") for name, target in targets.items() if target in weights]


def _kind(architecture: Architecture) -> type:
    return getattr(comfy.supported_models, architecture.kind)


def _randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
