"""The weights of a MODEL with its patches (LoRAs) applied.

They are computed from the stored weights one at a time, whatever is loaded where: ComfyUI may hold patches of this or
another MODEL inside the very same weights, or apply them only while it streams.
"""

import functools
import weakref
from typing import Any

import comfy.float
import comfy.lora
import comfy.utils
import torch
from comfy.model_management import cast_to_device
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ..comfyui.layer_choices import state_dict_of
from ..comfyui.patcher import DIFFUSION_MODEL, weight_below_patches
from ..files import quant_config
from ..files.holding import is_grouped, quant_config_in
from ..files.writing.tensor_files import PendingTensor, Tensors
from .file_notes import warn_of_folded
from .int8_weight import int8_weight, quant_config_of
from .weight_form import known_form


def float_weight(weight: torch.Tensor, pre_quant_scale: torch.Tensor | None = None) -> torch.Tensor:
    """Return the float tensor that a stored weight stands for, in a dtype that can be computed with, on its device.

    `pre_quant_scale` [K] is what a layer in ModelOpt's AWQ form multiplies its input by; the result's columns are
    multiplied by it. Raises as `check_readable`.
    """
    check_readable(weight)
    if isinstance(weight, QuantizedTensor):
        weight = weight.dequantize()
    if pre_quant_scale is not None:
        return weight.float() * pre_quant_scale.to(device=weight.device, dtype=torch.float32)
    return weight if weight.dtype in (torch.bfloat16, torch.float16, torch.float32) else weight.float()  # raw float8


def check_readable(weight: torch.Tensor) -> None:
    """Raise ValueError for a weight that is packed in a way ComfyUI's own loaders do not know."""
    if not (isinstance(weight, QuantizedTensor) or weight.is_floating_point()):
        raise ValueError(
            f"its weight is stored as {weight.dtype}, in a format that cannot be read (GGUF, perhaps); load the model "
            "from a bf16, fp16, FP8 or INT8 file"
        )


def possibly_patched(model: ModelPatcher) -> set[str]:
    """Return the names in the diffusion model of all that patches change or have changed."""
    keys = {*model.patches, *model.backup}
    return {key.removeprefix(DIFFUSION_MODEL) for key in keys if key.startswith(DIFFUSION_MODEL)}


def patched_weight(model: ModelPatcher, name: str) -> torch.Tensor:
    """Return what a layer multiplies its input by, with patches, as a float tensor of its own on the MODEL's device;
    `name` is the weight's in the diffusion model."""
    weight = _patched_as_stored(model, DIFFUSION_MODEL + name)
    layer, _, part = name.rpartition(".")
    module = model.model.diffusion_model.get_submodule(layer)
    return float_weight(weight, getattr(module, "pre_quant_scale", None) if part == "weight" else None)


def patched_shape(model: ModelPatcher, name: str) -> torch.Size:
    """Return the shape of a weight with patches: a LoRA for more input channels makes it wider."""
    key = DIFFUSION_MODEL + name
    held = weight_below_patches(model, key)
    return torch.Size(comfy.lora.calculate_shape(model.patches.get(key, ()), held, key))


def is_widened(model: ModelPatcher) -> bool:
    """Return whether patches give a MODEL's layers other shapes."""
    keys = [(name, DIFFUSION_MODEL + name) for name in possibly_patched(model)]
    return any(patched_shape(model, name) != weight_below_patches(model, key).shape for name, key in keys)


def _patched_as_stored(model: ModelPatcher, key: str) -> torch.Tensor:
    """Return a stored weight with patches applied, as a float tensor of its own on the MODEL's device."""
    weight = float_weight(cast_to_device(weight_below_patches(model, key), model.load_device, None, copy=True))
    return comfy.lora.calculate_weight(model.patches[key], weight.float(), key) if key in model.patches else weight


def whole_weights(model: Any, state_dict: dict[str, Any], prefix: str, _metadata: object = None) -> None:
    """Put quantized weights into a model's state dict whole, in place of the pieces that a file has."""
    for name, weight in model.named_parameters(prefix.removesuffix("."), remove_duplicate=False):
        if isinstance(weight, QuantizedTensor) and not isinstance(state_dict.get(name), QuantizedTensor | None):
            for piece in (f"{name.removesuffix('weight')}{quant_config.QUANT_CONFIG}", *weight.state_dict(name)):
                state_dict.pop(piece, None)
            state_dict[name] = weight


class _WholeWeights(dict):
    """A MODEL's state dict with whole weights. Its items are patched floats, of which ComfyUI extracts LoRAs."""

    def __init__(self, model: Any, filter_prefix: str | None = None) -> None:
        super().__init__(model.__class__.model_state_dict(model, filter_prefix))
        whole_weights(model.model, self, "")
        self.model = model

    def __getitem__(self, key: str) -> torch.Tensor:
        tensor = super().__getitem__(key)
        return _patched_as_stored(self.model, key) if isinstance(tensor, QuantizedTensor) else tensor


def show_whole(_: ModelPatcher, model: Any) -> None:
    """Give ComfyUI whole weights where it merges a MODEL or CLIP, hooks it or extracts a LoRA from it."""
    own = weakref.proxy(model)
    model.model_state_dict = functools.partial(_WholeWeights, own)
    model.get_key_patches = functools.partial(_key_patches, own)


def _key_patches(model: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Return a MODEL's weights and patches for a merge into another MODEL, which has no warning of folded weights."""
    warn_of_folded(model)
    return model.__class__.get_key_patches(model, *args, **kwargs)


def _pieces(model: ModelPatcher, key: str, form: Any) -> dict[str, torch.Tensor | PendingTensor]:
    """Return the tensors that a weight is written as, in a stored form. A patched one is computed for the first, or at
    once where a patch makes it wider."""
    pieces = form.state_dict(key) if isinstance(form, QuantizedTensor) else {key: form}
    if key not in model.patches:
        return pieces

    @functools.cache
    def made() -> dict[str, torch.Tensor]:
        patched, seed = _patched_as_stored(model, key), comfy.utils.string_to_seed(key)
        if not isinstance(form, QuantizedTensor):
            return {key: comfy.float.stochastic_rounding(patched, form.dtype, seed=seed).to("cpu")}
        again = form.requantize_from_float(patched, scale="recalculate", stochastic_rounding=seed)
        if not bool(torch.isfinite(again.params.scale).all()):
            raise ValueError(f"{key}: its patches (a LoRA?) make a NaN or Inf of it; it cannot be saved")
        return {name: tensor.to("cpu") for name, tensor in again.state_dict(key).items()}

    if patched_shape(model, key.removeprefix(DIFFUSION_MODEL)) != form.shape:
        return dict(made())  # the sizes of its pieces are others
    return {name: PendingTensor(piece, lambda name=name: made().pop(name)) for name, piece in pieces.items()}


def patched_state_dict(model: ModelPatcher) -> Tensors:
    """The diffusion model's tensors under its own names, patches applied (those when they are written).

    Codes of 4 or 6 bits would lose most of a LoRA: weights in them that are patched become INT8.
    """
    tensors: Tensors = dict(state_dict_of(model))
    for name in possibly_patched(model):
        key = DIFFUSION_MODEL + name
        form = stored = weight_below_patches(model, key)
        if key in model.patches and is_grouped(stored):
            for piece in stored.state_dict(key):
                tensors.pop(piece.removeprefix(DIFFUSION_MODEL), None)
            q = torch.empty(stored.shape, dtype=torch.int8, device="meta")
            form = int8_weight(q, torch.empty(len(q), device="meta"), stored.dtype, *known_form(stored).unsmoothed)
            config = quant_config_of(form, quant_config.other_options(quant_config_in(stored)))
            tensors[f"{name.removesuffix('.weight')}.{quant_config.QUANT_CONFIG}"] = config
        for piece, tensor in _pieces(model, key, form).items():
            own = piece.removeprefix(DIFFUSION_MODEL)
            if own in tensors or form is not stored:
                tensors[own] = tensor
    return tensors
