"""The nodes "Record Calibration", which arms a MODEL, and "Collect Calibration", which takes what samplers showed."""

from comfy_api.latest import io
from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import is_link

from .calibration.recorder import Recording, armed
from .sockets import CalibrationType, RecordingType


class RecordINT8Calibration(io.ComfyNode):
    """MODEL -> the same MODEL, recorded whenever it samples."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="RecordINT8Calibration",
            display_name="Record Calibration",
            category="model/quantization",
            description=(
                "Records what enters the linear layers of a model while your own workflow samples with it, for "
                "Quantize to INT8. Sample with the MODEL of this node, then take the result with Collect Calibration. "
                "For two models in one guider, use one pair of nodes for each. Every run samples and records anew: "
                "save the calibration to quantize with it more than once."
            ),
            inputs=[io.Model.Input("model", tooltip="The model that will be quantized.")],
            outputs=[
                io.Model.Output(tooltip="The same model; sample with it."),
                RecordingType.Output(display_name="recording", tooltip="For Collect Calibration."),
            ],
        )

    @classmethod
    def fingerprint_inputs(cls, **_inputs) -> float:
        """Never equal to itself: every run records anew, and nothing is left of samplers that have changed since."""
        return float("nan")

    @classmethod
    def execute(cls, model) -> io.NodeOutput:
        recording = Recording()
        return io.NodeOutput(armed(model, recording), recording)


class CollectINT8Calibration(io.ComfyNode):
    """What the samplers before this node recorded -> CALIBRATION."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="CollectINT8Calibration",
            display_name="Collect Calibration",
            category="model/quantization",
            description="Takes what Record Calibration saw, once the sampler has run.",
            inputs=[
                RecordingType.Input("recording", tooltip="From Record Calibration."),
                io.AnyType.Input(
                    "after",
                    tooltip="The sampler's output, or anything made of it: this node waits for it, and takes what the "
                    "samplers behind it recorded.",
                ),
            ],
            outputs=[CalibrationType.Output(display_name="calibration", tooltip="What the sampling showed.")],
            hidden=[io.Hidden.unique_id, io.Hidden.dynprompt],
        )

    @classmethod
    def execute(cls, recording, after) -> io.NodeOutput:
        prompt = cls.hidden.dynprompt
        return io.NodeOutput(recording.calibration(None if prompt is None else _upstream(prompt, cls.hidden.unique_id)))


def _upstream(prompt: DynamicPrompt, node: str) -> set[str]:
    """The nodes whose results `node` got, directly or through others."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        inputs = prompt.get_node(waiting.pop())["inputs"].values()
        new = {value[0] for value in inputs if is_link(value)} - found
        found |= new
        waiting += new
    return found
