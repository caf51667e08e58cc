"""Saving a MODEL with INT8 linears as one file."""

import json
from collections.abc import Iterable, Mapping
from functools import partial

import torch
from comfy.model_patcher import ModelPatcher

from ..files import quant_config
from ..files.holding.gguf_weight import is_gguf
from ..files.holding.grouped_weight import is_grouped
from ..files.workflow_entries import with_workflow
from ..files.writing.safetensors_writer import PendingTensor, write_safetensors
from ..host import notices
from ..host.work import Progress
from ..layers.int8_weight import is_int8
from ..layers.layer_selection import check_runs_as_stored
from ..loading.load import file_metadata, tensors_of_file
from ..patching.file_notes import FOLDED, RECIPE_KEY, recipe_of, unknown_choices_of, warn_of_patches_on_folded
from ..patching.folding import fold
from ..patching.patched_weights import state_dict_for_saving


def save_int8_model(
    model: ModelPatcher, destination: str | Iterable[str], workflow: Mapping[str, str], fold_factors: bool = False
) -> str:
    """Write a MODEL with INT8 linears, its patches applied, as one safetensors file with plain module names.

    Weights that are held in 4 or 6 bits stay in them, but for those that patches change: they become INT8.

    `destination` is a new file's path, or several of which the first free one is taken. `workflow` is what the file's
    metadata says of it. Returns the file's path.

    With `fold_factors` smoothing factors go into the layers before, and the file is a plain native one, unless layers
    have activations of 16 bits: then a warning says that other loaders refuse it.

    Raises ValueError if the MODEL holds no INT8 weight, or something that is in no weight, or naming a layer whose
    factors cannot be folded, or for a header that readers refuse; `write_new_file`'s OSErrors; ComfyUI's interrupt
    exception on cancel. The file is then not there.
    """
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
    check_runs_as_stored(model)
    tensors = state_dict_for_saving(model)
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
    tensors = unknown_choices_of(model) | tensors
    warn_of_patches_on_folded(model)
    recipe = recipe_of(model)
    recipe[FOLDED] = folded or bool(recipe.get(FOLDED))
    about = {RECIPE_KEY: json.dumps(recipe), **quant_config.as_metadata(tensors), **file_metadata(model.model)}
    metadata = with_workflow(about, workflow)
    progress = Progress(len(tensors))
    path = write_safetensors(destination, tensors, metadata, partial(progress.step, "saving tensor"))
    progress.finish()
    return path


def _narrowed(key: str, tensor: torch.Tensor | PendingTensor) -> torch.Tensor | PendingTensor:
    """Half the size where that loses nothing: on a CPU, ComfyUI holds what came from a bf16 file as float32."""
    is_parameter_of_int8 = key.rpartition(".")[2] in quant_config.FLOAT32_PARTS
    if isinstance(tensor, PendingTensor) or tensor.dtype != torch.float32 or is_parameter_of_int8:
        return tensor
    narrow = tensor.bfloat16()
    return narrow if torch.equal(narrow.float(), tensor) else tensor
