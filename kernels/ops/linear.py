"""The INT8 linear and its two halves, and the operators of PyTorch (`torch.ops.int8_dit`) that a compiler sees of them.

`quantize_activations` and `int8_gemm` are opaque to a compiler, the quantizer not to Inductor (compilers.py);
`int8_linear` is composed of the two.
"""

import math

import torch

from ..card.device import uses_triton
from ..checks import (
    check_activation_bits,
    check_float,
    check_float_matrix,
    check_int8_matrix,
    check_same_device,
    check_vector,
    check_weight_scale,
)
from ..operators import Result, operator
from ..reference.linear import (
    int8_gemm_reference,
    new_quantized,
    quantize_activations_reference,
    quantized_layouts,
)
from ..reference.transform import UNCHANGED, ChannelTransform


def linear_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The input [..., K] of a linear as a matrix. Raises what `int8_linear` does for a bad `x` or `weight`."""
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension")
    check_int8_matrix("weight", weight)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has K = {x.shape[-1]} but weight has K = {weight.shape[1]}")
    _refuse_gradient("int8_linear", x)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _refuse_gradient(name: str, activations: torch.Tensor) -> None:
    """Raise RuntimeError where a gradient is asked to pass the rounding.

    Weights, scales and biases are constants here.
    """
    if activations.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} has no gradient: run it under torch.no_grad() or use the bf16 kernel")


def _check_quantization(x: torch.Tensor, transform: ChannelTransform, activation_bits: int) -> list[Result]:
    _refuse_gradient("quantize_activations", x)
    check_float_matrix("x", x)
    check_activation_bits(activation_bits)
    transform.check(x.shape[1])
    check_same_device(x=x, smooth=transform.smooth)
    return quantized_layouts(x, x.shape[1], activation_bits)


def _check_gemm(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> list[Result]:
    _refuse_gradient("int8_gemm", q_scale)
    check_int8_matrix("q", q)
    check_int8_matrix("weight", weight)
    if q.shape[1] not in (weight.shape[1], 2 * weight.shape[1]):
        raise ValueError(f"q has K = {q.shape[1]} but weight has K = {weight.shape[1]}")
    if q_scale.dtype != torch.float32:
        raise TypeError(f"q_scale must be float32, got {q_scale.dtype}")
    check_vector("q_scale", q_scale, q.shape[0], "the rows of q")
    check_weight_scale(weight_scale, weight.shape[0])
    if bias is not None:
        check_vector("bias", bias, weight.shape[0], "the rows of weight")
    check_float("out_dtype", out_dtype)
    check_same_device(q=q, q_scale=q_scale, weight=weight, weight_scale=weight_scale, bias=bias)
    return [((q.shape[0], weight.shape[0]), out_dtype)]


@operator(
    "quantize_activations(Tensor x, Tensor? smooth=None, int? rotation_group=None, int activation_bits=8)"
    " -> (Tensor, Tensor)",
    _check_quantization,
)
def quantize_activations(
    x: torch.Tensor, transform: ChannelTransform = UNCHANGED, activation_bits: int = 8
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per-token symmetric quantization: scale = absmax / 127, q = round(x 127 / absmax), halves to even.

    With 16 bits a second int8 number r = round(254 (x / scale - q)) holds what the first one rounded away, so that
    x = scale (q + r / 254) to within 1 / 508 of a step.

    All arithmetic is float32. A row that holds a NaN or Inf gets the scale NaN (and q = 0); a row of zeros the scale 0.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        transform: what is done to the channels first.
        activation_bits: 8 or 16.

    Returns:
        int8 [M, K], or [M, 2K] with q beside r for 16 bits, and float32 per-token scale [M].

    Raises:
        TypeError, ValueError: wrong dtype, shape, device, group or number of bits.
        RuntimeError: `x` needs a gradient, which rounding does not have.
    """
    if x.numel() == 0:
        q, scale = new_quantized(x, x.shape[1], activation_bits)
        return q, scale.zero_()
    if uses_triton(x):
        from ..triton_kernels.activations import launch_activation_quantizer

        return launch_activation_quantizer(x, transform, activation_bits)
    with torch.no_grad():
        return quantize_activations_reference(x, transform, activation_bits)


@operator(
    "int8_gemm(Tensor q, Tensor q_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype)"
    " -> Tensor",
    _check_gemm,
)
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
        q: int8 [M, K] activations, or [M, 2K] of 16 bits from `quantize_activations`: their K is walked twice.
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
    if q.numel() == 0 or weight.numel() == 0:
        empty_sum = torch.zeros((q.shape[0], weight.shape[0]), dtype=out_dtype, device=q.device)
        return empty_sum if bias is None else empty_sum.add_(bias.detach().to(out_dtype))
    if uses_triton(q):
        from ..triton_kernels.gemm import launch_gemm

        return launch_gemm(q, q_scale, weight, weight_scale, bias, out_dtype)
    with torch.no_grad():
        return int8_gemm_reference(q, q_scale, weight, weight_scale, bias, out_dtype)


@operator(
    "int8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None, Tensor? smooth=None, "
    "int? rotation_group=None, ScalarType? out_dtype=None, int activation_bits=8) -> Tensor",
    check=None,
)
def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    out_dtype: torch.dtype | None = None,
    activation_bits: int = 8,
) -> torch.Tensor:
    """A linear layer on INT8 tensor cores: quantize the activations per token, then the fused GEMM.

    Args:
        x: [..., K] bf16, fp16 or fp32, any leading dimensions, none and empty ones included.
        weight: int8 [N, K] from `quantize_weight` with the same `transform`.
        weight_scale: float32 per-channel scale [N] or [N, 1], or a scalar.
        bias: [N] floating point, or None.
        transform: what is done to the channels of `x` first.
        out_dtype: dtype of the result; that of `x` when None.
        activation_bits: 8, or 16 for layers whose inputs 8 bits round too much: twice the multiplications.

    Returns:
        [..., N] in `out_dtype`.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device, group or number of bits.
        RuntimeError: `x` needs a gradient, which rounding does not have.
    """
    q, q_scale = quantize_activations(linear_rows(x, weight), transform, activation_bits)
    out = int8_gemm(q, q_scale, weight, weight_scale, bias, x.dtype if out_dtype is None else out_dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])
