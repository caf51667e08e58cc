"""The Triton that goes with the installed PyTorch: whether it is installed, and the command that installs it."""

import importlib.metadata
import importlib.util
import re
import sys
from pathlib import PurePosixPath, PureWindowsPath
from typing import NamedTuple

from ..error_text import first_line
from .machine import triton_available

# Each minor version of PyTorch is built for one of Triton's; another breaks torch.compile, for other packs too. From
# the requirements of PyTorch's wheels for Linux on PyPI and, up to 2.10, the table in triton-windows' README.
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
_NEWEST_FOR_WINDOWS = "3.8"  # of triton-windows on PyPI, which comes weeks after PyTorch
_PORTABLE = "python_embeded"  # the folder of the Python in ComfyUI's portable build for Windows, as it is spelled there


class TritonProblem(NamedTuple):
    """A defect of the installed Triton, in words for the user."""

    summary: str  # its effect in a few words
    detail: str  # the defect and its remedy, in one sentence


def triton_problem() -> TritonProblem | None:
    """Return a problem where Triton is missing, cannot be imported, or is not the one that PyTorch is built for."""
    if not triton_available():
        return _without_triton("Triton is not installed")
    try:
        import triton

        installed = _minor(triton.__version__)
    except Exception as error:  # its compiled and other parts may be of different versions
        line = first_line(error)
        return _without_triton(f"Triton cannot be imported ({line})", anew=True)
    wanted = _wanted()
    if wanted is None or installed == wanted or _is_unreleased(wanted):
        return None
    what = f"Triton {installed} is installed, but PyTorch {_torch_release()} is built for Triton {wanted}"
    return TritonProblem("Triton does not go with PyTorch", f"{what}: torch.compile may fail; {triton_advice()}")


def triton_installation(anew: bool = False) -> tuple[str, str]:
    """Return a folder, and the command that installs Triton for the running Python from there, in any shell.

    `anew` replaces one that is installed in the same version.
    """
    windows = sys.platform == "win32"
    python = (PureWindowsPath if windows else PurePosixPath)(sys.executable)
    portable = windows and python.parent.name.lower() == _PORTABLE
    folder = python.parent.parent if portable else python.parent
    program = ("\\" if windows else "/").join((".", *python.relative_to(folder).parts))
    # A venv of uv has no pip.
    pip = "uv pip" if importlib.util.find_spec("pip") is None and importlib.util.find_spec("uv") else "pip"
    options = " --force-reinstall --no-deps" if anew else ""
    isolated = " -s" if portable else ""
    return str(folder), f'{program}{isolated} -m {pip} install{options} "{triton_requirement()}"'


def triton_advice(anew: bool = False) -> str:
    """Return `triton_installation` as the second half of a sentence."""
    folder, command = triton_installation(anew)
    return f"in the folder {folder} run `{command}`"


def triton_requirement() -> str:
    """Return the requirement for pip, such as `triton-windows==3.6.*`.

    It has no version where PyTorch is missing or unknown. On Windows it is the newest Triton while that of PyTorch is
    yet to come.
    """
    package = "triton-windows" if sys.platform == "win32" else "triton"
    release = _wanted()
    if release is not None and _is_unreleased(release):
        release = _NEWEST_FOR_WINDOWS
    return package if release is None else f"{package}=={release}.*"


def _without_triton(what: str, anew: bool = False) -> TritonProblem:
    return TritonProblem("INT8 layers compute in bf16", f"{what}; {triton_advice(anew)}")


def _wanted() -> str | None:
    """Return the minor version of Triton that the installed PyTorch is built for, where it is known."""
    return _named_by_torch() or _OF_TORCH.get(_torch_release())


def _is_unreleased(release: str) -> bool:
    """Whether a release of Triton is yet to come for this system."""
    number, newest = ([int(part) for part in version.split(".")] for version in (release, _NEWEST_FOR_WINDOWS))
    return sys.platform == "win32" and number > newest


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])


def _torch_release() -> str:
    try:
        return _minor(importlib.metadata.version("torch"))
    except importlib.metadata.PackageNotFoundError:
        return ""


def _named_by_torch() -> str | None:
    """Return the Triton that PyTorch requires on Linux: its wheels for Windows say it too, but are not bound to."""
    try:
        required = importlib.metadata.requires("torch") or []
    except importlib.metadata.PackageNotFoundError:
        return None
    found = (re.match(r"(?:pytorch-)?triton\s*\(?[=~]=\s*(\d+\.\d+)", line) for line in required)
    return next((match[1] for match in found if match), None)
