"""Weights from one form to another while a model runs: INT8, GGUF's formats, codes of 4 and 6 bits, floats.

The INT8 of a code of W4A8 or W6A8 is its level times the group's scale, rounded: to expand codes loses nothing.

All raise TypeError or ValueError for a wrong dtype, shape, device, format or rotation group. `blocks` are uint8 [N,
bytes of a row], as in a GGUF file, and `name` is a key of GGUF_FORMATS.
"""

import torch

from ..checks import check_dtype, check_matrix, check_weight_scale
from ..linear.channel_transform import UNCHANGED, ChannelTransform
from ..operators import Operation, operator
from .gguf_formats import GGUF_FORMATS, GGUFFormat
from .weight_reference import (
    GroupedCodes,
    LowRank,
    check_channels,
    quantize_rows,
    rounded_rows,
    row_scales,
    row_slices,
)

# A minimum of GGUF's K formats is at most 63 times an fp16 number.
_LARGEST = 63 * int(torch.finfo(torch.float16).max)


@operator(kernel="linear.rows", rounds=())
def requantize_weight(
    w: torch.Tensor, transform: ChannelTransform = UNCHANGED, seed: int | None = None
) -> Operation[tuple[torch.Tensor, torch.Tensor]]:
    """Quantize a weight that changes while a model runs, as `quantize_weight` does: on a GPU one kernel, and no wait.

    Args:
        w: [N, K] bf16, fp16 or fp32.
        transform: what `quantize_activations` does to the channels that meet this weight; w takes its other half.
        seed: rounds stochastically, so that a change smaller than a step survives on average; None rounds half to
            even. The same seed gives the same result on the same kind of device.

    Returns:
        int8 [N, K] in -127..127 and float32 per-channel scale [N], absmax / 127; NaN for a channel with a NaN or Inf.
    """
    check_matrix("w", w)
    transform.check(w.shape[1])
    yield [(w.shape, torch.int8), (w.shape[:1], torch.float32)]
    generator = None if seed is None else torch.Generator(w.device).manual_seed(seed)
    yield quantize_rows(w, transform, generator)


@operator(kernel="linear.rows", rounds=())
def dequantize_weight(
    q: torch.Tensor,
    scale: torch.Tensor,
    transform: ChannelTransform = UNCHANGED,
    dtype: torch.dtype = torch.bfloat16,
) -> Operation[torch.Tensor]:
    """Return the weight [N, K] in `dtype` and the original basis: q . scale with `transform` undone.

    Args:
        q: int8 [N, K].
        scale: float32, scalar or per-channel [N] or [N, 1].
        transform: as given to `quantize_weight`.
    """
    check_matrix("q", q, torch.int8)
    check_weight_scale(scale, q.shape[0])
    transform.check(q.shape[1])
    yield [(q.shape, dtype)]
    per_channel = scale.reshape(-1, 1).expand(q.shape[0], 1)
    weight = torch.empty(q.shape, dtype=dtype, device=q.device)
    for rows in row_slices(q.shape):
        weight[rows] = transform.from_weight(q[rows].float() * per_channel[rows]).to(dtype)
    yield weight


def _format(name: str) -> GGUFFormat:
    if name not in GGUF_FORMATS:
        raise ValueError(f"{name!r} is no known GGUF format; known are {', '.join(GGUF_FORMATS)}")
    return GGUF_FORMATS[name]


def _check_blocks(blocks: torch.Tensor, name: str) -> GGUFFormat:
    """Return the format of this name. Raise TypeError or ValueError unless `blocks` are rows of its blocks."""
    form = _format(name)
    check_matrix("blocks", blocks, torch.uint8)
    if blocks.shape[1] % form.bytes:
        raise ValueError(f"rows of {name} must be a multiple of {form.bytes} bytes, got {blocks.shape[1]}")
    return form


def quantize_gguf(weight: torch.Tensor, name: str) -> torch.Tensor:
    """Return `blocks` of a weight [N, K] bf16, fp16 or fp32; `name` is "Q8_0", "Q4_K", "Q5_K" or "Q6_K".

    K is a multiple of the weights in a block. Raises ValueError for a NaN, an Inf and values too large for the format.
    """
    blocks = _format(name)
    check_matrix("weight", weight)
    if blocks.quantize is None:
        able = ", ".join(other for other, its in GGUF_FORMATS.items() if its.quantize is not None)
        raise ValueError(f"{name} can be read but not made; the formats that can are {able}")
    channels = weight.shape[1]
    if channels % blocks.weights:
        raise ValueError(f"K must be a multiple of {blocks.weights} for {name}, got {channels}")
    row_bytes = channels // blocks.weights * blocks.bytes
    out = torch.empty(weight.shape[0], row_bytes, dtype=torch.uint8, device=weight.device)
    for rows in row_slices(weight.shape):
        values = weight[rows].float()
        too_large = f"a value beyond {_LARGEST}, too large for {name},"
        for wrong, what in ((~torch.isfinite(values), "a NaN or Inf"), (values.abs() > _LARGEST, too_large)):
            if bool(wrong.any()):
                raise ValueError(f"weight has {what} in output channel {rows.start + int(wrong.nonzero()[0, 0])}")
        out[rows] = blocks.quantize(values).flatten(1)
    return out


@operator(kernel="weights.gguf_kernels", rounds=())
def dequantize_gguf(blocks: torch.Tensor, name: str, dtype: torch.dtype = torch.bfloat16) -> Operation[torch.Tensor]:
    """Return the weight [N, K] in bf16, fp16 or fp32, computed in float32 as ggml does."""
    form = _check_blocks(blocks, name)
    check_dtype("dtype", dtype)
    yield [(_weight_shape(blocks, form), dtype)]
    yield _by_rows(blocks, form, dtype, lambda values, rows: values)


@operator(kernel="weights.gguf_kernels", rounds=())
def gguf_channel_scales(blocks: torch.Tensor, name: str) -> Operation[torch.Tensor]:
    """Return the per-channel scale, float32 [N], that `quantize_weight` finds for the decoded weight.

    It is absmax / 127 of each row; 0 for zeros, or values too small for a scale; NaN for a row with a NaN or Inf.
    """
    form = _check_blocks(blocks, name)
    yield [(blocks.shape[:1], torch.float32)]
    scale = torch.zeros(blocks.shape[0], device=blocks.device)
    for rows in row_slices(_weight_shape(blocks, form)):
        if blocks.shape[1]:
            scale[rows] = row_scales(_decode(blocks[rows], form))
    yield torch.where(torch.isfinite(scale), scale, torch.nan)


@operator(kernel="weights.gguf_kernels", rounds=())
def expand_gguf(
    blocks: torch.Tensor, name: str, scale: torch.Tensor, low_rank: LowRank | None = None
) -> Operation[torch.Tensor]:
    """Return the INT8 weight: round(w / scale), halves to even, as `quantize_weight` does by `gguf_channel_scales`.

    Args:
        scale: float32 [N] or [N, 1].
        low_rank: added to the decoded weight, summed in float32 in no certain order; `scale` is the sum's.

    Returns:
        int8 [N, K] in -127..127; zeros where the scale is none that `gguf_channel_scales` finds: 0, NaN, Inf, negative.
    """
    form = _check_blocks(blocks, name)
    shape = _weight_shape(blocks, form)
    check_weight_scale(scale, shape[0])
    if low_rank is not None:
        low_rank.check(*shape)
    yield [(shape, torch.int8)]
    per_channel = scale.reshape(-1, 1).expand(blocks.shape[0], 1)
    yield _by_rows(blocks, form, torch.int8, lambda values, rows: rounded_rows(values, per_channel, low_rank, rows))


def gguf_to_int8(blocks: torch.Tensor, name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the decoded weight as `quantize_weight` does, int8 [N, K] and its scale float32 [N], at once.

    Raises ValueError for a NaN or Inf in the weight.
    """
    scale = gguf_channel_scales.at_once(blocks, name)
    check_channels(scale)
    return expand_gguf.at_once(blocks, name, scale), scale


def _weight_shape(blocks: torch.Tensor, form: GGUFFormat) -> tuple[int, int]:
    return blocks.shape[0], blocks.shape[1] // form.bytes * form.weights


def _decode(blocks: torch.Tensor, form: GGUFFormat) -> torch.Tensor:
    return form.decode(blocks.unflatten(1, (-1, form.bytes)), torch.float32)


def _by_rows(blocks: torch.Tensor, form: GGUFFormat, dtype: torch.dtype, change) -> torch.Tensor:
    """Return [N, K] in `dtype`: `change` of some decoded rows at a time, float32, and of which rows they are."""
    out = torch.empty(_weight_shape(blocks, form), dtype=dtype, device=blocks.device)
    if out.numel():
        for rows in row_slices(out.shape):
            out[rows] = change(_decode(blocks[rows], form), rows).to(dtype)
    return out


@operator(kernel="weights.grouped_codes", rounds=())
def expand_codes(
    weight: GroupedCodes,
    channel_scale: torch.Tensor | None = None,
    larger: torch.Tensor | None = None,
    low_rank: LowRank | None = None,
) -> Operation[torch.Tensor]:
    """Return the INT8 weight [N, K] of codes: clamp(round(level * scale of the group), -127, 127), halves to even.

    With a `low_rank` it is round((that * channel_scale + up @ down) / larger), clamped alike, and zeros in rows for
    which `larger` is none: 0, NaN, Inf, negative. The sums are float32, in no certain order.

    Args:
        channel_scale: of the weight, float32 [N] or [N, 1].
        larger: the sum's, such as channel_scale + low_rank.channel_scales(); as many values.
        low_rank: what is added before rounding, in the basis of the stored weight: rotated as that is. Both scales are
            read only with it.
    """
    weight.check()
    if low_rank is not None:
        low_rank.check(*weight.shape)
        if channel_scale is None or larger is None:
            raise TypeError("a low_rank is added to a weight with a channel_scale, and what is larger")
        check_weight_scale(channel_scale, weight.shape[0])
        check_weight_scale(larger, weight.shape[0])
    yield [(weight.shape, torch.int8)]
    out = torch.empty(weight.shape, dtype=torch.int8, device=weight.codes.device)
    if out.numel():
        for some in row_slices(out.shape):
            whole = _levels(weight, some).round_().clamp_(-127, 127)
            if low_rank is not None and channel_scale is not None and larger is not None:
                own, sums = (scale.reshape(-1, 1).expand(len(out), 1) for scale in (channel_scale, larger))
                whole = rounded_rows(whole * own[some], sums, low_rank, some)
            out[some] = whole.to(torch.int8)
    yield out


def _levels(weight: GroupedCodes, rows: slice) -> torch.Tensor:
    """Return level times scale of some rows of codes, float32 [rows, K]."""
    channels = weight.shape[1]
    packed = weight.codes[rows].view(torch.uint8)
    low = packed[:, : channels // 2]
    codes = torch.stack([low & 15, low >> 4], dim=2).flatten(1)
    if weight.bits == 6:
        shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=packed.device)
        codes |= (packed[:, channels // 2 :, None] >> shifts & 3).flatten(1) << 4
    levels = codes.float() - (1 << weight.bits - 1) if weight.codebook is None else weight.codebook[codes.int()]
    return (levels.unflatten(1, (-1, weight.group)) * weight.scale[rows].float()[:, :, None]).flatten(1)
