"""Smoothing factors folded into what produces a layer's input: a smoothed model as a file that every loader runs.

Where ComfyUI's models let that happen is known per block class, since names alone do not say what feeds a layer. Every
rule is checked against the class itself in the tests.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeGuard

import torch

from ...kernels import FLOAT_DTYPES, ChannelTransform, divide_modulation_scale, divide_rows, multiply_columns
from ..comfyui.classes import (
    FLUX_DOUBLE_BLOCK,
    FLUX_SINGLE_BLOCK,
    IDEOGRAM4,
    IDEOGRAM4_BLOCK,
    LUMINA_BLOCK,
    QWEN_IMAGE_BLOCK,
    SD3_BLOCK_HALF,
    full_name,
)
from ..comfyui.patcher import DIFFUSION_MODEL, ModelPatcher, weight_below_patches
from ..comfyui.quantized import QuantizedTensor, params
from ..files import quant_config
from ..files.writing.safetensors_writer import PendingTensor, Tensors
from ..layers.int8_weight import is_int8
from .patched_weights import LaterTensor

_Change = tuple[str, slice | None, Callable[[torch.Tensor], torch.Tensor]]
"""A tensor's name, the rows of it that change (None: all), and what becomes of them."""


@dataclass(frozen=True)
class _Site:
    """A tensor that `readers`, and nothing else, read, and whose channels its producer can divide.

    Attributes:
        producer: the module that has the channels.
        readers: all linears that read the tensor.
    """

    producer: str
    readers: tuple[str, ...]

    def fits(self, width: int, channels: int) -> bool:
        """Whether a producer of this many output channels can be the one of readers with this many input channels."""
        return width == channels

    def divisor(self, smooth: torch.Tensor, produced: torch.Tensor) -> torch.Tensor:
        """What the channels of the producer, whose weight is given, are divided by: the smoothing factors up to a
        common factor, which the readers' weights take."""
        return smooth

    def changes(self, divisor: torch.Tensor, rows_in: str) -> Iterator[_Change]:
        """What happens to the producer, whose rows are divided in its tensor `rows_in`: weight, or INT8 scale."""
        raise NotImplementedError


@dataclass(frozen=True)
class _Norm(_Site):
    """A norm with a weight, behind which channels are scaled, if anything."""

    def divisor(self, smooth: torch.Tensor, produced: torch.Tensor) -> torch.Tensor:
        # The norm's weight keeps its spread: ComfyUI tells by that of a Z-Image whether it may run in fp16.
        weight = produced.detach().float().to(smooth.device)
        before, after = weight.std(), (weight / smooth).std()
        return smooth * (after / before) if before > 0 and after > 0 else smooth

    def changes(self, divisor: torch.Tensor, rows_in: str) -> Iterator[_Change]:
        for name in (rows_in, "bias"):
            yield f"{self.producer}.{name}", None, lambda tensor: divide_rows(tensor, divisor)


@dataclass(frozen=True)
class _Rows(_Site):
    """A linear, one of whose `parts` equal parts has the channels: a factor on them passes through to the readers, as
    through attention (from v) and through the linear half of a SwiGLU."""

    part: int = 0
    parts: int = 1

    def fits(self, width: int, channels: int) -> bool:
        return width == self.parts * channels

    def changes(self, divisor: torch.Tensor, rows_in: str) -> Iterator[_Change]:
        rows = slice(self.part * len(divisor), (self.part + 1) * len(divisor))
        for name in (rows_in, "bias"):
            yield f"{self.producer}.{name}", rows, lambda tensor: divide_rows(tensor, divisor)


@dataclass(frozen=True)
class _Modulation(_Site):
    """A linear with a bias whose parts number `shift` and `scale` make x (1 + scale) + shift of a tensor x."""

    shift: int = 0
    scale: int = 1

    def fits(self, width: int, channels: int) -> bool:
        return width % channels == 0 and width >= (self.scale + 1) * channels

    def divisor(self, smooth: torch.Tensor, produced: torch.Tensor) -> torch.Tensor:
        # At most 1, or (1 + scale) / s - 1 would lie so close to -1 that bf16 loses what is left of it.
        return smooth / smooth.max()

    def changes(self, divisor: torch.Tensor, rows_in: str) -> Iterator[_Change]:
        shift, scale = (slice(part * len(divisor), (part + 1) * len(divisor)) for part in (self.shift, self.scale))
        for rows in (shift, scale):
            yield f"{self.producer}.{rows_in}", rows, lambda tensor: divide_rows(tensor, divisor)
        yield f"{self.producer}.bias", shift, lambda tensor: divide_rows(tensor, divisor)
        yield f"{self.producer}.bias", scale, lambda tensor: divide_modulation_scale(tensor, divisor)


def _swiglu_block(attention_output: str) -> tuple[_Site, ...]:
    """Ideogram 4's and Lumina's blocks, Z-Image among them: RMSNorms with a weight, and modulation that only scales."""
    return (
        _Norm("attention_norm1", ("attention.qkv",)),
        _Rows("attention.qkv", (attention_output,), part=2, parts=3),
        _Norm("ffn_norm1", ("feed_forward.w1", "feed_forward.w3")),
        _Rows("feed_forward.w3", ("feed_forward.w2",)),
    )


def _modulated(producer: str, first: tuple[str, ...], second: tuple[str, ...]) -> tuple[_Site, ...]:
    """One linear that makes shift, scale and gate of the attention, then of the MLP."""
    return _Modulation(producer, first, 0, 1), _Modulation(producer, second, 3, 4)


_SITES: dict[str, tuple[_Site, ...]] = {
    IDEOGRAM4_BLOCK: _swiglu_block("attention.o"),
    IDEOGRAM4: (_Norm("llm_cond_norm", ("llm_cond_proj",)),),
    LUMINA_BLOCK: _swiglu_block("attention.out"),
    SD3_BLOCK_HALF: _modulated("adaLN_modulation.1", ("attn.qkv",), ("mlp.fc1",)),
    FLUX_DOUBLE_BLOCK: (
        *_modulated("img_mod.lin", ("img_attn.qkv",), ("img_mlp.0",)),
        *_modulated("txt_mod.lin", ("txt_attn.qkv",), ("txt_mlp.0",)),
    ),
    FLUX_SINGLE_BLOCK: (_Modulation("modulation.lin", ("linear1",)),),
    QWEN_IMAGE_BLOCK: (
        *_modulated("img_mod.1", ("attn.to_q", "attn.to_k", "attn.to_v"), ("img_mlp.net.0.proj",)),
        *_modulated("txt_mod.1", ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), ("txt_mlp.net.0.proj",)),
    ),
}


def _sites(model: ModelPatcher) -> Iterator[_Site]:
    """The sites of a MODEL whose modules are there and fit together, by names in the diffusion model."""
    modules = dict(model.model.diffusion_model.named_modules())
    for prefix, block in modules.items():
        for site in _SITES.get(full_name(type(block)), ()):
            dot = f"{prefix}." if prefix else ""
            named = replace(site, producer=dot + site.producer, readers=tuple(dot + name for name in site.readers))
            if named.producer not in modules or any(name not in modules for name in named.readers):
                continue
            weights = [weight_below_patches(model, f"{DIFFUSION_MODEL}{name}.weight") for name in named.readers]
            produced = weight_below_patches(model, f"{DIFFUSION_MODEL}{named.producer}.weight")
            if len({weight.shape[-1] for weight in weights}) == 1 and named.fits(
                produced.shape[0], weights[0].shape[-1]
            ):
                yield named


def _can_be_divided(weight: torch.Tensor) -> bool:
    """Not a weight in another quantized format, whose rows have no scale or dtype of their own to take the factors."""
    return is_int8(weight) or (type(weight.data) is torch.Tensor and weight.dtype in FLOAT_DTYPES)


def foldable_groups(model: ModelPatcher, quantizable: Collection[str]) -> list[set[str]]:
    """The sets of quantizable linears that could be smoothed by one vector of factors each and have it folded, once the
    MODEL is quantized."""
    return [
        {name for name in site.readers if name in quantizable}
        for site in _sites(model)
        if site.producer in quantizable
        # A raw float8 weight will be one of the compute dtype.
        or not isinstance(weight_below_patches(model, f"{DIFFUSION_MODEL}{site.producer}.weight"), QuantizedTensor)
    ]


def fold(model: ModelPatcher, tensors: Tensors) -> Tensors:
    """A state dict of a MODEL's diffusion model, by the names of its modules, with all smoothing factors folded away.

    The result computes the same with plain INT8 layers. Those with activations of 16 bits stay what they are, since no
    other loader reads them: where their input is divided for others, they multiply it back. What changes is computed
    when the tensor is written. Raises ValueError naming the first layer whose factors cannot be folded.
    """
    folded = dict(tensors)
    for site in _sites(model):
        stored = {name: weight_below_patches(model, f"{DIFFUSION_MODEL}{name}.weight") for name in site.readers}
        producer = weight_below_patches(model, f"{DIFFUSION_MODEL}{site.producer}.weight")
        smooth = _common_factors(stored.values())
        if smooth is None or not _can_be_divided(producer):
            continue
        divisor = site.divisor(smooth, producer)
        common = float(smooth[0] / divisor[0])
        rows_in = quant_config.SCALE if is_int8(producer) else "weight"
        for key, rows, change in site.changes(divisor, rows_in):
            if key in folded:
                folded[key] = _later(folded[key], _on_rows(key, rows, change))
        for name, weight in stored.items():
            config: Any = folded.get(f"{name}.{quant_config.QUANT_CONFIG}")
            others = {} if config is None else quant_config.other_options(quant_config.decode_config(config))
            if _has_16_bits(weight):
                own = params(weight).smooth
                back = divisor.reciprocal() if own is None else own / divisor
                folded[f"{name}.{quant_config.SMOOTH}"] = back
                transform = ChannelTransform(back, params(weight).rotation_group)
                folded[f"{name}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(transform, 16, others)
                continue
            if is_int8(weight):
                del folded[f"{name}.{quant_config.SMOOTH}"]
                transform = ChannelTransform(None, params(weight).rotation_group)
                folded[f"{name}.{quant_config.QUANT_CONFIG}"] = quant_config.encode_config(transform, 8, others)
                key, change = f"{name}.{quant_config.SCALE}", partial(torch.div, other=common)
            else:
                key, change = f"{name}.weight", partial(multiply_columns, smooth=divisor)
            folded[key] = _later(folded[key], change)

    left = quant_config.configured_layers(folded, quant_config.SMOOTHED_FORMAT)
    if left:
        raise ValueError(
            f"the smoothing factors of {len(left)} layers, {left[0]} first, cannot be folded into the layer before "
            "them. Quantize with smooth_only_foldable switched on, or save without folding"
        )
    return folded


def _later(tensor: torch.Tensor | PendingTensor, change: Callable[[torch.Tensor], torch.Tensor]) -> PendingTensor:
    """What a function makes of a tensor, with the same shape and dtype, when it is written."""
    return LaterTensor(tensor, lambda: change(tensor.to("cpu")))


def _has_16_bits(weight: torch.Tensor) -> TypeGuard[QuantizedTensor]:
    """Whether a weight is INT8 and its input rounded to 16 bits."""
    return is_int8(weight) and params(weight).activation_bits == 16


def _common_factors(weights: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The smoothing factors that all plain INT8 weights of a site's readers share; None where there are none, where
    they differ, or where another weight could not take its share."""
    weights = list(weights)
    factors = [params(weight).smooth for weight in weights if is_int8(weight) and not _has_16_bits(weight)]
    if not factors or any(smooth is None for smooth in factors) or not all(map(_can_be_divided, weights)):
        return None
    return factors[0] if all(torch.equal(smooth, factors[0]) for smooth in factors) else None


def _on_rows(
    key: str, rows: slice | None, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[torch.Tensor], torch.Tensor]:
    """`change` for these rows of the tensor `key` (None: for all). It raises ValueError where fp16 overflows."""

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.clone()
        part = slice(None) if rows is None else rows
        tensor[part] = change(tensor[part])
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(
                f"with the smoothing factors folded into it, {key} leaves the range of {tensor.dtype}; save without "
                "folding"
            )
        return tensor

    return changed
