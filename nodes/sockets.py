"""Types and inputs that several nodes have."""

from comfy.model_patcher import ModelPatcher
from comfy_api.latest import io

from ..kernels import KERNEL_CHOICES
from .model.attention import AS_COMFYUI, ATTENTION_CHOICES
from .model.summary import summarize

_SUMMARY_RESULT = "int8_dit_summary"  # web/int8_dit.js shows it on the node

CalibrationType = io.Custom("INT8_CALIBRATION")
RecordingType = io.Custom("INT8_RECORDING")


def kernel_input() -> io.Combo.Input:
    """The widget that chooses what INT8 linears compute with."""
    return io.Combo.Input(
        "kernel",
        options=list(KERNEL_CHOICES),
        default="auto",
        tooltip="auto: fused INT8 on consumer Ampere (RTX 30), bf16 with a warning on other cards. "
        "fused int8: the INT8 kernel on any card from Ampere on (on a CPU, its slow reference). bf16: never INT8.",
    )


def attention_input() -> io.Combo.Input:
    """The widget that chooses what a MODEL's attention computes with."""
    return io.Combo.Input(
        "attention",
        options=list(ATTENTION_CHOICES),
        default=AS_COMFYUI,
        optional=True,
        tooltip="INT8 (comfy-kitchen): attention in INT8 too where a call has no mask and heads of at most 256; the "
        "other calls run as ComfyUI's. Needs comfy-kitchen 0.2.40 and an RTX 20 card or newer. Check your images: it "
        "rounds more than the linears do.",
    )


def model_outputs() -> list[io.Output]:
    """The outputs of a node that ends in `shown_model`."""
    return [
        io.Model.Output(tooltip="The model, for samplers and LoRA loaders."),
        io.String.Output(
            display_name="what runs where",
            tooltip="How many linear layers compute in INT8, what the others and the attention compute with, and why.",
        ),
    ]


def shown_model(model: ModelPatcher) -> io.NodeOutput:
    """A MODEL, what of it runs where in words, and the same words on the node."""
    text = str(summarize(model))
    return io.NodeOutput(model, text, ui={_SUMMARY_RESULT: [text]})
