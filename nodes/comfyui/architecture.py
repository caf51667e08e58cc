"""What ComfyUI takes tensors for: its architectures, their settings, and the names that their tensors have."""

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import comfy.model_detection
import torch

from .patcher import BaseModel

if TYPE_CHECKING:  # a type checker does not see ComfyUI

    class ModelConfig(Any): ...

else:
    from comfy.supported_models_base import BASE as ModelConfig

StateDict = dict[str, torch.Tensor]

_COUNT = re.compile(r"(^|_)(layers|blocks|depth)(_|$)")  # names of what ComfyUI counts in a file


def prefix_in(tensors: StateDict) -> str:
    """What stands before the names of the diffusion model's tensors in a file that holds other models too."""
    return comfy.model_detection.unet_prefix_from_state_dict(tensors)


def architecture_of_file(tensors: StateDict, metadata: dict[str, str]) -> ModelConfig | None:
    """What ComfyUI takes a file's tensors for, also a UNet under the names of diffusers; None where it knows no such
    model.

    Raises ValueError where the metadata say another number of blocks than the tensors: ComfyUI builds as many.
    """
    counted, told = (settings_in(tensors, says) for says in (None, metadata)) if "config" in metadata else ({}, {})
    for name in sorted(filter(_COUNT.search, counted)):
        if type(counted[name]) is int and told[name] != counted[name]:
            raise ValueError(
                f"its metadata say {name} = {str(told[name])[:20]}, but its tensors have {counted[name]}; download or "
                "copy the file again"
            )
    return architecture_of(tensors, metadata) or diffusers_unet_of(tensors)


def architecture_of(tensors: StateDict, metadata: dict[str, str] | None = None) -> ModelConfig | None:
    """What ComfyUI takes tensors under its own names for; None where it knows no such model."""
    return comfy.model_detection.model_config_from_unet(tensors, "", metadata=metadata)


def diffusers_unet_of(tensors: StateDict) -> ModelConfig | None:
    """What ComfyUI takes a UNet under the names of diffusers for."""
    return comfy.model_detection.model_config_from_diffusers_unet(tensors)


def settings_in(tensors: StateDict, metadata: dict[str, str] | None) -> dict[str, Any]:
    """What ComfyUI reads of an architecture in tensors, and in metadata if there are any; empty for no such model."""
    return comfy.model_detection.detect_unet_config(tensors, "", metadata=metadata) or {}


def compute_dtypes(config: ModelConfig) -> list[torch.dtype]:
    """The dtypes that an architecture can be computed in, the best first."""
    return config.supported_inference_dtypes


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
