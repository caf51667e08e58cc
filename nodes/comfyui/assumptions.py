"""What the pack assumes of ComfyUI and comfy-kitchen: a table, checked when the pack is loaded.

It imports nothing of theirs at the top, so that it can say what is missing before anything fails.
"""

import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_OLDEST_KITCHEN = "0.2.26"  # the oldest comfy-kitchen that the pack was tested with; ComfyUI 0.30 asks for it


@dataclass(frozen=True)
class Assumption:
    """A name of theirs that the pack relies on.

    Attributes:
        name: its module, a colon, and where it is in there.
        instead: what the pack does where it is missing; empty where it cannot run.
        keywords: arguments that it is given by name.
        known: the arguments that the pack follows, where others would change what it means; empty where that is no
            matter.
        since: the ComfyUI that brought it; an older one lacks nothing.
    """

    name: str
    instead: str = ""
    keywords: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    since: tuple[int, ...] = ()

    def obstacle(self) -> str | None:
        """The missing part, in a few words; None where nothing is missing."""
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


# Without these the pack cannot run.
_NEEDED = {
    "comfy.cli_args": "args",
    "comfy.float": "stochastic_rounding",
    "comfy.ldm.modules.attention": "optimized_attention optimized_attention_masked",
    "comfy.latent_formats": (
        "LatentFormat.latent_dimensions LatentFormat.spacial_downscale_ratio LatentFormat.temporal_downscale_ratio"
    ),
    "comfy.lora": "calculate_weight",
    "comfy.model_base": "BaseModel",
    "comfy.model_detection": "convert_diffusers_mmdit model_config_from_diffusers_unet unet_prefix_from_state_dict",
    "comfy.model_management": (
        "InterruptProcessingException LoadedModel.model_loaded_memory OOM_EXCEPTION cuda_device_context "
        "current_loaded_models extra_reserved_memory free_memory get_all_torch_devices get_free_memory "
        "get_torch_device get_total_memory in_training is_device_cpu minimum_inference_memory "
        "throw_exception_if_processing_interrupted unet_manual_cast"
    ),
    "comfy.model_patcher": (
        "LowVramPatch ModelPatcher.add_callback_with_key ModelPatcher.add_object_patch "
        "ModelPatcher.add_wrapper_with_key get_key_weight"
    ),
    "comfy.ops": "CastWeightBiasOp run_every_op uncast_bias_weight",
    "comfy.patcher_extension": "CallbacksMP WrappersMP get_wrappers_with_key",
    "comfy.quant_ops": (
        "QUANT_ALGOS QuantizedLayout QuantizedTensor.params QuantizedTensor.requantize_from_float get_layout_class "
        "register_layout_class"
    ),
    "comfy.sample": "fix_empty_latent_channels prepare_noise",
    "comfy.samplers": "CFGGuider calculate_sigmas sampler_object",
    "comfy.utils": "calculate_parameters get_attr string_to_seed",
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
_CAST = ("dtype", "device", "bias_dtype", "offloadable", "compute_dtype", "want_requant")
_LINEAR = ("self", "input", "input_act", "act_weight", "act_eps", "residual", "residual_scale")
_LOAD = ("model_options", "metadata", "disable_dynamic")
_NO_IDEOGRAM4 = "files of Transformer Lab are refused"

ASSUMPTIONS = (
    *(Assumption(f"{module}:{name}") for module, names in _NEEDED.items() for name in names.split()),
    Assumption("comfy.model_detection:detect_unet_config", keywords=("metadata",)),
    Assumption("comfy.model_detection:model_config_from_unet", keywords=("metadata",)),
    Assumption("comfy.model_management:cast_to_device", keywords=("copy",)),
    Assumption("comfy.model_patcher:ModelPatcher.clone", keywords=("model_override",)),
    Assumption("comfy.ops:cast_bias_weight", keywords=_CAST),
    Assumption("comfy.ops:pick_operations", keywords=("load_device", "model_config")),
    Assumption("comfy.sd:load_diffusion_model_state_dict", keywords=_LOAD),
    Assumption("comfy.utils:ProgressBar.update_absolute", keywords=("preview",)),
    Assumption("comfy.utils:convert_old_quants", keywords=("metadata",)),
    Assumption("comfy.utils:load_torch_file", keywords=("return_metadata",)),
    Assumption("comfy.utils:state_dict_prefix_replace", keywords=("filter_keys",)),
    # Of ComfyUI behind 0.39 single files could be read, and no Linear: other packs show what it is called with.
    Assumption(
        "comfy.ops:disable_weight_init.Linear.forward",
        "a call with it is refused by INT8 layers: update INT8 DiT",
        known=_LINEAR,
    ),
    Assumption(
        "comfy.ops:_eager_input_act",
        "INT8 layers refuse activations other than gelu_tanh, swiglu and rms_norm",
        since=(0, 40),
    ),
    Assumption(
        "comfy.weight_adapter.lora:LoRAAdapter",
        "LoRAs on streamed and stored weights are added to the weight before each product, which is slower",
    ),
    Assumption("comfy.hooks:EnumHookMode.MinVram", "LoRA hooks may not act on INT8 layers"),
    Assumption("comfy.multigpu:create_multigpu_deepclones", "a quantized MODEL runs on one GPU"),
    Assumption("comfy_api.torch_helpers.torch_compile:COMPILE_KEY", "a MODEL under torch.compile is not recognised"),
    Assumption("comfy.ldm.modules.attention:attention_pytorch", "attention set to auto runs as ComfyUI's"),
    Assumption("comfy.ldm.ideogram4.model:Ideogram4Transformer2DModel", _NO_IDEOGRAM4),
    Assumption("comfy.supported_models:Ideogram4.unet_extra_config", _NO_IDEOGRAM4),
    Assumption("comfy.model_detection:count_blocks", _NO_IDEOGRAM4),
    Assumption(
        "comfy.model_prefetch:pause_malloc_graph",
        "ComfyUI's compiler may end the process when a MiniMax runs first, or is recorded",
        since=(0, 38),
    ),
    Assumption("latent_preview:get_previewer", "calibration shows no previews"),
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
    """The names that this ComfyUI lacks and the pack can do without, each with what it does instead.

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
