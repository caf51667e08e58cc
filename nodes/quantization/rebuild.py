"""A MODEL built anew around quantized layers: all else of it as it was."""

from collections.abc import Collection

import torch
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ...kernels import GroupedCodes, QuantizedLinear
from ..calibration.recorder import disarm
from ..comfyui.attention import state_dict_of
from ..comfyui.patcher import (
    DIFFUSION_MODEL,
    clone_around,
    on_other_gpus_again,
    possibly_patched,
    take_callbacks,
    weight_below_patches,
)
from ..comfyui.residency import CALLBACK_KEY
from ..deferred.install import defer
from ..files.holding.grouped_weight import coded_weight
from ..files.holding.stored_weight import is_stored
from ..layers.int8_weight import int8_weight
from ..loading.load import build_like, rebuild_int8_model
from ..loading.load_plan import LoadPlan
from ..patching.patched_weights import patched_weight


def with_quantized_layers(
    model: ModelPatcher, results: dict[str, QuantizedLinear], in_floats: Collection[str], kernel: str
) -> ModelPatcher:
    """A MODEL as `model`, its sampling settings, wrappers and hooks, with its quantized layers, which are taken out of
    `results`, but for those held in floats."""
    compute_dtype = model.model.get_dtype_inference()
    tensors = _state_dict_with_placeholders(model, set(results))
    for name in in_floats:
        del results[name]

    def make(name: str, weight: torch.Tensor, input_scale: torch.Tensor | None) -> torch.Tensor | None:
        if name in in_floats:
            return patched_weight(model, f"{name}.weight").to(device="cpu", dtype=compute_dtype, copy=True)
        if name not in results:
            return None
        result = results.pop(name)
        if isinstance(result.q, GroupedCodes):
            assert result.transform.rotation_group is not None
            return coded_weight(result.q, result.scale, result.transform.rotation_group, compute_dtype)
        return int8_weight(result.q, result.scale, compute_dtype, result.transform, result.activation_bits)

    built = build_like(model.model, tensors, LoadPlan(kernel, compute_dtype, make))
    clone = clone_around(model, built)
    defer(clone)
    disarm(clone)  # a recorder was for the MODEL that was quantized
    take_callbacks(clone, built, CALLBACK_KEY)  # those of an earlier quantization go
    clone.cached_patcher_init = (rebuild_int8_model, (clone.model, kernel))
    return on_other_gpus_again(clone)


def _state_dict_with_placeholders(model: ModelPatcher, targets: set[str]) -> dict[str, torch.Tensor]:
    """The diffusion model's tensors under its own names, patches applied, with placeholders for the weights of
    `targets`.

    A placeholder has a shape and dtype but no data: it lets the loader recognise the model, and each real weight is
    made only when its layer is loaded. Of another layer the weight is a float if it is quantized and patched, or in a
    form of which a state dict has only the pieces.
    """
    changed, targets = possibly_patched(model), {f"{name}.weight" for name in targets}
    held = {f"{name}.weight": module for name, module in model.model.diffusion_model.named_modules()}
    floats = {key for key, module in held.items() if is_stored(getattr(module, "weight", None))} - targets
    below = {key: weight_below_patches(model, DIFFUSION_MODEL + key) for key in {*changed, *targets, *floats}}
    floats |= {key for key in changed - targets if isinstance(below[key], QuantizedTensor)}

    state_dict = {}
    for key, tensor in state_dict_of(model).items():
        layer, _, tensor_name = key.rpartition(".")
        if f"{layer}.weight" in targets | floats and tensor_name != "bias":
            continue  # the weight, and what belongs to its quantized form
        if key in changed:
            tensor = patched_weight(model, key).to(tensor.dtype)
        # A copy, because a loader may adopt the tensors it is given, and these belong to the original model.
        state_dict[key] = tensor.to(device="cpu", copy=True)
    state_dict |= {key: torch.empty(below[key].shape, dtype=below[key].dtype, device="meta") for key in targets}
    return state_dict | {key: patched_weight(model, key).to("cpu", below[key].dtype) for key in floats}
