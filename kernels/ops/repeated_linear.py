"""INT8 linears that are called many times over: what a first call found out is not asked again."""

from collections.abc import Sequence
from typing import Any

import torch

from ..card.device import uses_triton
from ..compilers import is_dispatched
from ..reference.transform import ChannelTransform
from .linear import int8_gemm, linear_rows, quantize_activations


class RepeatedLinear:
    """The calls of linears with int8 weights [N, K] of one form on one device, which cost the host as little as two
    launches can, whatever the number of tokens.

    Each call brings the tensors, and none is held: only how operands like these are launched. A call unlike all before
    is checked as `int8_linear` checks it. Linears of one form share one, which so stays in the host's caches.

    Args:
        weight, weight_scale, smooth: like those of all calls, of which only the devices and addresses are looked at
            again: int8 [N, K]; float32 [N], [N, 1] or one value; floating point [K] or None.
        rotation_group, activation_bits: how the linear wants its input, as in `int8_linear`.
    """

    def __init__(
        self,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        smooth: torch.Tensor | None,
        rotation_group: int | None,
        activation_bits: int,
    ) -> None:
        self._n, self._k = weight.shape
        self._row_bytes = self._k * (activation_bits // 8)
        self._index = weight.get_device()
        self._rotation_group, self._activation_bits = rotation_group, activation_bits
        # What launches the quantizer, by the dtype of its input, and the product, by what `_product` says.
        self._quantizers: dict[torch.dtype, Any] = {}
        self._products: dict[tuple, Any] = {}
        self._repeats = (
            uses_triton(weight)
            and weight.numel() > 0
            and self._k % 16 == 0  # others are copied into wider rows
            and _is_dense(weight, torch.int8)
            and _is_dense(weight_scale, torch.float32)
            and weight_scale.numel() in (1, self._n)
            and (smooth is None or _is_dense(smooth, torch.float32))
        )
        if self._repeats:
            from ..triton_kernels.gemm import m_bucket, rows_kind, stores_blocks_from

            self._bucket, self._rows_kind = m_bucket, rows_kind
            self._stores_blocks_from = stores_blocks_from(self._n, self._row_bytes)

    @staticmethod
    def of(
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        smooth: torch.Tensor | None,
        rotation_group: int | None,
        activation_bits: int,
    ) -> "RepeatedLinear":
        """The one for all linears like this one."""
        operands = weight, weight_scale, smooth
        if not uses_triton(weight):
            return RepeatedLinear(*operands, rotation_group, activation_bits)
        from ..triton_kernels.launching import kept

        layouts = [None if t is None else (t.shape, t.stride(), t.dtype) for t in operands]
        key = (RepeatedLinear, weight.device, *layouts, rotation_group, activation_bits)
        return kept(key, lambda: RepeatedLinear(*operands, rotation_group, activation_bits))

    def __call__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        smooth: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """What `int8_linear` makes of x [..., K]: [..., N] in the dtype of `x`. Raises what that does."""
        dtype, leading = x.dtype, x.shape[:-1]
        quantizer = self._quantizers.get(dtype)
        rows = 0 if quantizer is None else x.numel() // self._k
        product = self._product(x, rows, dtype, bias)
        if quantizer is None or product is None or x.shape[-1] != self._k or not x.is_contiguous():
            return self._checked(x, weight, weight_scale, smooth, bias)
        factors = x if smooth is None else smooth
        x_at, factors_at, weight_at, scale_at = [t.data_ptr() for t in (x, factors, weight, weight_scale)]
        together = factors.get_device() == weight.get_device() == weight_scale.get_device() == self._index
        if not together or (x_at | factors_at | weight_at | scale_at) & 15:
            return self._checked(x, weight, weight_scale, smooth, bias)
        # One allocation for the int8 rows and their scales behind: it takes the host as long as all these checks.
        first_scale = rows * self._row_bytes + 15 & -16
        buffer = x.new_empty(first_scale + 4 * rows, dtype=torch.int8)
        out = x.new_empty((*leading, self._n))
        addend = out if bias is None else bias
        if quantizer.direct is not None and product.takes_addresses:
            q_at = buffer.data_ptr()
            q_scale_at = q_at + first_scale
            quantizer.direct(rows, 1, x_at, factors_at, q_at, q_scale_at, self._k, self._k, 0)
            given = (q_at, weight_at, q_scale_at, scale_at, addend.data_ptr(), out.data_ptr())
            product(rows, buffer, weight, out, given)
            return out
        # Triton launches, and takes tensors only.
        q = buffer[: rows * self._row_bytes].view(rows, -1)
        q_scale = buffer[first_scale:].view(torch.float32)
        quantizer((rows, 1), x, factors, q, q_scale, self._k, self._k, 0)
        product(rows, q, weight, out, (q, weight, q_scale, weight_scale, addend, out))
        return out

    def _checked(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        smooth: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """The call of the linear as if it were the first."""
        rows = linear_rows(x, weight)
        quantized = quantize_activations(rows, ChannelTransform(smooth, self._rotation_group), self._activation_bits)
        if self._repeats and x.is_contiguous() and _may_repeat(x) and _is_aligned(x, smooth):
            from ..triton_kernels.activations import quantizer_launch

            self._quantizers[x.dtype] = quantizer_launch(rows, smooth, *quantized, self._rotation_group)
        return self.multiply(quantized, weight, weight_scale, bias, x.shape[:-1], x.dtype)

    def multiply(
        self,
        quantized: tuple[torch.Tensor, torch.Tensor],
        weight: torch.Tensor,
        weight_scale: torch.Tensor,
        bias: torch.Tensor | None,
        leading: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """[*leading, N] in `dtype`: what `int8_gemm` makes of quantized rows, of which `leading` are the dimensions.

        Raises what `int8_gemm` does.
        """
        q, q_scale = quantized
        rows = len(q)
        product = self._product(q, rows, dtype, bias)
        dense = q.is_contiguous() and q_scale.is_contiguous()
        if product is not None and dense and q.shape[1] == self._row_bytes:
            q_at, weight_at, q_scale_at, scale_at = [t.data_ptr() for t in (q, weight, q_scale, weight_scale)]
            together = q_scale.get_device() == weight.get_device() == weight_scale.get_device() == self._index
            if together and not (q_at | weight_at | q_scale_at | scale_at) & 15:
                out = q.new_empty((*leading, self._n), dtype=dtype)
                addend = out if bias is None else bias
                given: Any = (q, weight, q_scale, weight_scale, addend, out)
                if product.takes_addresses:
                    given = (q_at, weight_at, q_scale_at, scale_at, addend.data_ptr(), out.data_ptr())
                product(rows, q, weight, out, given)
                return out
        out = int8_gemm(q, q_scale, weight, weight_scale, bias, dtype)
        dense = dense and (bias is None or bias.is_contiguous())
        if self._repeats and dense and out.numel() and _may_repeat(q):
            operands = (q, q_scale, weight, weight_scale, bias)
            if _is_aligned(*operands):
                from ..triton_kernels.gemm import tuned_gemm

                self._products[self._kind(rows, dtype, bias)] = tuned_gemm(out, *operands)
        return out.reshape(*leading, self._n)

    def _kind(self, rows: int, dtype: torch.dtype, bias: torch.Tensor | None) -> tuple:
        """What decides how a product is launched."""
        tuned = self._bucket(rows), rows >= self._stores_blocks_from, self._rows_kind(rows)
        return dtype, None if bias is None else bias.dtype, *tuned

    def _product(self, x: torch.Tensor, rows: int, dtype: torch.dtype, bias: torch.Tensor | None) -> Any:
        """What launches a product like this one, of as many rows as `x` or its quantized form has; None where that is
        not known, or where the call is not as plain as those before."""
        if not self._products or not rows or x.get_device() != self._index or not _is_plain(x):
            return None
        if self._index >= 0 and torch.cuda.current_device() != self._index:
            return None
        if bias is not None and (
            bias.numel() != self._n
            or bias.get_device() != self._index
            or bias.data_ptr() & 15
            or not bias.is_contiguous()
        ):
            return None
        return self._products.get(self._kind(rows, dtype, bias))


def _is_dense(tensor: torch.Tensor, dtype: torch.dtype) -> bool:
    return tensor.dtype == dtype and tensor.is_contiguous()


def _is_aligned(*tensors: torch.Tensor | None) -> bool:
    """Whether tensors begin on 16 bytes, as nearly all do and kernels are compiled for."""
    return not any(tensor is not None and tensor.data_ptr() & 15 for tensor in tensors)


def _is_plain(x: torch.Tensor) -> bool:
    """Whether nobody wants to see operators or a gradient of `x`."""
    return not (is_dispatched(x) or (x.requires_grad and torch.is_grad_enabled()))


def _may_repeat(x: torch.Tensor) -> bool:
    """Whether the call just made with `x` launched kernels that can be launched again: what is chosen during the
    capture of a CUDA graph is not measured."""
    if not x.numel() or not _is_plain(x):
        return False
    return not (x.is_cuda and torch.cuda.is_current_stream_capturing())
