"""The node "Save INT8 DiT"."""

import json

import torch
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from .files import int8_mark
from .files.checkpoint import holds_int8
from .files.safetensors_writer import write_safetensors
from .host.output_files import output_path, workflow_metadata
from .model.folding import fold
from .model.layer_selection import check_runs_as_stored
from .model.load import (
    FOLDED,
    RECIPE_KEY,
    LayerProgress,
    as_file,
    file_metadata,
    recipe_of,
    warn_of_patches_on_folded,
)
from .model.patched_weights import PendingTensor, state_dict_for_saving


def save_int8_model(model: ModelPatcher, path: str, metadata: dict[str, str], fold_factors: bool = False) -> None:
    """Write a MODEL with INT8 linears, its patches applied, as one safetensors file with plain module names.

    With `fold_factors` smoothing factors go into the layers before, and the file is a plain native one.

    Raises ValueError if the MODEL holds no INT8 weight, or something that is in no weight, or naming a layer whose factors
    cannot be folded; OSError when the disk is full; ComfyUI's interrupt exception on cancel. The file is then not there.
    """
    check_runs_as_stored(model)
    tensors = state_dict_for_saving(model)
    folded = fold_factors and any(key.endswith(f".{int8_mark.SMOOTH}") for key in tensors)
    if folded:
        tensors = fold(model, tensors)
    tensors = {key: _narrowed(key, tensor) for key, tensor in as_file(model.model, tensors).items()}
    if not holds_int8(tensors):
        raise ValueError(
            "this MODEL holds no INT8 weights. Connect Quantize to INT8, or Load INT8 DiT with kernel set to 'fused int8' "
            "(where bf16 is used instead, the weights are loaded as bf16)"
        )
    warn_of_patches_on_folded(model)
    recipe = recipe_of(model)
    recipe[FOLDED] = folded or bool(recipe.get(FOLDED))
    metadata = {RECIPE_KEY: json.dumps(recipe), **file_metadata(model.model), **metadata}
    write_safetensors(path, tensors, metadata, LayerProgress(len(tensors)).step)


def _narrowed(key: str, tensor: torch.Tensor | PendingTensor) -> torch.Tensor | PendingTensor:
    """Half the size where that loses nothing: on a CPU, ComfyUI holds what came from a bf16 file as float32."""
    is_parameter_of_int8 = key.endswith((f".{int8_mark.SCALE}", f".{int8_mark.SMOOTH}"))
    if isinstance(tensor, PendingTensor) or tensor.dtype != torch.float32 or is_parameter_of_int8:
        return tensor
    narrow = tensor.bfloat16()
    return narrow if torch.equal(narrow.float(), tensor) else tensor


class SaveINT8DiT(io.ComfyNode):
    """MODEL -> a safetensors file in the output folder, named as ComfyUI's own save nodes name theirs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveINT8DiT",
            display_name="Save INT8 DiT",
            category="model/quantization",
            description=(
                "Saves an INT8 model. Without smoothing factors, or with them folded, the file is in ComfyUI's native INT8 "
                "format, which every loader reads; otherwise it needs Load INT8 DiT, and other loaders refuse it."
            ),
            inputs=[
                io.Model.Input("model"),
                io.String.Input("filename_prefix", default="diffusion_models/INT8"),
                io.Boolean.Input(
                    "fold",
                    default=False,
                    optional=True,
                    tooltip="Fold the smoothing factors into the layers before, so that every loader reads the file. LoRAs made "
                    "for the original model do not fit such a file: bake them in before.",
                ),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, filename_prefix, fold=False) -> io.NodeOutput:
        path, ui = output_path(filename_prefix)
        save_int8_model(model, path, workflow_metadata(cls.hidden), fold)
        return io.NodeOutput(ui=ui)
