"""The INT8 linear and its two halves: what the rest of the pack calls. Checks first, then the device decides who runs."""

import math

import torch

from .device import uses_triton
from .reference import int8_accumulate_reference, int8_gemm_reference, quantize_activations_reference
from .validation import (
    check_float_matrix,
    check_int8_matrix,
    check_out_dtype,
    check_rotation_group,
    check_same_device,
    check_vector,
    check_weight_scale,
)


def quantize_activations(
    x: torch.Tensor, smooth: torch.Tensor | None = None, rotation_group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token symmetric INT8 quantization: scale = absmax / 127, round half to even, clamp to -127..127.

    `x` is divided by `smooth` first, then each group of `rotation_group` channels is multiplied by the regular Hadamard
    matrix. All arithmetic is float32. A row that holds a NaN or Inf gets the scale NaN (and q = 0); a row of zeros the
    scale 0.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        smooth: smoothing factors [K], floating point, or None.
        rotation_group: a power of 4 that divides K, or None.

    Returns:
        int8 [M, K] and float32 per-token scale [M].

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or group.
    """
    check_float_matrix("x", x)
    check_rotation_group(rotation_group, x.shape[1])
    if smooth is not None:
        check_vector("smooth", smooth, x.shape[1], "K")
        check_same_device(x=x, smooth=smooth)
    if x.numel() == 0:
        return x.new_zeros(x.shape, dtype=torch.int8), x.new_zeros(x.shape[:1], dtype=torch.float32)
    if uses_triton(x):
        from .activations import launch_activation_quantizer

        return launch_activation_quantizer(x, smooth, rotation_group)
    return quantize_activations_reference(x, smooth, rotation_group)


def _check_operands(q: torch.Tensor, weight: torch.Tensor) -> None:
    check_int8_matrix("q", q)
    check_int8_matrix("weight", weight)
    if q.shape[1] != weight.shape[1]:
        raise ValueError(f"q has K = {q.shape[1]} but weight has K = {weight.shape[1]}")


def int8_accumulate(q: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The bare accumulator of `int8_gemm`: int8 [M, K] x int8 [N, K] -> int32 [M, N], exact below K = 133152.

    Raises TypeError or ValueError for wrong dtypes, shapes or devices.
    """
    _check_operands(q, weight)
    check_same_device(q=q, weight=weight)
    if q.numel() == 0 or weight.numel() == 0:
        return torch.zeros((q.shape[0], weight.shape[0]), dtype=torch.int32, device=q.device)
    if uses_triton(q):
        from .gemm import launch_gemm

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
    """
    _check_operands(q, weight)
    (m, k), n = q.shape, weight.shape[0]
    if q_scale.dtype != torch.float32:
        raise TypeError(f"q_scale must be float32, got {q_scale.dtype}")
    check_vector("q_scale", q_scale, m, "the rows of q")
    check_weight_scale(weight_scale, n)
    if bias is not None:
        check_vector("bias", bias, n, "the rows of weight")
    check_out_dtype(out_dtype)
    check_same_device(q=q, q_scale=q_scale, weight=weight, weight_scale=weight_scale, bias=bias)
    if m == 0 or n == 0 or k == 0:
        empty_sum = torch.zeros((m, n), dtype=out_dtype, device=q.device)
        return empty_sum if bias is None else empty_sum + bias.to(out_dtype)
    if uses_triton(q):
        from .gemm import launch_gemm

        return launch_gemm(q, q_scale, weight, weight_scale, bias, out_dtype)
    return int8_gemm_reference(q, q_scale, weight, weight_scale, bias, out_dtype)


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    smooth: torch.Tensor | None = None,
    rotation_group: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A linear layer on INT8 tensor cores: quantize the activations per token, then the fused GEMM.

    Args:
        x: [..., K] bf16, fp16 or fp32, any leading dimensions, none and empty ones included.
        weight: int8 [N, K] from `quantize_weight` with the same `smooth` and `rotation_group`.
        weight_scale: float32 per-channel scale [N] or [N, 1], or a scalar.
        bias: [N] floating point, or None.
        smooth: smoothing factors [K], or None.
        rotation_group: a power of 4 that divides K, or None.
        out_dtype: dtype of the result; that of `x` when None.

    Returns:
        [..., N] in `out_dtype`.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or group.
        RuntimeError: `x` needs a gradient, which rounding does not have.
    """
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension")
    check_int8_matrix("weight", weight)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has K = {x.shape[-1]} but weight has K = {weight.shape[1]}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("int8_linear has no gradient: run it under torch.no_grad() or use the bf16 kernel")
    q, q_scale = quantize_activations(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), smooth, rotation_group)
    out = int8_gemm(q, q_scale, weight, weight_scale, bias, out_dtype or x.dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])
