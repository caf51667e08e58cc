"""Which Triton goes with the installed PyTorch. Needs nothing but Python: install.py runs it by its path."""

import importlib.metadata
import re
import sys

# Each minor version of PyTorch is built for one of Triton's; another breaks torch.compile, for other packs too. What
# PyTorch's wheels on PyPI require on Linux, and, up to 2.10, the table in triton-windows' README.
_OF_TORCH = {
    "2.6": "3.2",
    "2.7": "3.3",
    "2.8": "3.4",
    "2.9": "3.5",
    "2.10": "3.6",
    "2.11": "3.6",
    "2.12": "3.7",
    "2.13": "3.7",
    "2.14": "3.8",
    "2.15": "3.9",
}


def triton_requirement() -> str:
    """What pip is asked for where Triton is missing, such as `triton-windows==3.6.*`.

    Without a version where PyTorch is missing, or is one of which nobody knows.
    """
    package = "triton-windows" if sys.platform == "win32" else "triton"
    release = _named_by_torch() or _OF_TORCH.get(_torch_release())
    return package if release is None else f"{package}=={release}.*"


def _torch_release() -> str:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return ""
    return ".".join(version.split(".")[:2])


def _named_by_torch() -> str | None:
    """What PyTorch itself requires on Linux: its wheels for Windows say it too, but are not bound to."""
    try:
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (re.match(r"(?:pytorch-)?triton\s*\(?[=~]=\s*(\d+\.\d+)", line) for line in required)
    return next((match[1] for match in found if match), None)
