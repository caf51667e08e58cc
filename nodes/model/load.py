"""Loading a MODEL whose linears run INT8 from a diffusion model file."""

import re
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from ...kernels import BF16, FUSED, WAYS, choose_path, expand_codes, naming_layer, quantize_weight
from ..comfyui import loading
from ..comfyui.memory import all_devices, default_device, dtype_computed_in, reserved_for_inference, total_memory
from ..comfyui.patcher import ModelPatcher, call_factory
from ..comfyui.quantized import params
from ..files.attention_choices import choices_in
from ..files.checkpoint import holds_int8, read_checkpoint
from ..files.contents import BRANCHES, Checkpoint
from ..files.faults import naming_file
from ..files.gguf_weight import is_gguf
from ..files.grouped_weight import channel_scale, grouped_codes, is_grouped
from ..files.kinds import kind_of_tensors
from ..files.stored_weight import can_stay, is_stored, stored_kind
from ..files.values import check_finite
from ..host.work import Progress, make_room_to_quantize
from .build import build_model, warn_of_fallback
from .int8_weight import int8_weight
from .layer_selection import is_quantizable
from .loaded_values import check_values, stored
from .operations import ConvertLayer, int8_operations, leave_layer
from .patched_weights import float_weight
from .recipe import FOLDED, keep_block_formats, keep_recipe_of_file, keep_unknown_choices, recipe_in
from .stored_blocks import SMALLEST_STORED, int8_form, patch_products

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
    device = default_device()
    devices = [device, *(all_devices() if anywhere else [])]
    choose_path(device, kernel)  # what cannot run is refused before a file is read for nothing
    checkpoint = read_checkpoint(path, branch, None if base_path is None else partial(_read_base, base_path))
    tensors = checkpoint.tensors
    compute_dtype = detect_compute_dtype(checkpoint)
    as_stored = memory == AS_STORED and any(map(can_stay, tensors.values()))
    fits = all(_fits(tensors, compute_dtype, place) for place in devices)

    def stays(weight: torch.Tensor) -> bool:
        return as_stored and can_stay(weight) and weight.nbytes >= SMALLEST_STORED

    def in_floats(n: int, k: int, native: bool = True) -> bool:
        ways = WAYS if native else (FUSED, BF16)
        return fits and all(choose_path(place, kernel, (n, k), ways).kind == BF16 for place in devices)

    def becomes_int8(name: str, weight: torch.Tensor) -> bool:
        return is_quantizable(name, tuple(weight.shape)) and not in_floats(*weight.shape, native=not stays(weight))

    if fits and choose_path(device, kernel).kind == BF16:
        warn_of_fallback(device, kernel, "This MODEL cannot be saved as INT8: set kernel to 'fused int8' to save it.")
    converter: ConvertLayer = leave_layer
    progress: Progress | None = None  # a file that needs no work is loaded as fast as any
    block_formats, choices = _block_formats(tensors), choices_in(tensors)
    never_int8 = _never_int8(tensors, stays)
    sizes = [tensors[key].numel() for key in never_int8]
    # A file that holds INT8, perhaps in fewer bits, has its floats for a reason.
    whole, weights = holds_int8(tensors), {k: w for k, w in tensors.items() if k.endswith(".weight")}
    quantized = set() if whole else {k for k, w in weights.items() if becomes_int8(k.removesuffix(".weight"), w)}
    sizes += [w.numel() for k, w in weights.items() if k not in never_int8 and (k in quantized or is_stored(w))]
    if sizes:
        make_room_to_quantize(device, max(sizes))
        progress = Progress(len(sizes))
        with naming_file(checkpoint.name):
            _decode(tensors, never_int8, device, compute_dtype, progress)
        converter = _quantizing_converter(
            (lambda name, weight: False) if whole else becomes_int8, stays, device, compute_dtype, progress
        )
    operations = int8_operations(kernel, compute_dtype, converter, dequantize_once=in_floats)
    held = stored(tensors)
    with naming_file(checkpoint.name):
        model = build_model(tensors, checkpoint.metadata, operations, compute_dtype, disable_dynamic)
        check_values(model, checkpoint.name, held, operations.unexpected)
    if as_stored:
        patch_products(model)
    # ComfyUI says only afterwards which device it wants a second MODEL for.
    call_factory(model, partial(load_int8_model, anywhere=True, memory=memory), path, kernel, branch, base_path)
    keep_recipe_of_file(model, checkpoint.metadata)
    keep_unknown_choices(model, choices)
    keep_block_formats(model, block_formats)
    if progress is not None:
        done = "loaded as stored" if as_stored else "quantized while loading" if quantized else "decoded while loading"
        progress.finish(done)
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


def _quantizing_converter(
    becomes_int8: Callable[[str, torch.Tensor], bool],
    stays: Callable[[torch.Tensor], bool],
    device: torch.device,
    dtype: torch.dtype,
    progress: Progress,
) -> ConvertLayer:
    """Plain per-channel quantization of the layers that become INT8, computed on `device`, kept in host memory. Of
    weights that stay as they are stored it finds only what their rows will be scaled by. Other blocks become floats,
    and other codes the INT8 weight that they stand for."""

    def convert(name: str, weight: torch.Tensor, pre_quant_scale: torch.Tensor | None) -> torch.Tensor | None:
        kind, as_int8 = stored_kind(weight), becomes_int8(name, weight)
        hold = kind.held if kind is not None and stays(weight) else None
        if kind is None and not as_int8:
            return None
        weight = weight.to(device=device)
        if is_gguf(weight) and hold is None and not as_int8:
            step, held = "decoding", _decoded(f"{name}.weight", float_weight(weight, pre_quant_scale), dtype)
        else:
            with naming_layer(name):
                if hold is not None:
                    step, held = "reading", hold(weight, dtype, as_int8)
                elif is_grouped(weight):
                    step, held = "reading", _as_int8(weight, dtype)
                else:
                    q, scale = quantize_weight(float_weight(weight, pre_quant_scale))
                    check_finite(f"{name}.weight", 127 * scale)  # 127 of it is the largest value
                    step, held = "quantizing", int8_weight(q, scale, dtype)
        progress.step(f"{step} layer")
        return held.to(device="cpu")

    return convert


def _as_int8(weight: Any, dtype: torch.dtype) -> torch.Tensor:
    """The INT8 weight that codes of 4 or 6 bits stand for, exactly."""
    return int8_weight(expand_codes(grouped_codes(weight)), channel_scale(weight), dtype, **(int8_form(weight) or {}))


def _block_formats(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """The formats of GGUF's blocks, by the names that their tensors get in the diffusion model."""
    prefix = loading.prefix_in(tensors)
    return {key.removeprefix(prefix): params(t).block_format for key, t in tensors.items() if is_gguf(t)}


def _never_int8(tensors: dict[str, torch.Tensor], stays: Callable[[torch.Tensor], bool]) -> list[str]:
    """The names of GGUF's blocks that nothing makes INT8 and that do not stay."""

    def may_be(key: str, tensor: torch.Tensor) -> bool:
        name = key.removesuffix(".weight")
        return name != key and (stays(tensor) or is_quantizable(name, tuple(tensor.shape)))

    return [key for key, tensor in tensors.items() if is_gguf(tensor) and not may_be(key, tensor)]


def _decode(
    tensors: dict[str, torch.Tensor], keys: Iterable[str], device: torch.device, dtype: torch.dtype, progress: Progress
) -> None:
    """Put floats in place of these tensors, which are GGUF's blocks."""
    for key in keys:
        tensors[key] = _decoded(key, tensors[key].to(device=device).dequantize(), dtype)
        progress.step("decoding layer")


def _decoded(key: str, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats of GGUF's blocks in host memory. Raises ValueError where they are none that a weight has."""
    check_finite(key, values)
    return values.to(device="cpu", dtype=dtype)


def _fits(state_dict: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether all weights fit the device in `dtype` and leave ComfyUI what it reserves for inference."""
    needed = loading.parameters_in(state_dict) * dtype.itemsize
    reserved = reserved_for_inference()
    return needed + reserved <= total_memory(device)
