"""Patches (LoRAs) of weights that stay stored (GGUF, W4A8, W6A8) while a MODEL runs.

No such form holds a patched weight as exactly as INT8 does, so ComfyUI never writes one back. Plain LoRAs are added
where the INT8 weight of each product is computed. Any other patch makes a float weight. A hook's weight replaces the
stored one while the hook is on.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from comfy.model_management import cast_to_device
from comfy.model_patcher import LowVramPatch, ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.quant_ops import QuantizedTensor

from ...kernels import LowRank, requantize_weight, rotation_group_of
from ..comfyui.compiling import has_compiled_parts
from ..comfyui.patcher import CALLBACK_KEY, is_patch
from ..comfyui.quantized import HeldWeight, layout_of, stored, to_device
from ..files.holding import is_gguf, is_stored, stored_kind
from .int8_weight import int8_weight
from .plain_loras import StoredLoRA, plain_loras
from .weight_form import known_weight, weight_form

SMALLEST_STORED = 1 << 16
"""Bytes below which a weight becomes INT8 all the same: ComfyUI patches small weights where they are."""


def fits_codes(n: int, k: int) -> bool:
    """Whether a weight [N, K] that this pack quantizes can be stored in codes of 4 bits, as ComfyUI reads them."""
    return rotation_group_of(k) is not None and n * k // 2 >= SMALLEST_STORED


class HookedWeight:
    """A linear's weight while a hook is on. ComfyUI takes the hook off by copying the old weight over it, which then
    lies where this one does: ComfyUI may have moved the linear meanwhile.

    Memory of the host that ComfyUI has pinned must not be freed until then: CUDA would still take it for pinned. A
    HeldWeight lives on as ComfyUI's backup, and floats as `own`.
    """

    linear: Any = None  # a compiler's fake tensor of it has none
    own: torch.nn.Parameter | None = None

    @property
    def data(self) -> "HookedWeight":
        return self

    def copy_(self, weight: torch.Tensor, non_blocking: bool = False) -> Any:
        if self.linear is None or self is not self.linear.weight:  # one like it, which ComfyUI fills on another device
            return super().copy_(weight, non_blocking)  # pyright: ignore[reportAttributeAccessIssue]
        place: Any = self
        old = weight if self.own is None else self.own
        if old.device != place.device:
            old = to_device(weight, place.device)
        self.linear.weight = torch.nn.Parameter(old, requires_grad=False)
        return self


class _HookedINT8(HookedWeight, HeldWeight):
    def _copy_with(self, *args, **kwargs) -> "_HookedINT8":
        copied = super()._copy_with(*args, **kwargs)
        hooked = _HookedINT8(stored(copied), layout_of(copied), copied.params)
        hooked.linear = self.linear
        return hooked


class _HookedFloats(HookedWeight, torch.nn.Parameter):
    def detach(self) -> "_HookedFloats":
        return self  # a Parameter is made of this

    def to(self, *args, **kwargs) -> "_HookedFloats":
        moved: Any = super().to(*args, **kwargs)
        if moved is not self:
            moved = _HookedFloats(moved, requires_grad=False)
            moved.linear = self.linear
        return moved


def put_hooked(linear: Any, weight: torch.Tensor, seed: int | None) -> None:
    """Replace a linear's weight by a hook's, float [N, K], until ComfyUI takes the hook off. It becomes INT8 where the
    weight is INT8 in products, and keeps the form of other quantized ones. `seed` rounds it."""
    held = linear.weight
    form = weight_form(held, linear)
    if form is not None and form.own:
        transform, bits = form.input_form(held)
        made = int8_weight(*requantize_weight(weight, transform, seed or None), held.dtype, transform, bits)
    elif isinstance(held, QuantizedTensor) and not is_stored(held):
        made = held.requantize_from_float(weight, scale="recalculate", stochastic_rounding=seed).to(held.dtype)
    else:
        linear.weight = _HookedFloats(weight.to(held.dtype), requires_grad=False)
        linear.weight.linear = linear
        if held.device.type == "cpu":
            linear.weight.own = held
        return
    hooked = _HookedINT8(stored(made), layout_of(made), made.params)
    hooked.linear = linear
    linear.weight = torch.nn.Parameter(hooked, requires_grad=False)


def patch_products(model: ModelPatcher) -> None:
    """Apply patches in the products of a MODEL's stored weights, in every memory mode.

    ComfyUI's own save nodes are refused: no loader reads what they would write of GGUF's blocks, and other forms they
    would write without patches.
    """
    known: dict[str, tuple[object, torch.Tensor]] = {}

    def patch(loaded: ModelPatcher, *_: object) -> None:
        for key, module in _stored(loaded):
            if key in loaded.patches:
                loaded.backup.pop(key, None)
                patched = _patch_of(loaded, key, module.weight, known)
                others = [function for function in module.weight_function if not is_patch(function)]
                module.weight_function = [patched, *others]
                module.weight_lowvram_function = None  # else dynamic VRAM writes a patched weight into it

    def take_off(unloaded: ModelPatcher, unpatched: bool) -> None:
        for _, module in _stored(unloaded) if unpatched else ():
            module.weight_function = [function for function in module.weight_function if not is_patch(function)]

    looked = False

    def check(loaded: ModelPatcher) -> None:
        nonlocal looked
        if looked or not has_compiled_parts(loaded):
            return
        for _, module in _stored(loaded):  # compiled products check nothing
            kind, (_, known) = stored_kind(module.weight), known_weight(module)
            if kind is not None and kind.finding is not None and known is not None:
                known.scale(to_device(module.weight, loaded.load_device))
        looked = True

    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, check)
    model.add_callback_with_key(CallbacksMP.ON_LOAD, CALLBACK_KEY, patch)
    model.add_callback_with_key(CallbacksMP.ON_DETACH, CALLBACK_KEY, take_off)
    blocks = any(is_gguf(module.weight) for _, module in _stored(model))
    model.model.state_dict_for_saving = partial(_refuse_to_save, blocks)


def _refuse_to_save(blocks: bool, *_args: object, **_kwargs: object) -> None:
    form, node = ("in GGUF's blocks", "Save GGUF") if blocks else ("in 4 or 6 bits", "Save INT8 DiT")
    raise ValueError(
        f"this node cannot save weights that stay {form}. Connect {node}, or set memory of Load INT8 DiT to INT8"
    )


def _stored(model: ModelPatcher) -> Iterator[tuple[str, Any]]:
    """Yield the linears with a stored weight, each with its weight's name in the BaseModel."""
    for name, module in model.model.named_modules():
        if is_stored(getattr(module, "weight", None)):
            yield f"{name}.weight", module


def _patch_of(
    model: ModelPatcher, key: str, weight: QuantizedTensor, known: dict[str, tuple[object, torch.Tensor]]
) -> LowVramPatch:
    """Return the patches of a stored weight, on the device where the MODEL runs: plain LoRAs as one product of factors
    in its dtype, rotated as the weight is as INT8; else patches as ComfyUI has them. `known` caches scales of LoRAs by
    `key`, each with the MODEL's `patches_uuid`, since they take a product as large as the weight."""
    patches, device, dtype, form = model.patches[key], model.load_device, weight.dtype, weight_form(weight, None)
    loras = plain_loras(patches, weight.shape)
    if form is None or not loras:
        return LowVramPatch(key, {key: patches})
    up = torch.cat([lora.factor * cast_to_device(lora.up, device, torch.float32) for lora in loras], dim=1)
    down = torch.cat([cast_to_device(lora.down, device, dtype) for lora in loras])
    low_rank = LowRank(up.to(dtype), form.unsmoothed.transform.to_weight(down).to(dtype))
    found_for, scale = known.get(key, (None, None))
    if scale is None or found_for != model.patches_uuid or scale.device != device:
        scale = low_rank.channel_scales()[:, None]
        known[key] = model.patches_uuid, scale
    return StoredLoRA(key, patches, low_rank, scale)
