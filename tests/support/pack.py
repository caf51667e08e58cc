"""The one place where tests and studies import ComfyUI and this pack as ComfyUI does."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from pathlib import Path
from types import ModuleType

PROJECT = Path(__file__).resolve().parents[2]


@cache
def import_comfyui(path: Path, cpu: bool) -> None:
    """Make ComfyUI's modules importable in this process, computing on the CPU or on the GPU."""
    sys.path.insert(0, str(path))
    from comfy.cli_args import args

    # Read by comfy.model_management when it is first imported, so it comes before anything else of ComfyUI.
    args.cpu = cpu


def use_dynamic_vram() -> None:
    """Let ComfyUI load models with dynamic VRAM from now on, as its main.py does. It holds for the whole process.

    `comfy_aimdo.control.init()` must have been called before ComfyUI was imported.
    """
    import comfy.memory_management
    import comfy.model_management
    import comfy.model_patcher
    import comfy_aimdo.control

    devices = [device.index for device in comfy.model_management.get_all_torch_devices()]
    if not comfy_aimdo.control.init_devices(devices):
        sys.exit("comfy-aimdo does not work here")
    comfy_aimdo.control.set_log_warning()
    comfy.model_patcher.CoreModelPatcher = comfy.model_patcher.ModelPatcherDynamic
    comfy.memory_management.aimdo_enabled = True


def import_package(name: str, folder: Path) -> ModuleType:
    """A node pack from its folder, as ComfyUI imports one, under a name of its own."""
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@cache
def import_pack() -> ModuleType:
    """This pack with its nodes: `int8_dit`. ComfyUI must be importable."""
    module = import_package("int8_dit", PROJECT)
    importlib.import_module("int8_dit.nodes.extension")
    return module
