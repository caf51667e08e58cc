"""Files to MODELs: ComfyUI's reader, what it knows of architectures, its loader."""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import comfy.model_detection
import comfy.sd
import comfy.utils
import torch

from .patcher import BaseModel, ModelPatcher

if TYPE_CHECKING:  # a type checker does not see ComfyUI

    class ModelConfig(Any): ...

else:
    from comfy.supported_models_base import BASE as ModelConfig

StateDict = dict[str, torch.Tensor]

_PREFIXES = ("model.diffusion_model.", "model.model.", "model.", "")
"""What ComfyUI puts before the names of a diffusion model's tensors in a checkpoint, by kind of model."""


def read_safetensors(path: str) -> tuple[StateDict, dict[str, str] | None]:
    """The tensors and the metadata of a safetensors file."""
    return comfy.utils.load_torch_file(path, return_metadata=True)


def with_marks(tensors: StateDict, metadata: dict[str, str]) -> tuple[StateDict, dict[str, str]]:
    """Tensors with the marks that ComfyUI makes of what older files have in their metadata or in other tensors.

    It trusts what it reads: damaged ones raise AttributeError, KeyError, RuntimeError, TypeError or ValueError.
    """
    return comfy.utils.convert_old_quants(tensors, "", metadata=metadata)


def prefix_in(tensors: StateDict) -> str:
    """What stands before the names of the diffusion model's tensors in a file that holds other models too."""
    return comfy.model_detection.unet_prefix_from_state_dict(tensors)


def without_prefix(tensors: StateDict, prefix: str, only: bool = True) -> dict[str, Any]:
    """The tensors with this prefix, without it; with `only` no others."""
    return comfy.utils.state_dict_prefix_replace(dict(tensors), {prefix: ""}, filter_keys=only)


def architecture_of(tensors: StateDict, metadata: dict[str, str] | None = None) -> ModelConfig | None:
    """What ComfyUI takes tensors under its own names for; None where it knows no such model."""
    return comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)


def settings_in(tensors: StateDict, metadata: dict[str, str] | None) -> dict[str, Any]:
    """What ComfyUI reads of an architecture in tensors, and in metadata if there are any; empty for no such model."""
    return comfy.model_detection.detect_unet_config(tensors, "", metadata=metadata) or {}


def diffusers_unet_of(tensors: StateDict) -> ModelConfig | None:
    """What ComfyUI takes a UNet under the names of diffusers for."""
    return comfy.model_detection.model_config_from_diffusers_unet(tensors)


def renamed_from_diffusers(tensors: StateDict) -> StateDict | None:
    """A transformer under the names of diffusers with ComfyUI's names, tensors joined as it holds them; None for any
    other.

    ComfyUI swaps rows of some tensors where they are. Those are copied before: a file may be mapped read-only.
    """
    rows = {key: torch.arange(len(tensor))[:, None] for key, tensor in tensors.items() if tensor.ndim}
    if comfy.model_detection.convert_diffusers_mmdit(dict(rows), "") is None:
        return None
    swapped = {key for key, numbers in rows.items() if not torch.equal(numbers[:, 0], torch.arange(len(numbers)))}
    own = {key: tensor.clone() if key in swapped else tensor for key, tensor in tensors.items()}
    return comfy.model_detection.convert_diffusers_mmdit(own, "")


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


def architecture_settings(model: BaseModel) -> dict[str, Any]:
    """What ComfyUI builds a BaseModel's diffusion model with, by name."""
    return model.model_config.unet_config


def architecture_names(model: BaseModel) -> list[str]:
    """The name of the class of a BaseModel's architecture, then those that it derives from."""
    return [kind.__name__ for kind in type(model.model_config).__mro__]


def kind_of(model: BaseModel) -> tuple[object, ...]:
    """What decides how a BaseModel is sampled, apart from its weights."""
    return (
        type(model).__name__,
        model.model_type,
        model.model_config.sampling_settings,
        type(model.latent_format).__name__,
    )


def compute_dtypes(config: ModelConfig) -> list[torch.dtype]:
    """The dtypes that an architecture can be computed in, the best first."""
    return config.supported_inference_dtypes


def ideogram4_shapes(names: Iterable[str]) -> dict[str, torch.Size]:
    """The shapes of all tensors of an Ideogram 4 with as many blocks as tensors with these names are of.

    Raises ImportError where this ComfyUI has no Ideogram 4.
    """
    import comfy.ldm.ideogram4.model
    import comfy.ops
    import comfy.supported_models

    model = comfy.ldm.ideogram4.model.Ideogram4Transformer2DModel(
        num_layers=comfy.model_detection.count_blocks(list(names), "layers.{}."),
        **comfy.supported_models.Ideogram4.unet_extra_config,
        device="meta",
        operations=comfy.ops.disable_weight_init,
    )
    return {key: tensor.shape for key, tensor in model.state_dict().items()}
