"""The node "Load INT8 DiT"."""

import folder_paths
from comfy_api.latest import io

from ..kernels import KERNEL_CHOICES
from .model.load import load_int8_model

KERNEL_TOOLTIP = (
    "auto: fused INT8 on consumer Ampere (RTX 30), bf16 with a warning on other cards. "
    "fused int8: the INT8 kernel on any card from Ampere on (on a CPU, its slow reference). bf16: never INT8."
)


class LoadINT8DiT(io.ComfyNode):
    """A file of models/diffusion_models -> MODEL with INT8 linears."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadINT8DiT",
            display_name="Load INT8 DiT",
            category="model/loaders",
            description=(
                "Loads a diffusion transformer whose linear layers run on INT8 tensor cores. Reads INT8 files (ComfyUI's "
                "native format, with or without ConvRot, and this pack's) and quantizes bf16, fp16 and FP8 files while loading."
            ),
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=folder_paths.get_filename_list("diffusion_models"),
                    tooltip="A .safetensors file in models/diffusion_models.",
                ),
                io.Combo.Input("kernel", options=list(KERNEL_CHOICES), default="auto", tooltip=KERNEL_TOOLTIP),
            ],
            outputs=[io.Model.Output()],
        )

    @classmethod
    def execute(cls, model_name: str, kernel: str) -> io.NodeOutput:
        path = folder_paths.get_full_path_or_raise("diffusion_models", model_name)
        return io.NodeOutput(load_int8_model(path, kernel))
