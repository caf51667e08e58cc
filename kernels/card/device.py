"""Where the fused kernel runs: whether a card can launch it, and what `auto` chooses there."""

import contextlib
import functools
import os
from collections.abc import Collection, Iterable
from typing import NamedTuple

import torch

from ..error_text import first_line
from .choices import Choices
from .machine import describe_machine, kernel_source_hash, native_backend, triton_available
from .triton_release import triton_advice

FUSED, NATIVE, BF16 = "fused int8", "native int8", "bf16"
WAYS = (FUSED, NATIVE, BF16)
"""How a linear can compute: by this pack's kernel, by ComfyUI's own INT8, with a weight in bf16."""
KERNEL_CHOICES = ("auto", FUSED, BF16)
CONSUMER_AMPERE = (8, 6)
# Triton builds int8 `tl.dot` for tensor cores from Ampere on.
_OLDEST_CAPABILITY = (8, 0)
# By how many times the sizes of a linear may differ from measured ones that decide for it: what wins changes with them.
_ALIKE = 4.0


@functools.cache
def _machine_of(device: torch.device) -> dict[str, str]:
    """Return what a choice for linears is bound to."""
    found, backend = describe_machine(device), ""
    with contextlib.suppress(LookupError):
        backend = native_backend(device)
    machine = {name: found.get(name, "") for name in ("card", "driver", "torch", "triton", "comfy-kitchen")}
    return machine | {"native backend": backend, "kernels": kernel_source_hash("linear")}


AUTO_CHOICES = Choices("auto", ("n", "k"), WAYS, _machine_of)
"""Kernel Benchmark's choices of linears. Without a clear winner the fused kernel runs: in blocks it saves more."""


class ComputePath(NamedTuple):
    """How INT8 linears compute, one of WAYS, and the reason in words for the user."""

    kind: str
    reason: str
    fallback: bool = False  # whether bf16 was not asked for but is all that the rule allows here
    # Whether the fused kernel cannot run at all, so that choosing it would be refused; `reason` says what to do.
    blocked: bool = False


def uses_triton(tensor: torch.Tensor) -> bool:
    """Whether operations on `tensor` launch kernels: on a GPU that runs them, or on a CPU by Triton's interpreter."""
    if tensor.is_cuda:
        return _builds_kernels(tensor.device)
    return os.environ.get("TRITON_INTERPRET") == "1" and triton_available()


@functools.cache
def triton_error() -> str | None:
    """Return why Triton cannot build kernels (it needs a C compiler for its launcher), or None where it can."""
    try:
        from ..internals.triton_runtime import check_driver

        check_driver()
    except Exception as error:  # whatever it is, there will be no kernel
        return first_line(error)
    return None


@functools.cache
def _builds_kernels(device: torch.device) -> bool:
    return fused_obstacle(device) is None


def takes_kernels(device: torch.device) -> bool:
    """Whether the kernels are made for a device, so that Triton is of use there."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _OLDEST_CAPABILITY


def fused_obstacle(device: torch.device) -> str | None:
    """Return why the fused kernel cannot run on a GPU and what to do, in words, or None where it can."""
    name = torch.cuda.get_device_name(device)
    if not takes_kernels(device):
        major, minor = torch.cuda.get_device_capability(device)
        return f"{name} (sm_{major}{minor}) lacks what the fused INT8 kernel needs, an NVIDIA card from Ampere on"
    if not triton_available():
        return f"Triton is not installed; {triton_advice()}"
    error = triton_error()
    return None if error is None else f"Triton does not work here ({error}); install a C compiler, or Triton anew"


def choose_path(
    device: torch.device | str, kernel: str = "auto", shape: tuple[int, int] | None = None, ways: Collection[str] = WAYS
) -> ComputePath:
    """Choose how a linear computes on a device.

    "auto" is the fastest way of the linear's shape by the card's own benchmark. Where that measured no shape like it,
    it is fused INT8 on consumer Ampere (sm_86), where that is known to win, and bf16 on any other card. No Triton or no
    GPU falls back to bf16. The other kernels override the rule.

    Args:
        device: where the model computes.
        kernel: "auto", "fused int8" or "bf16".
        shape: N and K of the linear; None for the model as a whole, which runs fused INT8 if any shape does.
        ways: those that a benchmark's choice may be of.

    Raises:
        ValueError: unknown `kernel`.
        RuntimeError: "fused int8" was demanded on a GPU that cannot run it. (On a CPU it runs the eager reference.)
    """
    if kernel not in KERNEL_CHOICES:
        raise ValueError(f"kernel must be one of {', '.join(KERNEL_CHOICES)}; got {kernel!r}")
    place = torch.device(device)
    if kernel == "bf16":
        return ComputePath(BF16, "bf16 was chosen")
    if place.type != "cuda":
        if kernel == "fused int8":
            return ComputePath(FUSED, f"no GPU: the eager INT8 reference runs on {place.type}")
        return ComputePath(BF16, f"the model runs on {place.type}, and INT8 tensor cores need a GPU", fallback=True)

    name = torch.cuda.get_device_name(place)
    major, minor = capability = torch.cuda.get_device_capability(place)
    obstacle = fused_obstacle(place)
    if kernel == "fused int8":
        if obstacle is not None:
            raise RuntimeError(f"kernel is set to fused int8, but {obstacle}. The alternative is kernel set to bf16")
        return ComputePath(FUSED, f"fused int8 was chosen for {name} (sm_{major}{minor})")
    choice = None if obstacle is not None else AUTO_CHOICES.stored(place)
    if choice is not None:
        shapes = choice.milliseconds if shape is None else [shape]
        found = {way for each in shapes if (way := choice.fastest(each, ways, FUSED, _ALIKE)) is not None}
        if shape is None and capability == CONSUMER_AMPERE:
            found.add(FUSED)  # in shapes that are like none of the measured ones
        if found:
            return ComputePath(min(found, key=WAYS.index), f"measured to be the fastest on this {name}, {choice.date}")
    if capability != CONSUMER_AMPERE or torch.version.hip is not None:
        reason = (
            f"{name} (sm_{major}{minor}) is not a consumer Ampere card (sm_86), the only kind INT8 is known to win on "
            "before Kernel Benchmark has measured such layers here"
        )
        return ComputePath(BF16, reason, fallback=True, blocked=obstacle is not None)
    if obstacle is not None:
        return ComputePath(BF16, obstacle, fallback=True, blocked=True)
    return ComputePath(FUSED, f"{name} is a consumer Ampere card (sm_86)")


def choose_model_path(device: torch.device, kernel: str, shapes: Iterable[tuple[int, int]]) -> ComputePath:
    """Choose how a model with linears of these shapes computes: the first of WAYS that any of them runs.

    bf16 is a fallback only where nothing was measured that is like any of them.
    """
    paths = [choose_path(device, kernel, shape) for shape in shapes] or [choose_path(device, kernel)]
    return min(paths, key=lambda path: (WAYS.index(path.kind), path.fallback))


def native_computes(smooth: torch.Tensor | None, activation_bits: int) -> bool:
    """Whether ComfyUI's own INT8 could compute a linear: it neither smooths nor rounds to 16 bits."""
    return smooth is None and activation_bits == 8


@functools.cache
def _kind(device: torch.device, kernel: str, shape: tuple[int, int], native: bool) -> str:
    return choose_path(device, kernel, shape, (FUSED, NATIVE) if native else (FUSED,)).kind


AUTO_CHOICES.after_change.append(_kind.cache_clear)


@torch.compiler.assume_constant_result
def int8_path(device: torch.device, kernel: str, n: int, k: int, native: bool) -> str:
    """Return how a linear with an INT8 weight [n, k] computes, one of WAYS; cards of one machine may differ.

    `native` says whether ComfyUI's own INT8 could compute it. A benchmark's choice is between the INT8 ways only: a
    weight that becomes bf16 in each call is slower than either. To a compiler the result is a constant. Raises what
    `choose_path` does.
    """
    return _kind(device, kernel, (n, k), native)


def runs_fused(device: torch.device, kernel: str, n: int, k: int, native: bool) -> bool:
    """Whether `int8_path` is the fused kernel."""
    return int8_path(device, kernel, n, k, native) == FUSED
