"""The nodes that keep calibrations: "Save Calibration", "Load Calibration" and "Merge Calibrations"."""

from functools import partial

import folder_paths
from comfy_api.latest import io

from .calibration.calibration import Calibration, merge_calibrations
from .calibration.file import load_calibration, save_calibration
from .host.output_files import output_paths, saved_file, workflow_metadata
from .host.work import Progress
from .sockets import CalibrationType, filename_prefix_input

FOLDER = "int8_calibrations"


def _given(calibration: Calibration | None) -> Calibration:
    """A connected calibration. Raises ValueError for the one that a quantization without any has put out."""
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
        calibration = _given(calibration)
        paths = output_paths(filename_prefix)
        progress = Progress(2 * len(calibration.statistics))  # two tensors of each layer
        on_tensor = partial(progress.step, "saving tensor")
        path = save_calibration(calibration, paths, workflow_metadata(cls.hidden), on_tensor)
        progress.finish()
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
    def execute(cls, calibration_name: str) -> io.NodeOutput:
        return io.NodeOutput(load_calibration(folder_paths.get_full_path_or_raise(FOLDER, calibration_name)))


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
