"""Saving a MODEL as one file: with INT8 linears as safetensors, or as GGUF, with linears in one format."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from comfy.model_base import BaseModel
from comfy.model_patcher import ModelPatcher
from comfy.quant_ops import QuantizedTensor

from ...kernels import GGUF_FORMATS, quantize_gguf, saying
from ..comfyui.layer_choices import state_dict_of
from ..comfyui.patcher import DIFFUSION_MODEL, undo_object_patches, weight_below_patches
from ..comfyui.quantized import stored
from ..files import quant_config
from ..files.attention_choices import CONFIG
from ..files.holding import is_gguf, is_grouped
from ..files.writing.tensor_files import (
    PendingGGUF,
    PendingTensor,
    plain_type,
    with_workflow,
    write_gguf,
    write_safetensors,
)
from ..host import notices
from ..host.work import make_room_to_quantize
from ..linears import file_notes
from ..linears.folding import fold
from ..linears.int8_weight import is_int8
from ..linears.layer_selection import check_runs_as_stored, linears
from ..linears.patched_weights import is_widened, patched_shape, patched_state_dict, patched_weight
from ..loading.load import check_known, file_metadata, tensors_of_file
from .gguf_int8 import KNOWN_ARCHITECTURES, Q8_CR, int8_metadata, int8_pieces

SAVED_TYPES = {
    **{"Q8_0": "MOSTLY_Q8_0", "Q6_K": "MOSTLY_Q6_K", "Q5_K": "MOSTLY_Q5_K_S", "Q4_K": "MOSTLY_Q4_K_S"},
    Q8_CR: None,
}
"""The formats that linears in a GGUF file can be saved in, and what llama.cpp calls such a file."""

_ARCHITECTURES = {
    "sd1": ("SD15",),
    "sdxl": ("SDXL",),
    "sd3": ("SD3",),
    "aura": ("AuraFlow",),
    "flux": ("Flux", "LongCatImage", "Chroma"),
    "hidream": ("HiDream",),
    "cosmos": ("CosmosT2V", "CosmosT2IPredict2", "Anima"),
    "ltxv": ("LTXV",),
    "hyvid": ("HunyuanVideo",),
    "wan": ("WAN21_T2V",),
    # Ideogram 4 has no name of its own yet. ComfyUI-GGUF asks only whether it knows the name; ComfyUI looks at the
    # tensors.
    "lumina2": ("Lumina2", "Ideogram4"),
    "qwen_image": ("QwenImage",),
}
"""Architectures as ComfyUI-GGUF names them -> ComfyUI's classes of such models, or those that they derive from."""
_REFUSED = " cannot be saved as GGUF: "  # behind a tensor's name


def save_int8_model(
    model: ModelPatcher, destination: str | Iterable[str], workflow: Mapping[str, str], fold_factors: bool = False
) -> str:
    """Write a MODEL with INT8 linears, its patches applied, as one safetensors file with plain names; return its path.

    Weights that are held in 4 or 6 bits stay in them, but for those that patches change: they become INT8.

    Args:
        destination: a new file's path, or several of which the first free one is taken.
        workflow: what the file's metadata say of it.
        fold_factors: whether smoothing factors go into the layers before. The file is then a plain native one, or a
            warning says that other loaders refuse it, since layers have activations of 16 bits.

    Raises ValueError where the MODEL holds no INT8 weight, holds something that is in no weight, or is of a kind that
    no file has; naming a layer whose factors cannot be folded; for a header that readers refuse. Others are
    `write_new_file`'s OSErrors, and ComfyUI's interrupt exception on cancel. The file is then not there.
    """
    undo_object_patches(model)
    # Before anything else is touched: the weights of other packs need not be tensors that can be read.
    weights = [getattr(module, "weight", None) for module in model.model.diffusion_model.modules()]
    if any(map(is_gguf, weights)):
        raise ValueError(
            "this MODEL holds GGUF's blocks, not INT8. Set memory to INT8 on Load INT8 DiT to save it as INT8, "
            "or connect Save GGUF"
        )
    if not any(is_int8(weight) or is_grouped(weight) for weight in weights):
        raise ValueError(
            "this MODEL holds no INT8 weights. Connect Quantize to INT8, or Load INT8 DiT with kernel set to "
            "'fused int8' (where bf16 is used instead, the weights are loaded as bf16)"
        )
    if floats := [name for name, layer in linears(model).items() if getattr(layer, "dequantized", False)]:
        raise ValueError(
            f"this MODEL holds {len(floats)} layers of its INT8 file, such as {floats[0]}, in floats, which are faster "
            "here. Set kernel on Load INT8 DiT to 'fused int8' to save all as INT8"
        )
    check_runs_as_stored(model)
    check_known(model.model)
    tensors = patched_state_dict(model)
    folded = fold_factors and bool(quant_config.configured_layers(tensors, quant_config.SMOOTHED_FORMAT))
    if folded:
        tensors = fold(model, tensors)
    of_16_bits = quant_config.configured_layers(tensors, quant_config.ACT16_FORMAT)
    if fold_factors and of_16_bits:
        notices.warn(
            "fold-incomplete",
            "Other loaders refuse the folded file",
            f"{len(of_16_bits)} of its layers need 16-bit activations, which they do not know. For a file that every "
            "loader reads, set protected_in of Quantize to INT8 to bf16.",
        )
    tensors = {key: _narrowed(key, tensor) for key, tensor in tensors_of_file(model.model, tensors).items()}
    tensors = file_notes.unknown_choices_of(model) | tensors
    file_notes.warn_of_patches_on_folded(model)
    recipe = file_notes.recipe_of(model)
    recipe[file_notes.FOLDED] = folded or bool(recipe.get(file_notes.FOLDED))
    about = {file_notes.RECIPE_KEY: json.dumps(recipe)} | quant_config.as_metadata(tensors)
    about |= file_metadata(model.model, is_widened(model))
    return write_safetensors(destination, tensors, with_workflow(about, workflow))


def _narrowed(key: str, tensor: torch.Tensor | PendingTensor) -> torch.Tensor | PendingTensor:
    """Return bf16 of float32 where that loses nothing: on a CPU, ComfyUI holds what came from a bf16 file so."""
    is_parameter_of_int8 = key.rpartition(".")[2] in quant_config.FLOAT32_PARTS
    if isinstance(tensor, PendingTensor) or tensor.dtype != torch.float32 or is_parameter_of_int8:
        return tensor
    narrow = tensor.bfloat16()
    return narrow if torch.equal(narrow.float(), tensor) else tensor


def save_gguf_model(
    model: ModelPatcher, destination: str | Iterable[str], workflow: Mapping[str, str], type: str
) -> str:
    """Write a MODEL, its patches applied, as one GGUF file with plain names, and return the file's path.

    Linears are in the format `type`, a key of SAVED_TYPES; where its blocks do not divide the rows, in Q8_0, or else in
    F16. Of Q8_CR are those that `int8_pieces` names. Other tensors are F16, or F32 where they have one dimension or F16
    would not hold their values. What the MODEL holds in that format already, and no patch changes, is written as it is.

    The other arguments, OSErrors and the cancel are `save_int8_model`'s. Raises ValueError naming a tensor that cannot
    be read or written, for something that is in no weight, or for a kind that no file has; ImportError without the
    package gguf. The file is then not there.
    """
    undo_object_patches(model)
    check_runs_as_stored(model)
    check_known(model.model)
    file_notes.warn_of_patches_on_folded(model)
    tensors = _tensors(model, type)
    _warn_of_patches_on_rounded(model, type)
    architecture = architecture_name(model.model, KNOWN_ARCHITECTURES if type == Q8_CR else ())
    about = file_metadata(model.model, is_widened(model)) | int8_metadata(tensors)
    recipe = file_notes.recipe_of(model)
    # Of the one a loader warns, the other holds for these weights too; the rest of a recipe is about INT8.
    kept = {name: recipe[name] for name in (file_notes.FOLDED, file_notes.ATTENTION) if recipe.get(name)}
    if kept:
        about[file_notes.RECIPE_KEY] = json.dumps(kept)
    return write_gguf(destination, tensors, architecture, SAVED_TYPES[type], with_workflow(about, workflow))


def architecture_name(model: BaseModel, others: Collection[str] = ()) -> str:
    """Return a model's `general.architecture`; warn where ComfyUI-GGUF does not know it, and it is none of `others`."""
    names = [kind.__name__ for kind in type(model.model_config).__mro__]
    known = [name for kind in names for name, kinds in _ARCHITECTURES.items() if kind in kinds]
    if known:
        return known[0]
    name = str(model.model_config.unet_config.get("image_model") or names[0].lower())
    if name in others:
        return name
    notices.warn(
        "gguf-architecture",
        "ComfyUI-GGUF may refuse the file",
        f"it has no name for models of this kind: the file's architecture is {name!r}. Load INT8 DiT reads it.",
    )
    return name


def _tensors(model: ModelPatcher, type: str) -> dict[str, PendingGGUF]:
    """Return what is to be written, by name in the file: weights, and no scales that quantized ones are stored with."""
    layers = linears(model)
    for name, layer in layers.items():
        weight: Any = layer.weight
        if not (isinstance(weight, QuantizedTensor) or weight.is_floating_point()):
            raise ValueError(
                f"{name}: its weight is stored as {weight.dtype}, in a format that cannot be read (perhaps by another "
                "pack's GGUF loader); load the model with Load INT8 DiT or ComfyUI's own"
            )
    make_room_to_quantize(model.load_device, max((layer.weight.numel() for layer in layers.values()), default=0))
    parts = model.model.diffusion_model.named_modules()
    quantized = {name for name, part in parts if isinstance(getattr(part, "weight", None), QuantizedTensor)}
    int8 = int8_pieces(model) if type == Q8_CR else {}
    own: dict[str, Any] = {}  # under the names of the MODEL
    for name, tensor in state_dict_of(model).items():
        layer, _, part = name.rpartition(".")
        if name.endswith(CONFIG):
            own[name] = tensor
        elif name in int8:
            own |= {key: piece._replace(make=saying(name + _REFUSED)(piece.make)) for key, piece in int8[name].items()}
        elif layer not in quantized or part in ("weight", "bias"):
            with saying(name + _REFUSED):
                own[name] = _of_model(model, name, part == "weight" and layer in layers, type)
    found: dict[str, Any] = file_notes.unknown_choices_of(model) | tensors_of_file(model.model, own)
    for name, value in found.items():
        if isinstance(value, torch.Tensor):  # a layer's choice of attention, or beside the diffusion model
            value = value.view(torch.int8) if name.endswith(CONFIG) else value  # GGUF has no plain bytes
            with saying(name + _REFUSED):
                found[name] = _plain(lambda value=value: value)
    return found


def _of_model(model: ModelPatcher, name: str, in_blocks: bool, type: str) -> PendingGGUF:
    key = DIFFUSION_MODEL + name
    held: Any = weight_below_patches(model, key)
    if not (held.dtype.is_floating_point or isinstance(held, QuantizedTensor)):
        return _plain(lambda: held)
    read, shape = partial(patched_weight, model, name), tuple(patched_shape(model, name))
    fitting = _fitting(shape, type) if in_blocks else None
    if fitting is None:
        return _plain(read)
    if key not in model.patches and is_gguf(held) and held.params.gguf_format == fitting:
        return PendingGGUF(shape, fitting, lambda: stored(held))
    return PendingGGUF(shape, fitting, saying(name + _REFUSED)(lambda: quantize_gguf(read(), fitting)))


def _fitting(shape: tuple[int, ...], type: str) -> str | None:
    """Return the best format whose blocks divide a linear's rows; None where there is none, and for Q8_CR."""
    wanted = (type, "Q8_0") if type in GGUF_FORMATS else ()
    return next((name for name in wanted if shape[-1:] and shape[-1] % GGUF_FORMATS[name].weights == 0), None)


def _warn_of_patches_on_rounded(model: ModelPatcher, type: str) -> None:
    """Warn, once, if a patch changes weights that may round back to their values of another GGUF file."""
    formats = file_notes.gguf_formats_of(model)
    for name, layer in linears(model).items():
        before, after = formats.get(f"{name}.weight"), _fitting(tuple(layer.weight.shape), type)
        if before is None or after is None or f"{DIFFUSION_MODEL}{name}.weight" not in model.patches:
            continue
        # Q8_0, on either side, keeps 0.93 or more of what a LoRA of a hundredth of the weight's norm does, and so do
        # weights of Q6_K in coarser blocks. In Q4_K those of Q4_K keep 0.01 of it, and those of IQ4_NL 0.4.
        if "Q8_0" not in (before, after) and (before != "Q6_K" or after == "Q6_K"):
            notices.warn(
                "gguf-lora",
                "Save GGUF may lose a LoRA",
                f"the model's weights were rounded to {before} before, and in {type} small changes round back to the "
                "same values.",
                "Save as Q8_0, or load the 16-bit file and put the LoRA on that.",
            )
            return


def _plain(read: Callable[[], torch.Tensor]) -> PendingGGUF:
    value = read()
    dtype = value.dtype
    if value.is_floating_point():
        if not bool(value.isfinite().all()):
            raise ValueError("it has a NaN or Inf, which its patches (a LoRA?) may have made")
        values, norm = value.float(), torch.linalg.vector_norm
        half = values.half().float()
        # Biases and norms are F32 in every GGUF file, and so is what F16 rounds to Inf, or by more than bf16 does.
        fits = value.ndim > 1 and half.isfinite().all() and norm(half - values) <= 2.0**-9 * norm(values)
        dtype = torch.float16 if fits else torch.float32
    return PendingGGUF(tuple(value.shape), plain_type(dtype), lambda: read().to(dtype))
