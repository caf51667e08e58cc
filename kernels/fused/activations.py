"""Per-token dynamic INT8 quantization of activations: one Triton kernel, one pass over memory."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..reference import quantize_activations_reference
from ..transform import ChannelTransform
from .launching import RepeatedLaunch, on_device, remembered

# 1.5 * 2^23: added to |v| < 2^22 in float32 it rounds v to the nearest integer, ties to even, and leaves that integer
# in the low bits of the sum.
_ROUND_TO_EVEN = tl.constexpr(12582912.0)
_FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
# Without the sign, float32 bits order like the numbers, with Inf and then the NaNs above them all.
_MAGNITUDE_BITS = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)

# Longer rows do not fit one program's registers and are read twice, the second time from cache.
_LONGEST_ROW_IN_REGISTERS = 32768
_CHUNK, _CHUNK_WARPS = 8192, 32
# A rotation is one or two Hadamard matrices of sizes that the tensor cores multiply with.
HADAMARD_FACTORS = {1: (1, 1), 4: (1, 4), 16: (1, 16), 64: (1, 64), 256: (16, 16), 1024: (16, 64), 4096: (64, 64)}


@triton.jit
def _hadamard(SIZE: tl.constexpr, GROUP: tl.constexpr, dtype: tl.constexpr):
    """[SIZE, SIZE] with the normalized regular Hadamard matrix of GROUP = 4 ** n along its diagonal, exact in `dtype`.

    An entry is negative where an odd number of base-4 digits of row and column add up to three.
    """
    row = tl.arange(0, SIZE)[:, None]
    column = tl.arange(0, SIZE)[None, :]
    mirrored = row ^ column ^ (GROUP - 1)
    negative = tl.zeros((SIZE, SIZE), tl.int32)
    VALUE: tl.constexpr = 0.5 if GROUP == 4 else 0.25 if GROUP == 16 else 0.125
    for digit in tl.static_range(0, 6, 2):
        if (1 << digit) < GROUP:
            negative = negative ^ (((mirrored >> digit) & 3) == 0).to(tl.int32)
    signed = tl.where(negative > 0, -VALUE, VALUE)
    return tl.where(row // GROUP == column // GROUP, signed, 0.0).to(dtype)


@triton.jit
def _upper_half(values):
    """float32 -> its upper 16 bits as bf16, and the rest, exactly."""
    upper = values.to(tl.int32, bitcast=True) & -65536
    return (upper >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), values - upper.to(tl.float32, bitcast=True)


@triton.jit
def _exact_dot(a, b, acc, INTERPRETED: tl.constexpr):
    if INTERPRETED:  # the interpreter multiplies bf16 as the integers that hold it
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc=acc)
    else:
        return tl.dot(a, b, acc=acc)


@triton.jit
def _times_hadamard(values, BATCH: tl.constexpr, SIZE: tl.constexpr, GROUP: tl.constexpr, INTERPRETED: tl.constexpr):
    """H @ values for `values` [BATCH, SIZE, any], exact products summed in float32.

    bf16 and fp16 go to the tensor cores as they are; float32 as the three bf16 numbers it is the sum of.
    """
    zeros = tl.zeros(values.shape, tl.float32)  # Triton 3.2 cannot hand None on to tl.dot
    if values.dtype == tl.float32:
        h = tl.broadcast_to(_hadamard(SIZE, GROUP, tl.bfloat16)[None, :, :], (BATCH, SIZE, SIZE))
        high, rest = _upper_half(values)
        middle, rest = _upper_half(rest)
        low, rest = _upper_half(rest)
        product = _exact_dot(h, low, zeros, INTERPRETED)
        product = _exact_dot(h, middle, product, INTERPRETED)
        return _exact_dot(h, high, product, INTERPRETED)
    else:
        h = tl.broadcast_to(_hadamard(SIZE, GROUP, values.dtype)[None, :, :], (BATCH, SIZE, SIZE))
        return _exact_dot(h, values, zeros, INTERPRETED)


@triton.jit
def _rotate(values, BLOCK: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, INTERPRETED: tl.constexpr):
    """Regular Hadamard rotation of each LEFT * RIGHT neighbours of `values` [BLOCK], in float32.

    A group X [LEFT, RIGHT] becomes H_LEFT X H_RIGHT, computed as H_LEFT (H_RIGHT X^T)^T: so the first product leaves
    the tensor cores in the layout in which the second one enters them.
    """
    if LEFT == 1:
        SIZE: tl.constexpr = 16 if RIGHT == 4 else RIGHT  # pyright: ignore[reportAssignmentType]
        columns = tl.reshape(values, (1, BLOCK // SIZE, SIZE))
        rotated = tl.permute(_times_hadamard(tl.permute(columns, (0, 2, 1)), 1, SIZE, RIGHT, INTERPRETED), (0, 2, 1))
    else:
        GROUPS: tl.constexpr = BLOCK // (LEFT * RIGHT)
        groups = tl.reshape(values, (GROUPS, LEFT, RIGHT))
        right = _times_hadamard(tl.permute(groups, (0, 2, 1)), GROUPS, RIGHT, RIGHT, INTERPRETED)
        rotated = _times_hadamard(tl.permute(right, (0, 2, 1)), GROUPS, LEFT, LEFT, INTERPRETED)
    return tl.reshape(rotated, (BLOCK,))


@triton.jit
def _load_prepared(
    x_row,
    smooth,
    offsets,
    K,
    HAS_SMOOTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    BLOCK: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """A part of one row in float32, smoothed and rotated; zeros beyond K."""
    inside = offsets < K
    values = tl.load(x_row + offsets, mask=inside, other=0.0)
    if HAS_SMOOTH:
        factors = tl.load(smooth + offsets, mask=inside, other=1.0)
        if INTERPRETED:
            reciprocals = tl.div_rn(1.0, factors)
        else:
            # One instruction, off by one unit in the last place at most, where a division takes ten.
            reciprocals = tl.inline_asm_elementwise(
                "rcp.approx.ftz.f32 $0, $1;", "=f,f", [factors], dtype=tl.float32, is_pure=True, pack=1
            )
        values = values.to(tl.float32) * reciprocals
    if RIGHT > 1:
        values = _rotate(values, BLOCK, LEFT, RIGHT, INTERPRETED)
    return values.to(tl.float32)


@triton.jit
def _magnitude_bits(values):
    return values.to(tl.int32, bitcast=True) & _MAGNITUDE_BITS


@triton.jit
def _store_quantized(q_row, values, inverse_scale, broken, offsets, K):
    rounded = (values * inverse_scale + _ROUND_TO_EVEN).to(tl.int32, bitcast=True)
    tl.store(q_row + offsets, tl.where(broken, 0, rounded).to(tl.int8), mask=offsets < K)


@triton.jit
def _quantize_rows_kernel(
    x,
    smooth,
    q,
    scale,
    K,
    stride_x,
    HAS_SMOOTH: tl.constexpr,
    INTERPRETED: tl.constexpr,
    HEAD: tl.constexpr,
    TAIL: tl.constexpr,
    IN_REGISTERS: tl.constexpr,
    LEFT: tl.constexpr,
    RIGHT: tl.constexpr,
):
    """One program quantizes one token: scale = absmax / 127, q = round(x' 127 / absmax), x' = rotate(x / smooth).

    A token with a NaN or Inf gets the scale NaN and q = 0, so that its whole output row is NaN and no other row is
    touched. A row in registers is a HEAD and a TAIL of powers of two, which wastes fewer lanes than the next power of
    two above K would; a longer row is walked in chunks of HEAD, once for absmax and once to quantize.
    """
    row = tl.program_id(0).to(tl.int64)
    x_row = x + row * stride_x
    q_row = q + row * K
    head_offsets = tl.arange(0, HEAD)

    if IN_REGISTERS:
        head = _load_prepared(x_row, smooth, head_offsets, K, HAS_SMOOTH, INTERPRETED, HEAD, LEFT, RIGHT)
        largest = tl.max(_magnitude_bits(head), axis=0)
        if TAIL > 0:
            tail_offsets = HEAD + tl.arange(0, TAIL)
            tail = _load_prepared(x_row, smooth, tail_offsets, K, HAS_SMOOTH, INTERPRETED, TAIL, LEFT, RIGHT)
            largest = tl.maximum(largest, tl.max(_magnitude_bits(tail), axis=0))
    else:
        bits = tl.zeros((HEAD,), dtype=tl.int32)
        for start in range(0, K, HEAD):
            values = _load_prepared(x_row, smooth, start + head_offsets, K, HAS_SMOOTH, INTERPRETED, HEAD, LEFT, RIGHT)
            bits = tl.maximum(bits, _magnitude_bits(values))
        largest = tl.max(bits, axis=0)

    broken = largest >= _INFINITY_BITS
    absmax = largest.to(tl.float32, bitcast=True)
    tl.store(scale + row, tl.where(broken, float("nan"), tl.div_rn(absmax, 127.0)))
    # The minimum keeps 0 * inverse_scale a zero in rows so small that the reciprocal overflows.
    inverse_scale = tl.minimum(tl.div_rn(127.0, tl.where(absmax > 0, absmax, 1.0)), _FLOAT32_MAX)

    if IN_REGISTERS:
        _store_quantized(q_row, head, inverse_scale, broken, head_offsets, K)
        if TAIL > 0:
            _store_quantized(q_row, tail, inverse_scale, broken, tail_offsets, K)
    else:
        for start in range(0, K, HEAD):
            values = _load_prepared(x_row, smooth, start + head_offsets, K, HAS_SMOOTH, INTERPRETED, HEAD, LEFT, RIGHT)
            _store_quantized(q_row, values, inverse_scale, broken, start + head_offsets, K)


def smallest_block(group: int) -> int:
    """The fewest values that can be rotated in groups of this size at once."""
    # A rotation by one factor multiplies a matrix of at least 16 columns.
    return max(16 * max(16, group), 1024) if 1 < group <= 64 else group


def row_blocks(channels: int, group: int) -> tuple[int, int, bool, int]:
    """HEAD, TAIL, IN_REGISTERS and the number of warps for rows of this length (measured on an H200)."""
    smallest = smallest_block(group)
    if channels > _LONGEST_ROW_IN_REGISTERS:
        return max(_CHUNK, smallest), 0, False, _CHUNK_WARPS
    head = max(smallest, 1 << (channels.bit_length() - 1))
    tail = max(smallest, 1 << (channels - head - 1).bit_length()) if channels > head else 0
    return head, tail, True, max(1, min(16, head // 1024))


@dataclass(frozen=True)
class PreparedQuantizer:
    """The quantization of rows of one shape, stride and dtype on one device."""

    launch: RepeatedLaunch
    rows: int
    channels: int
    stride: int

    def __call__(self, x: torch.Tensor, smooth: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """x with `rows` rows of `channels` -> int8 [M, K], float32 scale [M]. `smooth` is float32 and contiguous."""
        q = torch.empty((self.rows, self.channels), dtype=torch.int8, device=x.device)
        scale = torch.empty(self.rows, dtype=torch.float32, device=x.device)
        self.launch(x, x if smooth is None else smooth, q, scale, self.channels, self.stride)
        return q, scale


# By all that Triton compiles for and the grid.
_launches: dict[tuple, PreparedQuantizer] = {}


def _prepare(x: torch.Tensor, has_smooth: bool, group: int) -> PreparedQuantizer:
    rows, channels = x.shape
    left, right = HADAMARD_FACTORS[group]
    head, tail, in_registers, warps = row_blocks(channels, group)
    constants = {
        "HAS_SMOOTH": has_smooth,
        "INTERPRETED": not x.is_cuda,
        "HEAD": head,
        "TAIL": tail,
        "IN_REGISTERS": in_registers,
        "LEFT": left,
        "RIGHT": right,
    }
    # Without fusion there is one rounding after a product and one after a sum, as in the reference. With one more stage
    # a long row, smoothed and rotated, would need more shared memory than Ampere's and Ada's smaller cards have.
    options = {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": False}
    launch = RepeatedLaunch(_quantize_rows_kernel, (rows, 1), constants, options)
    return PreparedQuantizer(launch, rows, channels, x.stride(0))


def prepared_quantizer(
    x: torch.Tensor, smooth: torch.Tensor | None, rotation_group: int | None
) -> PreparedQuantizer | None:
    """What quantizes x [M, K], its rows contiguous; `smooth` is float32. None for a group that no kernel rotates."""
    group = rotation_group or 1
    if group not in HADAMARD_FACTORS:
        return None
    key = (x.device, *x.shape, x.stride(0), x.dtype, smooth is not None, group)
    tensors = (x,) if smooth is None else (x, smooth)
    return remembered(_launches, key, tensors, lambda: _prepare(x, smooth is not None, group))


def launch_activation_quantizer(x: torch.Tensor, transform: ChannelTransform) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel on checked, non-empty arguments: x [M, K] -> int8 [M, K], float32 scale [M]."""
    if x.stride(1) != 1:
        x = x.contiguous()
    smooth = None if transform.smooth is None else transform.smooth.float().contiguous()
    prepared = prepared_quantizer(x, smooth, transform.rotation_group)
    if prepared is None:
        return quantize_activations_reference(x, transform)
    with on_device(x.device):
        return prepared(x, smooth)
