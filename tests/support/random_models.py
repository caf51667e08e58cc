"""Models of ComfyUI's with full-width blocks and random weights, made where they compute: for studies that measure.

A table of families, an entry a family. ComfyUI's own loader builds every MODEL, from tensors that are made and
quantized on the device, so that no file of many gigabytes is written. Imported only once ComfyUI and the pack can be.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property

import comfy.model_management
import comfy.model_patcher
import comfy.patcher_extension
import comfy.sd
import comfy.supported_models
import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from int8_dit.kernels import UNCHANGED, ChannelTransform, quantize_weight, rotation_group_of
from int8_dit.kernels.quantization.weight_rounding import quantize_to_codes
from int8_dit.nodes.deferred.install import KEY
from int8_dit.nodes.files import quant_config
from int8_dit.nodes.files.holding import coded_weight, quant_config_in
from int8_dit.nodes.linears.int8_weight import int8_weight
from int8_dit.nodes.linears.layer_selection import is_quantizable
from int8_dit.nodes.linears.stored_weights import patch_products
from int8_dit.nodes.loading.load import build_model
from int8_dit.nodes.loading.load_plan import LoadPlan

Tensors = dict[str, torch.Tensor]
SIGMA = 0.5


@dataclass(frozen=True)
class Family:
    """One architecture in full width."""

    kind: str  # its class in comfy.supported_models
    sizes: Mapping[str, object]  # arguments of its diffusion model beside those of that class's tables
    tiny: Mapping[str, object]  # those of one block a kind, to try a study out
    latent: Callable[[int], tuple[int, ...]]  # the shape of its latent at a number of pixels a side
    pixels: int  # a side of the image that it is measured at
    context: tuple[int, int, int]  # shape of the text's features
    # What else a forward takes; a tuple is the shape of a random tensor, and a function gives one at a number of pixels
    # a side.
    inputs: Mapping[str, object] = field(default_factory=dict)
    sound: Callable[[int], tuple[int, ...]] | None = None  # the same of its second latent, of a model that has one
    # What the metadata of its files say of it, where its tensors do not.
    config: Mapping[str, object] = field(default_factory=dict)

    def metadata(self) -> dict[str, str]:
        """Those of its files."""
        return {"config": json.dumps({"transformer": self.config})} if self.config else {}


def _mmdit(depth: int) -> dict[str, object]:
    embedder = {"target": "torch.nn.Linear", "params": {"in_features": 4096, "out_features": 64 * depth}}
    return {"depth": depth, "context_embedder_config": embedder}


def _image(channels: int, side: int) -> Callable[[int], tuple[int, ...]]:
    """Latents of images, a value for `side` x `side` pixels."""
    return lambda pixels: (1, channels, pixels // side, pixels // side)


def _video(channels: int, frames: int, side: int, width: float) -> Callable[[int], tuple[int, ...]]:
    """Latents of a video `pixels` high and `width` times as wide, a value for `side` x `side` pixels; of one frame at a
    size to try a study out."""

    def latent(pixels: int) -> tuple[int, ...]:
        return 1, channels, frames if pixels >= 480 else 1, pixels // side, int(pixels * width) // side // 2 * 2

    return latent


_LTX2 = {
    **{"apply_gated_attention": True, "cross_attention_adaln": True, "caption_proj_before_connector": True},
    **{"use_middle_indices_grid": True, "causal_temporal_positioning": True, "rope_type": "split"},
}

FAMILIES = {
    "Ideogram 4": Family(
        "Ideogram4",
        {"in_channels": 128, "num_layers": 34},
        {"num_layers": 1},
        _image(128, 16),
        1024,
        (1, 256, 53248),
    ),
    "Flux.1": Family(
        "Flux",
        {
            **{"in_channels": 16, "out_channels": 16, "vec_in_dim": 768, "context_in_dim": 4096, "hidden_size": 3072},
            **{"mlp_ratio": 4.0, "num_heads": 24, "depth": 3, "depth_single_blocks": 6, "axes_dim": [16, 56, 56]},
            **{"theta": 10000, "patch_size": 2, "qkv_bias": True, "txt_ids_dims": []},
        },
        {"depth": 1, "depth_single_blocks": 1},
        _image(16, 8),
        1024,
        (1, 512, 4096),
        {"y": (1, 768), "guidance": (1,)},
    ),
    "Qwen-Image": Family(
        "QwenImage",
        {"in_channels": 64, "num_layers": 4},
        {"num_layers": 1},
        lambda pixels: (1, 16, 1, pixels // 8, pixels // 8),
        1328,
        (1, 256, 3584),
    ),
    "Z-Image": Family(
        "ZImage",
        {
            **{"patch_size": 2, "in_channels": 16, "cap_feat_dim": 2560, "n_layers": 6, "n_refiner_layers": 2},
            **{"qk_norm": True, "n_heads": 30, "n_kv_heads": 30, "axes_dims": [32, 48, 48], "rope_theta": 256.0},
            **{"axes_lens": [1536, 512, 512], "ffn_dim_multiplier": 8 / 3, "z_image_modulation": True},
            **{"time_scale": 1000.0, "pad_tokens_multiple": 32},
        },
        {"n_layers": 2},
        _image(16, 8),
        1024,
        (1, 256, 2560),
        {"num_tokens": 256},
    ),
    "SD3.5 Large": Family(
        "SD3",
        {
            **{"patch_size": 2, "out_channels": 16, "input_size": None, "adm_in_channels": 2048, "num_patches": 36864},
            **{"pos_embed_max_size": 192, "qk_norm": "rms", "x_block_self_attn_layers": [], **_mmdit(38)},
        },
        _mmdit(4),
        _image(16, 8),
        1024,
        (1, 154, 4096),
        {"y": (1, 2048)},
    ),
    "Wan 14 B": Family(
        "WAN21_T2V",
        {"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 3, "in_dim": 16, "out_dim": 16},
        {"num_layers": 1},
        lambda pixels: (1, 16, 21 if pixels >= 480 else 1, pixels // 8, 104 * pixels // 480 // 2 * 2),
        480,  # 81 frames of 832 x 480: 32,760 tokens
        (1, 512, 4096),
    ),
    "Wan VACE 14 B": Family(
        "WAN21_Vace",
        {
            **{"dim": 5120, "ffn_dim": 13824, "num_heads": 40, "num_layers": 2, "in_dim": 16, "out_dim": 16},
            **{"vace_layers": 1, "vace_in_dim": 96},
        },
        {"num_layers": 1},
        _video(16, 21, 8, 104 / 60),
        480,
        (1, 512, 4096),
        {
            "vace_context": lambda pixels: (1, 1, *_video(96, 21, 8, 104 / 60)(pixels)[1:]),
            "vace_strength": [1.0],
        },
    ),
    "LTX-Video 13 B": Family(
        "LTXV",
        {"num_layers": 4, "attention_head_dim": 128, "cross_attention_dim": 4096},
        {"num_layers": 1},
        _video(128, 16, 32, 1.5),
        512,  # 121 frames of 768 x 512: 6,144 tokens
        (1, 256, 4096),
        {"attention_mask": None},
    ),
    "Kandinsky 5 Pro": Family(
        "Kandinsky5",
        {
            **{"in_text_dim": 3584, "in_text_dim2": 768, "time_dim": 1024, "model_dim": 4096, "ff_dim": 16384},
            **{"num_text_blocks": 1, "num_visual_blocks": 3, "visual_embed_dim": 132, "axes_dims": (32, 48, 48)},
        },
        {"num_visual_blocks": 1},
        _video(16, 21, 8, 104 / 60),
        480,  # 81 frames of 832 x 480: 32,760 tokens
        (1, 256, 3584),
        {"y": (1, 768), "c_concat": _video(17, 21, 8, 104 / 60)},
    ),
    "LTX-2.3": Family(
        "LTXAV",
        {"num_layers": 4, **_LTX2},
        {"num_layers": 1},
        _video(128, 16, 32, 1.5),
        512,
        (1, 1024, 4096 + 2048),
        sound=lambda pixels: (1, 8, 126, 16),
        config=_LTX2,
    ),
    "MiniMax H3": Family(
        "MiniMaxH3",
        {"num_layers": 4, "token_refiner_num_layers": 1},
        {"num_layers": 1},
        _video(24, 21, 16, 104 / 60),
        480,  # 8,190 tokens of video, 270 of sound
        (1, 256, 5376),
        sound=lambda pixels: (1, 32, 2, 135),
    ),
    "HunyuanVideo 1.5": Family(
        "HunyuanVideo15",
        {
            **{"in_channels": 65, "out_channels": 32, "patch_size": [1, 1, 1], "vec_in_dim": None, "hidden_size": 2048},
            **{"context_in_dim": 3584, "mlp_ratio": 4.0, "num_heads": 16, "depth": 8, "depth_single_blocks": 0},
            **{"axes_dim": [16, 56, 56], "theta": 256, "qkv_bias": True, "guidance_embed": False, "byt5": True},
            **{"meanflow": False, "use_cond_type_embedding": True, "meanflow_sum": True},
        },
        {"depth": 1},
        _video(32, 16, 16, 104 / 60),
        480,  # 61 frames of 832 x 480: 24,960 tokens
        (1, 256, 3584),
        {
            "c_concat": _video(33, 16, 16, 104 / 60),
            "txt_byt5": (1, 64, 1472),
            "clip_fea": (1, 729, 1152),
        },
    ),
}


class RandomModel:
    """The tensors of one family's model and the MODELs that can be built of them, the same weights in each.

    Args:
        family: an entry of FAMILIES.
        device: where tensors are made and held.
        sizes: arguments that replace those of the family, such as a number of blocks.
        seed: other weights for another seed.
    """

    def __init__(self, family: Family, device: torch.device, sizes: Mapping[str, object] = {}, seed: int = 0) -> None:
        self.family, self.device, self.seed = family, device, seed
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        kind = getattr(comfy.supported_models, family.kind)
        config = kind({**kind.unet_config, **family.sizes, **sizes})
        config.set_inference_dtype(torch.bfloat16, None)
        skeleton = config.get_model({}, "", device="meta").diffusion_model.state_dict()
        self.shapes = {name: tuple(tensor.shape) for name, tensor in skeleton.items()}

    @cached_property
    def layers(self) -> list[str]:
        """The layers that become INT8."""
        names = [key.removesuffix(".weight") for key in self.shapes if key.endswith(".weight")]
        return [name for name in names if is_quantizable(name, self.shapes[f"{name}.weight"])]

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of the model in bf16: norms are ones, the rest keeps activations finite."""
        shape = self.shapes[name]
        if len(shape) == 1 and "norm" in name and not name.endswith("bias"):
            return torch.ones(shape, dtype=torch.bfloat16, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()) + self.seed)
        values = torch.randn(shape, generator=generator, device=self.device, dtype=torch.bfloat16)
        inputs = values[0].numel() if values.ndim > 1 else 10_000
        return values.mul_(inputs**-0.5)

    def tensors(self) -> Tensors:
        """All tensors of the model in bf16."""
        return {name: self.tensor(name) for name in self.shapes}

    def native(self, rotation_group: int | None = None) -> Tensors:
        """The same in ComfyUI's native INT8, a scale per output channel; ConvRot with a group."""
        transform = ChannelTransform(None, rotation_group)
        return self._quantized(lambda weight: native_layer(weight, transform))

    def coded(self) -> Tensors:
        """The same in ComfyUI's W4A8; a layer that cannot be rotated is in native INT8."""
        return self._quantized(coded_layer)

    def _quantized(self, quantized: Callable[[torch.Tensor], Tensors]) -> Tensors:
        tensors: Tensors = {}
        for name in self.shapes:  # one by one: they need not fit on the device in floats
            tensors[name] = self.tensor(name)
            layer = name.removesuffix(".weight")
            if layer != name and layer in self.layers:
                tensors |= {f"{layer}.{part}": t for part, t in quantized(tensors[name]).items()}
        return tensors

    def bf16_model(self) -> ModelPatcher:
        """The MODEL of ComfyUI's loader in bf16."""
        return comfy.sd.load_diffusion_model_state_dict(self.tensors(), metadata=self.family.metadata())

    def native_model(self, rotation_group: int | None = None) -> ModelPatcher:
        """The MODEL of ComfyUI's loader in native INT8."""
        return comfy.sd.load_diffusion_model_state_dict(self.native(rotation_group), metadata=self.family.metadata())

    def int8_model(self, transform_of: Callable[[str, int], ChannelTransform] = lambda *_: UNCHANGED) -> ModelPatcher:
        """The MODEL of this pack, every quantizable layer in INT8, its inputs transformed as this says of its name and
        its input channels."""

        def held(name: str, weight: torch.Tensor) -> torch.Tensor:
            transform = transform_of(name, weight.shape[1])
            return int8_weight(*quantize_weight(weight, transform), self.dtype, transform)

        return self._built(held)

    def rotated_model(self, group: int) -> ModelPatcher:
        """The same smoothed and rotated. Smoothing factors in [0.5, 2] are the same for all layers of as many channels
        in one module: among them are those that read one input."""

        def transform_of(name: str, channels: int) -> ChannelTransform:
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.rpartition(".")[0].encode()))
            factors = 2 ** (2 * torch.rand(channels, generator=generator, device=self.device) - 1)
            return ChannelTransform(factors, group)

        return self.int8_model(transform_of)

    def coded_model(self) -> ModelPatcher:
        """The MODEL of this pack in W4A8: every quantizable layer that it can be, the others in INT8."""
        model = self._built(lambda name, weight: in_codes(weight, self.dtype))
        patch_products(model)
        return model

    def _built(self, held: Callable[[str, torch.Tensor], torch.Tensor | None]) -> ModelPatcher:
        def convert(name: str, weight: torch.Tensor, _: object) -> torch.Tensor | None:
            return held(name, weight) if is_quantizable(name, tuple(weight.shape)) else None

        return build_model(self.tensors(), self.family.metadata(), LoadPlan("fused int8", self.dtype, convert))

    def inputs(self, pixels: int | None = None, text: bool = True) -> dict[str, object]:
        """What BaseModel.apply_model takes beside its options: latents of a noisy image and the rest."""
        generator = torch.Generator(self.device).manual_seed(1)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, device=self.device)

        family = self.family
        pixels = pixels or family.pixels
        values = {name: value(pixels) if callable(value) else value for name, value in family.inputs.items()}
        more = {name: randn(*value) if isinstance(value, tuple) else value for name, value in values.items()}
        shape = family.latent(pixels)
        if family.sound is not None:  # a sampler packs several latents into one
            more["latent_shapes"] = [shape, family.sound(pixels)]
            shape = (1, 1, sum(map(math.prod, more["latent_shapes"])))
        latent = randn(*shape)
        sigma = torch.full((1,), SIGMA, device=self.device)
        return {"x": latent, "t": sigma, "c_crossattn": randn(*family.context) if text else None, **more}


def native_layer(weight: torch.Tensor, transform: ChannelTransform = UNCHANGED) -> Tensors:
    """The tensors of a layer in a native file."""
    q, scale = quantize_weight(weight, transform)
    config = quant_config.encode_config(transform)
    return {"weight": q, quant_config.SCALE: scale[:, None], quant_config.QUANT_CONFIG: config}


def fp8_layer(weight: torch.Tensor) -> Tensors:
    """The tensors of a layer in a file of ComfyUI's scaled FP8."""
    scale = (weight.abs().amax().float() / torch.finfo(torch.float8_e4m3fn).max).clamp_min(1e-12)
    config = quant_config.encoded({"format": "float8_e4m3fn"})
    weight = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": weight, quant_config.SCALE: scale, quant_config.QUANT_CONFIG: config}


def in_codes(weight: torch.Tensor, dtype: torch.dtype) -> QuantizedTensor | None:
    """A weight in W4A8, in floats of `dtype` to ComfyUI; None for one that cannot be rotated."""
    group = rotation_group_of(weight.shape[1])
    if group is None:
        return None
    rounded = quantize_to_codes(weight, group)
    assert rounded.codes is not None
    return coded_weight(rounded.codes, rounded.scale, group, dtype)


def coded_layer(weight: torch.Tensor) -> Tensors:
    """The tensors of a layer in a file in W4A8."""
    coded = in_codes(weight, weight.dtype)
    if coded is None:
        return native_layer(weight)
    return {**coded.state_dict("weight"), quant_config.QUANT_CONFIG: quant_config.encoded(quant_config_in(coded))}


@contextmanager
def weights_on_device() -> Iterator[None]:
    """Let ComfyUI build MODELs on the GPU, which has room: as its option --highvram does."""
    management = comfy.model_management
    before = management.vram_state
    if management.get_torch_device().type == "cuda":
        management.vram_state = management.VRAMState.HIGH_VRAM
    try:
        yield
    finally:
        management.vram_state = before


class Forward:
    """One call of a loaded MODEL as a sampler makes it, with the same inputs each time."""

    def __init__(self, model: ModelPatcher, inputs: Mapping[str, object]) -> None:
        model.pre_run()
        options = comfy.model_patcher.create_model_options_clone(model.model_options)["transformer_options"]
        for name in ("wrappers", "callbacks"):
            added = getattr(model, name)
            comfy.patcher_extension.merge_nested_dicts(options.setdefault(name, {}), added, copy_dict1=False)
        options |= {"cond_or_uncond": [0], "sigmas": inputs["t"], "sample_sigmas": inputs["t"]}
        self._model, self._inputs, self._options = model.model, inputs, options

    @torch.inference_mode()
    def __call__(self) -> torch.Tensor:
        """The denoised latents."""
        return self._model.apply_model(**self._inputs, transformer_options=self._options)

    def velocity(self) -> torch.Tensor:
        """What the diffusion model itself gives (of models of flows), in float32."""
        latent = self._inputs["x"]
        return (latent - self().float()) / SIGMA


def load(model: ModelPatcher) -> None:
    """Let ComfyUI load the whole MODEL, which also puts its object patches in place."""
    comfy.model_management.load_models_gpu([model], force_full_load=True)


def attending(model: ModelPatcher, kind: str) -> ModelPatcher:
    """The MODEL with a kind of attention, less the blocks that a calibration keeps exact."""
    from int8_dit.nodes.attention.attention_override import set_attention

    set_attention(model, kind)
    return model


def compiled(model: ModelPatcher) -> ModelPatcher:
    """The MODEL of ComfyUI's node TorchCompileModel."""
    from comfy_extras.nodes_torch_compile import TorchCompileModel

    return TorchCompileModel.execute(model, "inductor").result[0]


def unfused(model: ModelPatcher) -> ModelPatcher:
    """The MODEL with its linears one by one. Raises ValueError where they are that already."""
    if not model.get_wrappers(comfy.patcher_extension.WrappersMP.APPLY_MODEL, KEY):
        raise ValueError("nothing between the linears of this MODEL is fused")
    model.remove_wrappers_with_key(comfy.patcher_extension.WrappersMP.APPLY_MODEL, KEY)
    return model
