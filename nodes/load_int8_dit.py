"""The node "Load INT8 DiT"."""

import folder_paths
from comfy_api.latest import io

from .model.load import load_int8_model
from .sockets import kernel_input


class LoadINT8DiT(io.ComfyNode):
    """A file of models/diffusion_models -> MODEL with INT8 linears."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadINT8DiT",
            display_name="Load INT8 DiT",
            category="model/loaders",
            description=(
                "Loads a diffusion transformer whose linear layers run on INT8 tensor cores. Reads INT8 files "
                "(ComfyUI's native format, with or without ConvRot, and this pack's) and quantizes bf16, fp16 and FP8 "
                "files while loading."
            ),
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="A .safetensors file in models/diffusion_models.",
                ),
                kernel_input(),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model_name: str, kernel: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("diffusion_models", model_name)
        return io.NodeOutput(load_int8_model(path, kernel))
