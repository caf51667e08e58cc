"""Loading a MODEL whose linears run INT8 from a diffusion model file."""

import re
from functools import partial

import torch

from ...kernels import choose_path
from ..comfyui import loading
from ..comfyui.memory import all_devices, default_device, dtype_computed_in
from ..comfyui.patcher import ModelPatcher, call_factory
from ..comfyui.quantized import params
from ..files.attention_choices import choices_in
from ..files.checkpoint import read_checkpoint
from ..files.contents import BRANCHES, Checkpoint
from ..files.faults import naming_file
from ..files.gguf_weight import is_gguf
from ..files.kinds import kind_of_tensors
from ..files.stored_weight import can_stay
from .build import build_model, warn_of_fallback
from .load_plan import CheckpointPlan
from .loaded_values import check_values, stored
from .recipe import FOLDED, keep_block_formats, keep_recipe_of_file, keep_unknown_choices, recipe_in
from .stored_blocks import patch_products

MEMORY_CHOICES = ("INT8", "as stored")
"""How a loaded MODEL holds weights in fewer bits (GGUF, W4A8, W6A8); those of other files are INT8 either way."""
_COUNT = re.compile(r"(^|_)(layers|blocks|depth)(_|$)")  # names of what ComfyUI counts in a file
AS_STORED = MEMORY_CHOICES[1]


def load_int8_model(
    path: str,
    kernel: str = "auto",
    branch: str = BRANCHES[0],
    base_path: str | None = None,
    disable_dynamic: bool = False,
    anywhere: bool = False,
    memory: str = MEMORY_CHOICES[0],
) -> ModelPatcher:
    """A MODEL from a diffusion model file: INT8 files as they are, float, FP8 and GGUF files quantized while loading.

    With `memory` AS_STORED the weights in fewer bits that kernels read (GGUF's blocks, the codes of W4A8 and W6A8) stay
    what they are, and become INT8 in front of each product.

    `kernel` is one of kernels.KERNEL_CHOICES; `disable_dynamic` is ComfyUI's, for loads without dynamic VRAM. Where the
    path of a linear is bf16 and the whole model fits the device in bf16, its weight is not INT8: the device is
    ComfyUI's default, or with `anywhere` each that the machine has. `branch` chooses of a file with two models, and the
    file at `base_path` completes one with a part of a model; other files are read without them.

    Raises ValueError naming the file for anything that cannot be loaded, RuntimeError where `kernel` demands what the
    card cannot do.
    """
    devices = [default_device(), *(all_devices() if anywhere else [])]
    choose_path(devices[0], kernel)  # what cannot run is refused before a file is read for nothing
    checkpoint = read_checkpoint(path, branch, None if base_path is None else partial(_read_base, base_path))
    tensors, metadata = checkpoint.tensors, checkpoint.metadata
    as_stored = memory == AS_STORED and any(map(can_stay, tensors.values()))
    plan = CheckpointPlan(
        kernel, detect_compute_dtype(checkpoint), tensors=tensors, devices=devices, as_stored=as_stored
    )
    if plan.falls_back():
        warn_of_fallback(
            devices[0], kernel, "This MODEL cannot be saved as INT8: set kernel to 'fused int8' to save it."
        )
    gguf_formats, choices, held = _gguf_formats(tensors), choices_in(tensors), stored(tensors)
    with naming_file(checkpoint.name):
        plan.begin()
        model = build_model(tensors, metadata, plan, disable_dynamic)
        check_values(model, checkpoint.name, held, plan.unexpected)
    if as_stored:
        patch_products(model)
    # ComfyUI says only afterwards which device it wants a second MODEL for.
    call_factory(model, partial(load_int8_model, anywhere=True, memory=memory), path, kernel, branch, base_path)
    keep_recipe_of_file(model, metadata)
    keep_unknown_choices(model, choices)
    keep_block_formats(model, gguf_formats)
    plan.finish()
    return model


def _read_base(path: str) -> Checkpoint:
    base = read_checkpoint(path)
    if recipe_in(base.metadata).get(FOLDED):
        raise ValueError(
            f"base_checkpoint {base.name} cannot complete another file: smoothing factors are folded into its layers. "
            "Name one that was saved with fold switched off"
        )
    return base


def detect_compute_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The dtype ComfyUI computes this model in on this device.

    Raises ValueError if it is no diffusion model it knows.
    """
    with naming_file(checkpoint.name):
        _check_counts(checkpoint)
        config = loading.architecture_of(checkpoint.tensors, checkpoint.metadata)
        if config is None:
            config = loading.diffusers_unet_of(checkpoint.tensors)
    if config is None:
        kind = kind_of_tensors(checkpoint.tensors, packed=False)
        what = "" if kind is None else f"; it seems to be {kind.name}: {kind.advice}"
        raise ValueError(f"{checkpoint.name} is not a diffusion model that this ComfyUI knows{what}")
    return dtype_computed_in(default_device(), loading.compute_dtypes(config))


def _check_counts(checkpoint: Checkpoint) -> None:
    """Raise ValueError where the metadata say another number of blocks than the tensors: ComfyUI builds as many."""
    if "config" not in checkpoint.metadata:
        return
    counted, told = (loading.settings_in(checkpoint.tensors, says) for says in (None, checkpoint.metadata))
    for name in sorted(filter(_COUNT.search, counted)):
        if type(counted[name]) is int and told[name] != counted[name]:
            raise ValueError(
                f"its metadata say {name} = {str(told[name])[:20]}, but its tensors have {counted[name]}; download or "
                "copy the file again"
            )


def _gguf_formats(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """The formats of GGUF's blocks, by the names that their tensors get in the diffusion model."""
    prefix = loading.prefix_in(tensors)
    return {key.removeprefix(prefix): params(t).block_format for key, t in tensors.items() if is_gguf(t)}
