"""An INT8 weight in codes of 4 or 6 bits with a scale for each group of them, as one value."""

from typing import NamedTuple

import torch

from ..checks import FLOAT_DTYPES, check_dtype, check_same_device

LEVELS = 16
"""How many a codebook has."""
DEFAULT_CODEBOOK = (
    *(-0.980602, -0.794529, -0.638165, -0.500986, -0.377321, -0.263187, -0.155210, -0.050720),
    *(0.052541, 0.156985, 0.265284, 0.379533, 0.502636, 0.638953, 0.794876, 0.980671),
)
"""The levels of normally distributed weights in groups of 16, relative to each group's largest (Lloyd 1982). These
are comfy-kitchen's (0.2.40): its kernel for few tokens reads these alone."""
GROUP = 16
"""Columns of one scale in codes that the pack makes: 4.5 bits a weight with its FP8 scale."""
CANDIDATES = tuple((18 + number) / 32 for number in range(16))
"""Scales that are tried for a group, relative to the one that gives its largest value the largest level: a smaller one
wins where few values are large."""
_SCALES = (torch.float8_e4m3fn, *FLOAT_DTYPES)


class GroupedCodes(NamedTuple):
    """An INT8 weight [N, K] in codes, as comfy-kitchen stores it (its layout AsymW4A8Int8Layout, 0.2.40).

    Attributes:
        codes: int8 [N, K / 2] or [N, 3 K / 4], bytes without a sign. Byte j of a row has the lowest four bits of the
            codes of columns 2 j, in its own lowest four, and 2 j + 1. With 6 bits, K / 4 bytes follow: byte j has the
            upper two bits of columns 4 j to 4 j + 3, the first of them lowest.
        scale: float8_e4m3fn, bf16, fp16 or fp32 [N, K / group], finite.
        codebook: the 16 levels of 4-bit codes, float32; None for levels that are code - 8, or code - 32 with 6 bits.
        group: columns of one scale: 4, 8 or a multiple of 16, with 6 bits the latter.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    codebook: torch.Tensor | None
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """N and K."""
        return self.codes.shape[0], self.scale.shape[-1] * self.group

    @property
    def bits(self) -> int:
        """Of a code: 4 or 6."""
        return 4 if self.codes.shape[1] * 2 == self.shape[1] else 6

    def cpu(self) -> "GroupedCodes":
        """The same in host memory."""
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
        channels = self.shape[1]
        if 4 * codes.shape[1] not in (2 * channels, 3 * channels):
            raise ValueError(
                f"rows of K = {channels} codes must have {channels // 2} or {3 * channels // 4} bytes, got "
                f"{codes.shape[1]}"
            )
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
        check_same_device(codes=codes, scale=scale, codebook=codebook)


def packed_codes(codes: torch.Tensor) -> torch.Tensor:
    """Codes of 4 bits as `GroupedCodes` has them: int8 [N, K / 2] of uint8 [N, K] in 0..15, K even."""
    pairs = codes.unflatten(1, (-1, 2))
    return (pairs[..., 0] | pairs[..., 1] << 4).view(torch.int8)
