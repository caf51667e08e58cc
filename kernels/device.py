"""Where the fused kernel runs: what can launch it, and whether a card should."""

import functools
import importlib.util
import os
from dataclasses import dataclass
from typing import Any, Literal

import torch

KERNEL_CHOICES = ("auto", "fused int8", "bf16")
CONSUMER_AMPERE = (8, 6)
# Triton builds int8 `tl.dot` for tensor cores from Ampere on.
_OLDEST_CAPABILITY = (8, 0)


@dataclass(frozen=True)
class ComputePath:
    """What the INT8 linears of a model compute with, and the reason in words for the user."""

    kind: Literal["fused int8", "bf16"]
    reason: str
    fallback: bool = False
    """True when bf16 was not asked for but is all that the rule allows here."""


def triton_available() -> bool:
    """Whether the triton package (or triton-windows, which installs under the same name) is installed."""
    return importlib.util.find_spec("triton") is not None


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on `tensor` launch Triton kernels: on a GPU, or on a CPU under Triton's interpreter."""
    return triton_available() and (tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1")


@functools.cache
def triton_error() -> str | None:
    """Why the installed Triton cannot build kernels (it needs a C compiler for its launcher), or None where it can."""
    try:
        import triton.runtime

        driver: Any = triton.runtime.driver.active
        driver.get_current_device()
    except Exception as error:  # whatever it is, there will be no kernel
        return str(error).strip().partition("\n")[0] or type(error).__name__
    return None


def weights_use_triton(tensor: torch.Tensor) -> bool:
    """Whether conversions of a weight launch Triton kernels: they also run where the INT8 linear does not."""
    return uses_triton(tensor) and (not tensor.is_cuda or _builds_kernels(tensor.device))


@functools.cache
def _builds_kernels(device: torch.device) -> bool:
    return fused_obstacle(device) is None


def fused_obstacle(device: torch.device) -> str | None:
    """Why the fused kernel cannot run on a GPU, in words and with what to do, or None where it can."""
    name = torch.cuda.get_device_name(device)
    major, minor = capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < _OLDEST_CAPABILITY:
        return f"{name} (sm_{major}{minor}) lacks what the fused INT8 kernel needs, an NVIDIA card from Ampere on"
    if not triton_available():
        return "Triton is not installed; run `pip install triton` (`pip install triton-windows` on Windows)"
    error = triton_error()
    return None if error is None else f"Triton does not work here ({error}); install a C compiler, or Triton anew"


def choose_path(device: torch.device | str, kernel: str = "auto") -> ComputePath:
    """Fused INT8 or bf16 for a device.

    The rule of `auto`: consumer Ampere (sm_86) runs fused INT8, where it is known to win; any other card, no Triton or
    no GPU falls back to bf16. The other choices override the rule.

    Args:
        device: where the model computes.
        kernel: "auto", "fused int8" or "bf16".

    Raises:
        ValueError: unknown `kernel`.
        RuntimeError: "fused int8" was demanded on a GPU that cannot run it. (On a CPU it runs the eager reference.)
    """
    if kernel not in KERNEL_CHOICES:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_CHOICES)}; got {kernel!r}")
    place = torch.device(device)
    if kernel == "bf16":
        return ComputePath("bf16", "bf16 was chosen")
    if place.type != "cuda":
        if kernel == "fused int8":
            return ComputePath("fused int8", f"no GPU: the eager INT8 reference runs on {place.type}")
        return ComputePath("bf16", f"the model runs on {place.type}, and INT8 tensor cores need a GPU", fallback=True)

    name = torch.cuda.get_device_name(place)
    major, minor = capability = torch.cuda.get_device_capability(place)
    obstacle = fused_obstacle(place)
    if kernel == "fused int8":
        if obstacle is not None:
            raise RuntimeError(f"kernel is set to fused int8, but {obstacle}. The alternative is kernel set to bf16")
        return ComputePath("fused int8", f"fused int8 was chosen for {name} (sm_{major}{minor})")
    if capability != CONSUMER_AMPERE or torch.version.hip is not None:
        reason = (
            f"{name} (sm_{major}{minor}) is not a consumer Ampere card (sm_86), the only kind INT8 is known to win on"
        )
        return ComputePath("bf16", reason, fallback=True)
    if obstacle is not None:
        return ComputePath("bf16", obstacle, fallback=True)
    return ComputePath("fused int8", f"{name} is a consumer Ampere card (sm_86)")


_path_on = functools.cache(choose_path)


@torch.compiler.assume_constant_result
def runs_fused(device: torch.device, kernel: str) -> bool:
    """Whether `choose_path` is fused INT8: what a linear asks in each call, because cards of one machine may differ.

    The answer for a device is kept. A compiler takes it for a constant. Raises what `choose_path` does.
    """
    return _path_on(device, kernel).kind == "fused int8"
