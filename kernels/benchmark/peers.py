"""What the benchmark compares the fused kernel with: PyTorch's FP8, and comfy-kitchen where it is installed."""

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable

import torch

_OLDEST_FP8_CAPABILITY = (8, 9)
_FP8_MAX = 448.0  # of e4m3


class Unavailable(Exception):
    """A method that does not exist on this machine; the message says why."""


def require_fp8(device: torch.device) -> None:
    """Raise Unavailable where `torch._scaled_mm` has no e4m3 to run on."""
    if device.type != "cuda":
        raise Unavailable("no GPU")
    major, minor = capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is not None or capability < _OLDEST_FP8_CAPABILITY:
        raise Unavailable(f"no FP8 tensor cores (sm_{major}{minor})")


def quantize_fp8(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tensor-wise e4m3 in plain PyTorch: the same shape in FP8, and its float32 scale (0-dim), absmax / 448."""
    scale = values.abs().amax().float() / _FP8_MAX
    return (values * scale.reciprocal()).to(torch.float8_e4m3fn), scale


def fp8_gemm(q: torch.Tensor, q_scale: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor) -> torch.Tensor:
    """bf16 [M, N] from e4m3 [M, K] and [N, K] with one scale each, accumulated the fast way."""
    return torch._scaled_mm(q, weight.t(), q_scale, weight_scale, out_dtype=torch.bfloat16, use_fast_accum=True)


def kitchen_version() -> str | None:
    """The version of comfy-kitchen, or None where it is not installed."""
    try:
        return importlib.metadata.version("comfy-kitchen")
    except importlib.metadata.PackageNotFoundError:
        return None


def kitchen_int8_linear(backend: str, device: torch.device) -> Callable[..., torch.Tensor]:
    """comfy-kitchen's `int8_linear` of one backend, "cuda" or "triton", past its choice of the best one.

    Raises Unavailable with comfy-kitchen's reason where the backend cannot be had. The function itself may still raise.
    """
    if device.type != "cuda":
        raise Unavailable("no GPU")
    if importlib.util.find_spec("comfy_kitchen") is None:
        raise Unavailable("comfy-kitchen is not installed")
    try:
        registry = importlib.import_module("comfy_kitchen.registry").registry
        return registry.get_implementation("int8_linear", backend=backend)
    except Exception as error:
        raise Unavailable(first_line(error)) from error


def first_line(error: BaseException) -> str:
    """An exception in one line."""
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__
