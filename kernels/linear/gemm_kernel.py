"""The Triton kernel of the fused INT8 GEMM: int8 x int8 -> int32, then dequantization and bias in the epilogue."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launching.launching import Build, built
from .linear_reference import REMAINDER_STEPS
from .tiles import GemmConfig

_REMAINDER_STEPS = tl.constexpr(REMAINDER_STEPS)


@triton.jit
def _rounded_to_steps(remainders):
    """Round int32 sums over remainders to the nearest steps, halves away from zero."""
    halves = tl.where(remainders < 0, -(_REMAINDER_STEPS // 2), _REMAINDER_STEPS // 2)
    return (remainders + halves) // _REMAINDER_STEPS  # towards zero


@triton.jit
def _epilogue(sums, a_scale, b_scale, bias, rows, columns, M, N, dtype: tl.constexpr, ONE_SCALE: tl.constexpr):
    """Return sums x a_scale[m] x b_scale[n] + bias[n] in float32, rounded to `dtype`; for int32 the sums themselves.
    With ONE_SCALE `b_scale` is a single value."""
    if dtype == tl.int32:
        return sums
    else:
        token_scale = tl.load(a_scale + rows, mask=rows < M, other=0.0)
        result = sums.to(tl.float32) * token_scale[:, None]
        if ONE_SCALE:
            result *= tl.load(b_scale)
        else:
            result *= tl.load(b_scale + columns, mask=columns < N, other=0.0)[None, :]
        if bias is not None:
            result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        return result.to(dtype)


@triton.jit
def _store(sums, a_scale, b_scale, bias, out, rows, columns, M, N, stride_om, ONE_SCALE: tl.constexpr):
    """Run the epilogue and write what lies inside `out`."""
    result = _epilogue(sums, a_scale, b_scale, bias, rows, columns, M, N, out.dtype.element_ty, ONE_SCALE)
    # The address before the mask: the other way round ptxas needs up to 88 instructions more.
    out_tile = out + rows[:, None].to(tl.int64) * stride_om + columns[None, :]
    tl.store(out_tile, result, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit(do_not_specialize=("M", "group"))
def int8_gemm_kernel(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    out,
    partial_sums,
    arrivals,
    M,
    N,
    K,
    stride_am,
    stride_bn,
    stride_om,
    group,
    HAS_BIAS: tl.constexpr,
    ONE_SCALE: tl.constexpr,
    DESCRIPTORS: tl.constexpr,
    STORE_BLOCKS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PASSES: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[m, n] = (sum_k a[m, k] b[n, k]) a_scale[m] b_scale[n] + bias[n]; an int32 `out` gets the sums themselves.

    Both operands are K-major, as `mma.s8` and int8 `wgmma` want them: neither is transposed in memory. `b` is loaded as
    it lies and transposed in the dot, since Triton 3.8 spills where its addresses are transposed.

    With DESCRIPTORS `a` and `b` are tensor descriptors of [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K] blocks: Hopper's
    copy engine computes the addresses and fills what lies outside with zeros. With STORE_BLOCKS `out` is one too, of
    [BLOCK_M, BLOCK_N], and no edge needs a mask.

    With two PASSES `a` is [M, 2K], activations of 16 bits, and K is not split. One loop, whose pipeline never drains,
    walks K over the remainders in its right half, rounds their sums to steps, and walks K again over the left half.

    With SPLIT_K several programs share a tile's K range: `partial_sums` int32 [tiles, SPLIT_K, BLOCK_M, BLOCK_N] is
    their workspace, `arrivals` int32 [tiles] is zero before and after.
    """
    bias = bias if HAS_BIAS else None
    # Tiles are walked in groups of so many rows, so that those in flight share L2.
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = group * tiles_n
    first_m = (tile // tiles_in_group) * group
    group_rows = tl.minimum(tiles_m - first_m, group)
    first_row = (first_m + (tile % tiles_in_group) % group_rows) * BLOCK_M
    first_column = (tile % tiles_in_group) // group_rows * BLOCK_N

    if not DESCRIPTORS:
        # Rows past the edge repeat the last one; the masked store drops what they computed. Only the tile's origin
        # needs 64 bits, which halves the registers that hold addresses.
        a_rows = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - first_row)
        b_rows = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_column)
        k_offsets = tl.arange(0, BLOCK_K)
        a_tile = a + first_row.to(tl.int64) * stride_am + (a_rows[:, None] * stride_am + k_offsets[None, :])
        b_tile = b + first_column.to(tl.int64) * stride_bn + (b_rows[:, None] * stride_bn + k_offsets[None, :])

    begin = 0
    end = K
    if SPLIT_K > 1:
        blocks = tl.cdiv(K, BLOCK_K)
        begin = (blocks * tl.program_id(1) // SPLIT_K) * BLOCK_K
        end = (blocks * (tl.program_id(1) + 1) // SPLIT_K) * BLOCK_K
        if not DESCRIPTORS:
            a_tile += begin
            b_tile += begin
    if PASSES == 2:
        pass_end = tl.cdiv(K, BLOCK_K) * BLOCK_K
        end = 2 * pass_end
        if not DESCRIPTORS:
            a_tile += K

    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for walked in range(begin, end, BLOCK_K):
        start = walked
        a_start = walked
        a_step = BLOCK_K
        b_step = BLOCK_K
        if PASSES == 2:
            over_remainders = walked < pass_end
            start = tl.where(over_remainders, walked, walked - pass_end)
            a_start = tl.where(over_remainders, K + walked, walked - pass_end)
            first_pass_ends = walked == pass_end - BLOCK_K
            a_step = tl.where(first_pass_ends, BLOCK_K - pass_end - K, BLOCK_K)
            b_step = tl.where(first_pass_ends, BLOCK_K - pass_end, BLOCK_K)
        if DESCRIPTORS:
            # What a block of `a` holds of the other half meets the zeros past the edge of `b`.
            a_values = a.load([first_row, a_start])
            b_values = b.load([first_column, start])
        elif EVEN_K:
            a_values = tl.load(a_tile)
            b_values = tl.load(b_tile)
        else:
            in_row = k_offsets[None, :] < K - start
            a_values = tl.load(a_tile, mask=in_row, other=0)
            b_values = tl.load(b_tile, mask=in_row, other=0)
        sums = tl.dot(a_values, b_values.T, acc=sums, out_dtype=tl.int32)
        if not DESCRIPTORS:
            a_tile += a_step
            b_tile += b_step
        if PASSES == 2:  # noqa: SIM102 - decided while compiling
            if first_pass_ends:
                sums = _rounded_to_steps(sums)

    rows = first_row + tl.arange(0, BLOCK_M)
    if SPLIT_K > 1:
        # Each split leaves its sums in the workspace. Who comes last at the tile adds them up, which is exact in any
        # order since they are integers, and runs the epilogue.
        tile_rows = tl.arange(0, BLOCK_M)[:, None]
        inside = tile_rows < M - first_row
        tile_sums = partial_sums + tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N) + tile_rows * BLOCK_N
        own = tile_sums + tl.program_id(1) * (BLOCK_M * BLOCK_N)
        tl.store(own + tl.arange(0, BLOCK_N)[None, :], sums, mask=inside)
        # The stores of every warp come before the arrival that announces them.
        tl.debug_barrier()
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1:
            # A part of the tile at a time, so that the loads of all splits are in flight at once without spilling.
            for part in range(0, BLOCK_N, PART_N):
                total = tl.zeros((BLOCK_M, PART_N), dtype=tl.int32)
                for split in tl.static_range(SPLIT_K):
                    partial = tile_sums + split * (BLOCK_M * BLOCK_N) + part + tl.arange(0, PART_N)[None, :]
                    total += tl.load(partial, mask=inside, other=0, cache_modifier=".cg")
                columns = first_column + part + tl.arange(0, PART_N)
                _store(total, a_scale, b_scale, bias, out, rows, columns, M, N, stride_om, ONE_SCALE)
            tl.store(arrivals + tile, 0)
    else:
        columns = first_column + tl.arange(0, BLOCK_N)
        if STORE_BLOCKS:
            result = _epilogue(sums, a_scale, b_scale, bias, rows, columns, M, N, out.dtype, ONE_SCALE)
            out.store([first_row, first_column], result)
        else:
            _store(sums, a_scale, b_scale, bias, out, rows, columns, M, N, stride_om, ONE_SCALE)


class Operands(NamedTuple):
    """The tensors that one launch reads and writes, in the order of the kernel's parameters.

    Rows of q and of the weight lie any distance apart. Without scales `out` is the accumulator itself, int32.
    """

    q: torch.Tensor  # int8 [M, K], or [M, 2K] of 16 bits
    weight: torch.Tensor  # int8 [N, K]
    q_scale: torch.Tensor | None  # float32 [M]
    weight_scale: torch.Tensor | None  # float32 [N], or one value
    bias: torch.Tensor | None  # [N]
    out: torch.Tensor  # [M, N]

    @property
    def read(self) -> list[torch.Tensor]:
        """The kernel's arguments, `out` in the place of a missing tensor: a pointer like any other."""
        return [self.out if tensor is None else tensor for tensor in self]

    @property
    def passes(self) -> int:
        """How often K is walked: twice for activations of 16 bits."""
        return self.q.shape[1] // self.weight.shape[1]

    @property
    def has_one_scale(self) -> bool:
        """Whether all channels of the weight share one."""
        return self.weight_scale is not None and self.weight_scale.numel() == 1


def gemm_build(
    config: GemmConfig,
    has_bias: bool,
    even_k: bool,
    descriptors: bool = False,
    store_blocks: bool = False,
    passes: int = 1,
    one_scale: bool = False,
) -> Build:
    """Return the kernel's constants and compilation options; `even_k` is whether BLOCK_K divides K."""
    form = (has_bias, one_scale, descriptors, store_blocks, even_k or descriptors, passes, config.split_k)
    constants = (*form, config.part_n, config.block_m, config.block_n, config.block_k)
    # Fusion is asked for by name, since Triton 3.10 changes its default.
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages, "enable_fp_fusion": True}
    return built(int8_gemm_kernel, *constants, **options)
