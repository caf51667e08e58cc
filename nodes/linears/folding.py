"""Smoothing factors folded into the layer before: a smoothed model as a file that every loader runs.

A table of block classes says where ComfyUI's models allow that, since names alone do not say what feeds a layer. The
tests check every rule against the class itself.
"""

from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ...kernels import FLOAT_DTYPES, ChannelTransform, divide_modulation_scale, divide_rows, multiply_columns
from ..comfyui.patcher import DIFFUSION_MODEL, weight_below_patches
from ..files import quant_config
from ..files.writing.tensor_files import PendingTensor, Tensors
from .int8_weight import is_int8


class _Site(NamedTuple):
    """A tensor that only `readers` read, and whose channels its producer can divide: a norm with a weight, after which
    channels are at most scaled, or a linear."""

    producer: str  # the module that has the channels
    readers: tuple[str, ...]  # all linears that read the tensor
    # Which parts of the producer's rows, each of as many rows as there are channels, are divided. A factor on them
    # reaches the readers, as through attention (from v) and through the linear half of a SwiGLU.
    parts: tuple[int, ...] = (0,)
    of: int | None = 1  # how many parts it has; None for any number
    scale: int | None = None  # the one of `parts` that makes x (1 + scale) of a tensor x; the other is added to that

    def divisor(self, smooth: torch.Tensor, produced: torch.Tensor) -> torch.Tensor:
        """Return what the channels of a producer with this weight are divided by: the smoothing factors up to a common
        factor, which the readers' weights take."""
        if self.scale is not None:
            # At most 1: (1 + scale) / s - 1 near -1 would lose its last bits in bf16.
            return smooth / smooth.max()
        if produced.ndim > 1:
            return smooth
        # A norm's weight keeps its spread, by which ComfyUI tells whether a Z-Image may run in fp16.
        weight = produced.detach().float().to(smooth.device)
        before, after = weight.std(), (weight / smooth).std()
        return smooth * (after / before) if before > 0 and after > 0 else smooth


def _swiglu_block(attention_output: str) -> tuple[_Site, ...]:
    """Return the sites of Ideogram 4's and Lumina's (Z-Image's) blocks: RMSNorms with a weight, then only scales."""
    return (
        _Site("attention_norm1", ("attention.qkv",)),
        _Site("attention.qkv", (attention_output,), parts=(2,), of=3),
        _Site("ffn_norm1", ("feed_forward.w1", "feed_forward.w3")),
        _Site("feed_forward.w3", ("feed_forward.w2",)),
    )


def _modulated(producer: str, *readers: tuple[str, ...]) -> tuple[_Site, ...]:
    """Return the sites of a linear with a bias that makes shift, scale and gate of the attention, then of the MLP."""
    at = enumerate(readers)
    return tuple(_Site(producer, those, (3 * n, 3 * n + 1), of=None, scale=3 * n + 1) for n, those in at)


_SITES: dict[str, tuple[_Site, ...]] = {
    "comfy.ldm.ideogram4.model.Ideogram4TransformerBlock": _swiglu_block("attention.o"),
    "comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel": (_Site("llm_cond_norm", ("llm_cond_proj",)),),
    "comfy.ldm.lumina.model.JointTransformerBlock": _swiglu_block("attention.out"),
    "comfy.ldm.modules.diffusionmodules.mmdit.DismantledBlock": _modulated(
        "adaLN_modulation.1", ("attn.qkv",), ("mlp.fc1",)
    ),
    "comfy.ldm.flux.layers.DoubleStreamBlock": (
        *_modulated("img_mod.lin", ("img_attn.qkv",), ("img_mlp.0",)),
        *_modulated("txt_mod.lin", ("txt_attn.qkv",), ("txt_mlp.0",)),
    ),
    "comfy.ldm.flux.layers.SingleStreamBlock": _modulated("modulation.lin", ("linear1",)),
    "comfy.ldm.qwen_image.model.QwenImageTransformerBlock": (
        *_modulated("img_mod.1", ("attn.to_q", "attn.to_k", "attn.to_v"), ("img_mlp.net.0.proj",)),
        *_modulated("txt_mod.1", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), ("txt_mlp.net.0.proj",)),
    ),
}


def _sites(model: ModelPatcher) -> Iterator[_Site]:
    """Yield the sites of a MODEL whose modules are there and fit together, by names in the diffusion model."""
    modules = dict(model.model.diffusion_model.named_modules())
    for prefix, block in modules.items():
        for site in _SITES.get(f"{type(block).__module__}.{type(block).__qualname__}", ()):
            dot = f"{prefix}." if prefix else ""
            named = site._replace(producer=dot + site.producer, readers=tuple(dot + name for name in site.readers))
            if named.producer not in modules or any(name not in modules for name in named.readers):
                continue
            weights = [weight_below_patches(model, f"{DIFFUSION_MODEL}{name}.weight") for name in named.readers]
            produced = weight_below_patches(model, f"{DIFFUSION_MODEL}{named.producer}.weight")
            channels, *others = {weight.shape[-1] for weight in weights}
            parts, rest = divmod(produced.shape[0], channels)
            if not others and not rest and (parts > max(site.parts) if site.of is None else parts == site.of):
                yield named


def _can_be_divided(weight: torch.Tensor) -> bool:
    """Whether rows of a weight can be divided: not in other quantized formats, without a scale or dtype for that."""
    return is_int8(weight) or (type(weight.data) is torch.Tensor and weight.dtype in FLOAT_DTYPES)


def foldable_groups(model: ModelPatcher, quantizable: Collection[str]) -> list[set[str]]:
    """Return the sets of quantizable linears that can share smoothing factors and have them folded, once quantized."""
    return [
        {name for name in site.readers if name in quantizable}
        for site in _sites(model)
        if site.producer in quantizable
        # A raw float8 weight will be one of the compute dtype.
        or not isinstance(weight_below_patches(model, f"{DIFFUSION_MODEL}{site.producer}.weight"), QuantizedTensor)
    ]


def fold(model: ModelPatcher, tensors: Tensors) -> Tensors:
    """Return a diffusion model's state dict, by the names of its modules, with all smoothing factors folded away.

    The result computes the same with plain INT8 layers. Layers with activations of 16 bits stay, since no other loader
    reads them: where their input is divided for others, they multiply it back. What changes is computed when the tensor
    is written. Raises ValueError naming the first layer whose factors cannot be folded.
    """
    folded = dict(tensors)
    for site in _sites(model):
        stored = {name: weight_below_patches(model, f"{DIFFUSION_MODEL}{name}.weight") for name in site.readers}
        producer = weight_below_patches(model, f"{DIFFUSION_MODEL}{site.producer}.weight")
        smooth = _common_factors(list(stored.values()))
        if smooth is None or not _can_be_divided(producer):
            continue
        divisor = site.divisor(smooth, producer)
        common = float(smooth[0] / divisor[0])
        divided = partial(divide_rows, smooth=divisor)
        for part in site.parts:
            rows = slice(part * len(divisor), (part + 1) * len(divisor))
            of_bias = partial(divide_modulation_scale, smooth=divisor) if part == site.scale else divided
            rows_in = quant_config.SCALE if is_int8(producer) else "weight"
            for key, change in ((f"{site.producer}.{rows_in}", divided), (f"{site.producer}.bias", of_bias)):
                if key in folded:
                    folded[key] = _changed(key, folded[key], change, rows)
        for name, weight in stored.items():
            config: Any = folded.get(f"{name}.{quant_config.QUANT_CONFIG}")
            others = {} if config is None else quant_config.other_options(quant_config.decode_config(config))
            if _has_16_bits(weight):
                own = weight.params.smooth
                back = divisor.reciprocal() if own is None else own / divisor
                folded[f"{name}.{quant_config.SMOOTH}"] = back
                transform = ChannelTransform(back, weight.params.rotation_group)
                folded[f"{name}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(transform, 16, others)
                continue
            if is_int8(weight):
                del folded[f"{name}.{quant_config.SMOOTH}"]
                transform = ChannelTransform(None, weight.params.rotation_group)
                folded[f"{name}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(transform, 8, others)
                key, change = f"{name}.{quant_config.SCALE}", partial(torch.div, other=common)
            else:
                key, change = f"{name}.weight", partial(multiply_columns, smooth=divisor)
            folded[key] = _changed(key, folded[key], change, slice(None))

    left = quant_config.configured_layers(folded, quant_config.SMOOTHED_FORMAT)
    if left:
        raise ValueError(
            f"the smoothing factors of {len(left)} layers, {left[0]} first, cannot be folded into the layer before "
            "them. Quantize with smooth_only_foldable switched on, or save without folding"
        )
    return folded


def _changed(
    key: str, tensor: torch.Tensor | PendingTensor, change: Callable[[torch.Tensor], torch.Tensor], rows: slice
) -> PendingTensor:
    """Return a tensor whose rows change when it is written. Writing raises ValueError naming `key` on an overflow."""

    def made() -> torch.Tensor:
        changed = tensor.to("cpu").clone()
        changed[rows] = change(changed[rows])
        if not bool(torch.isfinite(changed).all()):
            raise ValueError(
                f"with the smoothing factors folded into it, {key} leaves the range of {changed.dtype}; save without "
                "folding"
            )
        return changed

    return PendingTensor(tensor, made)


def _has_16_bits(weight: torch.Tensor) -> TypeGuard[QuantizedTensor]:
    """Whether a weight is INT8 with activations of 16 bits."""
    return is_int8(weight) and weight.params.activation_bits == 16


def _common_factors(weights: list[torch.Tensor]) -> torch.Tensor | None:
    """Return the smoothing factors that all plain INT8 weights of a site's readers share; None where there are none,
    where they differ, or where another weight could not take its share."""
    factors = [weight.params.smooth for weight in weights if is_int8(weight) and not _has_16_bits(weight)]
    if not factors or any(smooth is None for smooth in factors) or not all(map(_can_be_divided, weights)):
        return None
    return factors[0] if all(torch.equal(smooth, factors[0]) for smooth in factors) else None
