"""Whether a kernel computes a small product exactly on this card, asked before it is used there.

No interpreter can run such a kernel: an error of a compiler or of a launch would otherwise be a wrong image.
"""

from collections.abc import Callable

import torch

from ..call_cache import CACHE, cached
from ..memory_plan import is_capturing
from .gemm_kernel import Operands
from .linear_reference import int8_accumulate_reference

# Of ragged tiles, and of few enough that all multiprocessors share them where K is shared.
_M, _N, _K = 300, 1008, 4608
# Sums of so many of 1 and -1, twice at most, are whole numbers that bf16 holds.
_SPARSE = 16


class WrongResult(Exception):
    """A kernel does not compute what it should."""


def check_once(key: tuple, device: torch.device, ask: Callable[[], bool]) -> bool:
    """Return a card's answer, cached under `key`. False, and not cached, where it cannot be asked now: with too little
    memory, and in the capture of a CUDA graph, in which no result can be read."""
    if key not in CACHE and is_capturing(device):
        return False
    try:
        return cached(key, ask)
    except torch.cuda.OutOfMemoryError:
        return False


def check_exact(
    launch: Callable[[Operands], None], device: torch.device, dtype: torch.dtype, has_bias: bool, one_scale: bool
) -> None:
    """Launch a GEMM twice on operands whose products are small though parts of their sums are large.

    So partial sums that are rounded show, and channels that do not meet. The second launch finds the workspace as the
    first one left it. Raises WrongResult.
    """
    row, column = torch.arange(_M, device=device)[:, None], torch.arange(_N, device=device)[:, None]
    channel = torch.arange(_K, device=device)
    signs = 1 - 2 * (channel * 11 // 7 % 2)
    halves = torch.where(channel < _K // 2, signs, -signs)  # whose products with the signs add up to nothing
    sparse = torch.where((channel + 5 * column) % (_K // _SPARSE) == 0, (channel * 3 + column * 7) % 3 - 1, 0)
    q = ((1 + row % 2) * signs).to(torch.int8)
    weight = (halves + sparse).to(torch.int8)
    expected = int8_accumulate_reference(q, weight)
    floats = dtype != torch.int32
    scale = torch.ones(_M, device=device) if floats else None
    weight_scale = torch.ones(1 if one_scale else _N, device=device) if floats else None
    bias = torch.zeros(_N, device=device, dtype=dtype) if floats and has_bias else None
    for _ in range(2):
        out = torch.full((_M, _N), 77, device=device, dtype=dtype)
        launch(Operands(q, weight, scale, weight_scale, bias, out))
        if not torch.equal(out.to(torch.int32), expected):
            raise WrongResult
