"""The INT8 linear and its two halves: what the rest of the pack calls. All are operators to a compiler."""

import torch

from . import operators
from .checks import check_same_device
from .device import uses_triton
from .reference import int8_accumulate_reference
from .transform import UNCHANGED, ChannelTransform


def quantize_activations(x: torch.Tensor, transform: ChannelTransform = UNCHANGED) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token symmetric INT8 quantization: scale = absmax / 127, q = round(x 127 / absmax), halves to even.

    All arithmetic is float32. A row that holds a NaN or Inf gets the scale NaN (and q = 0); a row of zeros the scale 0.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        transform: what is done to the channels first.

    Returns:
        int8 [M, K] and float32 per-token scale [M].

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or group.
        RuntimeError: `x` needs a gradient, which rounding does not have.
    """
    return operators.quantize_activations(x, transform.smooth, transform.rotation_group)


def int8_accumulate(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The bare accumulator of `int8_gemm`: int8 [M, K] x int8 [N, K] -> int32 [M, N], exact below K = 133152.

    Raises TypeError or ValueError for wrong dtypes, shapes or devices.
    """
    operators.check_operands(q, weight)
    check_same_device(q=q, weight=weight)
    if q.numel() == 0 or weight.numel() == 0:
        return torch.zeros((q.shape[0], weight.shape[0]), dtype=torch.int32, device=q.device)
    if uses_triton(q):
        from .fused.gemm import launch_gemm

        return launch_gemm(q, None, weight, None, None, torch.int32)
    return int8_accumulate_reference(q, weight)


def int8_gemm(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """The fused GEMM: (q . weight^T) in int32, then x q_scale x weight_scale + bias in float32, in one launch.

    Args:
        q: int8 [M, K] activations.
        q_scale: float32 [M] per-token scale.
        weight: int8 [N, K].
        weight_scale: float32 per-channel scale [N] or [N, 1], or a scalar.
        bias: [N] floating point, or None.
        out_dtype: bf16, fp16 or fp32.

    Returns:
        [M, N] in `out_dtype`.

    Raises:
        TypeError, ValueError: wrong dtype, shape or device.
        RuntimeError: `q_scale` needs a gradient, which rounding does not have.
    """
    return operators.int8_gemm(q, q_scale, weight, weight_scale, bias, out_dtype)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A linear layer on INT8 tensor cores: quantize the activations per token, then the fused GEMM.

    Args:
        x: [..., K] bf16, fp16 or fp32, any leading dimensions, none and empty ones included.
        weight: int8 [N, K] from `quantize_weight` with the same `transform`.
        weight_scale: float32 per-channel scale [N] or [N, 1], or a scalar.
        bias: [N] floating point, or None.
        transform: what is done to the channels of `x` first.
        out_dtype: dtype of the result; that of `x` when None.

    Returns:
        [..., N] in `out_dtype`.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or group.
        RuntimeError: `x` needs a gradient, which rounding does not have.
    """
    return operators.int8_linear(x, weight, weight_scale, bias, transform.smooth, transform.rotation_group, out_dtype)
