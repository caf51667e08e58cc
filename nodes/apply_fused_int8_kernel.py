"""The nodes "Apply Fused INT8 Kernel" and "Apply Fused INT8 Kernel (Text Encoder)"."""

from comfy_api.latest import io

from .attention.attention_kinds import AS_COMFYUI
from .attention.attention_override import set_attention
from .linears.apply_kernel import apply_fused_kernel, apply_to_text_encoder
from .sockets import DecidedNode, attention_input, choice, model_outputs, shown

_OTHERWISE = "ComfyUI's own INT8"


class ApplyFusedINT8Kernel(DecidedNode):
    """MODEL -> the same MODEL, its native INT8 linears on the fused kernel."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ApplyFusedINT8Kernel",
            display_name="Apply Fused INT8 Kernel",
            category="model/quantization",
            search_aliases=["int8", "w8a8", "convrot", "faster", "speed", "3090", "rtx 30"],
            description=(
                "Runs a model that any loader has loaded as native INT8, with or without ConvRot, on this pack's fused "
                "INT8 kernel. LoRA loaders can stand before or after it."
            ),
            inputs=[
                io.Model.Input("model", tooltip="A model that another loader has loaded as native INT8."),
                _kernel_input(),
                attention_input(),
            ],
            outputs=model_outputs(),
            has_intermediate_output=True,
        )

    @classmethod
    def execute(cls, model, kernel: str = "auto", attention: str = AS_COMFYUI) -> io.NodeOutput:
        patched = apply_fused_kernel(model, kernel)
        set_attention(patched, attention)
        return shown(patched, kernel, _OTHERWISE)


class ApplyFusedINT8KernelCLIP(DecidedNode):
    """CLIP -> the same CLIP, the native INT8 linears of its text encoders on the fused kernel."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="ApplyFusedINT8KernelCLIP",
            display_name="Apply Fused INT8 Kernel (Text Encoder)",
            category="model/quantization",
            search_aliases=["int8", "w8a8", "clip", "text encoder", "prompt", "qwen", "t5", "gemma", "faster", "speed"],
            description=(
                "Runs a text encoder that any loader has loaded as native INT8 on this pack's fused INT8 kernel, with "
                "16-bit activations. LoRA loaders can stand before or after it."
            ),
            inputs=[
                io.Clip.Input("clip", tooltip="A text encoder that another loader has loaded as native INT8."),
                _kernel_input(),
            ],
            outputs=[
                io.Clip.Output(tooltip="The text encoder, for prompts and LoRA loaders."),
                io.String.Output(
                    display_name="what runs where",
                    tooltip="How many linear layers compute in INT8, what the others compute with, and why.",
                ),
            ],
            has_intermediate_output=True,
        )

    @classmethod
    def execute(cls, clip, kernel: str = "auto") -> io.NodeOutput:
        return shown(apply_to_text_encoder(clip, kernel), kernel, _OTHERWISE)


def _kernel_input() -> io.Combo.Input:
    return choice(
        "kernel",
        ["auto", "fused int8"],
        "auto: what Kernel Benchmark found fastest on this card; before such a run the fused kernel on "
        "consumer Ampere (RTX 30), while on other cards the model runs as before, with a warning. fused int8: on any "
        "card from Ampere on (on a CPU, its slow reference).",
    )
