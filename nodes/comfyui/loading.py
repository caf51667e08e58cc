"""Files to MODELs: ComfyUI's reader and its loader."""

from typing import Any

import comfy.sd
import comfy.utils
import torch

from .patcher import BaseModel, ModelPatcher

StateDict = dict[str, torch.Tensor]

_PREFIXES = ("model.diffusion_model.", "model.model.", "model.", "")
"""What ComfyUI puts before the names of a diffusion model's tensors in a checkpoint, by kind of model."""


def read_safetensors(path: str) -> tuple[StateDict, dict[str, str] | None]:
    """The tensors and the metadata of a safetensors file."""
    return comfy.utils.load_torch_file(path, return_metadata=True)


def with_quant_configs(tensors: StateDict, metadata: dict[str, str]) -> tuple[StateDict, dict[str, str]]:
    """Tensors with the marks that ComfyUI makes of what older files have in their metadata or in other tensors.

    It trusts what it reads: damaged ones raise AttributeError, KeyError, RuntimeError, TypeError or ValueError.
    """
    return comfy.utils.convert_old_quants(tensors, "", metadata=metadata)


def without_prefix(tensors: StateDict, prefix: str, only: bool = True) -> dict[str, Any]:
    """The tensors with this prefix, without it; with `only` no others."""
    return comfy.utils.state_dict_prefix_replace(dict(tensors), {prefix: ""}, filter_keys=only)


def parameters_in(tensors: StateDict) -> int:
    """The number of values in tensors."""
    return comfy.utils.calculate_parameters(tensors)


def load(
    tensors: StateDict, metadata: dict[str, str], operations: type, compute_dtype: torch.dtype, disable_dynamic: bool
) -> ModelPatcher | None:
    """A MODEL of these layer classes; None for what ComfyUI does not know. `tensors` are empty afterwards.

    `disable_dynamic` loads without dynamic VRAM.
    """
    options = {"custom_operations": operations, "dtype": compute_dtype}
    return comfy.sd.load_diffusion_model_state_dict(
        tensors, model_options=options, metadata=metadata, disable_dynamic=disable_dynamic
    )


def tensors_of_file(model: BaseModel, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A diffusion model file's tensors, made of those of `model.diffusion_model`, a ComfyUI BaseModel's.

    Beside them are the marks of how the model predicts, and the few conditioners that ComfyUI loads with it.
    """
    # The class's: a MODEL may refuse ComfyUI's save nodes.
    tensors = type(model).state_dict_for_saving(model, state_dict)
    if model.model_config.sampling_settings.get("zsnr"):
        tensors["ztsnr"] = torch.tensor([])
    prefix = next(prefix for prefix in _PREFIXES if any(key.startswith(prefix) for key in tensors))
    return without_prefix(tensors, prefix, only=False)
