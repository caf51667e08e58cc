"""The node "Save INT8 DiT"."""

import json
import os

import folder_paths
import torch
from comfy.cli_args import args
from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from . import file_format
from .checkpoint import holds_int8
from .model_loading import RECIPE_KEY, LayerProgress, as_file
from .patched_weights import LazyTensor, state_dict_for_saving
from .safetensors_writer import write_safetensors


def save_int8_model(model: ModelPatcher, path: str, metadata: dict[str, str]) -> None:
    """Write a MODEL with INT8 linears, its patches applied, as one safetensors file with plain module names.

    Raises ValueError if the MODEL holds no INT8 weight; OSError when the disk is full; ComfyUI's interrupt exception on
    cancel. The file is then not there.
    """
    tensors = {key: _narrowed(key, t) for key, t in as_file(model.model, state_dict_for_saving(model)).items()}
    if not holds_int8(tensors):
        raise ValueError(
            "this MODEL holds no INT8 weights. Connect Quantize to INT8, or Load INT8 DiT with kernel set to 'fused int8' "
            "(where bf16 is used instead, the weights are loaded as bf16)"
        )
    write_safetensors(path, tensors, metadata, LayerProgress(len(tensors)).step)


def _narrowed(key: str, tensor: torch.Tensor | LazyTensor) -> torch.Tensor | LazyTensor:
    """Half the size where that loses nothing: on a CPU, ComfyUI holds what came from a bf16 file as float32."""
    is_parameter_of_int8 = key.endswith((f".{file_format.SCALE}", f".{file_format.SMOOTH}"))
    if isinstance(tensor, LazyTensor) or tensor.dtype != torch.float32 or is_parameter_of_int8:
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
                "Saves an INT8 model. Without smoothing factors the file is in ComfyUI's native INT8 format, which every "
                "loader reads; with them it needs Load INT8 DiT, and other loaders refuse it."
            ),
            inputs=[
                io.Model.Input("model"),
                io.String.Input("filename_prefix", default="diffusion_models/INT8"),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, filename_prefix) -> io.NodeOutput:
        folder, filename, counter, subfolder, _ = folder_paths.get_save_image_path(
            filename_prefix, folder_paths.get_output_directory()
        )
        filename = f"{filename}_{counter:05}_.safetensors"
        save_int8_model(model, os.path.join(folder, filename), cls._metadata(model))
        return io.NodeOutput(ui={"saved": [{"filename": filename, "subfolder": subfolder, "type": "output"}]})

    @classmethod
    def _metadata(cls, model: ModelPatcher) -> dict[str, str]:
        """The recipe, and unless the user disabled it the workflow, as ComfyUI's save nodes store it."""
        metadata = {}
        recipe = model.get_attachment(RECIPE_KEY)
        if recipe is not None:
            metadata[RECIPE_KEY] = recipe
        if not args.disable_metadata:
            if cls.hidden.prompt is not None:
                metadata["prompt"] = json.dumps(cls.hidden.prompt)
            for key, value in (cls.hidden.extra_pnginfo or {}).items():
                metadata[key] = json.dumps(value)
        return metadata
