"""Card, driver, versions and date: without them a figure means nothing."""

import contextlib
import datetime
import importlib.metadata
from collections.abc import Mapping

import torch

from ..device import triton_available
from .health import query


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


def _driver(device: torch.device) -> dict[str, str]:
    """The driver's version and the card's power limit as nvidia-smi gives them; empty where it does not."""
    answer = query(device, "driver_version,power.limit")
    return {} if len(answer) != 2 else {"driver": answer[0], "power limit": f"{answer[1]} W"}
