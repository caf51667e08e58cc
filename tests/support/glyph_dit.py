"""The glyph model in the hands of the node tests: files made of it, loaded, run once and looked at.

Tests get this module through the fixture `dit`. Everything computes in float32 on a CPU, since ComfyUI picks that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from unittest.mock import patch

import comfy.model_management
import comfy.sample
import comfy.samplers
import comfy.sd
import gguf
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor
from comfy_api.latest._io import NodeOutput
from safetensors.torch import load_file, save_file

from glyphs import conditioning, latents
from glyphs.alphabet import ALPHABET
from int8_dit.nodes import quantize_to_int8
from int8_dit.nodes.apply_fused_int8_kernel import ApplyFusedINT8Kernel
from int8_dit.nodes.files.holding import is_grouped, is_stored
from int8_dit.nodes.files.quant_config import QUANT_CONFIG, decode_config
from int8_dit.nodes.linears.file_notes import recipe_of as recipe  # noqa: F401
from int8_dit.nodes.linears.int8_weight import is_int8
from int8_dit.nodes.loading.load import load_int8_model
from int8_dit.nodes.loading.summary import describe_attention as described  # noqa: F401
from int8_dit.nodes.loading.summary import summarize  # noqa: F401
from int8_dit.nodes.quantization.calibration import Calibration
from int8_dit.nodes.saving.save import save_gguf_model, save_int8_model
from support import adapters
from support.adapters import with_delta as with_delta  # tests have these two as `dit.…`
from support.file_formats import FORMATS, Tensors, int8
from support.gguf_files import linears_in, write_gguf
from support.tensors import relative_error as relative_error

FILE = Path(__file__).resolve().parents[1] / "data" / "glyph_dit.safetensors"

# What the pack makes INT8: the attention and MLP linears of the three blocks. The last block's context stream ends
# after its qkv.
LINEARS = tuple(
    f"joint_blocks.{block}.{stream}_block.{layer}"
    for block in range(3)
    for stream in ("context", "x")
    for layer in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    if (block, stream) != (2, "context") or layer == "attn.qkv"
)
LAYER = "joint_blocks.1.x_block.mlp.fc1"  # one of them, [768, 192]


def tensors() -> dict[str, torch.Tensor]:
    """The tensors of the bf16 file."""
    return load_file(FILE)


def write(path: Path, state_dict: dict[str, torch.Tensor], metadata: dict[str, str] | None = None) -> str:
    """Write a safetensors file and return its path as the loaders want it."""
    save_file({key: tensor.contiguous() for key, tensor in state_dict.items()}, path, metadata)
    return str(path)


def native_int8(per_channel: bool = True, rotation_group: int | None = None) -> dict[str, torch.Tensor]:
    """The model in ComfyUI's native INT8 format, quantized by comfy-kitchen and not by this pack."""
    return dict(int8(tensors(), LINEARS, per_channel, rotation_group).tensors)


def smoothed_int8() -> dict[str, torch.Tensor]:
    """The same in this pack's own, every layer with smoothing factors."""
    return dict(int8(tensors(), LINEARS, smooth=True).tensors)


def load(path: str | Path = FILE, kernel: str = "fused int8", memory: str = "INT8") -> ModelPatcher:
    """The MODEL of this pack's loader."""
    return load_int8_model(str(path), kernel, memory=memory)


def stock(path: str | Path = FILE) -> ModelPatcher:
    """The MODEL of ComfyUI's own loader."""
    return comfy.sd.load_diffusion_model(str(path))


def apply(model: ModelPatcher, kernel: str = "fused int8") -> ModelPatcher:
    """The MODEL of Apply Fused INT8 Kernel."""
    return ApplyFusedINT8Kernel.execute(model, kernel).result[0]


def run_node(model: ModelPatcher, **inputs: object) -> tuple:
    """All outputs of the quantize node, whose inputs are the defaults of these tests unless given. Its picture is not
    drawn, which takes five times as long as the rest: see `node_output`."""
    with patch.object(quantize_to_int8, "plot_chart", lambda chart: None):
        return node_output(model, **inputs).result


def node_output(model: ModelPatcher, **inputs: object) -> NodeOutput:
    """What the quantize node returns, its picture and its ui result with it; inputs as in `run_node`."""
    defaults = {
        "method": "smooth",
        "alpha": 0.5,
        "search_alpha": False,
        "protect": protect_layers(0),
        "weight_scales": "absmax",
        "smooth_only_foldable": False,
        "kernel": "fused int8",
        "protected_in": "bf16",
        "rounding": "nearest",
    }
    return quantize_to_int8.QuantizeToINT8SmoothQuant.execute(model, **defaults | inputs)


def protect_layers(number: int) -> dict[str, object]:
    """The value of the widget `protect` that protects a number of layers."""
    return {"protect": "number of layers", "layers": number}


def quantize(model: ModelPatcher, protect: int = 0, **inputs: object) -> ModelPatcher:
    """The MODEL of the quantize node with a number of protected layers."""
    return run_node(model, protect=protect_layers(protect), **inputs)[0]


def calibration(model: ModelPatcher, text: str = "INT8", steps: int = 2, seed: int = 0) -> dict[str, object]:
    """Calibration inputs of the quantize node: a few Euler steps of `text`."""
    context, pooled = conditioning.encode(text)
    return {
        "positive": {"positive_0": [[context, {"pooled_output": pooled}]]},
        "sampler": comfy.samplers.sampler_object("euler"),
        "sigmas": comfy.samplers.calculate_sigmas(model.get_model_object("model_sampling"), "simple", steps),
        "latent_image": {"samples": torch.zeros(len(text), latents.CHANNELS, latents.SIDE, latents.SIDE)},
        "seed": seed,
    }


@cache
def recorded() -> Calibration:
    """What these inputs show of the stock MODEL. Sampled once a session, for what is not about the sampling."""
    model = stock()
    return run_node(model, **calibration(model))[3]


def sample(model: ModelPatcher, text: str = "A", steps: int = 1, seed: int = 0, **named: object) -> torch.Tensor:
    """Sample as a KSampler node does, through everything that is attached to the MODEL, and named values (`hooks`)
    that are to the conditioning."""
    context, pooled = conditioning.encode(text)
    cond = [[context, {"pooled_output": pooled, **named}]]
    empty = torch.zeros(len(text), latents.CHANNELS, latents.SIDE, latents.SIDE)
    noise = comfy.sample.prepare_noise(empty, seed)
    return comfy.sample.sample(model, noise, steps, 1.0, "euler", "simple", cond, cond, empty, seed=seed)


def output(model: ModelPatcher) -> torch.Tensor:
    """One forward of the diffusion model on fixed inputs, with the MODEL's weight patches applied."""
    comfy.model_management.load_models_gpu([model])
    return forward(model)


@cache
def int8_noise() -> float:
    """The relative error of `output` where all weights become INT8."""
    return relative_error(output(load()), output(stock()))


def forward(model: ModelPatcher) -> torch.Tensor:
    """`output` of a MODEL that is loaded already, however it is."""
    return _apply(model, "R2", 0.7, seed=0)


def attached_output(model: ModelPatcher) -> torch.Tensor:
    """`output` with the overrides and wrappers that are attached to the MODEL."""
    comfy.model_management.load_models_gpu([model])
    options = model.model_options["transformer_options"] | {"wrappers": model.wrappers}
    return _apply(model, "R2", 0.7, seed=0, transformer_options=options)


def velocity(model: ModelPatcher, time: float) -> torch.Tensor:
    """One forward on noise for all characters at a time of the schedule."""
    comfy.model_management.load_models_gpu([model])
    return _apply(model, ALPHABET, time, seed=1)


def _apply(model: ModelPatcher, text: str, time: float, seed: int, **named: object) -> torch.Tensor:
    context, pooled = conditioning.encode(text)
    shape = (len(text), latents.CHANNELS, latents.SIDE, latents.SIDE)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    with torch.inference_mode():
        return model.model.apply_model(x, torch.full((len(text),), time), c_crossattn=context, y=pooled, **named)


def rows(module: torch.nn.Module, *shape: int) -> torch.Tensor:
    """An input of a linear, [*shape, channels], the same each time."""
    return torch.randn(*shape, module.in_features, generator=torch.Generator().manual_seed(0))


def stream(model: ModelPatcher) -> None:
    """Load a MODEL as ComfyUI does on a card without memory for its weights: each comes, and is patched, when used."""
    model.patch_model(device_to=model.load_device, lowvram_model_memory=1)
    assert model.model.model_lowvram


def write_as(folder: Path, kind: str, tensors: Tensors | None = None, layers: Collection[str] = LINEARS) -> str:
    """Write the glyph model, or other tensors, in "floats", a format of FORMATS or a type of GGUF; the path."""
    tensors = tensors or load_file(FILE)
    if kind in gguf.GGMLQuantizationType.__members__:
        return write_gguf(folder / f"{kind}.gguf", tensors, linears_in(kind))
    if kind != "floats":
        tensors = FORMATS[kind]({name: tensor.float() for name, tensor in tensors.items()}, layers).tensors
    return write(folder / f"{kind}.safetensors", tensors)


def save(model: ModelPatcher, path: str | Path, fold: bool = False) -> str:
    """Save a MODEL as Save INT8 DiT does, or Save GGUF in Q8_0 by the path's ending, and return the path."""
    if str(path).endswith(".gguf"):
        return save_gguf_model(model, str(path), {}, "Q8_0")
    return save_int8_model(model, str(path), {}, fold)


def formats(path: str | Path) -> dict[str, str]:
    """The first word of each format that a file names, by layer."""
    configs = {key: tensor for key, tensor in load_file(path).items() if key.endswith(f".{QUANT_CONFIG}")}
    return {key.rpartition(".")[0]: decode_config(t)["format"].partition(" ")[0] for key, t in configs.items()}


def module(model: ModelPatcher, layer: str) -> torch.nn.Module:
    """A layer of the diffusion model."""
    return model.model.diffusion_model.get_submodule(layer)


def int8_weights(model: ModelPatcher) -> dict[str, QuantizedTensor]:
    """The INT8 weights a MODEL holds right now, by layer."""
    return weights(model, is_int8)


def coded(model: ModelPatcher) -> dict[str, QuantizedTensor]:
    """The weights in codes of 4 or 6 bits that a MODEL holds right now, by layer."""
    return weights(model, is_grouped)


def stored(model: ModelPatcher) -> dict[str, QuantizedTensor]:
    """The weights in the form of their file, codes or GGUF's blocks, that a MODEL holds right now, by layer."""
    return weights(model, is_stored)


def weights(model: ModelPatcher, are: Callable[[object], bool]) -> dict[str, QuantizedTensor]:
    held = {name: getattr(layer, "weight", None) for name, layer in model.model.diffusion_model.named_modules()}
    return {name: weight for name, weight in held.items() if are(weight)}


def snapshot(model: ModelPatcher) -> dict[str, torch.Tensor]:
    """A copy of every tensor the diffusion model holds; INT8 layers as the tensors they are saved as."""
    return {key: tensor.clone() for key, tensor in model.model.diffusion_model.state_dict().items()}


def assert_same_tensors(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """The same names, and equal bits under each."""
    assert actual.keys() == expected.keys()
    different = [key for key in expected if not torch.equal(actual[key], expected[key])]
    assert not different


@contextmanager
def untouched(model: ModelPatcher) -> Iterator[None]:
    """Assert that what happens inside leaves a MODEL as it was: weights, patches, hooks, and what it computes."""
    before, result = snapshot(model), output(model)
    attached = {name: str(getattr(model, name)) for name in ("patches", "object_patches", "wrappers", "callbacks")}
    yield
    assert {name: str(getattr(model, name)) for name in attached} == attached
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in model.model.modules())
    assert torch.equal(output(model), result)
    assert_same_tensors(snapshot(model), before)


def lora(layers: Iterable[str], scale: float = 0.05) -> dict[str, torch.Tensor]:
    """A LoRA file's tensors for some linears: random, `scale` relative to the weights it changes."""
    own = tensors()
    return adapters.lora({layer: own[f"{layer}.weight"] for layer in layers}, scale)


def delta(state_dict: dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """What such a LoRA adds to the weight of a linear."""
    up, down = (state_dict[f"diffusion_model.{layer}.lora_{end}.weight"] for end in ("up", "down"))
    return up @ down


def with_lora(model: ModelPatcher, state_dict: dict[str, torch.Tensor], strength: float = 1.0) -> ModelPatcher:
    """The MODEL of ComfyUI's LoRA loader node."""
    patched, _ = comfy.sd.load_lora_for_models(model, None, state_dict, strength, 0.0)
    return patched
