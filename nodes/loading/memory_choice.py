"""In which bits a loaded MODEL holds its weights: those of fewer than 8 bits (GGUF, W4A8, W6A8) as INT8 or as the file
stores them, and floats as INT8 or as floats.

`auto` holds INT8, whose steps are the fastest, where ComfyUI can keep a whole step of it on the card. Where ComfyUI
would stream INT8 over the bus, the smaller of the two is held.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import comfy.model_management
import comfy.utils
import torch
from comfy.model_patcher import ModelPatcher

from ..files import quant_config
from ..files.holding import can_stay, is_gguf, is_grouped
from ..files.reading.importers import Checkpoint
from ..host.output_files import size_text
from ..linears.layer_selection import is_quantizable
from ..linears.stored_weights import SMALLEST_STORED

AUTO, INT8, AS_STORED = "auto", "INT8", "as stored"
MEMORY_CHOICES = (AUTO, INT8, AS_STORED)
"""What the widget `memory` says. Files without weights in fewer bits are loaded alike by all three."""

InFloats = Callable[[int, int, bool], bool]
"""Whether a linear of N outputs and K channels is held in floats; the third says whether ComfyUI's INT8 may run it."""

CHOICE_KEY = "int8_dit_memory_choice"
"""The attachment of a MODEL that is its MemoryChoice."""
_MODELS_OF_A_STEP = {"Ideogram4": 2}  # where it is not one
_IMAGES_IN_VIDEO_LATENTS = {"Anima", "CosmosT2IPredict2", "HunyuanImage21Refiner", "JoyImage", "Krea2", "QwenImage"}
"""Families that draw one image in latents of three dimensions, which those of videos have."""
_IMAGE, _VIDEO = (1024, 1024, 1), (832, 480, 81)  # width, height, frames


class MemoryChoice(NamedTuple):
    """How a MODEL holds weights in fewer bits, decided once, when it is loaded."""

    as_stored: bool  # whether they stay in the file's bits
    why: str = ""  # a clause for the line on the node; empty where nothing was decided


def choose_memory(
    memory: str, checkpoint: Checkpoint, compute_dtype: torch.dtype, device: torch.device, in_floats: InFloats
) -> MemoryChoice:
    """Return how the weights of a checkpoint are held on `device`.

    `memory` is one of MEMORY_CHOICES; of linears `in_floats` none is held in INT8. AUTO compares bytes and never times
    anything: what the MODEL takes in either form, what the card and the host have free, and what ComfyUI sets aside for
    a step.
    """
    if memory != AUTO:
        return MemoryChoice(memory == AS_STORED)
    int8, stored = held_bytes(checkpoint, compute_dtype, in_floats)
    if stored >= int8:
        return MemoryChoice(False)
    models = models_of_a_step(checkpoint.architecture)
    weights = "weights of both models" if models == 2 else "weights"
    # What the host holds of the other model is no longer free there; what the card holds of it is counted as free.
    places = {
        "card": (models * int8, free_for_weights(checkpoint.architecture, device, compute_dtype)),
        "host": (int8, comfy.model_management.get_free_memory(torch.device("cpu"))),
    }
    as_int8, as_stored = size_text(models * int8), size_text(models * stored)
    for place, (needed, free) in places.items():
        if needed > free:
            why = f"INT8 takes {size_text(needed)}, the {place} has {size_text(max(0, free))} free"
            return MemoryChoice(True, f"{weights} as stored in {as_stored} ({why})")
    return MemoryChoice(False, f"{weights} as INT8 in {as_int8} (as stored {as_stored})")


def held_bytes(checkpoint: Checkpoint, compute_dtype: torch.dtype, in_floats: InFloats) -> tuple[int, int]:
    """Return how many bytes a checkpoint's tensors take with weights in fewer bits as INT8, or those of linears
    `in_floats` as floats, and as they are stored.

    Both are equal where the file has no such weights.
    """
    int8 = stored = 0
    whole = keeps_floats(checkpoint.tensors, quant_config.configs_in(checkpoint.tensors))
    for key, tensor in checkpoint.tensors.items():
        linear = is_quantizable(key.removesuffix(".weight"), tuple(tensor.shape))
        as_int8 = tensor.nbytes
        int8_there = is_grouped(tensor) or (linear and (is_gguf(tensor) or not whole))
        if int8_there and not (tensor.ndim == 2 and in_floats(tensor.shape[0], tensor.shape[1], True)):
            as_int8 = tensor.shape.numel()
        elif int8_there or is_gguf(tensor) or tensor.is_floating_point():
            as_int8 = tensor.shape.numel() * compute_dtype.itemsize
        int8 += as_int8
        stored += tensor.nbytes if can_be_stored(tensor) else as_int8
    return int8, stored


def fits_in_floats(tensors: dict[str, Any], dtype: torch.dtype, devices: Sequence[torch.device]) -> bool:
    """Whether all weights fit each device in `dtype` and leave ComfyUI what it reserves for inference."""
    needed = comfy.utils.calculate_parameters(tensors) * dtype.itemsize
    needed += comfy.model_management.minimum_inference_memory()
    return all(needed <= comfy.model_management.get_total_memory(device) for device in devices)


def keeps_floats(tensors: Mapping[str, Any], configs: Mapping[str, Mapping[str, Any]]) -> bool:
    """Return whether the floats of a file, given its quant configs, stay floats: one that holds INT8, perhaps in fewer
    bits, has them for a reason. W4A4 is computed by ComfyUI."""
    formats = (*quant_config.INT8_FORMATS, quant_config.W4A4)
    return any(config.get("format") in formats for config in configs.values()) or any(map(is_grouped, tensors.values()))


def can_be_stored(weight: Any) -> bool:
    """Return whether a weight that was read may be held in the bits of its file."""
    return can_stay(weight) and weight.nbytes >= SMALLEST_STORED


def models_of_a_step(architecture: Any) -> int:
    """Return how many MODELs of a family one step runs: conditional and unconditional, or one for both."""
    return _MODELS_OF_A_STEP.get(type(architecture).__name__, 1)


def free_for_weights(architecture: Any, device: torch.device, compute_dtype: torch.dtype) -> int:
    """Return the bytes that ComfyUI can give to weights on `device` while a step runs.

    ComfyUI unloads other models for a sampling, so what they hold counts as free. Of the rest it sets aside what it
    expects a step to need (BaseModel.memory_required, model_management.load_models_gpu). Negative where not even
    the step fits.
    """
    management = comfy.model_management
    free = management.get_free_memory(device)
    free += sum(m.model_loaded_memory() for m in management.current_loaded_models if m.device == device)
    step = _latent_area(architecture) * compute_dtype.itemsize * 0.01 * architecture.memory_usage_factor * 2**20
    return free - math.ceil(max(management.minimum_inference_memory(), step + management.extra_reserved_memory()))


def _latent_area(architecture: Any) -> float:
    """The latent pixels of what a family draws: an image of 1024 px, or 81 frames of 832 x 480."""
    latents = architecture.latent_format
    video = latents.latent_dimensions == 3 and type(architecture).__name__ not in _IMAGES_IN_VIDEO_LATENTS
    width, height, frames = _VIDEO if video else _IMAGE
    in_time = 1 + (frames - 1) / latents.temporal_downscale_ratio
    return width * height * in_time / latents.spacial_downscale_ratio**2


def memory_choice(model: ModelPatcher) -> MemoryChoice:
    """Return how a MODEL's weights were decided to be held; of one that no file was loaded for nothing was."""
    return model.get_attachment(CHOICE_KEY) or MemoryChoice(False)
