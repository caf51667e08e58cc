"""INT8 weights while a model runs: to floats and, changed by a patch (LoRA), back."""

import torch

from ..checks import check_float_matrix, check_int8_matrix, check_weight_scale
from ..operators import Operation, operator
from ..reference.int8_weights import dequantize_rows, quantize_rows
from ..reference.transform import UNCHANGED, ChannelTransform


@operator(kernel="quantizer", rounds=())
def requantize_weight(
    w: torch.Tensor, transform: ChannelTransform = UNCHANGED, seed: int | None = None
) -> Operation[tuple[torch.Tensor, torch.Tensor]]:
    """`quantize_weight` for weights that change while a model runs: on a GPU one kernel, and nobody waits for it.

    Args:
        w: [N, K] bf16, fp16 or fp32.
        transform: what `quantize_activations` does to the channels that meet this weight; w takes its other half.
        seed: rounds stochastically, so that a change smaller than a step survives on average; None rounds half to
            even. The same seed gives the same result on the same kind of device.

    Returns:
        int8 [N, K] in -127..127 and float32 per-channel scale [N], absmax / 127; NaN for a channel with a NaN or Inf.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or group.
    """
    check_float_matrix("w", w)
    transform.check(w.shape[1])
    yield [(w.shape, torch.int8), (w.shape[:1], torch.float32)]
    generator = None if seed is None else torch.Generator(w.device).manual_seed(seed)
    yield quantize_rows(w, transform, generator)


@operator(kernel="quantizer", rounds=())
def dequantize_weight(
    q: torch.Tensor,
    scale: torch.Tensor,
    transform: ChannelTransform = UNCHANGED,
    dtype: torch.dtype = torch.bfloat16,
) -> Operation[torch.Tensor]:
    """The float weight [N, K] in the original basis: q . scale with `transform` undone.

    Args:
        q: int8 [N, K].
        scale: float32, scalar or per-channel [N] or [N, 1].
        transform: as given to `quantize_weight`.
        dtype: dtype of the result.

    Raises:
        TypeError, ValueError: wrong dtype, shape, device or group.
    """
    check_int8_matrix("q", q)
    check_weight_scale(scale, q.shape[0])
    transform.check(q.shape[1])
    yield [(q.shape, dtype)]
    yield dequantize_rows(q, scale, transform, dtype)
