"""Weights in INT8 and in codes of 4 or 6 bits, and LoRAs that are added when a weight is made INT8."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from ..checks import FLOAT_DTYPES, check_dtype, check_matrix
from ..linear.channel_transform import UNCHANGED, ChannelTransform
from ..linear.linear_reference import SMALLEST_SCALE

# Rows are independent: a large weight is processed in slices, so that float32 copies stay this small.
_SLICE_ELEMENTS = 1 << 24
# What a clipped channel's scale can be, relative to absmax / 127; the first, no clipping, wins ties.
_CLIPPING = tuple(1.0 - step / 50 for step in range(26))


def row_slices(shape: Sequence[int]) -> Iterator[slice]:
    """Return slices over the rows of a weight [N, K], each small enough for a float32 copy."""
    rows = max(1, _SLICE_ELEMENTS // max(1, shape[1]))
    return (slice(start, start + rows) for start in range(0, shape[0], rows))


def _least_error_scale(values: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Return the multiple of `scale` [N] in _CLIPPING whose rounding of float32 values [N, K] loses least, by row."""
    best, least = scale, torch.full_like(scale, torch.inf)
    for ratio in _CLIPPING:
        candidate = scale * ratio
        steps = (values / candidate[:, None]).round_().clamp_(-127, 127)
        squares = steps.mul_(candidate[:, None]).sub_(values).square_().sum(dim=1)
        best = torch.where(squares < least, candidate, best)
        least = torch.minimum(squares, least)
    return best


def quantize_weight(
    w: torch.Tensor, transform: ChannelTransform = UNCHANGED, clip: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a weight symmetrically to INT8 with one scale per output channel.

    Args:
        w: [N, K] bf16, fp16 or fp32.
        transform: what `quantize_activations` does to the channels that meet this weight; w takes its other half.
        clip: choose each channel's scale, from half of absmax / 127 to the whole, by the least squared rounding error,
            which clips the channel's largest weights where that pays.

    Returns:
        int8 [N, K] in -127..127 and float32 per-channel scale [N], absmax / 127 unless clipped; 0 for a row of zeros,
        or of values so small that float32 could not hold the scale with all its bits.

    Raises TypeError or ValueError for a wrong dtype, shape or group, ValueError for a NaN or Inf in the weight.
    """
    check_matrix("w", w)
    transform.check(w.shape[1])
    q, scale = quantize_rows(w, transform.on(w.device), clip=clip)
    check_channels(scale)
    return q, scale


def check_channels(scale: torch.Tensor) -> None:
    """Raise ValueError with the first channel whose scale is NaN, of scales [N]: it has a weight that is NaN or Inf."""
    broken = ~torch.isfinite(scale)
    if bool(broken.any()):
        raise ValueError(f"weight has a NaN or Inf in output channel {int(broken.nonzero()[0])}")


def row_scales(values: torch.Tensor) -> torch.Tensor:
    """Return absmax / 127 of each float32 row of [N, K]; 0 where float32 does not hold that with all its bits."""
    absmax = values.abs().amax(dim=1) if values.shape[1] else values.new_zeros(values.shape[0])
    scale = absmax / torch.full_like(absmax, 127)
    return torch.where(scale < SMALLEST_SCALE, 0.0, scale)  # NaN stays


def quantize_rows(
    w: torch.Tensor, transform: ChannelTransform, generator: torch.Generator | None = None, clip: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `quantize_weight` of checked arguments; a NaN or Inf gives its channel the scale NaN."""
    q = torch.empty(w.shape, dtype=torch.int8, device=w.device)
    scale = torch.empty(w.shape[0], dtype=torch.float32, device=w.device)
    for rows in row_slices(w.shape):
        values = transform.to_weight(w[rows])
        scale[rows] = row_scales(values)
        divisor = torch.where(scale[rows] > 0, scale[rows], 1.0)
        if clip:
            divisor = _least_error_scale(values, divisor)
            scale[rows] = torch.where(scale[rows] > 0, divisor, scale[rows])
        steps = values / divisor[:, None]
        noise = None if generator is None else torch.rand(steps.shape, generator=generator, device=steps.device)
        steps = steps.round() if noise is None else (steps + noise).floor()
        q[rows] = steps.clamp(-127, 127).to(torch.int8)
    return q, torch.where(torch.isfinite(scale), scale, torch.nan)


class LowRank(NamedTuple):
    """What is added to a stored weight [N, K], such as LoRAs: up @ down."""

    up: torch.Tensor  # [N, R], R at least 1, bf16, fp16 or fp32 (of which the GPU's kernel keeps all bits)
    down: torch.Tensor  # [R, K], of the same dtype

    def channel_scales(self) -> torch.Tensor:
        """Return by how much the per-channel scale of any weight must grow to hold this, too: absmax / 127 of each row
        of up @ down, float32 [N]."""
        scale = torch.empty(self.up.shape[0], device=self.up.device)
        down = self.down.float()
        for rows in row_slices((len(scale), down.shape[1])):
            scale[rows] = (self.up[rows].float() @ down).abs().amax(dim=1) / 127
        return scale

    def check(self, rows: int, channels: int) -> None:
        """Raise TypeError or ValueError unless it can be added to a weight of this shape."""
        up, down = self
        check_matrix("up", up)
        check_matrix("down", down)
        if up.dtype != down.dtype:
            raise TypeError(f"up and down must be of one dtype, got {up.dtype} and {down.dtype}")
        rank = up.shape[1]
        if up.shape[0] != rows or down.shape != (rank, channels) or rank == 0:
            got = f"{list(up.shape)} and {list(down.shape)}"
            raise ValueError(f"up and down must be [{rows}, R] and [R, {channels}], got {got}")


def rounded_rows(values: torch.Tensor, scale: torch.Tensor, low_rank: LowRank | None, rows: slice) -> torch.Tensor:
    """Return some rows [rows, K] of a weight as int8: round((values + up @ down) / scale), halves to even, clamped.

    `scale` float32 [N, 1] and `low_rank` are of the whole weight. Zeros stand in rows whose scale is none: 0, NaN, Inf,
    negative, or too small.
    """
    if low_rank is not None:
        values = values + low_rank.up[rows].float() @ low_rank.down.float()
    usable = (scale[rows] >= SMALLEST_SCALE) & torch.isfinite(scale[rows])
    steps = (values / torch.where(usable, scale[rows], 1.0)).round().clamp(-127, 127)
    return torch.where(usable, steps, 0).to(torch.int8)


LEVELS = 16
"""How many a codebook has."""
DEFAULT_CODEBOOK = (
    *(-0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720),
    *(0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671),
)
"""The levels of normally distributed weights in groups of 16, relative to each group's largest (Lloyd 1982).
comfy-kitchen's (0.2.40): its kernel for few tokens reads these alone."""
GROUP = 16
"""Columns of one scale in codes that the pack makes: 4.5 bits a weight with its FP8 scale."""
CANDIDATES = tuple((18 + number) / 32 for number in range(16))
"""Scales that are tried for a group, relative to the one that gives its largest value the largest level. A smaller one
wins where few values are large."""
_SCALES = (torch.float8_e4m3fn, *FLOAT_DTYPES)


class GroupedCodes(NamedTuple):
    """An INT8 weight [N, K] in codes, as comfy-kitchen stores it (its layout AsymW4A8Int8Layout, 0.2.40).

    Byte j of a row has the lowest four bits of the codes of columns 2 j, in its own lowest four, and 2 j + 1. With 6
    bits, K / 4 bytes follow: byte j has the upper two bits of columns 4 j to 4 j + 3, the first of them lowest.
    """

    codes: torch.Tensor  # int8 [N, K / 2] or [N, 3 K / 4], bytes without a sign
    scale: torch.Tensor  # float8_e4m3fn, bf16, fp16 or fp32 [N, K / group], finite
    codebook: torch.Tensor | None  # the levels of 4-bit codes, float32 [16]; None for code - 8, or code - 32 of 6 bits
    group: int  # columns of one scale: 4, 8 or a multiple of 16, with 6 bits the latter

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.scale.shape[-1] * self.group

    @property
    def bits(self) -> int:
        """Of a code: 4 or 6."""
        return 4 if self.codes.shape[1] * 2 == self.shape[1] else 6

    def cpu(self) -> "GroupedCodes":
        """A copy in host memory."""
        codebook = None if self.codebook is None else self.codebook.cpu()
        return GroupedCodes(self.codes.cpu(), self.scale.cpu(), codebook, self.group)

    def check(self) -> None:
        """Raise TypeError or ValueError unless it is what the attributes say."""
        codes, scale, codebook, group = self
        check_dtype("codes", codes.dtype, torch.int8)
        if scale.dtype not in _SCALES:
            raise TypeError(f"the scales of groups must be float8_e4m3fn or floats, got {scale.dtype}")
        if codes.ndim != 2 or scale.ndim != 2 or len(codes) != len(scale):
            raise ValueError(f"codes and scales must be rows, got shapes {list(codes.shape)} and {list(scale.shape)}")
        channels, width = self.shape[1], codes.shape[1]
        if 4 * width not in (2 * channels, 3 * channels):
            sizes = f"{channels // 2} or {3 * channels // 4}"
            raise ValueError(f"rows of K = {channels} codes must have {sizes} bytes, got {width}")
        if group not in (4, 8) and (group < 16 or group % 16):
            raise ValueError(f"a group must be 4, 8 or a multiple of 16 columns, got {group}")
        if channels % 16 or (self.bits == 6 and (channels % 32 or group % 16)):
            raise ValueError(
                f"K = {channels} in groups of {group} must be a multiple of 16; for 6 bits K must be one of 32 and the "
                "group one of 16"
            )
        if codebook is not None:
            check_dtype("the codebook", codebook.dtype, torch.float32)
            if self.bits == 6 or codebook.shape != (LEVELS,):
                raise ValueError(f"a codebook must have {LEVELS} levels, for 4 bits, got shape {list(codebook.shape)}")


def packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits as `GroupedCodes` has them: int8 [N, K / 2] of uint8 [N, K] in 0..15, K even."""
    pairs = codes.unflatten(1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)
