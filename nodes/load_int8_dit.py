"""The node "Load INT8 DiT"."""

import comfy.model_management
from comfy_api.latest import io

from .attention.attention_kinds import AS_COMFYUI
from .attention.attention_override import check_attention, set_attention
from .files.reading.importers import BRANCHES
from .host.model_files import model_files, model_path
from .loading.load import load_int8_model
from .loading.memory_choice import INT8, MEMORY_CHOICES
from .sockets import DecidedNode, attention_input, choice, file_stamp, kernel_input, model_outputs, shown

NO_BASE = "none"


class LoadINT8DiT(DecidedNode):
    """A diffusion model file -> MODEL with INT8 linears."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        files = model_files()
        return io.Schema(
            node_id="LoadINT8DiT",
            display_name="Load INT8 DiT",
            category="model/loaders",
            search_aliases=[
                "int8",
                "load int8",
                "w8a8",
                "convrot",
                "gguf",
                "fp8",
                "low vram",
                "memory",
                "faster",
                "speed",
                "3090",
                "rtx 30",
                "unet loader",
                "load diffusion model",
            ],
            description=(
                "Loads a diffusion transformer whose linear layers run on INT8 tensor cores. Reads INT8 files "
                "(ComfyUI's native formats, with or without ConvRot, in 4 or 6 bits, and this pack's) and quantizes "
                "bf16, fp16, FP8 and GGUF files while loading."
            ),
            inputs=[
                io.Combo.Input(
                    "model_name",
                    options=files,
                    tooltip="A .safetensors or .gguf file in models/diffusion_models.",
                ),
                kernel_input(),
                choice(
                    "branch",
                    BRANCHES,
                    "Which model to load from a file that holds both models of Ideogram 4. A file with one "
                    "model is loaded as it is.",
                    advanced=True,
                ),
                choice(
                    "base_checkpoint",
                    [NO_BASE, *files[:-1]],  # the demo, which is last, completes no other
                    "For files that hold only linear layers (Transformer Lab's ideogram4-int8-w8a8): a file "
                    "with the whole model of the same branch, in bf16, FP8 or INT8. Only what is missing is taken from "
                    "it. A complete file is loaded without it.",
                    advanced=True,
                ),
                attention_input(),
                choice(
                    "memory",
                    MEMORY_CHOICES,
                    "How the weights of a GGUF, W4A8 or W6A8 file lie in memory. auto: INT8 where it fits the card "
                    "beside a step, else as stored; the line on the node says which and why. INT8: 8 bits each, "
                    "fastest where it fits. as stored: as in the file, such as 4.5 bits each in Q4_K, and made INT8 in "
                    "front of each product. Other files are not affected.",
                    advanced=True,
                ),
            ],
            outputs=model_outputs(),
            has_intermediate_output=True,  # the line on the node comes back where the MODEL comes out of the cache
        )

    @classmethod
    def fingerprint_inputs(
        cls, kernel: str = "auto", model_name: str | None = None, base_checkpoint: str | None = NO_BASE, **_inputs
    ) -> str:
        """Return what decides, and what tells the files from others of their names; nothing of a name that a node gives
        which runs first."""
        stamps = [file_stamp(model_path(name)) for name in (model_name, base_checkpoint) if name and name != NO_BASE]
        return " ".join(filter(None, [super().fingerprint_inputs(kernel), *stamps]))

    @classmethod
    def execute(
        cls,
        model_name: str,
        kernel: str,
        branch: str = BRANCHES[0],
        base_checkpoint: str = NO_BASE,
        attention: str = AS_COMFYUI,
        memory: str = INT8,  # what workflows say nothing of that were saved before there was a choice
    ) -> io.NodeOutput:
        check_attention(attention, comfy.model_management.get_torch_device())  # before a file is read for nothing
        base = None if base_checkpoint == NO_BASE else model_path(base_checkpoint)
        model = load_int8_model(model_path(model_name), kernel, branch, base, memory=memory)
        set_attention(model, attention)
        return shown(model, kernel)
