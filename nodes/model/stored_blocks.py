"""Weights that stay in GGUF's blocks while a MODEL runs, and what patches (LoRAs) do to them.

No block holds a patched weight as exactly as INT8 does, so ComfyUI never writes one back. Plain LoRAs become part of
the INT8 weight that is made for each product. Any other patch makes a weight in floats of its own. While a hook is on,
what it made stands in the place of the blocks.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ...kernels import LowRank
from ..comfyui.layers import keep_weight, set_weight_functions, weight_functions
from ..comfyui.memory import moved
from ..comfyui.patcher import (
    CallbacksMP,
    LowVramPatch,
    ModelPatcher,
    forget_stored,
    identity_of_patches,
    is_patch,
    is_patched,
    patches_of,
)
from ..comfyui.quantized import HeldWeight, QuantizedTensor, layout_of, params, stored
from ..comfyui.residency import CALLBACK_KEY
from ..files.gguf_weight import GGUF_LAYOUT, has_scales, is_gguf, with_scales
from .int8_weight import LAYOUT, PerChannelINT8Layout, is_int8
from .plain_loras import each_once, plain_loras

SMALLEST_STORED = 1 << 16
"""Bytes below which a weight becomes INT8 all the same: ComfyUI patches small weights where they are."""


class StoredLoRA(LowVramPatch):
    """The plain LoRAs of a stored weight.

    Attributes:
        low_rank: all of them, on the device where the MODEL runs: they are small, and every product reads them.
        scale: float32 [N, 1], how much larger they make what each row is scaled by as INT8.
    """

    def __init__(self, key: str, patches: Sequence[tuple], low_rank: LowRank, scale: torch.Tensor) -> None:
        super().__init__(key, {key: patches})
        self.low_rank = low_rank
        self.scale = scale


def stored_lora(weight: Any, functions: list) -> StoredLoRA | None:
    """What changes a weight in use, if that is plain LoRAs of a stored weight and nothing else."""
    if not functions or not isinstance(functions[0], StoredLoRA) or not is_gguf(weight):
        return None
    return functions[0] if len(each_once(functions)) == 1 else None


def stored_weight(weight: Any, dtype: torch.dtype, becomes_int8: bool) -> QuantizedTensor:
    """A weight that was read of a GGUF file, as a linear holds it that takes and gives floats of `dtype`.

    Its product is INT8's, or else that of the floats that its blocks stand for. Raises ValueError where a row holds a
    NaN or Inf.
    """
    scaled = with_scales(weight)
    form = replace(params(scaled if becomes_int8 else weight), orig_dtype=dtype)
    return HeldWeight(stored(weight).clone(), GGUF_LAYOUT, form)  # nobody reads the file once it is loaded


class HookedWeight:
    """What a hook made of a linear's stored weight: ComfyUI takes it off by copying the blocks over it."""

    linear: torch.nn.Module

    @property
    def data(self) -> "HookedWeight":
        return self

    def copy_(self, blocks: torch.Tensor, non_blocking: bool = False) -> "HookedWeight":
        self.linear.weight = torch.nn.Parameter(blocks, requires_grad=False)
        return self


class _HookedINT8(HookedWeight, HeldWeight):
    def _copy_with(self, *args, **kwargs) -> "_HookedINT8":
        copied = super()._copy_with(*args, **kwargs)
        hooked = _HookedINT8(stored(copied), layout_of(copied), params(copied))
        hooked.linear = self.linear
        return hooked


class _HookedFloats(HookedWeight, torch.nn.Parameter):
    pass


def put_hooked(linear: Any, weight: torch.Tensor, kernel: str, seed: int | None) -> None:
    """Let a linear with a stored weight compute with what a hook made of that, float [N, K], until the blocks are back.

    It is INT8 where the blocks would be for a product, rounded with `seed`; `kernel` is one of kernels.KERNEL_CHOICES.
    """
    held = linear.weight
    if is_int8(held) or (is_gguf(held) and has_scales(held)):
        q, form = PerChannelINT8Layout.quantize(weight, stochastic_rounding=seed or 0, kernel=kernel)
        hooked = _HookedINT8(q, LAYOUT, replace(form, orig_dtype=held.dtype))
        hooked.linear = linear
        linear.weight = torch.nn.Parameter(hooked, requires_grad=False)
    else:
        linear.weight = _HookedFloats(weight.to(held.dtype), requires_grad=False)
        linear.weight.linear = linear


def patch_products(model: ModelPatcher) -> None:
    """Let patches act in the products of a MODEL's stored weights, in every memory mode.

    ComfyUI's own save nodes are refused: what they would write of blocks, no loader takes for a weight.
    """
    known: dict[str, tuple[object, torch.Tensor]] = {}

    def patch(loaded: ModelPatcher, *_: object) -> None:
        for key, module in _stored(loaded):
            if is_patched(loaded, key):
                forget_stored(loaded, key)
                patched = _patch_of(loaded, key, module.weight, known)
                set_weight_functions(module, [patched, *_without_patches(module)])
                keep_weight(module)

    def take_off(unloaded: ModelPatcher, unpatched: bool) -> None:
        for _, module in _stored(unloaded) if unpatched else ():
            set_weight_functions(module, _without_patches(module))

    model.add_callback_with_key(CallbacksMP.ON_LOAD, CALLBACK_KEY, patch)
    model.add_callback_with_key(CallbacksMP.ON_DETACH, CALLBACK_KEY, take_off)
    model.model.state_dict_for_saving = _refuse_to_save


def _refuse_to_save(*_args: object, **_kwargs: object) -> None:
    raise ValueError(
        "this node cannot save weights that stay in GGUF's blocks. Connect Save GGUF, or set memory of INT8 DiT Loader "
        "to INT8"
    )


def _stored(model: ModelPatcher) -> Iterator[tuple[str, Any]]:
    """The linears with a stored weight, each with its weight's name in the BaseModel."""
    for name, module in model.model.named_modules():
        if is_gguf(getattr(module, "weight", None)):
            yield f"{name}.weight", module


def _without_patches(module: Any) -> list:
    return [function for function in weight_functions(module) if not is_patch(function)]


def _patch_of(
    model: ModelPatcher, key: str, weight: QuantizedTensor, known: dict[str, tuple[object, torch.Tensor]]
) -> LowVramPatch:
    """The patches of a stored weight, on the device where the MODEL runs.

    `known` holds scales of LoRAs by `key`, each beside what ComfyUI tells a MODEL's patches by: to find them takes a
    product as large as the weight.
    """
    patches, device = patches_of(model, key), model.load_device
    low_rank = _low_rank(patches, weight, device) if has_scales(weight) else None
    if low_rank is None:
        return LowVramPatch(key, {key: patches})
    found_for, scale = known.get(key, (None, None))
    if scale is None or found_for != identity_of_patches(model) or scale.device != device:
        scale = low_rank.channel_scales()[:, None]
        known[key] = identity_of_patches(model), scale
    return StoredLoRA(key, patches, low_rank, scale)


def _low_rank(patches: Sequence[tuple], weight: QuantizedTensor, device: torch.device) -> LowRank | None:
    """The sum of a weight's plain LoRAs as one product of factors in its dtype; None if there are other patches."""
    loras, dtype = plain_loras(patches, weight.shape), weight.dtype
    if not loras:
        return None
    up = torch.cat([lora.factor * moved(lora.up, device, torch.float32) for lora in loras], dim=1)
    down = torch.cat([moved(lora.down, device, dtype) for lora in loras])
    return LowRank(up.to(dtype), down)
