"""The node "Save INT8 DiT"."""

from comfy_api.latest import io

from .host.output_files import output_paths, saved_file, workflow_metadata
from .saving.save import save_int8_model
from .sockets import filename_prefix_input


class SaveINT8DiT(io.ComfyNode):
    """MODEL -> a safetensors file in the output folder, named as ComfyUI's own save nodes name theirs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveINT8DiT",
            display_name="Save INT8 DiT",
            category="model/quantization",
            search_aliases=["save quantized model", "convert model"],
            description=(
                "Saves an INT8 model. Without smoothing factors, or with them folded, and without 16-bit layers the "
                "file is in ComfyUI's native INT8 format, which every loader reads; otherwise it needs Load "
                "INT8 DiT, and other loaders refuse it."
            ),
            inputs=[
                io.Model.Input("model", tooltip="A model with INT8 layers. Its LoRAs are baked into the file."),
                filename_prefix_input("diffusion_models/INT8"),
                io.Boolean.Input(
                    "fold",
                    default=False,
                    optional=True,
                    tooltip="Fold the smoothing factors into the layers before, so that every loader reads the file, "
                    "unless layers are protected with 16-bit activations. LoRAs made for the original model do not fit "
                    "such a file: bake them in before.",
                ),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, filename_prefix, fold=False) -> io.NodeOutput:
        path = save_int8_model(model, output_paths(filename_prefix), workflow_metadata(cls.hidden), fold)
        return io.NodeOutput(ui=saved_file(path))
