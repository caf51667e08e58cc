"""The fused INT8 GEMM for Ampere and Ada, in Gluon: a ring of shared buffers, and fragments loaded a step ahead.

Triton's own pipeline waits for a block of K, passes a barrier, loads the block's fragments before its first product,
and passes another barrier before the next copies. Here the next 32 channels' fragments are loaded while the tensor
cores multiply these, also over the edge of a block. Each block has one barrier.
"""

# Gluon evaluates types and tuples while it compiles, which pyright cannot follow.
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportAttributeAccessIssue=false

from ..internals.gluon import barrier, commit_copies, copy_async, gl, gluon, mma_v2, wait_for_copies
from ..launching.launching import Build, built
from .tiles import GemmConfig

# Channels of one tensor core instruction, and edges of a warp's part of a tile.
STEP, WARP_TILE = 32, 64
_BLOCKS_A_WALK = 4


@gluon.jit
def _copy(a_stage, b_stage, a_tile, b_tile, inside):
    """Begin to copy a block of both operands; channels that are not `inside` become zeros."""
    copy_async(a_stage, a_tile, mask=inside)
    copy_async(b_stage, b_tile, mask=inside)
    commit_copies()


@gluon.jit(do_not_specialize=("M", "whole", "parts", "group"))
def ring_gemm_kernel(
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
    whole,
    parts,
    group,
    HAS_BIAS: gl.constexpr,
    ONE_SCALE: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    WARPS_M: gl.constexpr,
    WARPS_N: gl.constexpr,
    STEP: gl.constexpr,
    WALKED: gl.constexpr,
):
    """out[m, n] = (sum_k a[m, k] b[n, k]) a_scale[m] b_scale[n] + bias[n]; an int32 `out` gets the sums themselves.

    Operands and outputs are those of `int8_gemm_kernel`; the rows of `a` and `b` begin on 16 bytes, and 16 divides K.

    Tiles are walked in groups of `group` rows. `parts` programs share each tile from `whole` on, a part of K each:
    `partial_sums` int32 [tiles - whole, parts, BLOCK_M, BLOCK_N] is their workspace, `arrivals` int32 [tiles - whole]
    is zero before and after. The grid has whole + (tiles - whole) * parts programs.

    The loop over K is unrolled for WALKED blocks, a multiple of STAGES, the buffers of the ring. Each of these is an
    allocation of its own, so that the compiler sees that a copy into one does not touch the others. Each warp
    multiplies STEP channels at a time.
    """
    WARPS: gl.constexpr = WARPS_M * WARPS_N
    ACROSS: gl.constexpr = BLOCK_K // 16  # threads of 16 bytes along a row
    copied: gl.constexpr = gl.BlockedLayout([1, 16], [32 // ACROSS, ACROSS], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.SwizzledSharedLayout(16, max(1, 128 // BLOCK_K), min(8, ACROSS), [1, 0])
    summed: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS_M, WARPS_N], [16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, summed, 4)
    right: gl.constexpr = gl.DotOperandLayout(1, summed, 4)
    STEPS: gl.constexpr = BLOCK_K // STEP
    WALK: gl.constexpr = BLOCK_K * WALKED

    tile = gl.program_id(0)
    begin = 0
    end = K
    part = -1
    if tile >= whole:
        part = (tile - whole) % parts
        tile = whole + (tile - whole) // parts
        walks = gl.cdiv(K, WALK)
        begin = walks * part // parts * WALK
        end = gl.minimum(K, walks * (part + 1) // parts * WALK)
    tiles_m = gl.cdiv(M, BLOCK_M)
    tiles_n = gl.cdiv(N, BLOCK_N)
    tiles_in_group = group * tiles_n
    first_m = (tile // tiles_in_group) * group
    group_rows = gl.minimum(tiles_m - first_m, group)
    first_row = (first_m + (tile % tiles_in_group) % group_rows) * BLOCK_M
    first_column = (tile % tiles_in_group) // group_rows * BLOCK_N

    # Rows past the edge repeat the last one; the masked store drops what they computed.
    a_rows = gl.minimum(gl.arange(0, BLOCK_M, gl.SliceLayout(1, copied)), M - 1 - first_row)
    b_rows = gl.minimum(gl.arange(0, BLOCK_N, gl.SliceLayout(1, copied)), N - 1 - first_column)
    k_offsets = gl.arange(0, BLOCK_K, gl.SliceLayout(0, copied))
    a_tile = a + first_row.to(gl.int64) * stride_am + begin + (a_rows[:, None] * stride_am + k_offsets[None, :])
    b_tile = b + first_column.to(gl.int64) * stride_bn + begin + (b_rows[:, None] * stride_bn + k_offsets[None, :])

    a_ring = ()
    b_ring = ()
    for stage in gl.static_range(STAGES):
        a_ring = a_ring + (gl.allocate_shared_memory(gl.int8, [BLOCK_M, BLOCK_K], shared),)  # noqa: RUF005
        b_ring = b_ring + (gl.allocate_shared_memory(gl.int8, [BLOCK_N, BLOCK_K], shared),)  # noqa: RUF005
        _copy(a_ring[stage], b_ring[stage], a_tile, b_tile, (k_offsets < end - begin - stage * BLOCK_K)[None, :])
        a_tile += BLOCK_K
        b_tile += BLOCK_K

    sums = gl.zeros([BLOCK_M, BLOCK_N], gl.int32, summed)
    wait_for_copies(STAGES - 1)
    for start in range(begin, end, WALK):
        # Fragments are not carried over the loop's edge: LLVM would carry each byte in a register.
        a_now = a_ring[0].slice(0, STEP, 1).load(left)
        b_now = b_ring[0].slice(0, STEP, 1).permute([1, 0]).load(right)
        for stage in gl.static_range(WALKED):
            for step in gl.static_range(1, STEPS):
                a_next = a_ring[stage % STAGES].slice(step * STEP, STEP, 1).load(left)
                b_next = b_ring[stage % STAGES].slice(step * STEP, STEP, 1).permute([1, 0]).load(right)
                sums = mma_v2(a_now, b_now, sums)
                a_now = a_next
                b_now = b_next
            # All fragments of this block are in registers: its buffer takes the block STAGES ahead.
            wait_for_copies(STAGES - 2)
            if stage + 1 < WALKED:
                a_next = a_ring[(stage + 1) % STAGES].slice(0, STEP, 1).load(left)
                b_next = b_ring[(stage + 1) % STAGES].slice(0, STEP, 1).permute([1, 0]).load(right)
            inside = (k_offsets < end - start - (stage + STAGES) * BLOCK_K)[None, :]
            _copy(a_ring[stage % STAGES], b_ring[stage % STAGES], a_tile, b_tile, inside)
            a_tile += BLOCK_K
            b_tile += BLOCK_K
            sums = mma_v2(a_now, b_now, sums)
            if stage + 1 < WALKED:
                a_now = a_next
                b_now = b_next
    wait_for_copies(0)

    last_row = M
    if part >= 0:
        # Each part leaves its sums in the workspace; the last one to come adds up all of them, exact in any order.
        place = (tile - whole).to(gl.int64) * parts
        tile_rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, summed))[:, None]
        offsets = tile_rows * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, summed))[None, :]
        gl.store(partial_sums + (place + part) * (BLOCK_M * BLOCK_N) + offsets, sums)
        # The stores of every warp come before the arrival that announces them.
        barrier()
        if gl.atomic_add(arrivals + (tile - whole), 1, sem="acq_rel") == parts - 1:
            for other in range(parts):
                if other != part:
                    others = partial_sums + (place + other) * (BLOCK_M * BLOCK_N)
                    sums += gl.load(others + offsets, cache_modifier=".cg")
            gl.store(arrivals + (tile - whole), 0)
        else:
            last_row = 0

    dtype: gl.constexpr = out.dtype.element_ty
    if dtype == gl.int32:
        result = sums
    else:
        rows = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, summed))
        columns = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, summed))
        result = sums.to(gl.float32) * gl.load(a_scale + rows, mask=rows < last_row, other=0.0)[:, None]
        if ONE_SCALE:
            result *= gl.load(b_scale)
        else:
            result *= gl.load(b_scale + columns, mask=columns < N, other=0.0)[None, :]
        if HAS_BIAS:
            result += gl.load(bias + columns, mask=columns < N, other=0.0).to(gl.float32)[None, :]
        result = result.to(dtype)
    # Values of 4 bytes are stored as they lie in registers, 32 bytes of a row together: a tile of them is larger than
    # the shared memory, through which 2-byte values get rows of 16 bytes a thread.
    if dtype.primitive_bitwidth == 32:
        stored: gl.constexpr = summed
    else:
        stored: gl.constexpr = gl.BlockedLayout(
            [1, 8], [32 // min(32, BLOCK_N // 8), min(32, BLOCK_N // 8)], [WARPS, 1], [1, 0]
        )
        result = gl.convert_layout(result, stored)
    out_rows = first_row + gl.arange(0, BLOCK_M, gl.SliceLayout(1, stored))
    out_columns = first_column + gl.arange(0, BLOCK_N, gl.SliceLayout(0, stored))
    out_tile = out + out_rows[:, None].to(gl.int64) * stride_om + out_columns[None, :]
    gl.store(out_tile, result, mask=(out_rows[:, None] < last_row) & (out_columns[None, :] < N))


def ring_build(config: GemmConfig, has_bias: bool, one_scale: bool = False) -> Build:
    """Return the kernel's constants and compilation options.

    The group of tiles and the split are no constants: one kernel serves all. The ring's stages are: the option
    `num_stages` is Triton's own pipeline.
    """
    blocks, stages = (config.block_m, config.block_n, config.block_k), config.num_stages
    warps = (config.block_m // WARP_TILE, config.block_n // WARP_TILE)
    walked = stages * max(1, _BLOCKS_A_WALK // stages)
    constants = (has_bias, one_scale, *blocks, stages, *warps, STEP, walked)
    return built(ring_gemm_kernel, *constants, num_warps=config.num_warps, enable_fp_fusion=True)
