"""What the pack assumes of the inside of ComfyUI and comfy-kitchen: a table, checked when the pack is loaded.

It imports nothing of theirs at the top, so that it can say what is missing before anything fails.
"""

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from . import classes

_OLDEST_KITCHEN = "0.2.26"  # the oldest comfy-kitchen that the pack was tested with; ComfyUI 0.30 asks for it


@dataclass(frozen=True)
class Assumption:
    """A name of theirs that the pack relies on.

    Attributes:
        name: its module, a colon, and where it is in there.
        assumed: what it is taken for.
        instead: what the pack does where it is missing; empty where it cannot run.
        keywords: arguments that it is given by name.
        known: the arguments that the pack follows, where others would change what it means; empty where that is no
            matter.
        since: the ComfyUI that brought it; an older one lacks nothing.
    """

    name: str
    assumed: str
    instead: str = ""
    keywords: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    since: tuple[int, ...] = ()

    def obstacle(self) -> str | None:
        """What is missing of it, in a few words; None where nothing is."""
        module, _, path = self.name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in filter(None, path.split(".")):
                found = getattr(found, part)
        except (ImportError, AttributeError):
            return self.name.replace(":", ".")
        if not self.keywords and not self.known:
            return None
        parameters = inspect.signature(found).parameters
        named = [name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        if self.known and (more := [name for name in named if name not in self.known]):
            return f"support for {', '.join(more)} of {self.name.replace(':', '.')}"
        if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
            return None
        lacking = [keyword for keyword in self.keywords if keyword not in parameters]
        return f"{', '.join(lacking)} of {self.name.replace(':', '.')}" if lacking else None


_CAST = ("dtype", "device", "bias_dtype", "offloadable", "compute_dtype", "want_requant")
_LINEAR = ("self", "input", "input_act", "act_weight", "act_eps", "residual", "residual_scale")
_PATCHER = "comfy.model_patcher:ModelPatcher"
_MANAGEMENT = "comfy.model_management"
_DETECTION = "comfy.model_detection"

ASSUMPTIONS = (
    # quantized.py
    Assumption("comfy.quant_ops:QuantizedTensor", "carries plain data and parameters (_qdata, _params, _layout_cls)"),
    Assumption("comfy.quant_ops:QuantizedTensor.requantize_from_float", "other values in the same form"),
    Assumption("comfy.quant_ops:QuantizedLayout", "what a layout of this pack derives from"),
    Assumption("comfy.quant_ops:register_layout_class", "(name, class): QuantizedTensors find their layout by name"),
    Assumption("comfy.quant_ops:get_layout_class", "(name) -> class, with its Params"),
    Assumption("comfy.quant_ops:QUANT_ALGOS", "the formats that files may name, each with comfy_tensor_layout"),
    Assumption("comfy_kitchen.tensor:BaseLayoutParams", "scale, orig_dtype, orig_shape"),
    Assumption("comfy_kitchen:int8_linear", "(rows, weight, scale, bias, dtype, convrot=, convrot_groupsize=)"),
    # layers.py
    Assumption("comfy.ops:CastWeightBiasOp", "the base of all layers whose weights ComfyUI moves"),
    Assumption("comfy.ops:pick_operations", "the layer classes of a model", keywords=("load_device", "model_config")),
    Assumption("comfy.ops:cast_bias_weight", "a layer's weight, bias and stream where it computes", keywords=_CAST),
    Assumption("comfy.ops:uncast_bias_weight", "(layer, weight, bias, stream) gives them back"),
    Assumption("comfy.ops:run_every_op", "hears the cancel button"),
    # Of ComfyUI behind 0.39 single files could be read, and no Linear: other packs show what it is called with.
    Assumption(
        "comfy.ops:disable_weight_init.Linear.forward",
        "the arguments of a linear",
        "a call with it is refused by INT8 layers: update INT8 DiT",
        known=_LINEAR,
    ),
    Assumption(
        "comfy.ops:_eager_input_act",
        "(x, activation, weight, eps) -> the activated input; KeyError for one that it does not know",
        "INT8 layers refuse activations other than gelu_tanh, swiglu and rms_norm",
        since=(0, 40),
    ),
    # patcher.py, residency.py, compiling.py
    Assumption(_PATCHER, "patches, backup, object_patches, model_options and their UUIDs"),
    Assumption(f"{_PATCHER}.clone", "a clone around another BaseModel", keywords=("model_override",)),
    Assumption(f"{_PATCHER}.add_object_patch", "(name, value): in place while the MODEL is loaded"),
    Assumption(f"{_PATCHER}.add_callback_with_key", "(kind, key, function): called at that moment"),
    Assumption(f"{_PATCHER}.add_wrapper_with_key", "(kind, key, function): called around that function"),
    Assumption("comfy.sd:CLIP.clone", "() -> another CLIP; patcher is its ModelPatcher, whose is_clip is True"),
    Assumption("comfy.model_patcher:LowVramPatch", "key and patches: a function that patches a weight in use"),
    Assumption("comfy.model_patcher:get_key_weight", "(model, key) -> the weight first"),
    Assumption("comfy.patcher_extension:CallbacksMP", "ON_LOAD, ON_DETACH, ON_PRE_RUN, ON_CLEANUP, ON_PREPARE_STATE"),
    Assumption("comfy.patcher_extension:WrappersMP", "APPLY_MODEL, DIFFUSION_MODEL"),
    Assumption("comfy.patcher_extension:get_all_wrappers", "(kind, transformer_options) -> functions"),
    Assumption("comfy.patcher_extension:get_wrappers_with_key", "(kind, key, transformer_options) -> functions"),
    Assumption("comfy.lora:calculate_weight", "(patches, weight, key) -> the patched weight"),
    Assumption("comfy.float:stochastic_rounding", "(weight, dtype, seed=): as ComfyUI rounds patched weights"),
    Assumption(
        "comfy.weight_adapter.lora:LoRAAdapter",
        "weights: up, down, alpha, then None for a plain LoRA",
        "LoRAs on streamed and stored weights are added to the weight before each product, which is slower",
    ),
    Assumption(
        "comfy.hooks:EnumHookMode.MinVram", "hooks patch weights in place", "LoRA hooks may not act on INT8 layers"
    ),
    Assumption(
        "comfy.multigpu:create_multigpu_deepclones", "(model, count) -> MODEL", "a quantized MODEL runs on one GPU"
    ),
    Assumption(
        "comfy_api.torch_helpers.torch_compile:COMPILE_KEY",
        "the key of torch.compile's wrappers",
        "a MODEL under torch.compile is not recognised",
    ),
    # attention.py
    Assumption(
        "comfy.ldm.modules.attention:AttentionTensorContainer",
        "take(): a tensor that its last reader owns",
        "blocks of layers that choose their attention run as ComfyUI's",
        since=(0, 33),
    ),
    Assumption("comfy.ldm.modules.attention:optimized_attention", "(q, k, v, heads, mask=, ...) -> output"),
    Assumption("comfy.ldm.modules.attention:optimized_attention_masked", "the same, with a mask"),
    Assumption(
        "comfy.ldm.modules.attention:attention_pytorch",
        "PyTorch's attention, which the default is where nothing else was chosen",
        "attention set to auto runs as ComfyUI's",
    ),
    Assumption("comfy.utils:get_attr", "(model, path) -> the part of a model"),
    # loading.py
    Assumption(
        "comfy.sd:load_diffusion_model_state_dict",
        "builds a MODEL with custom_operations",
        keywords=("model_options", "metadata", "disable_dynamic"),
    ),
    Assumption("comfy.utils:load_torch_file", "(path) -> tensors, metadata", keywords=("return_metadata",)),
    Assumption("comfy.utils:convert_old_quants", "marks of older files", keywords=("metadata",)),
    Assumption("comfy.utils:calculate_parameters", "the number of values in tensors"),
    Assumption("comfy.supported_models_base:BASE", "an architecture: unet_config, sampling_settings, dtypes"),
    Assumption("comfy.model_base:BaseModel", "diffusion_model, model_config, model_type, latent_format"),
    Assumption("comfy.utils:state_dict_prefix_replace", "(tensors, {prefix: prefix})", keywords=("filter_keys",)),
    Assumption(f"{_DETECTION}:model_config_from_unet", "(tensors, prefix) -> architecture", keywords=("metadata",)),
    Assumption(f"{_DETECTION}:detect_unet_config", "(tensors, prefix) -> settings by name", keywords=("metadata",)),
    Assumption(f"{_DETECTION}:model_config_from_diffusers_unet", "(tensors) -> architecture"),
    Assumption(f"{_DETECTION}:convert_diffusers_mmdit", "(tensors, prefix) -> renamed tensors"),
    Assumption(f"{_DETECTION}:unet_prefix_from_state_dict", "(tensors) -> prefix"),
    Assumption(
        "comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel",
        "built on no device it shows all shapes",
        "files of Transformer Lab are refused",
    ),
    Assumption("comfy.supported_models:Ideogram4.unet_extra_config", "its sizes", "as above"),
    Assumption(f"{_DETECTION}:count_blocks", "(names, pattern) -> blocks", "as above"),
    Assumption("comfy.ops:disable_weight_init", "layer classes without values", "as above"),
    # memory.py
    Assumption(
        "comfy.model_prefetch:pause_malloc_graph",
        "() -> a context: memory asked for inside may outlive a block's call",
        "ComfyUI's compiler may end the process when a MiniMax runs first, or is recorded",
        since=(0, 38),
    ),
    Assumption(f"{_MANAGEMENT}:InterruptProcessingException", "the user has cancelled"),
    Assumption(f"{_MANAGEMENT}:throw_exception_if_processing_interrupted", "raises it"),
    Assumption(f"{_MANAGEMENT}:OOM_EXCEPTION", "memory has run out"),
    Assumption(f"{_MANAGEMENT}:get_total_memory", "(device) -> bytes"),
    Assumption(f"{_MANAGEMENT}:minimum_inference_memory", "bytes kept free of weights"),
    Assumption(f"{_MANAGEMENT}:is_device_cpu", "(device)"),
    Assumption(f"{_MANAGEMENT}:get_torch_device", "the default device"),
    Assumption(f"{_MANAGEMENT}:get_all_torch_devices", "every device"),
    Assumption(f"{_MANAGEMENT}:free_memory", "(bytes, device) unloads models"),
    Assumption(f"{_MANAGEMENT}:cast_to_device", "(tensor, device, dtype)", keywords=("copy",)),
    Assumption(f"{_MANAGEMENT}:unet_manual_cast", "(None, device, dtypes) -> the dtype to compute in"),
    Assumption(f"{_MANAGEMENT}:cuda_device_context", "(device): the GPU that kernels are launched on"),
    Assumption(f"{_MANAGEMENT}:in_training", "whether a node trains a model"),
    # execution.py, folders.py, sampling.py
    Assumption("comfy_execution.utils:get_executing_context", "prompt_id and node_id of the node that runs"),
    Assumption("comfy_execution.graph_utils:is_link", "whether an input comes from another node"),
    Assumption("comfy_execution.graph:DynamicPrompt.get_node", "(id) -> the node, with its inputs"),
    Assumption("comfy_execution.validation:validate_node_input", "(output type, input type) -> whether they link"),
    Assumption("comfy.utils:ProgressBar.update_absolute", "(steps)", keywords=("preview",)),
    Assumption("comfy.utils:string_to_seed", "(key) -> seed"),
    Assumption("comfy.cli_args:args", "disable_metadata"),
    Assumption("folder_paths:models_dir", "where models are"),
    Assumption("folder_paths:folder_names_and_paths", "kind -> folders, extensions"),
    Assumption("folder_paths:add_model_folder_path", "(kind, folder)"),
    Assumption("folder_paths:get_folder_paths", "(kind) -> folders"),
    Assumption("folder_paths:get_filename_list", "(kind) -> names"),
    Assumption("folder_paths:get_full_path", "(kind, name) -> path or None"),
    Assumption("folder_paths:get_full_path_or_raise", "(kind, name) -> path"),
    Assumption("folder_paths:get_output_directory", "the output folder"),
    Assumption("folder_paths:get_save_image_path", "(prefix, folder) -> folder, beginning of the name, ..."),
    Assumption("folder_paths:recursive_search", "(folder, excluded) -> names first"),
    Assumption("comfy.samplers:CFGGuider", "samples a MODEL: inner_set_conds, set_conds, set_cfg, sample"),
    Assumption("comfy.samplers:calculate_sigmas", "(model_sampling, scheduler, steps) -> sigmas"),
    Assumption("comfy.samplers:sampler_object", "(name) -> SAMPLER"),
    Assumption("comfy.sample:fix_empty_latent_channels", "(model, samples, ratios) -> samples"),
    Assumption("comfy.sample:prepare_noise", "(samples, seed, indices) -> noise"),
    Assumption(
        "latent_preview:get_previewer", "(device, latent format) -> pictures of steps", "calibration shows no previews"
    ),
)


def lacking() -> Iterator[tuple[Assumption, str]]:
    """The assumptions that do not hold here, each with what is missing."""
    version = tuple(map(int, re.findall(r"\d+", comfyui_version())))
    for assumption in ASSUMPTIONS:
        if version and version < assumption.since:
            continue
        obstacle = assumption.obstacle()
        if obstacle is not None:
            yield assumption, obstacle


def check_comfyui() -> list[str]:
    """What this ComfyUI lacks of what the pack can do without, each with what it does instead.

    Raises ImportError, in one line that says what to do, for what it cannot do without.
    """
    missing = list(lacking())
    needed = [obstacle for assumption, obstacle in missing if not assumption.instead]
    if needed:
        raise ImportError(
            f"INT8 DiT cannot run on this ComfyUI ({comfyui_version()}, comfy-kitchen {_kitchen()}): it lacks "
            f"{', '.join(needed)}. Update ComfyUI and this pack; comfy-kitchen must be {_OLDEST_KITCHEN} or newer "
            f'(`pip install -U "comfy-kitchen>={_OLDEST_KITCHEN}"` with the Python of ComfyUI)'
        )
    return [f"{obstacle} ({assumption.instead})" for assumption, obstacle in missing]


def comfyui_version() -> str:
    """The version of the ComfyUI that runs."""
    try:
        return importlib.import_module("comfyui_version").__version__
    except (ImportError, AttributeError):
        return "of an unknown version"


def _kitchen() -> str:
    try:
        return importlib.metadata.version("comfy-kitchen")
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
