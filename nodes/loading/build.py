"""Building a MODEL whose linears run INT8 out of tensors, with ComfyUI's own loader."""

import json
from typing import Any

import torch

from ...kernels import choose_path
from ..comfyui import loading
from ..comfyui.architecture import architecture_settings, kind_of
from ..comfyui.patcher import BaseModel, CallbacksMP, ModelPatcher, call_factory
from ..comfyui.quantized import QuantizedTensor
from ..comfyui.residency import CALLBACK_KEY, let_patches_act
from ..deferred.install import defer
from ..files import quant_config
from ..files.holding.grouped_weight import held_codes, is_grouped, with_joined_codes
from ..host import notices
from ..layers.input_groups import group_inputs
from ..layers.linear_call import name_linears
from ..layers.stored_weights import patch_products
from .load_plan import LoadPlan
from .loaded_checks import check_loaded
from .operations import int8_operations
from .summary import floats_name


def build_model(
    state_dict: dict[str, torch.Tensor],
    metadata: dict[str, str],
    plan: LoadPlan,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """ComfyUI's loader with linears that hold what `plan` says, plus the warning for a bf16 fallback.

    Raises ValueError for tensors it does not recognise, and naming the first that the model needs and does not get.
    """
    names, operations = list(state_dict), int8_operations(plan)  # the loader empties it
    model = loading.load(state_dict, metadata, operations, plan.compute_dtype, disable_dynamic)
    plan.let_go()
    if model is None:
        raise ValueError("this is not a diffusion model that this ComfyUI can load")
    check_loaded(model, names, operations, plan)
    group_inputs(model.model.diffusion_model)
    name_linears(model.model.diffusion_model)
    # Merges and hooks look up everything that a BaseModel's state dict names, and add what it holds to other weights.
    model.model.register_state_dict_post_hook(_whole_weights)
    let_patches_act(model)
    add_fallback_warning(model, plan.kernel)
    defer(model)
    return model


def _whole_weights(model: BaseModel, state_dict: dict[str, torch.Tensor], prefix: str, _metadata: object) -> None:
    """Put each quantized weight into a BaseModel's state dict as what it is, in place of the pieces a file has."""
    for name, module in model.named_modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(weight, QuantizedTensor) and f"{prefix}{name}.{quant_config.QUANT_CONFIG}" in state_dict:
            key = f"{prefix}{name}.weight"
            for piece in (f"{prefix}{name}.{quant_config.QUANT_CONFIG}", *weight.state_dict(key)):
                state_dict.pop(piece)
            state_dict[key] = weight


def file_metadata(model: BaseModel) -> dict[str, str]:
    """What ComfyUI needs to know of a BaseModel's architecture and cannot see in its tensors, as metadata of its file.

    Some families (LTX-Video, Wan) have it in a "config" there, which ComfyUI does not keep: this is what it made of it.
    """
    config = {}
    for name, value in architecture_settings(model).items():
        try:
            if json.loads(json.dumps(value)) == value:
                config[name] = value
        except TypeError:  # a dtype
            pass
    return {"config": json.dumps({"transformer": config})}


def build_like(
    model: BaseModel,
    state_dict: dict[str, torch.Tensor],
    plan: LoadPlan,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """A MODEL of the same kind as `model`, a BaseModel, from tensors named as its diffusion model's.

    Raises ValueError if ComfyUI takes those for another kind: it may have read from other parts of a checkpoint how the
    model predicts.
    """
    built = build_model(loading.tensors_of_file(model, state_dict), file_metadata(model), plan, disable_dynamic)
    for before, after in zip(kind_of(model), kind_of(built.model), strict=True):
        if before != after:
            raise ValueError(
                f"the diffusion model by itself would be taken for another kind of model ({after} instead of "
                f"{before}), and its images would be wrong"
            )
    return built


def rebuild_int8_model(model: BaseModel, kernel: str, disable_dynamic: bool = False) -> ModelPatcher:
    """A second MODEL with weights of its own, equal to those of `model`, a BaseModel of this pack (multi-GPU)."""
    tensors = {key: tensor.to(device="cpu", copy=True) for key, tensor in model.diffusion_model.state_dict().items()}
    tensors, dtype = with_joined_codes(tensors), model.get_dtype_inference()
    in_codes = any(map(is_grouped, tensors.values()))

    def as_it_was(name: str, weight: Any, input_scale: torch.Tensor | None) -> Any:
        return held_codes(weight, dtype) if is_grouped(weight) else None

    rebuilt = build_like(model, tensors, LoadPlan(kernel, dtype, as_it_was), disable_dynamic)
    if in_codes:
        patch_products(rebuilt)
    call_factory(rebuilt, rebuild_int8_model, model, kernel)
    return rebuilt


def add_fallback_warning(model: ModelPatcher, kernel: str) -> None:
    """Warn once per run and card, when a sampling begins there, that the model runs in floats and why.

    The sampling raises RuntimeError instead where `kernel` demands what the card cannot do.
    """

    def warn(patcher: ModelPatcher) -> None:
        warn_of_fallback(
            patcher.load_device,
            kernel,
            patcher.model.get_dtype_inference(),
            "Set kernel to 'fused int8' on the node that made the model, to use INT8 all the same.",
        )

    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, warn)


def warn_of_fallback(device: torch.device, kernel: str, floats: torch.dtype, advice: str) -> None:
    """Warn once per run and card that INT8 models run in `floats` there, if `kernel` falls back to it, and why.

    `advice` is how to have INT8 all the same, where that can be had. Raises what `choose_path` does.
    """
    compute = choose_path(device, kernel)
    if compute.fallback:
        summary = f"INT8 DiT runs in {floats_name(floats)}"
        notices.warn("bf16", summary, f"{compute.reason}.", "" if compute.blocked else advice)
