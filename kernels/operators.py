"""The INT8 linear as operators of PyTorch (`torch.ops.int8_dit`), so that a compiler can trace a model that calls it.

`quantize_activations` and `int8_gemm` are opaque to a compiler; `int8_linear` is composed of the two.
"""

import math
from collections.abc import Callable

import torch

from .checks import (
    check_float_matrix,
    check_int8_matrix,
    check_out_dtype,
    check_same_device,
    check_vector,
    check_weight_scale,
)
from .device import uses_triton
from .reference import int8_gemm_reference, quantize_activations_reference
from .transform import ChannelTransform

_NAMESPACE = "int8_dit"
_libraries: list[torch.library.Library] = []  # an operator lives as long as its library


def _refuse_gradient(name: str, activations: torch.Tensor) -> None:
    """Raise RuntimeError where a gradient is asked to pass the rounding. Weights, scales and biases are constants here."""
    if activations.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name} has no gradient: run it under torch.no_grad() or use the bf16 kernel")


def check_operands(q: torch.Tensor, weight: torch.Tensor) -> None:
    """Raise TypeError or ValueError unless q [M, K] and weight [N, K] are int8 and can be multiplied."""
    check_int8_matrix("q", q)
    check_int8_matrix("weight", weight)
    if q.shape[1] != weight.shape[1]:
        raise ValueError(f"q has K = {q.shape[1]} but weight has K = {weight.shape[1]}")


def _check_quantization(x: torch.Tensor, transform: ChannelTransform) -> None:
    _refuse_gradient("quantize_activations", x)
    check_float_matrix("x", x)
    transform.check(x.shape[1])
    check_same_device(x=x, smooth=transform.smooth)


def _quantize_activations(
    x: torch.Tensor, smooth: torch.Tensor | None = None, rotation_group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    transform = ChannelTransform(smooth, rotation_group)
    _check_quantization(x, transform)
    if x.numel() == 0:
        return x.new_zeros(x.shape, dtype=torch.int8), x.new_zeros(x.shape[:1], dtype=torch.float32)
    if uses_triton(x):
        from .fused.activations import launch_activation_quantizer

        return launch_activation_quantizer(x, transform)
    with torch.no_grad():
        return quantize_activations_reference(x, transform)


def _fake_quantize_activations(
    x: torch.Tensor, smooth: torch.Tensor | None = None, rotation_group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    _check_quantization(x, ChannelTransform(smooth, rotation_group))
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:1], dtype=torch.float32)


def _check_gemm(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> None:
    _refuse_gradient("int8_gemm", q_scale)
    check_operands(q, weight)
    if q_scale.dtype != torch.float32:
        raise TypeError(f"q_scale must be float32, got {q_scale.dtype}")
    check_vector("q_scale", q_scale, q.shape[0], "the rows of q")
    check_weight_scale(weight_scale, weight.shape[0])
    if bias is not None:
        check_vector("bias", bias, weight.shape[0], "the rows of weight")
    check_out_dtype(out_dtype)
    check_same_device(q=q, q_scale=q_scale, weight=weight, weight_scale=weight_scale, bias=bias)


def _int8_gemm(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    _check_gemm(q, q_scale, weight, weight_scale, bias, out_dtype)
    if q.numel() == 0 or weight.numel() == 0:
        empty_sum = torch.zeros((q.shape[0], weight.shape[0]), dtype=out_dtype, device=q.device)
        return empty_sum if bias is None else empty_sum.add_(bias.detach().to(out_dtype))
    if uses_triton(q):
        from .fused.gemm import launch_gemm

        return launch_gemm(q, q_scale, weight, weight_scale, bias, out_dtype)
    with torch.no_grad():
        return int8_gemm_reference(q, q_scale, weight, weight_scale, bias, out_dtype)


def _fake_int8_gemm(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    _check_gemm(q, q_scale, weight, weight_scale, bias, out_dtype)
    return q.new_empty((q.shape[0], weight.shape[0]), dtype=out_dtype)


def linear_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The input [..., K] of a linear as a matrix. Raises what `linear.int8_linear` does for a bad `x` or `weight`."""
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension")
    check_int8_matrix("weight", weight)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has K = {x.shape[-1]} but weight has K = {weight.shape[1]}")
    _refuse_gradient("int8_linear", x)
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _watched(x: torch.Tensor) -> bool:
    """Whether someone wants to see operators: a compiler, a tensor subclass or a dispatch mode.

    Plain eager calls go straight to the implementations: dispatching to Python takes longer than the checks do.
    """
    return (
        torch.compiler.is_compiling()
        or type(x) not in (torch.Tensor, torch.nn.Parameter)
        or torch._C._len_torch_dispatch_stack() > 0
    )


def composed_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype | None,
    quantize: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
) -> torch.Tensor:
    """`linear.int8_linear` with the quantization of the rows [M, K] of `x` left to `quantize`."""
    q, q_scale = quantize(linear_rows(x, weight))
    out = int8_gemm(q, q_scale, weight, weight_scale, bias, x.dtype if out_dtype is None else out_dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


def _int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    smooth: torch.Tensor | None = None,
    rotation_group: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return composed_linear(
        x,
        weight,
        weight_scale,
        bias,
        out_dtype,
        lambda rows: quantize_activations(rows, smooth, rotation_group),
    )


def _register() -> None:
    """Define the operators, once per process.

    The pack can be imported twice in one process under different names (as ComfyUI's custom node and as plain
    `kernels`), but operators belong to the process: the first import registers them, and the second uses those.
    """
    if hasattr(getattr(torch.ops, _NAMESPACE), "int8_linear"):
        return
    library = torch.library.Library(_NAMESPACE, "FRAGMENT")
    _libraries.append(library)
    opaque = {
        "quantize_activations(Tensor x, Tensor? smooth=None, int? rotation_group=None) -> (Tensor, Tensor)": (
            _quantize_activations,
            _fake_quantize_activations,
        ),
        "int8_gemm(Tensor q, Tensor q_scale, Tensor weight, Tensor weight_scale, Tensor? bias, ScalarType out_dtype)"
        " -> Tensor": (_int8_gemm, _fake_int8_gemm),
    }
    for schema, (implementation, fake) in opaque.items():
        name = library.define(schema, tags=torch.Tag.pt2_compliant_tag)
        library.impl(name, implementation, "CompositeExplicitAutograd")
        # Both refuse gradients themselves, where that costs least.
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        torch.library.register_fake(f"{_NAMESPACE}::{name}", fake, lib=library)
    name = library.define(
        "int8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias=None, Tensor? smooth=None, "
        "int? rotation_group=None, ScalarType? out_dtype=None) -> Tensor",
        tags=torch.Tag.pt2_compliant_tag,
    )
    library.impl(name, _int8_linear, "CompositeImplicitAutograd")


def _operator_where_it_matters(operator: Callable, implementation: Callable) -> Callable:
    """`implementation`, called as `operator` where someone watches its first argument."""

    def call(first: torch.Tensor, *others: object):
        return (operator if _watched(first) else implementation)(first, *others)

    return call


_register()
# `linear`'s functions of these names say what they take; here all arguments are given, in that order.
quantize_activations = _operator_where_it_matters(
    torch.ops.int8_dit.quantize_activations.default, _quantize_activations
)
int8_gemm = _operator_where_it_matters(torch.ops.int8_dit.int8_gemm.default, _int8_gemm)
int8_linear = _operator_where_it_matters(torch.ops.int8_dit.int8_linear.default, _int8_linear)
