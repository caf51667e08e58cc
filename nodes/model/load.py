"""Building a MODEL whose linears run INT8: from a checkpoint file, or from a state dict made out of another MODEL."""

import json
import os

import comfy.model_detection
import comfy.model_management
import comfy.sd
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher
from comfy.patcher_extension import CallbacksMP

from ...kernels import ComputePath, choose_path, naming_layer, quantize_weight
from ..files.checkpoint import holds_int8, read_checkpoint
from ..host import notices
from .input_groups import share_inputs
from .int8_weight import int8_weight
from .layer_selection import is_quantizable
from .operations import ConvertLayer, int8_operations, leave_layer
from .patched_weights import float_weight

CALLBACK_KEY = "int8_dit"
FOLDED_CALLBACK_KEY = "int8_dit_folded"
QUANTIZATION_BYTES = 12
"""Device memory that quantizing a layer takes, per weight: 5 measured for the largest of Ideogram 4, twice that while a LoRA
is patched into it."""
RECIPE_KEY = "int8_dit_recipe"
"""How a model was quantized, as JSON: an attachment of the MODEL and an entry of the file's metadata."""
_PREFIXES = ("model.diffusion_model.", "model.model.", "model.", "")
"""What ComfyUI puts before the names of a diffusion model's tensors in a checkpoint, by kind of model."""
FOLDED = "folded"
"""The entry of a saved recipe that says whether smoothing factors were folded into the layers before."""


def load_int8_model(path: str, kernel: str = "auto", disable_dynamic: bool = False) -> ModelPatcher:
    """A MODEL from a diffusion model file: INT8 files as they are, float and FP8 files quantized while loading.

    `kernel` is one of kernels.KERNEL_CHOICES; `disable_dynamic` is ComfyUI's, for loads without dynamic VRAM. Where the
    path is bf16 and the whole model fits the device in bf16, no weight is INT8.

    Raises ValueError naming the file for anything that cannot be loaded, RuntimeError where `kernel` demands what the
    card cannot do.
    """
    device = comfy.model_management.get_torch_device()
    compute = choose_path(device, kernel)
    state_dict, metadata = read_checkpoint(path)
    compute_dtype = detect_compute_dtype(state_dict, metadata, os.path.basename(path))
    once = compute.kind == "bf16" and _fits(state_dict, compute_dtype, device)

    converter: ConvertLayer = leave_layer
    if not holds_int8(state_dict) and not once:
        names = [k.removesuffix(".weight") for k in state_dict if k.endswith(".weight")]
        sizes = [w.numel() for name in names if is_quantizable(name, (w := state_dict[f"{name}.weight"]).shape)]
        make_room(device, QUANTIZATION_BYTES * max(sizes, default=0))
        converter = _quantizing_converter(device, compute_dtype, LayerProgress(len(sizes)))
    operations = int8_operations(compute, compute_dtype, converter, dequantize_once=once)
    try:
        model = build_model(state_dict, metadata, operations, compute_dtype, compute, disable_dynamic)
    except ValueError as error:
        raise ValueError(f"{os.path.basename(path)}: {error}") from error
    model.cached_patcher_init = (load_int8_model, (path, kernel))
    _keep_recipe(model, metadata)
    return model


def build_model(
    state_dict: dict[str, torch.Tensor],
    metadata: dict[str, str],
    operations: type,
    compute_dtype: torch.dtype,
    compute: ComputePath,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """ComfyUI's loader, plus the warning for a bf16 fallback. Raises ValueError for tensors it does not recognise."""
    options = {"custom_operations": operations, "dtype": compute_dtype}
    model = comfy.sd.load_diffusion_model_state_dict(
        state_dict, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic
    )
    # A conversion may hold the model it reads from, which need not live as long as this one.
    operations.convert_layer = staticmethod(leave_layer)
    if model is None:
        raise ValueError("this is not a diffusion model that this ComfyUI can load")
    share_inputs(model.model.diffusion_model)
    if compute.fallback:
        add_fallback_warning(model, compute)
    return model


def as_file(model: torch.nn.Module, state_dict: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A diffusion model file's tensors, made of those of `model.diffusion_model`, a ComfyUI BaseModel's.

    Beside them are the marks of how the model predicts, and the few conditioners that ComfyUI loads with it.
    """
    tensors = model.state_dict_for_saving(state_dict)
    if model.model_config.sampling_settings.get("zsnr"):
        tensors["ztsnr"] = torch.tensor([])
    prefix = next(prefix for prefix in _PREFIXES if any(key.startswith(prefix) for key in tensors))
    return comfy.utils.state_dict_prefix_replace(tensors, {prefix: ""})


def file_metadata(model: torch.nn.Module) -> dict[str, str]:
    """What ComfyUI needs to know of a BaseModel's architecture and cannot see in its tensors, as metadata of its file.

    Some families (LTX-Video, Wan) have it in a "config" there, which ComfyUI does not keep: this is what it made of it.
    """
    config = {}
    for name, value in model.model_config.unet_config.items():
        try:
            if json.loads(json.dumps(value)) == value:
                config[name] = value
        except TypeError:  # a dtype
            pass
    return {"config": json.dumps({"transformer": config})}


def build_like(
    model: torch.nn.Module,
    state_dict: dict[str, torch.Tensor],
    operations: type,
    compute: ComputePath,
    disable_dynamic: bool = False,
) -> ModelPatcher:
    """A MODEL of the same kind as `model`, a BaseModel, from tensors named as its diffusion model's.

    Raises ValueError if ComfyUI takes those for another kind: it may have read from other parts of a checkpoint how the
    model predicts.
    """
    tensors, dtype = as_file(model, state_dict), model.get_dtype_inference()
    built = build_model(tensors, file_metadata(model), operations, dtype, compute, disable_dynamic)
    for before, after in zip(_kind(model), _kind(built.model), strict=True):
        if before != after:
            raise ValueError(
                f"the diffusion model by itself would be taken for another kind of model ({after} instead of {before}), and "
                "its images would be wrong"
            )
    return built


def _kind(model: torch.nn.Module) -> tuple[object, ...]:
    """What decides how a BaseModel is sampled, apart from its weights."""
    return (
        type(model).__name__,
        model.model_type,
        model.model_config.sampling_settings,
        type(model.latent_format).__name__,
    )


def rebuild_int8_model(model: torch.nn.Module, kernel: str, disable_dynamic: bool = False) -> ModelPatcher:
    """A second MODEL with weights of its own, equal to those of `model`, a BaseModel this pack built (multi-GPU clones)."""
    tensors = {key: tensor.to(device="cpu", copy=True) for key, tensor in model.diffusion_model.state_dict().items()}
    compute = choose_path(comfy.model_management.get_torch_device(), kernel)
    operations = int8_operations(compute, model.get_dtype_inference())
    rebuilt = build_like(model, tensors, operations, compute, disable_dynamic)
    rebuilt.cached_patcher_init = (rebuild_int8_model, (model, kernel))
    return rebuilt


def add_fallback_warning(model: ModelPatcher, compute: ComputePath) -> None:
    """Warn once per run, when the model first samples, that it runs in bf16 and why."""

    def warn(patcher: ModelPatcher) -> None:
        notices.warn_once_per_run(
            "INT8 DiT runs in bf16",
            f"{compute.reason}. Set the node's kernel widget to 'fused int8' to use INT8 all the same.",
        )

    model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, CALLBACK_KEY, warn)


def _keep_recipe(model: ModelPatcher, metadata: dict[str, str]) -> None:
    """Let a loaded MODEL know how it was quantized. What is no JSON object is not a recipe."""
    try:
        recipe = json.loads(metadata.get(RECIPE_KEY, "null"))
    except ValueError:
        return
    if not isinstance(recipe, dict):
        return
    model.set_attachments(RECIPE_KEY, json.dumps(recipe))
    if recipe.get(FOLDED):
        model.add_callback_with_key(CallbacksMP.ON_PRE_RUN, FOLDED_CALLBACK_KEY, warn_of_patches_on_folded)


def recipe_of(model: ModelPatcher) -> dict[str, object]:
    """How a MODEL was quantized; empty where it is not known."""
    return json.loads(model.get_attachment(RECIPE_KEY) or "{}")


def warn_of_patches_on_folded(model: ModelPatcher) -> None:
    """Warn, once per run, if weights are patched (LoRA) in a MODEL whose weights are not in the original's basis."""
    if model.patches and recipe_of(model).get(FOLDED):
        notices.warn_once_per_run(
            "LoRA on a folded INT8 file",
            "the smoothing factors of this file are folded into its weights, so that a LoRA made for the original model comes "
            "out wrong. Use an INT8 file saved with fold switched off.",
        )


def detect_compute_dtype(state_dict: dict[str, torch.Tensor], metadata: dict[str, str], name: str) -> torch.dtype:
    """The dtype ComfyUI computes this model in on this device. Raises ValueError if it is no diffusion model it knows."""
    config = comfy.model_detection.model_config_from_unet(state_dict, "", metadata=metadata)
    if config is None:
        converted = comfy.model_detection.convert_diffusers_mmdit(dict(state_dict), "")
        if converted is not None:
            config = comfy.model_detection.model_config_from_unet(converted, "")
        else:
            config = comfy.model_detection.model_config_from_diffusers_unet(state_dict)
    if config is None:
        raise ValueError(
            f"{name} is not a diffusion model that this ComfyUI knows (a text encoder, VAE or LoRA, perhaps?)"
        )
    device = comfy.model_management.get_torch_device()
    return comfy.model_management.unet_manual_cast(None, device, config.supported_inference_dtypes)


def make_room(device: torch.device, needed: int) -> None:
    """Let ComfyUI unload what it must for `needed` bytes of work on a GPU."""
    if not comfy.model_management.is_device_cpu(device):
        comfy.model_management.free_memory(needed, device)


class LayerProgress:
    """ComfyUI's progress bar and cancel button for work done layer by layer."""

    def __init__(self, total: int) -> None:
        self._bar = comfy.utils.ProgressBar(max(1, total))

    def step(self) -> None:
        """One layer is done. Raises ComfyUI's interrupt exception when the user cancelled."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar.update(1)


def _quantizing_converter(device: torch.device, dtype: torch.dtype, progress: LayerProgress) -> ConvertLayer:
    """Plain per-channel quantization of every layer the rule selects, computed on `device`, kept in host memory."""

    def convert(name: str, weight: torch.Tensor, pre_quant_scale: torch.Tensor | None) -> torch.Tensor | None:
        if not is_quantizable(name, weight.shape):
            return None
        with naming_layer(name):
            q, scale = quantize_weight(float_weight(weight.to(device=device), pre_quant_scale))
        progress.step()
        return int8_weight(q.cpu(), scale.cpu(), dtype)

    return convert


def _fits(state_dict: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all weights fit the device in `dtype` and leave ComfyUI what it reserves for inference."""
    needed = comfy.utils.calculate_parameters(state_dict) * dtype.itemsize
    reserved = comfy.model_management.minimum_inference_memory()
    return needed + reserved <= comfy.model_management.get_total_memory(device)
