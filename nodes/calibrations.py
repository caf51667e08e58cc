"""The nodes of calibrations: Record, Collect, Save, Load and Merge."""

import folder_paths
from comfy_api.latest import io
from comfy_execution.graph import DynamicPrompt
from comfy_execution.graph_utils import is_link

from .host.output_files import output_paths, saved_file, workflow_metadata
from .quantization.calibration import Calibration, load_calibration, merge_calibrations, save_calibration
from .quantization.recorder import Recording, armed
from .sockets import CalibrationType, RecordingType, RunsAlways, file_stamp, filename_prefix_input

FOLDER = "int8_calibrations"


class RecordINT8Calibration(RunsAlways):
    """MODEL -> the same MODEL, recorded whenever it samples. Each run records anew: samplers may have changed."""

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
    """All nodes before `node` in the graph."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        inputs = prompt.get_node(waiting.pop())["inputs"].values()
        new = {value[0] for value in inputs if is_link(value)} - found
        found |= new
        waiting += new
    return found


def _given(calibration: Calibration | None) -> Calibration:
    """Return a connected calibration; ValueError for None, which a quantization without one has put out."""
    if calibration is None:
        raise ValueError(
            "there is no calibration: Quantize to INT8 had no calibration inputs connected, and so nothing was recorded"
        )
    return calibration


class SaveINT8Calibration(io.ComfyNode):
    """CALIBRATION -> a safetensors file in the output folder."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="SaveINT8Calibration",
            display_name="Save Calibration",
            category="model/quantization",
            description="Saves a calibration, so that a model can be quantized again without sampling again.",
            inputs=[
                CalibrationType.Input(
                    "calibration", tooltip="From Quantize to INT8, Collect Calibration or Merge Calibrations."
                ),
                filename_prefix_input(f"{FOLDER}/calibration"),
            ],
            outputs=[],
            hidden=[io.Hidden.prompt, io.Hidden.extra_pnginfo],
            is_output_node=True,
        )

    @classmethod
    def execute(cls, calibration, filename_prefix) -> io.NodeOutput:
        path = save_calibration(_given(calibration), output_paths(filename_prefix), workflow_metadata(cls.hidden))
        return io.NodeOutput(ui=saved_file(path))


class LoadINT8Calibration(io.ComfyNode):
    """A file that Save Calibration wrote -> CALIBRATION."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="LoadINT8Calibration",
            display_name="Load Calibration",
            category="model/quantization",
            description="Loads a calibration that Save Calibration wrote.",
            inputs=[
                io.Combo.Input(
                    "calibration_name",
                    options=folder_paths.get_filename_list(FOLDER),
                    tooltip=f"A .safetensors file in output/{FOLDER} or models/{FOLDER}.",
                )
            ],
            outputs=[CalibrationType.Output(display_name="calibration", tooltip="For Quantize to INT8.")],
        )

    @classmethod
    def fingerprint_inputs(cls, calibration_name: str | None) -> str:
        """Return what tells the file from another of its name; nothing where a node that runs first gives the name."""
        return "" if calibration_name is None else file_stamp(_path(calibration_name))

    @classmethod
    def execute(cls, calibration_name: str) -> io.NodeOutput:
        return io.NodeOutput(load_calibration(_path(calibration_name)))


def _path(calibration_name: str) -> str:
    return folder_paths.get_full_path_or_raise(FOLDER, calibration_name)


class MergeINT8Calibrations(io.ComfyNode):
    """Several CALIBRATIONs of one model -> one, as if all had been recorded together."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="MergeINT8Calibrations",
            display_name="Merge Calibrations",
            category="model/quantization",
            description="Makes one calibration of several of the same model: of other prompts, sizes or samplers.",
            inputs=[
                io.Autogrow.Input(
                    "calibrations",
                    template=io.Autogrow.TemplatePrefix(
                        CalibrationType.Input("calibration", tooltip="One of the same model as the others."),
                        "calibration_",
                        min=2,
                        max=32,
                    ),
                    tooltip="Connect one and the next slot appears.",
                )
            ],
            outputs=[CalibrationType.Output(display_name="calibration", tooltip="All of them in one.")],
        )

    @classmethod
    def execute(cls, calibrations: io.Autogrow.Type) -> io.NodeOutput:
        return io.NodeOutput(merge_calibrations([_given(calibration) for calibration in calibrations.values()]))
