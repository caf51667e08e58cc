"""Launching attention with an online softmax: in INT8, and exact for wide heads, where PyTorch is slow on a card."""

import functools
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..internals.gluon import HAS_GLUON
from ..internals.triton_runtime import is_unfit
from ..launching.launching import Build, Launcher, built
from ..linear.exactness import WrongResult, check_once
from ..linear.tuning import device_name
from ..operators import OperatorLaunch, Tensors
from .attention_exactness import check_attention
from .attention_kernel import attention_kernel
from .attention_operands import AttentionOperands, quantized_operands
from .attention_reference import WIDEST_HEAD, padded_width

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AttentionTiles:
    """The tile sizes of the attention kernel; warps and stages are as Triton has them."""

    rows: int  # of a tile of logits
    keys: int
    part: int  # channels of a sum of values: at most `rows`, or two warps share rows on an Ampere card
    warps: int
    stages: int
    ahead: bool = False  # whether a tile's products are computed while the one before is worked on
    share: int = 1  # keys that have a scale in common, in Gluon


# By channels of a head, padded to a power of two.
_AMPERE_TILES = {
    32: AttentionTiles(64, 128, 32, 4, 2),
    64: AttentionTiles(64, 128, 64, 4, 2),
    128: AttentionTiles(64, 64, 64, 4, 2, ahead=True),
    256: AttentionTiles(128, 32, 128, 8, 3, ahead=True),
}
_TILES = {
    (9, 0): _AMPERE_TILES | {128: AttentionTiles(64, 128, 128, 4, 2), 256: AttentionTiles(128, 64, 256, 8, 3)},
}
# Of the kernel in Gluon, which takes no mask; `stages` are its buffers of keys. With all sums in float32 wide heads do
# not fit an A100's registers.
_GEFORCE_GLUON_TILES = {
    64: AttentionTiles(64, 128, 64, 4, 1, share=16),
    128: AttentionTiles(64, 128, 64, 4, 1, share=8),
    256: AttentionTiles(128, 64, 64, 8, 1, share=8),
}
_GLUON_TILES = {
    (8, 0): {
        64: AttentionTiles(64, 128, 64, 4, 2, share=8),
        128: AttentionTiles(64, 128, 64, 4, 1, share=8),
    },
    (8, 6): _GEFORCE_GLUON_TILES,
    (8, 9): _GEFORCE_GLUON_TILES,
}
# Of exact attention, heads of 129 to 256 channels.
_FLOAT_TILES = {(9, 0): AttentionTiles(128, 64, 256, 8, 2)}
_AMPERE_FLOAT_TILES = AttentionTiles(128, 16, 128, 8, 3)
# Larger ones that are faster where calls leave hardly any multiprocessor without work, and how many run on one.
_FILLING_TILES = {(9, 0): {128: AttentionTiles(128, 64, 128, 4, 3)}}
_RESIDENT = 2
_FILLED = 0.9
# Elements from one token's values to the next that the kernel in Gluon counts in 32 bits.
_FARTHEST_TOKEN = 2**24
# GeForce's tensor cores halve their speed for float32 sums.
_HALF_SUMS = ((8, 6), (8, 9), (12, 0), (12, 1))


def mask_kind(mask: torch.Tensor | None) -> tuple[str, str]:
    """Return the kernels' constants MASK and MASK_ROWS for a mask [B, H, TQ, TK]."""
    if mask is None:
        return "none", "one"
    rows, keys, far = mask.stride(2), mask.stride(3), 2**31
    spread = "one" if not rows else "far" if mask.shape[2] * rows + mask.shape[3] * keys >= far else "many"
    return "bool" if mask.dtype == torch.bool else "float", spread


def tiles_for(
    capability: tuple[int, int],
    channels: int,
    mask: tuple[str, str] = ("none", "one"),
    heads_of: tuple[int, int] = (0, 0),
    multiprocessors: int = 1,
) -> AttentionTiles:
    """Return the tiles for a compute capability and heads of so many channels, padded to a power of two.

    A mask with a number for each query takes the registers of half of a tile. `heads_of` are the heads of all samples
    and the queries of one, on a card of so many multiprocessors.
    """
    tiles = _TILES.get(capability, _AMPERE_TILES)[channels]
    larger = _FILLING_TILES.get(capability, {}).get(channels)
    if larger is not None and mask[0] == "none" and _fills(larger, *heads_of, multiprocessors):
        return larger
    if mask[1] == "one":
        return tiles
    widest = channels == WIDEST_HEAD
    # With products made ahead the compiler keeps the sums of an A100, which are all float32, in registers.
    ahead = widest and mask[0] == "bool" and capability == (8, 0)
    return replace(tiles, keys=tiles.keys if widest else 32, stages=2, ahead=ahead)


def gluon_tiles_for(capability: tuple[int, int], channels: int) -> AttentionTiles | None:
    """Return the tiles of INT8 attention without a mask for the kernel in Gluon, None where it has none."""
    return _GLUON_TILES.get(capability, {}).get(channels) if HAS_GLUON else None


def _fills(tiles: AttentionTiles, heads: int, queries: int, multiprocessors: int) -> bool:
    """Whether a call's programs fill most places that the multiprocessors have in all of its rounds."""
    programs, places = heads * -(-queries // tiles.rows), _RESIDENT * multiprocessors
    return programs >= _FILLED * places * -(-programs // places) > 0


def attention_constants(
    tiles: AttentionTiles, int8: bool, width: int, mask: tuple[str, str], ragged: bool, half_sums: bool, scaled: bool
) -> Build:
    """Return the kernel's constants and compilation options."""
    channels = padded_width(width) if int8 else WIDEST_HEAD
    form = (int8, *mask, ragged, half_sums, scaled, width, channels if scaled else width, channels, tiles.part)
    constants = (*form, tiles.rows, tiles.keys, tiles.stages, tiles.ahead)
    return built(attention_kernel, *constants, num_warps=tiles.warps, num_stages=tiles.stages)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


_ATTENTION = Launcher(attention_kernel, attention_constants)


@functools.cache
def _ampere_attention() -> Launcher:
    """Return the launcher of the kernel in Gluon, which can be defined only where Gluon is as assumed."""
    from .ampere_attention_kernel import ampere_attention_kernel

    def constants(tiles: AttentionTiles, width: int, ragged: bool, half_sums: bool, scaled: bool) -> Build:
        form = (ragged, half_sums, scaled, width, padded_width(width), tiles.part, tiles.rows, tiles.keys, tiles.warps)
        return built(ampere_attention_kernel, *form, tiles.stages, tiles.share, num_warps=tiles.warps)

    return Launcher(ampere_attention_kernel, constants)


def _attend_on_ampere(operands: AttentionOperands, out: torch.Tensor, half_sums: bool, tiles: AttentionTiles) -> None:
    """Launch the kernel in Gluon on values [B, HK, TK, D], to fill `out` [B, H, TQ, WIDTH]."""
    (batch, heads, tq, width), (_, kv_heads, tk, _), scaled = out.shape, operands.v.shape, operands.v_scale is not None
    form = (tiles, width, tk % (tiles.keys * tiles.stages) != 0, half_sums, scaled)
    numbers = (heads, heads // kv_heads, tq, tk, operands.k.shape[1], *operands.v.stride()[:3], *out.stride()[:3])
    tensors = (*operands[:5], operands.v_scale if operands.v_scale is not None else operands.q_scale, out)
    _ampere_attention()(form, (-(-tq // tiles.rows) * batch * heads, 1), tensors, numbers)


def _in_pieces_of_16_bytes(v: torch.Tensor) -> bool:
    return v.element_size() == 2 and v.data_ptr() % 16 == 0 and not any(step % 16 for step in v.stride()[:3])


def _is_right(
    tiles: AttentionTiles, half_sums: bool, scaled: bool, width: int, dtype: torch.dtype, device: torch.device
) -> bool:
    """Whether the kernel in Gluon is exact on this card, found out once for values of WIDTH channels."""

    def found() -> bool:
        try:
            attend = functools.partial(_attend_on_ampere, half_sums=half_sums, tiles=tiles)
            check_attention(attend, width, tiles.share, scaled, dtype, device)
        except Exception as error:
            if not isinstance(error, WrongResult) and not is_unfit(error):
                raise
            text = "INT8 attention: a kernel is wrong on %s and is not used there: %s. Please report this."
            logger.warning(text, device_name(device.index), tiles)
            return False
        return True

    return check_once((check_attention, tiles, half_sums, scaled, dtype, width, device), device, found)


def _usable_gluon_tiles(v: torch.Tensor, channels: int, half_sums: bool, scaled: bool) -> AttentionTiles | None:
    """Return the tiles of the kernel in Gluon, None where it does not take these values."""
    tiles = gluon_tiles_for(_capability(v.device), channels)
    if tiles is None:
        return None
    if not (scaled or (v.shape[-1] == channels and v.stride(2) < _FARTHEST_TOKEN and _in_pieces_of_16_bytes(v))):
        return None
    dtype = torch.float16 if scaled else v.dtype
    return tiles if _is_right(tiles, half_sums, scaled, channels, dtype, v.device) else None


def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 6)


def _readable(tensors: Tensors, scale: float) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], float]:
    """Return q, k and v with each token's channels side by side, and a scale that is not negative.

    The kernels take the highest logit before they multiply by it.
    """
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in tensors[:3])
    return ((-q, k, v), -scale) if scale < 0 else ((q, k, v), scale)


def attend_in_int8(half_sums: bool, scale: float, tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
    """Launch the kernels on q, k, v and a mask, checked and non-empty, to fill [B, TQ, H, D]."""
    (q, k, v), scale = _readable(tensors, scale)
    mask = tensors[3]
    channels, scaled = padded_width(q.shape[-1]), half_sums or v.dtype == torch.float32 or not v.is_cuda
    tiles = _usable_gluon_tiles(v, channels, half_sums, scaled) if mask is None else None
    operands = quantized_operands(q, k, v, scale, scaled, tiles.share if tiles is not None else 1)
    if scaled:
        v = operands.v.unflatten(0, k.shape[:2])
    if tiles is not None:
        return _attend_on_ampere(operands._replace(v=v), results[0].transpose(1, 2), half_sums, tiles)
    _launch(operands, (q, k, v), mask, results[0], half_sums)


def launch_int8_attention(tensors: Tensors, scale: float) -> OperatorLaunch | None:
    """Return the launch on checked, non-empty tensors like these; None for heads that the kernels have no room for."""
    q = tensors[0]
    if q.shape[-1] > WIDEST_HEAD:
        return None
    return functools.partial(attend_in_int8, _capability(q.device) in _HALF_SUMS, scale)


def _attend_in_floats(scale: float, tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
    (q, k, v), scale = _readable(tensors, scale)
    operands = AttentionOperands(q, q, k, k, v, None)
    _launch(operands, (q, k, v), tensors[3], results[0], factor=scale * math.log2(math.e))


def launch_float_attention(tensors: Tensors, scale: float) -> OperatorLaunch:
    """Return the launch on checked, non-empty fp16 or bf16 tensors of more than 128 channels."""
    return functools.partial(_attend_in_floats, scale)


def _launch(
    operands: AttentionOperands,
    given: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mask: torch.Tensor | None,
    out: torch.Tensor,
    half_sums: bool = False,
    factor: float = 0.0,
) -> None:
    """Launch the kernel on operands of `given` q, k and v [B, H, T, WIDTH], by whose strides it reads floats, to fill
    `out` [B, TQ, H, D]."""
    (batch, heads, tq, width), (_, kv_heads, tk, _) = given[0].shape, given[1].shape
    mask, int8 = None if mask is None else mask.expand(batch, heads, tq, tk), operands.q.dtype == torch.int8
    kind, capability, out = mask_kind(mask), _capability(out.device), out.transpose(1, 2)
    if int8:
        multiprocessors = _multiprocessors(out.device)
        tiles = tiles_for(capability, operands.q.shape[-1], kind, (batch * heads, tq), multiprocessors)
    else:
        tiles = _FLOAT_TILES.get(capability, _AMPERE_FLOAT_TILES)
        tiles = tiles if kind[1] == "one" else replace(tiles, keys=min(tiles.keys, 32), stages=2)
    form = (tiles, int8, width, kind, tk % tiles.keys != 0, half_sums, operands.v_scale is not None)
    read = (0,) * 6 if int8 else (*given[0].stride()[:3], *given[1].stride()[:3])
    strides = (*read, *given[2].stride()[:3], *out.stride()[:3])
    mask_strides = (0, 0, 0, 0) if mask is None else mask.stride()
    numbers = (heads, heads // kv_heads, tq, tk, operands.k.shape[1], *strides, *mask_strides, factor)
    tensors = (*operands[:5], operands.v_scale if operands.v_scale is not None else operands.q_scale)
    grid = (-(-tq // tiles.rows) * batch * heads, 1)
    _ATTENTION(form, grid, (*tensors, operands.q if mask is None else mask, out), numbers)
