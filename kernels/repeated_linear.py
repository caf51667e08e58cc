"""INT8 linears that are called many times over: what a first call found out is not asked again."""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from .compilers import watched
from .device import uses_triton
from .linear import int8_gemm, linear_rows, quantize_activations
from .transform import ChannelTransform

# Prompts of all lengths would otherwise add up.
_MOST_SHAPES = 1024


class RepeatedLinear:
    """The calls of INT8 linears, which cost the host as little as two launches can.

    Each call brings the tensors, and none is held: only how operands of these shapes are launched. A call unlike all
    before is checked as `int8_linear` checks it. The linears of a model share one, which so stays in the host's caches.

    Args:
        rotation_group, activation_bits: how the linear wants its input, as in `int8_linear`.
    """

    def __init__(self, rotation_group: int | None, activation_bits: int = 8) -> None:
        self._rotation_group = rotation_group
        self._activation_bits = activation_bits
        self._gemms: dict[tuple, Any] = {}

    @classmethod
    @functools.cache
    def of(cls, rotation_group: int | None, activation_bits: int) -> "RepeatedLinear":
        """The one for all linears that want their input so."""
        return cls(rotation_group, activation_bits)

    def quantize(
        self, x: torch.Tensor, weight: torch.Tensor, smooth: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows of x [..., K] quantized for an int8 weight [N, K]: what `quantize_activations` gives.

        `smooth` is float32 [K] or None. Raises what `int8_linear` does.
        """
        rows = linear_rows(x, weight)
        return quantize_activations(rows, ChannelTransform(smooth, self._rotation_group), self._activation_bits)

    def multiply(
        self,
        quantized: tuple[torch.Tensor, torch.Tensor],
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        leading: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """[*leading, N] in `dtype`: what `int8_gemm` makes of `quantize`'s rows, of which `leading` are the dimensions.

        `weight` is int8 [N, K] and `weight_scale` float32 [N], [N, 1] or a scalar. Raises what `int8_gemm` does.
        """
        q, q_scale = quantized
        if not (_can_repeat(q) and _is_plain(q, q_scale, weight, weight_scale, bias)):
            out = int8_gemm(q, q_scale, weight, weight_scale, bias, dtype)
            return out.reshape(*leading, weight.shape[0])
        from .fused.gemm import stores_blocks, tuned_gemm
        from .fused.tuning import m_bucket

        rows = m_bucket(q.shape[0]), stores_blocks(q.shape[0], weight), q.shape[1]
        key = (*rows, q.device, dtype, *map(_kind, (weight, weight_scale)), None if bias is None else _kind(bias))
        prepared = self._gemms.get(key)
        if prepared is not None and _is_current(q.device):
            out = torch.empty((*leading, weight.shape[0]), dtype=dtype, device=q.device)
            prepared(out.view(len(q), -1), q, q_scale, weight, weight_scale, bias)
            return out
        out = int8_gemm(q, q_scale, weight, weight_scale, bias, dtype)
        if out.numel() > 0 and weight_scale.numel() == weight.shape[0] and weight_scale.dtype == torch.float32:
            _keep(self._gemms, key, tuned_gemm(out, q, q_scale, weight, weight_scale.reshape(-1), bias))
        return out.reshape(*leading, weight.shape[0])


def _kind(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _is_current(device: torch.device) -> bool:
    return device.type != "cuda" or torch.cuda.current_device() == device.index


def _is_plain(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Whether tensors are as a kernel that was compiled for such takes them, and nobody wants to see operators."""
    if watched(x) or (x.requires_grad and torch.is_grad_enabled()):
        return False
    for tensor in (x, *others):
        if tensor is not None and (tensor.data_ptr() % 16 or not tensor.is_contiguous()):
            return False
    return True


def _can_repeat(tensor: torch.Tensor) -> bool:
    """Whether the call just made launched kernels that can be launched again: what is chosen during the capture of a
    CUDA graph is not measured."""
    launched = tensor.numel() > 0 and uses_triton(tensor)
    return launched and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())


def _keep(prepared: dict[tuple, Any], key: tuple, launch: Any) -> None:
    if launch is None:
        return
    if len(prepared) >= _MOST_SHAPES:
        prepared.clear()
    prepared[key] = launch
