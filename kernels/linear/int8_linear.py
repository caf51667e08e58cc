"""The INT8 linear and its two halves, which are operators of PyTorch (`torch.ops.int8_dit`).

These are opaque to a compiler, the quantizer not to Inductor (compilers.py). A model's linears, which are called many
times over, are `RepeatedLinear`s. All raise TypeError or ValueError for a wrong dtype, shape, device, rotation group or
number of bits, and RuntimeError where a gradient is asked of the activations: rounding has none.
"""

import math
from collections.abc import Callable, Sequence

import torch

from ..call_cache import CACHE, ExpiringEntry, cached, store
from ..card.device import fused_obstacle
from ..checks import check_dtype, check_matrix, check_vector, check_weight_scale
from ..compilers import is_dispatched
from ..internals.torch_functions import current_device
from ..operators import Operation, operator
from .channel_transform import UNCHANGED, ChannelTransform
from .linear_reference import (
    Quantized,
    int8_accumulate_reference,
    quantize_activations_reference,
    quantized_layouts,
)


def linear_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return the input [..., K] of a linear as a matrix. Raises what `int8_linear` does for a bad `x` or `weight`."""
    if x.ndim == 0:
        raise ValueError("x must have at least one dimension")
    check_matrix("weight", weight, torch.int8)
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(f"x has K = {x.shape[-1]} but weight has K = {weight.shape[1]}")
    if x.requires_grad and torch.is_grad_enabled():
        raise RuntimeError("int8_linear has no gradient: run it under torch.no_grad() or use the bf16 kernel")
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


@operator(kernel="linear.rows", rounds=("x",))
def quantize_activations(
    x: torch.Tensor, transform: ChannelTransform = UNCHANGED, activation_bits: int = 8
) -> Operation[Quantized]:
    """Quantize each token symmetrically: scale = absmax / 127, q = round(x 127 / absmax), halves to even.

    With 16 bits a second int8 number r = round(254 (x / scale - q)) holds what the first one rounded away, so that
    x = scale (q + r / 254) to within 1 / 508 of a step.

    All arithmetic is float32. A row that holds a NaN or Inf gets the scale NaN (and q = 0); a row of zeros the scale 0.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        transform: what is done to the channels first.
        activation_bits: 8 or 16.

    Returns:
        int8 [M, K], or [M, 2K] with q beside r for 16 bits, and float32 per-token scale [M].
    """
    check_matrix("x", x)
    yield quantized_layouts(x, x.shape[1], transform, activation_bits)
    yield quantize_activations_reference(x, transform, activation_bits)


@operator(kernel="linear.gemm", rounds=("q_scale",))
def int8_gemm(
    q: torch.Tensor,
    q_scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
) -> Operation[torch.Tensor]:
    """Multiply in one launch: (q . weight^T) in int32, then x q_scale x weight_scale + bias in float32.

    Args:
        q: int8 [M, K] activations, or [M, 2K] of 16 bits from `quantize_activations`: their K is walked twice.
        q_scale: float32 [M] per-token scale.
        weight: int8 [N, K].
        weight_scale: float32 per-channel scale [N] or [N, 1], or a scalar.
        bias: [N] floating point, or None.
        out_dtype: of the result [M, N], bf16, fp16 or fp32.
    """
    check_matrix("q", q, torch.int8)
    check_matrix("weight", weight, torch.int8)
    if q.shape[1] not in (weight.shape[1], 2 * weight.shape[1]):
        raise ValueError(f"q has K = {q.shape[1]} but weight has K = {weight.shape[1]}")
    check_dtype("q_scale", q_scale.dtype, torch.float32)
    check_vector("q_scale", q_scale, q.shape[0], "the rows of q")
    check_weight_scale(weight_scale, weight.shape[0])
    if bias is not None:
        check_vector("bias", bias, weight.shape[0], "the rows of weight")
    check_dtype("out_dtype", out_dtype)
    yield [((q.shape[0], weight.shape[0]), out_dtype)]
    if q.numel() and weight.numel():
        out = int8_accumulate_reference(q, weight).float() * q_scale[:, None] * weight_scale.reshape(1, -1)
        yield (out if bias is None else out + bias.float()).to(out_dtype)
    else:
        empty_sum = torch.zeros((q.shape[0], weight.shape[0]), dtype=out_dtype, device=q.device)
        yield empty_sum if bias is None else empty_sum.add_(bias.to(out_dtype))


def int8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None = None,
    transform: ChannelTransform = UNCHANGED,
    out_dtype: torch.dtype | None = None,
    activation_bits: int = 8,
) -> torch.Tensor:
    """Compute a linear layer on INT8 tensor cores: quantize the activations per token, then the fused GEMM.

    Args:
        x: [..., K] bf16, fp16 or fp32, any leading dimensions, none and empty ones included.
        weight: int8 [N, K] from `quantize_weight` with the same `transform`, which changes the channels of `x` first.
        weight_scale, bias: as in `int8_gemm`.
        out_dtype: dtype of the result [..., N]; that of `x` when None.
        activation_bits: 8, or 16 for layers whose inputs 8 bits round too much: twice the multiplications.
    """
    q, q_scale = quantize_activations(linear_rows(x, weight), transform, activation_bits)
    out = int8_gemm(q, q_scale, weight, weight_scale, bias, x.dtype if out_dtype is None else out_dtype)
    return out.reshape(*x.shape[:-1], weight.shape[0])


LinearWeight = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]
"""What a linear holds: int8 [N, K], its scale in float32, [N], [N, 1] or one value, and the floating point factors [K]
that divide its input, or None."""


def settle(work: Callable[[], object], device: torch.device) -> None:
    """Do some work on a device again and again, for some seconds at most, until its GEMMs run with the tiles that stay
    for their shapes and nothing is compiled. Call before work is timed; it does nothing where no kernel runs."""
    if device.type == "cuda" and fused_obstacle(device) is None:
        from . import tuning

        tuning.settle(work, device)


def runs_kitchen(m: int, n: int, k: int, device: torch.device) -> bool:
    """Return whether fused products of [m, k] and [n, k] run comfy-kitchen's GEMM on a device, as it gave the same bits
    there and was faster; False while that is open."""
    if device.type != "cuda" or fused_obstacle(device) is not None:
        return False
    from . import gemm

    key = gemm.TuningKey(gemm.device_name(device.index), gemm.m_bucket(m), n, k)
    return gemm.tuner.settled(key) == gemm.KITCHEN


class RepeatedLinear:
    """The calls of linears with weights of one form on one device, at the host's time of two launches.

    It holds how operands like these are launched, and no tensor. A call unlike all before is checked as `int8_linear`
    checks it. Linears of one form share one.

    Args:
        weight: like those of all calls, of which only the devices and addresses are looked at again.
        rotation_group, activation_bits: how the linear wants its input, as in `int8_linear`.
    """

    def __init__(self, weight: LinearWeight, rotation_group: int | None, activation_bits: int) -> None:
        q, scale, smooth = weight
        self._n, self._k = q.shape
        self._index = q.get_device()
        self._rotation_group, self._activation_bits = rotation_group, activation_bits
        held = ((q, torch.int8), (scale, torch.float32), (smooth, torch.float32))
        dense = all(each is None or (each.dtype == dtype and each.is_contiguous()) for each, dtype in held)
        self._repeats = dense and self._k % 16 == 0  # rows of another K are copied into wider ones

    @staticmethod
    def of(weight: LinearWeight, rotation_group: int | None, activation_bits: int) -> "RepeatedLinear":
        """Return the one for all linears like this one."""
        layouts = [None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in weight]
        key = (RepeatedLinear, *layouts, rotation_group, activation_bits)
        return cached(key, lambda: RepeatedLinear(weight, rotation_group, activation_bits))

    def __call__(self, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return `int8_linear` of x [..., K]: [..., N] in the dtype of `x`. Raises what that does."""
        key = (self, x.shape, x.dtype, None if bias is None else bias.dtype)
        known, begin, smooth = CACHE.get(key), None, weight[2]
        if known is not None and x.is_contiguous():
            begin = self._addresses(x, x if smooth is None else smooth, weight, bias)
        if known is None or begin is None:
            return self._found(key, x, weight, bias)
        x_at, factors_at, weight_at, scale_at, bias_at = begin
        quantize, multiply, rows, first_scale, shape = known
        # One allocation for the int8 rows and their scales behind: it takes the host as long as all these checks.
        buffer, out = x.new_empty(first_scale + 4 * rows, dtype=torch.int8), x.new_empty(shape)
        q_at, out_at = buffer.data_ptr(), out.data_ptr()
        q_scale_at = q_at + first_scale
        quantize(rows, 1, x_at, factors_at, q_at, q_scale_at, self._k, self._k, 0)
        multiply(buffer, weight[0], out, (q_at, weight_at, q_scale_at, scale_at, bias_at or out_at, out_at))
        return out

    def _found(self, key: tuple, x: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None) -> torch.Tensor:
        """Return the linear of x as if it were the first; keep what launches another one like it."""
        transform = ChannelTransform(weight[2], self._rotation_group)
        quantizes = linear_rows(x, weight[0]), transform, self._activation_bits
        quantized = quantize_activations(*quantizes)
        out = self.multiply(quantized, weight, bias, x.shape[:-1], x.dtype)
        multiply = CACHE.get((self, x.dtype, quantized[0].shape, key[-1]))
        passes = multiply is None or isinstance(multiply, ExpiringEntry)
        quantize = None if passes else getattr(quantize_activations.launch_of(*quantizes), "direct", None)
        if quantize is not None:
            rows, row_bytes = quantized[0].shape
            store(key, (quantize, multiply, rows, rows * row_bytes + 15 & -16, (*x.shape[:-1], self._n)))
        return out

    def multiply(
        self,
        quantized: Quantized,
        weight: LinearWeight,
        bias: torch.Tensor | None,
        leading: Sequence[int],
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """Return `int8_gemm` of quantized rows, whose dimensions are `leading`: [*leading, N] in `dtype`."""
        q, q_scale = quantized
        key = (self, dtype, q.shape, None if bias is None else bias.dtype)
        launch = CACHE.get(key)
        if launch is not None and q.is_contiguous() and q_scale.is_contiguous():
            begin = self._addresses(q, q_scale, weight, bias)
            if begin is not None:
                q_at, q_scale_at, weight_at, scale_at, bias_at = begin
                out = q.new_empty((*leading, self._n), dtype=dtype)
                out_at = out.data_ptr()
                launch(q, weight[0], out, (q_at, weight_at, q_scale_at, scale_at, bias_at or out_at, out_at))
                return out
        multiplies = q, q_scale, weight[0], weight[1], bias, dtype
        out = int8_gemm(*multiplies)
        if self._repeats and not is_dispatched(q):
            tuned = int8_gemm.launch_of(*multiplies)
            if tuned is not None and (taken := tuned.take()) is not None:
                launch, calls = taken
                store(key, launch if calls == math.inf else ExpiringEntry(key, launch, calls))
        return out.reshape(*leading, self._n)

    def _addresses(
        self, x: torch.Tensor, factors: torch.Tensor, weight: LinearWeight, bias: torch.Tensor | None
    ) -> tuple[int, int, int, int, int] | None:
        """Return where x, its factors, the weight, its scale and the bias begin, 0 for no bias. None unless all lie on
        the form's device, which is the current one, and begin on 16 bytes, and nobody wants operators or a gradient of
        `x`."""
        index, bias_at, (q, scale, _) = self._index, 0, weight
        if not x.get_device() == factors.get_device() == q.get_device() == scale.get_device() == index:
            return None
        if index >= 0 and current_device() != index:
            return None
        if is_dispatched(x) or (x.requires_grad and torch.is_grad_enabled()):
            return None
        if bias is not None:
            if bias.numel() != self._n or bias.get_device() != index or not bias.is_contiguous():
                return None
            bias_at = bias.data_ptr()
        begin = x.data_ptr(), factors.data_ptr(), q.data_ptr(), scale.data_ptr(), bias_at
        return None if (begin[0] | begin[1] | begin[2] | begin[3] | bias_at) & 15 else begin
