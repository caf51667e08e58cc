"""Card, driver, versions and date: without them a figure means nothing, and what was measured counts nowhere else."""

import contextlib
import datetime
import importlib.metadata
import importlib.util
import shutil
import subprocess
from collections.abc import Mapping

import torch

from ..internals import kitchen


def triton_available() -> bool:
    """Whether the triton package (or triton-windows, which installs under the same name) is installed."""
    return importlib.util.find_spec("triton") is not None


def describe_machine(device: torch.device) -> dict[str, str]:
    """Card, driver, versions and date; what is not there is left out."""
    found = {"card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}
    found |= _driver(device) if device.type == "cuda" else {}
    found["torch"] = str(torch.__version__)
    if triton_available():
        import triton

        found["triton"] = triton.__version__
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["comfy-kitchen"] = importlib.metadata.version("comfy-kitchen")
    return found | {"date": datetime.date.today().isoformat()}


def title(environment: Mapping[str, str]) -> str:
    """The environment in one line: the card first, each version after its name."""
    named = [f"{name} {value}" for name, value in environment.items() if name not in ("card", "date")]
    return ", ".join([environment["card"], *named, environment["date"]])


def native_backend(device: torch.device) -> str:
    """Which of comfy-kitchen's backends ComfyUI's own INT8 linears run on here. Raises LookupError where none is.

    Inside ComfyUI it knows what ComfyUI switched off: below CUDA 13 that leaves the eager one.
    """
    x = torch.zeros(32, 64, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(64, 64, dtype=torch.int8, device=device)
    scale = torch.ones((), device=device)
    return kitchen.backend_for(x, weight, scale)


def query(device: torch.device, fields: str) -> list[str]:
    """What nvidia-smi answers for a card, a string a field; empty where it does not."""
    program = shutil.which("nvidia-smi")
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if program is None or uuid is None:
        return []
    command = [program, f"--id=GPU-{uuid}", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [value.strip() for value in answer.split(",")]


def _driver(device: torch.device) -> dict[str, str]:
    """The driver's version and the card's power limit as nvidia-smi gives them; empty where it does not."""
    answer = query(device, "driver_version,power.limit")
    return {} if len(answer) != 2 else {"driver": answer[0], "power limit": f"{answer[1]} W"}
