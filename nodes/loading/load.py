"""Loading a MODEL whose linears run INT8 from a diffusion model file."""

from functools import partial

from ...kernels import choose_path
from ..comfyui.architecture import architecture_of_file, compute_dtypes
from ..comfyui.memory import all_devices, default_device, dtype_computed_in
from ..comfyui.patcher import ModelPatcher, call_factory
from ..files.errors import naming_file
from ..files.reading.checkpoint import read_checkpoint
from ..files.reading.contents import BRANCHES, Checkpoint
from ..files.reading.kinds import kind_of_tensors
from ..layers.stored_weights import patch_products
from .build import build_model, warn_of_fallback
from .file_notes import FOLDED, keep_notes, notes_of, recipe_in
from .load_plan import CheckpointPlan

MEMORY_CHOICES = ("INT8", "as stored")
"""How a loaded MODEL holds weights in fewer bits (GGUF, W4A8, W6A8); those of other files are INT8 either way."""
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
    with naming_file(checkpoint.name):
        architecture, notes = architecture_of_file(checkpoint.tensors, checkpoint.metadata), notes_of(checkpoint)
        if architecture is None:
            raise ValueError(_unknown(checkpoint))
        dtype = dtype_computed_in(devices[0], compute_dtypes(architecture))
        held = {"file": checkpoint.name, "tensors": checkpoint.tensors}
        plan = CheckpointPlan(kernel, dtype, **held, devices=devices, as_stored=memory == AS_STORED)
        if plan.falls_back():
            advice = "This MODEL cannot be saved as INT8: set kernel to 'fused int8' to save it."
            warn_of_fallback(devices[0], kernel, dtype, advice)
        plan.begin()
        model = build_model(checkpoint.tensors, checkpoint.metadata, plan, disable_dynamic)
    if plan.as_stored:
        patch_products(model)
    # ComfyUI says only afterwards which device it wants a second MODEL for.
    call_factory(model, partial(load_int8_model, anywhere=True, memory=memory), path, kernel, branch, base_path)
    keep_notes(model, notes)
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


def _unknown(checkpoint: Checkpoint) -> str:
    """What to say of a file that is no diffusion model which ComfyUI knows."""
    kind = kind_of_tensors(checkpoint.tensors, packed=False)
    what = "" if kind is None else f"; it seems to be {kind.name}: {kind.advice}"
    return f"{checkpoint.name} is not a diffusion model that this ComfyUI knows{what}"
