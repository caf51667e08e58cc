"""What ComfyUI sees of the pack: the list of its nodes."""

import os

import comfy.model_management
import folder_paths
from comfy_api.latest import ComfyExtension, io

from ..kernels import ask_outside_plan_by, prepare_compiling
from . import calibrations
from .apply_fused_int8_kernel import ApplyFusedINT8Kernel, ApplyFusedINT8KernelCLIP
from .comfyui.compiling import outside_memory_plan
from .compare_images import CompareImagesINT8DiT
from .demo_letters import DemoLettersINT8DiT
from .kernel_benchmark import INT8KernelBenchmark
from .load_int8_dit import LoadINT8DiT
from .quantize_to_int8 import QuantizeToINT8SmoothQuant
from .save_models import SaveGGUFDiT, SaveINT8DiT

_FOLDER = calibrations.FOLDER
for _base in (folder_paths.models_dir, folder_paths.get_output_directory()):
    folder_paths.add_model_folder_path(_FOLDER, os.path.join(_base, _FOLDER))
folder_paths.folder_names_and_paths[_FOLDER] = (folder_paths.folder_names_and_paths[_FOLDER][0], {".safetensors"})
ask_outside_plan_by(outside_memory_plan)


class INT8DiTExtension(ComfyExtension):
    """Lists the pack's nodes for ComfyUI."""

    async def on_load(self) -> None:
        """Begin, while ComfyUI starts, what the first image would wait for."""
        prepare_compiling(comfy.model_management.get_torch_device())

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            LoadINT8DiT,
            ApplyFusedINT8Kernel,
            ApplyFusedINT8KernelCLIP,
            QuantizeToINT8SmoothQuant,
            SaveINT8DiT,
            SaveGGUFDiT,
            calibrations.RecordINT8Calibration,
            calibrations.CollectINT8Calibration,
            calibrations.SaveINT8Calibration,
            calibrations.LoadINT8Calibration,
            calibrations.MergeINT8Calibrations,
            INT8KernelBenchmark,
            CompareImagesINT8DiT,
            DemoLettersINT8DiT,
        ]
