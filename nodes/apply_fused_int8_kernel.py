"""The node "Apply Fused INT8 Kernel"."""

from comfy_api.latest import io

from .host.decision import decision_stamp
from .loading.file_notes import exact_attention_of
from .patching.apply_kernel import apply_fused_kernel
from .patching.attention import set_attention
from .patching.attention_kinds import AS_COMFYUI
from .sockets import attention_input, model_outputs, shown_model


class ApplyFusedINT8Kernel(io.ComfyNode):
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
                io.Combo.Input(
                    "kernel",
                    options=["auto", "fused int8"],
                    default="auto",
                    optional=True,
                    tooltip="auto: what Kernel Benchmark found fastest on this card; before such a run the fused "
                    "kernel on consumer Ampere (RTX 30), while on other cards the model runs as before, with a "
                    "warning. fused int8: on any card from Ampere on (on a CPU, its slow reference).",
                ),
                attention_input(),
            ],
            outputs=model_outputs(),
            has_intermediate_output=True,
        )

    @classmethod
    def fingerprint_inputs(cls, kernel: str = "auto", **_inputs) -> str:
        return decision_stamp(kernel)

    @classmethod
    def execute(cls, model, kernel: str = "auto", attention: str = AS_COMFYUI) -> io.NodeOutput:
        patched = apply_fused_kernel(model, kernel)
        set_attention(patched, attention, exact_attention_of(patched))
        return shown_model(patched, kernel, otherwise="ComfyUI's own INT8")
