"""The nodes that save a MODEL: "Save INT8 DiT" and "Save GGUF"."""

from comfy_api.latest import io

from .host.output_files import output_paths, saved_file, workflow_metadata
from .saving.save import SAVED_TYPES, save_gguf_model, save_int8_model
from .sockets import choice, filename_prefix_input


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


class SaveGGUFDiT(io.ComfyNode):
    """MODEL -> a GGUF file in the output folder, named as ComfyUI's own save nodes name theirs."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveGGUFDiT",
            display_name="Save GGUF",
            category="model/quantization",
            search_aliases=["save quantized model", "convert model", "gguf", "quantize to gguf"],
            description=(
                "Saves a diffusion model as GGUF: every linear layer in one block format, everything else in 16 or 32 "
                "bits. ComfyUI-GGUF and Load INT8 DiT read the file."
            ),
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="A model from a bf16, fp16, FP8, INT8 or GGUF file. Its LoRAs are baked into the file. "
                    "Best made of a 16-bit file: what was rounded before is rounded twice.",
                ),
                filename_prefix_input("diffusion_models/GGUF"),
                choice(
                    "type",
                    SAVED_TYPES,
                    "The format of the linear layers. Q8_0: 8.5 bits a weight, hardly to be told from 16 bits, "
                    "for every model. Q6_K: 6.6 bits. Q5_K: 5.5 bits. Q4_K: 4.5 bits, the smallest. Layers whose width "
                    "does not divide by 256 are Q8_0 in all of them, and F16 where it does not divide by 32. Q8_CR: "
                    "ComfyUI's own INT8 with ConvRot, which only molbal's ComfyUI-GGUF and Load INT8 DiT read.",
                    optional=False,
                ),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, model, filename_prefix, type) -> io.NodeOutput:
        path = save_gguf_model(model, output_paths(filename_prefix, "gguf"), workflow_metadata(cls.hidden), type)
        return io.NodeOutput(ui=saved_file(path))
