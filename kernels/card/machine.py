"""Card, driver, versions, kernels and date, which a measurement is bound to."""

import contextlib
import datetime
import functools
import hashlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from ..internals.kitchen import kitchen_backend

# The release of NVIDIA's driver on Linux. Elsewhere nothing that PyTorch brings has it.
_DRIVER = Path("/proc/driver/nvidia/version")
_SOURCES = {
    "GEMM": ("linear", "gemm_kernel ring_gemm_kernel gemm"),
    "linear": ("linear", "gemm_kernel ring_gemm_kernel gemm tiles rows"),
    "attention": ("attention", "attention_kernel attention_launch attention_operands"),
}
# Named one by one: a file that moves away is an error here, and not a hash that no longer follows it.
MEASURED_SOURCES = {
    what: tuple(Path(__file__).parents[1] / room / f"{name}.py" for name in names.split())
    for what, (room, names) in _SOURCES.items()
}
"""The kernels' files by what is measured of them."""


def triton_available() -> bool:
    """Whether the triton package (or triton-windows, which installs under the same name) is installed."""
    return importlib.util.find_spec("triton") is not None


def describe_machine(device: torch.device) -> dict[str, str]:
    """Return card, driver, versions and date, as far as they are there."""
    found = {"card": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"}
    if device.type == "cuda" and (driver := _driver_release()) is not None:
        found["driver"] = driver
    found["torch"] = str(torch.__version__)
    with contextlib.suppress(Exception):  # a Triton that another PyTorch needs may raise anything
        import triton

        found["triton"] = triton.__version__
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["comfy-kitchen"] = importlib.metadata.version("comfy-kitchen")
    return found | {"date": datetime.date.today().isoformat()}


@functools.cache
def memory_rate() -> float:
    """Return the bytes a second that the machine's slowest GPU reads or writes, by its memory's clock and width; those
    of an RTX 3090 where PyTorch does not say."""
    cards = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    # PyTorch gives kHz and bits; memory transfers twice a cycle.
    rates = [250 * getattr(card, "memory_clock_rate", 0) * getattr(card, "memory_bus_width", 0) for card in cards]
    return float(min(rates, default=0) or 936e9)


def title(environment: Mapping[str, str]) -> str:
    """Return the environment in one line: the card first, each version after its name."""
    named = [f"{name} {value}" for name, value in environment.items() if name not in ("card", "date")]
    return ", ".join([environment["card"], *named, environment["date"]])


def native_backend(device: torch.device) -> str:
    """Return the backend of comfy-kitchen that ComfyUI's own INT8 linears run on. Raises LookupError without one.

    Inside ComfyUI it knows what ComfyUI switched off: below CUDA 13 that leaves the eager one.
    """
    x = torch.zeros(32, 64, dtype=torch.bfloat16, device=device)
    weight = torch.zeros(64, 64, dtype=torch.int8, device=device)
    arguments = {"x": x, "weight": weight, "weight_scale": torch.ones((), device=device), "bias": None}
    options = {"out_dtype": x.dtype, "convrot": False, "convrot_groupsize": 256}
    return kitchen_backend("int8_linear", arguments | options)


def _driver_release() -> str | None:
    """Return the release of NVIDIA's driver, such as 580.159.04, or None."""
    try:
        text = _DRIVER.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^NVRM version:.*?\s(\d{3,}(?:\.\d+)+)\s", text, re.MULTILINE)
    return None if found is None else found[1]


@functools.cache
def kernel_source_hash(what: str) -> str:
    """Return SHA-256 over files of MEASURED_SOURCES: a measurement of other kernels says nothing about these."""
    digest = hashlib.sha256()
    for source in MEASURED_SOURCES[what]:
        digest.update(f"{source.name}\n{source.read_text(encoding='utf-8')}\n".encode())
    return digest.hexdigest()
