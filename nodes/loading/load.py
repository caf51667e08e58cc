"""MODELs whose linears run INT8, built by ComfyUI's own loader: out of a diffusion model file, or of another MODEL."""

import json
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy.model_base import BaseModel, ModelType
from comfy.model_detection import model_config_from_unet, unet_prefix_from_state_dict
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP
from comfy.quant_ops import QuantizedTensor

from ...kernels import BF16, choose_path
from ..comfyui.lazy_tensors import are_copied, whole_state_dict
from ..comfyui.patcher import CALLBACK_KEY, DIFFUSION_MODEL, let_patches_act
from ..deferred.install import defer
from ..files.errors import naming_file
from ..files.holding import held_codes, is_grouped, is_stored, with_joined_codes
from ..files.quant_config import marked_layers
from ..files.reading.checkpoint import read_checkpoint
from ..files.reading.importers import BRANCHES, Checkpoint
from ..host import notices
from ..linears.compile_ahead import compile_linears
from ..linears.file_notes import FOLDED, keep_notes, notes_of, recipe_in
from ..linears.layer_selection import is_quantizable, quantizable_shapes
from ..linears.linear_call import name_linears
from ..linears.patched_weights import show_whole, whole_weights
from ..linears.stored_weights import patch_products
from .load_plan import LoadPlan, checkpoint_plan, floats_where_faster
from .loaded_checks import check_loaded, check_scaled, unscaled_codes
from .memory_choice import AS_STORED, AUTO, CHOICE_KEY, INT8, choose_memory, fits_in_floats
from .operations import int8_operations
from .summary import floats_name

_RUNS_IN = "INT8 DiT runs in {}"
_TAKEN_OFF = {"PixelDiTT2I": "core."}  # prefixes of files, by kind of model, that ComfyUI does not put on again


def load_int8_model(
    path: str,
    kernel: str = "auto",
    branch: str = BRANCHES[0],
    base_path: str | None = None,
    disable_dynamic: bool = False,
    anywhere: bool = False,
    memory: str = INT8,
) -> ModelPatcher:
    """Return a MODEL of a diffusion model file: INT8 as it is, floats, FP8 and GGUF quantized while loading.

    With `memory` AS_STORED, weights in fewer bits that kernels read stay what they are, and become INT8 in front of
    each product; with AUTO, choose_memory decides. `kernel` is one of kernels.KERNEL_CHOICES: a linear whose path is
    bf16 is not INT8 where the whole model fits in bf16, on ComfyUI's default device or with `anywhere` on each of the
    machine. `branch` chooses of a file with two models; the file at `base_path` completes a part of one.
    `disable_dynamic` is ComfyUI's.

    Raises ValueError naming the file for anything that cannot be loaded, RuntimeError where `kernel` demands what the
    card cannot do.
    """
    devices = [comfy.model_management.get_torch_device()]
    devices += comfy.model_management.get_all_torch_devices() if anywhere else []
    path_kind = choose_path(devices[0], kernel).kind  # what cannot run is refused before a file is read for nothing
    checkpoint = read_checkpoint(path, branch, None if base_path is None else partial(_read_base, base_path))
    with naming_file(checkpoint.name):
        notes, supported = notes_of(checkpoint), checkpoint.architecture.supported_inference_dtypes
        dtype = comfy.model_management.unet_manual_cast(None, devices[0], supported)
        if fits := fits_in_floats(checkpoint.tensors, dtype, devices):
            advice = "This MODEL cannot be saved as INT8: set kernel to 'fused int8' to save it."
            weights = ((key.removesuffix(".weight"), tuple(t.shape)) for key, t in checkpoint.tensors.items())
            shapes = {(shape[0], shape[1]) for name, shape in weights if is_quantizable(name, shape)}
            notices.warn_of_fallback("bf16", devices[0], kernel, shapes, _RUNS_IN.format(floats_name(dtype)), advice)
        if fits and path_kind == BF16 and memory == AUTO:
            memory = INT8  # of no account: linears are held in floats
        in_floats = floats_where_faster(kernel, devices, fits)
        choice = choose_memory(memory, checkpoint, dtype, devices[0], in_floats)
        lazy = not disable_dynamic and are_copied(devices[0])
        plan = checkpoint_plan(checkpoint, kernel, dtype, devices[0], in_floats, choice.as_stored, lazy)
        model = build_model(checkpoint.tensors, checkpoint.metadata, plan, disable_dynamic)
    # ComfyUI says only afterwards which device it wants a second MODEL for. It holds weights as the first one does.
    factory = partial(load_int8_model, anywhere=True, memory=AS_STORED if choice.as_stored else INT8)
    model.cached_patcher_init = (factory, (path, kernel, branch, base_path))
    keep_notes(model, notes, plan.unexpected)
    model.set_attachments(CHOICE_KEY, choice)
    return model


def _read_base(path: str) -> Checkpoint:
    base = read_checkpoint(path)
    if recipe_in(base.metadata).get(FOLDED):
        raise ValueError(
            f"base_checkpoint {base.name} cannot complete another file: smoothing factors are folded into its layers. "
            "Name one that was saved with fold switched off"
        )
    return base


def build_model(
    state_dict: dict[str, torch.Tensor],
    metadata: dict[str, str],
    plan: LoadPlan,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """Have ComfyUI's loader build a MODEL whose linears hold what `plan` says, and that warns of a bf16 fallback.

    Raises ValueError for tensors it does not recognise, and naming the first that the model needs and does not get.
    """
    names, operations = list(state_dict), int8_operations(plan)  # the loader empties it
    codes = unscaled_codes(state_dict, marked_layers(state_dict))
    options = {"custom_operations": operations, "dtype": plan.compute_dtype}
    model = comfy.sd.load_diffusion_model_state_dict(
        state_dict, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic
    )
    plan.release()
    if model is None:
        raise ValueError("this is not a diffusion model that this ComfyUI can load")
    check_loaded(model, names, operations, plan)
    check_scaled(model, codes, operations)
    diffusion_model = model.model.diffusion_model
    name_linears(diffusion_model)
    compile_linears(diffusion_model, plan.kernel, plan.compute_dtype, model.load_device)
    model.model.register_state_dict_post_hook(whole_weights)  # hooks add what it holds to other weights
    let_patches_act(model, show_whole)
    if any(is_stored(getattr(module, "weight", None)) for module in diffusion_model.modules()):
        patch_products(model)

    shapes = quantizable_shapes(model)

    def warn(patcher: ModelPatcher) -> None:
        advice = "Set kernel to 'fused int8' on the node that made the model, to use INT8 all the same."
        summary = _RUNS_IN.format(floats_name(patcher.model.get_dtype_inference()))
        notices.warn_of_fallback("bf16", patcher.load_device, plan.kernel, shapes, summary, advice)

    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, warn)
    defer(model)
    return model


def file_metadata(model: BaseModel, widened: bool = False) -> dict[str, str]:
    """Return what ComfyUI cannot see of a BaseModel's architecture in its tensors, as metadata of its file.

    Some families (LTX-Video, Wan) have it in a "config" there, which ComfyUI does not keep: this is what it made of it.
    `widened` says that patches changed how many channels the model reads.
    """
    config = {}
    for name, value in model.model_config.unet_config.items():
        if widened and name in ("in_dim", "in_channels"):
            continue
        with suppress(TypeError):  # of a dtype
            if json.loads(json.dumps(value)) == value:
                config[name] = value
    return {"config": json.dumps({"transformer": config})}


def tensors_of_file(model: BaseModel, state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a BaseModel's file, made of those of its diffusion model.

    Beside them are the marks of how the model predicts, and the few conditioners that ComfyUI loads with it.
    """
    # The class's: a MODEL may refuse ComfyUI's save nodes.
    tensors = type(model).state_dict_for_saving(model, state_dict)
    prefix, own = unet_prefix_from_state_dict(tensors), _TAKEN_OFF.get(type(model).__name__, "")
    return comfy.utils.state_dict_prefix_replace(dict(tensors), {prefix: own}) | _marks(model)


def _marks(model: BaseModel) -> dict[str, torch.Tensor]:
    """Return what a checkpoint of an SDXL says of how it predicts, in tensors that ComfyUI does not write there."""
    settings, latents = model.model_config.sampling_settings, model.latent_format
    marks = {"ztsnr": torch.tensor([])} if settings.get("zsnr") else {}
    if model.model_type == ModelType.V_PREDICTION_EDM:  # CosXL
        sigmas = [name for name in ("sigma_max", "sigma_min") if name in settings]
        marks |= {f"edm_vpred.{name}": torch.tensor([float(settings[name])]) for name in sigmas}
    if type(latents).__name__ == "SDXL_Playground_2_5":
        marks |= {"edm_mean": latents.latents_mean, "edm_std": latents.latents_std}
    return marks


def check_known(model: BaseModel) -> None:
    """Raise ValueError where ComfyUI would not know a model again by the tensors of its file, or how it predicts."""
    parts, all_names = model.diffusion_model, {"remove_duplicate": False}
    held = dict([*parts.named_parameters(**all_names), *parts.named_buffers(**all_names)])
    tensors = tensors_of_file(model, held)
    found = model_config_from_unet(tensors, "", metadata=file_metadata(model))
    if found is None:
        raise ValueError(
            f"ComfyUI would not know a file of this model ({type(model).__name__}) again, so it cannot be quantized or "
            "saved; load the model's own file with Load INT8 DiT, which makes INT8 of it"
        )
    found.model_type(tensors)  # it reads the marks
    _check_alike(*((c.sampling_settings, type(c.latent_format).__name__) for c in (model.model_config, found)))


def _check_alike(*kinds: tuple[Any, ...]) -> None:
    """Raise ValueError unless two models are of one kind."""
    for before, after in zip(*kinds, strict=True):
        if before != after:
            raise ValueError(
                f"the diffusion model by itself would be taken for another kind of model ({after} instead of "
                f"{before}), and its images would be wrong"
            )


def build_like(
    model: BaseModel,
    state_dict: dict[str, torch.Tensor],
    plan: LoadPlan,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """Return a MODEL of the same kind as a BaseModel, from tensors named as its diffusion model's.

    Raises ValueError if ComfyUI takes those for another kind: it may have read from other parts of a checkpoint how the
    model predicts.
    """
    tensors, metadata = tensors_of_file(model, state_dict), file_metadata(model)
    built = build_model(tensors, metadata, plan, disable_dynamic)
    _check_alike(
        *(
            (type(m).__name__, m.model_type, m.model_config.sampling_settings, type(m.latent_format).__name__)
            for m in (model, built.model)
        )
    )
    return built


def rebuild_int8_model(
    model: BaseModel, kernel: str, backup: Mapping[str, Any] = {}, disable_dynamic: bool = False
) -> ModelPatcher:
    """Return a second MODEL with weights of its own, equal to those of a BaseModel of this pack (multi-GPU). `backup`
    is its MODELs': what the weights were that hold patches now."""
    held = whole_state_dict(model.diffusion_model)
    for key, (weight, *_) in backup.items():
        if key.startswith(DIFFUSION_MODEL):
            name = key.removeprefix(DIFFUSION_MODEL)
            held |= weight.state_dict(name) if isinstance(weight, QuantizedTensor) else {name: weight}
    tensors = {key: tensor.to(device="cpu", copy=True) for key, tensor in held.items()}
    dtype = model.get_dtype_inference()
    plan = LoadPlan(kernel, dtype, lambda name, weight, _: held_codes(weight, dtype) if is_grouped(weight) else None)
    rebuilt = build_like(model, with_joined_codes(tensors), plan, disable_dynamic)
    rebuilt.cached_patcher_init = (rebuild_int8_model, (model, kernel, backup))
    return rebuilt
