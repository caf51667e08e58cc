"""comfy-kitchen's INT8 linear, its backends, its GEMM, and its INT8 attention."""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from ..error_text import first_line
from .insides import KITCHEN_GEMM, holds


def kitchen_linear(backend: str | None = None) -> Callable[..., torch.Tensor]:
    """Return its `int8_linear`, which chooses among its backends, or that of one backend, "cuda" or "triton".

    It takes x, weight, scale, bias and out_dtype, and may raise. Raises LookupError where comfy-kitchen is not
    installed, or has none here.
    """
    if backend is None:
        return _module("comfy_kitchen").int8_linear
    return _asked(lambda registry: registry.get_implementation("int8_linear", backend=backend))


def kitchen_attention(device: torch.device) -> Callable[..., torch.Tensor]:
    """Return its `int8_attention`, which takes q, k, v [B, H, T, D] and attn_mask.

    Raises LookupError where comfy-kitchen is not installed, or has none that runs on a device.
    """
    library = _module("comfy_kitchen")
    runs = getattr(library, "int8_attention_is_available", None)
    if runs is None or not runs(device):
        raise LookupError("comfy-kitchen has no INT8 attention here")
    return library.int8_attention


@functools.cache
def kitchen_gemm() -> Callable[..., bool] | None:
    """Return its GEMM of quantized activations with scales and bias; None where it has none here.

    The function takes q int8 [M, K], weight int8 [N, K], q_scale float32 [M], weight_scale float32 [N] or [N, 1], bias
    in the dtype of the result or None, and the result [M, N], all contiguous. It launches on the current device and
    stream, and returns whether there was a kernel for that. What it raises is comfy-kitchen's.
    """
    try:
        cuda = _module("comfy_kitchen.backends.cuda") if holds(KITCHEN_GEMM) else None
    except (ImportError, LookupError, OSError):  # its library may want another CUDA
        return None
    library: Any = getattr(cuda, "_C", None)
    if cuda is None or not hasattr(library, "cutlass_int8_dequant"):
        return None

    def run(
        q: torch.Tensor,
        weight: torch.Tensor,
        q_scale: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        out: torch.Tensor,
    ) -> bool:
        bias = out.new_empty(0) if bias is None else bias.detach()
        operands = (q, weight, q_scale.reshape(-1, 1), weight_scale.reshape(-1), bias, out)
        # -1: the stream waits for no other.
        capsules = [tensor.__dlpack__(stream=-1) for tensor in operands]
        stream = torch.cuda.current_stream(out.device).cuda_stream
        return library.cutlass_int8_dequant(*capsules, cuda.DTYPE_TO_CODE[out.dtype], stream)

    return run


def kitchen_backend(function: str, arguments: dict[str, Any] | None = None) -> str:
    """Return its backend for a function with these arguments; "eager" is PyTorch. Raises LookupError without one."""
    return _asked(lambda registry: registry.get_capable_backend(function, arguments))


def _module(name: str) -> Any:
    if importlib.util.find_spec("comfy_kitchen") is None:
        raise LookupError("comfy-kitchen is not installed")
    return importlib.import_module(name)


def _asked(question: Callable[[Any], Any]) -> Any:
    registry = _module("comfy_kitchen.registry").registry
    try:
        return question(registry)
    except Exception as error:
        raise LookupError(first_line(error)) from error
