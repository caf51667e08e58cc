"""What the pack assumes of ComfyUI and comfy-kitchen: a table, checked when the pack is loaded.

It imports nothing of theirs at the top, so that it can say what is missing before anything fails.
"""

import importlib
import importlib.metadata
import inspect
import re
from typing import Any

_OLDEST_KITCHEN = "0.2.26"  # the oldest comfy-kitchen that the pack was tested with; ComfyUI 0.30 asks for it

_NEEDED = {
    "comfy.cli_args": "args",
    "comfy.float": "stochastic_rounding",
    "comfy.ldm.modules.attention": "optimized_attention optimized_attention_masked",
    "comfy.latent_formats": (
        "LatentFormat.latent_dimensions LatentFormat.spacial_downscale_ratio LatentFormat.temporal_downscale_ratio"
    ),
    "comfy.lora": "calculate_shape calculate_weight",
    "comfy.model_base": "BaseModel ModelType",
    "comfy.model_detection": (
        "convert_diffusers_mmdit detect_unet_config(metadata) model_config_from_diffusers_unet "
        "model_config_from_unet(metadata) unet_prefix_from_state_dict"
    ),
    "comfy.model_management": (
        "InterruptProcessingException LoadedModel.model_loaded_memory OOM_EXCEPTION cast_to_device(copy) "
        "cuda_device_context current_loaded_models extra_reserved_memory free_memory get_all_torch_devices "
        "get_free_memory get_torch_device get_total_memory in_training is_device_cpu is_oom minimum_inference_memory "
        "throw_exception_if_processing_interrupted unet_manual_cast"
    ),
    "comfy.model_patcher": (
        "LowVramPatch ModelPatcher.add_callback_with_key ModelPatcher.add_object_patch "
        "ModelPatcher.add_wrapper_with_key ModelPatcher.clone(model_override) "
        "ModelPatcher.unpatch_model(unpatch_weights) get_key_weight"
    ),
    "comfy.ops": (
        "CastWeightBiasOp cast_bias_weight(dtype,device,bias_dtype,offloadable,compute_dtype,want_requant) "
        "pick_operations(load_device,model_config) run_every_op uncast_bias_weight"
    ),
    "comfy.patcher_extension": "CallbacksMP WrappersMP get_wrappers_with_key",
    "comfy.quant_ops": (
        "QUANT_ALGOS QuantizedLayout QuantizedTensor.params QuantizedTensor.requantize_from_float get_layout_class "
        "register_layout_class"
    ),
    "comfy.sample": "fix_empty_latent_channels prepare_noise",
    "comfy.samplers": "CFGGuider calculate_sigmas sampler_object",
    "comfy.sd": "load_diffusion_model_state_dict(model_options,metadata,disable_dynamic)",
    "comfy.utils": (
        "ProgressBar.update_absolute(preview) calculate_parameters convert_old_quants(metadata) get_attr "
        "load_torch_file(return_metadata) state_dict_prefix_replace(filter_keys) string_to_seed"
    ),
    "comfy_execution.graph": "DynamicPrompt.get_node",
    "comfy_execution.graph_utils": "is_link",
    "comfy_execution.utils": "get_executing_context",
    "comfy_execution.validation": "validate_node_input",
    "comfy_kitchen": "int8_linear",
    "comfy_kitchen.tensor": "BaseLayoutParams",
    "folder_paths": (
        "add_model_folder_path folder_names_and_paths get_filename_list get_folder_paths get_full_path "
        "get_full_path_or_raise get_output_directory get_save_image_path models_dir recursive_search"
    ),
}
"""By module the names without which the pack cannot run, with the arguments that it gives by name."""

_FORWARD = "disable_weight_init.Linear.forward"
LINEAR_ARGUMENTS = ("input_act", "act_weight", "act_eps", "residual", "residual_scale")
"""What INT8 layers follow behind the input, in the order of ComfyUI's forward: another would change what a call means.
Of ComfyUI behind 0.39 single files could be read, and no Linear: other packs show what it is called with."""

_NOT_LAZY = "with dynamic VRAM, weights in fewer bits are kept in the host's memory as INT8, too"
_NO_IDEOGRAM4 = "files of Transformer Lab are refused"
_INSTEAD = {
    f"comfy.ops:{_FORWARD}": "a call with it is refused by INT8 layers: update INT8 DiT",
    "comfy.ops:_eager_input_act": "INT8 layers refuse activations other than gelu_tanh, swiglu and rms_norm",
    "comfy.weight_adapter.lora:LoRAAdapter": (
        "LoRAs on streamed and stored weights are added to the weight before each product, which is slower"
    ),
    "comfy.hooks:EnumHookMode.MinVram": "LoRA hooks may not act on INT8 layers",
    "comfy.multigpu:create_multigpu_deepclones": "a quantized MODEL runs on one GPU",
    "comfy_api.torch_helpers.torch_compile:COMPILE_KEY": "a MODEL under torch.compile is not recognised",
    "comfy.ldm.modules.attention:attention_pytorch": "attention set to auto runs as ComfyUI's",
    "comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel": _NO_IDEOGRAM4,
    "comfy.supported_models:Ideogram4.unet_extra_config": _NO_IDEOGRAM4,
    "comfy.model_detection:count_blocks": _NO_IDEOGRAM4,
    "comfy.model_prefetch:pause_malloc_graph": (
        "ComfyUI's compiler may end the process when a MiniMax runs first, or is recorded"
    ),
    "comfy.memory_management:TensorFileSlice": "with dynamic VRAM, GGUF files are read through their mapping",
    "comfy.memory_management:read_tensor_file_slice_into": "with dynamic VRAM, files are read through their mapping",
    "comfy.memory_management:vram_aligned_size": _NOT_LAZY,
    "comfy.memory_management:interpret_gathered_like": _NOT_LAZY,
    "comfy.model_management:cast_to_gathered": _NOT_LAZY,
    "comfy.model_patcher:CoreModelPatcher": _NOT_LAZY,
    "comfy.model_patcher:ModelPatcherDynamic": _NOT_LAZY,
    "latent_preview:get_previewer": "calibration shows no previews",
}
"""Other names that the pack relies on, and what it does where one is missing."""

_SINCE = {"comfy.ops:_eager_input_act": (0, 40), "comfy.model_prefetch:pause_malloc_graph": (0, 38)}
"""The ComfyUI that brought a name; an older one lacks nothing."""

ASSUMPTIONS = *(f"{module}:{name}" for module, names in _NEEDED.items() for name in names.split()), *_INSTEAD


def check_comfyui() -> list[str]:
    """Return the names that this ComfyUI lacks and the pack can do without, each with what it does instead.

    Raises ImportError, in one line that says what to do, for what it cannot do without.
    """
    version = tuple(map(int, re.findall(r"\d+", comfyui_version())))
    expected = [name for name in ASSUMPTIONS if not version or version >= _SINCE.get(name, ())]
    missing = {name: obstacle for name in expected if (obstacle := _obstacle(name))}
    needed = [obstacle for name, obstacle in missing.items() if name not in _INSTEAD]
    if needed:
        try:
            kitchen = importlib.metadata.version("comfy-kitchen")
        except importlib.metadata.PackageNotFoundError:
            kitchen = "not installed"
        raise ImportError(
            f"INT8 DiT cannot run on this ComfyUI ({comfyui_version()}, comfy-kitchen {kitchen}): it lacks "
            f"{', '.join(needed)}. Update ComfyUI and this pack; comfy-kitchen must be {_OLDEST_KITCHEN} or newer "
            f'(`pip install -U "comfy-kitchen>={_OLDEST_KITCHEN}"` with the Python of ComfyUI)'
        )
    return [f"{obstacle} ({_INSTEAD[name]})" for name, obstacle in missing.items()]


def _obstacle(name: str) -> str:
    """What is missing of an assumption, in a few words; "" where nothing is."""
    name, _, keywords = name.removesuffix(")").partition("(")
    module, _, path = name.partition(":")
    said = name.replace(":", ".")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return said
    if not keywords and path != _FORWARD:
        return ""
    parameters = inspect.signature(found).parameters
    if path == _FORWARD:
        named = [name for name, p in parameters.items() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        more = [name for name in named if name not in ("self", "input", *LINEAR_ARGUMENTS)]
        return f"support for {', '.join(more)} of {said}" if more else ""
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return ""
    lacking = [keyword for keyword in keywords.split(",") if keyword not in parameters]
    return f"{', '.join(lacking)} of {said}" if lacking else ""


def comfyui_version() -> str:
    """The version of the ComfyUI that runs."""
    try:
        return importlib.import_module("comfyui_version").__version__
    except (ImportError, AttributeError):
        return "of an unknown version"
