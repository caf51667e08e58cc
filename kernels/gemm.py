"""The fused INT8 GEMM: int8 x int8 -> int32 on the tensor cores, dequantization and bias in the epilogue, one launch."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from .launching import RepeatedLaunch, on_device, remembered
from .tile_configs import GemmConfig, candidates
from .tuning import TuningKey, device_name, m_bucket, tuner

try:  # Triton 3.4 and newer
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:
    TensorDescriptor = None


# Multiply-adds from which on it pays to write the result with the copy engine: one more descriptor takes the host longer.
_STORE_BLOCKS_FROM = 2**36


@triton.jit
def _tile_origin(tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, GROUP_M: tl.constexpr):
    """First row and column of a tile. Tiles are walked in groups of GROUP_M rows, so that those in flight share L2."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    first_m = (tile // tiles_in_group) * GROUP_M
    group_rows = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + (tile % tiles_in_group) % group_rows
    tile_n = (tile % tiles_in_group) // group_rows
    return tile_m * BLOCK_M, tile_n * BLOCK_N


@triton.jit
def _epilogue(
    accumulator,
    a_scale,
    b_scale,
    bias,
    rows,
    columns,
    M,
    N,
    dtype: tl.constexpr,
    SCALAR_B_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAW_ACCUMULATOR: tl.constexpr,
):
    """accumulator x a_scale[m] x b_scale[n] + bias[n] in float32, rounded to `dtype`, or the accumulator as it is."""
    if RAW_ACCUMULATOR:
        return accumulator
    else:
        token_scale = tl.load(a_scale + rows, mask=rows < M, other=0.0)
        if SCALAR_B_SCALE:
            result = accumulator.to(tl.float32) * token_scale[:, None] * tl.load(b_scale)
        else:
            channel_scale = tl.load(b_scale + columns, mask=columns < N, other=0.0)
            result = accumulator.to(tl.float32) * token_scale[:, None] * channel_scale[None, :]
        if HAS_BIAS:
            result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        return result.to(dtype)


@triton.jit
def _store_result(
    accumulator,
    a_scale,
    b_scale,
    bias,
    out,
    first_row,
    first_column,
    M,
    N,
    stride_om,
    SCALAR_B_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAW_ACCUMULATOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Run the epilogue and write what lies inside `out`."""
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    result = _epilogue(
        accumulator,
        a_scale,
        b_scale,
        bias,
        rows,
        columns,
        M,
        N,
        out.dtype.element_ty,
        SCALAR_B_SCALE,
        HAS_BIAS,
        RAW_ACCUMULATOR,
    )
    out_tile = out + rows[:, None].to(tl.int64) * stride_om + columns[None, :]
    tl.store(out_tile, result, mask=(rows[:, None] < M) & (columns[None, :] < N))


@triton.jit
def _finish_splits(
    accumulator,
    partial_sums,
    arrivals,
    tile,
    a_scale,
    b_scale,
    bias,
    out,
    first_row,
    first_column,
    M,
    N,
    stride_om,
    SCALAR_B_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAW_ACCUMULATOR: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Leave this split's accumulator in the workspace; who comes last at the tile sums them all and runs the epilogue.

    The sum is one of integers, hence exact in any order. The last one also puts `arrivals` back to zero.
    """
    rows = tl.arange(0, BLOCK_M)[:, None]
    inside = rows < M - first_row
    tile_sums = partial_sums + tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N) + rows * BLOCK_N
    own = tile_sums + tl.program_id(1) * (BLOCK_M * BLOCK_N)
    tl.store(own + tl.arange(0, BLOCK_N)[None, :], accumulator, mask=inside)
    # The stores of every warp come before the arrival that announces them.
    tl.debug_barrier()
    if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT_K - 1:
        # A part of the tile at a time, so that the loads of all splits are in flight at once without spilling.
        for column in range(0, BLOCK_N, PART_N):
            total = tl.zeros((BLOCK_M, PART_N), dtype=tl.int32)
            for split in tl.static_range(SPLIT_K):
                partial = tile_sums + split * (BLOCK_M * BLOCK_N) + column + tl.arange(0, PART_N)[None, :]
                total += tl.load(partial, mask=inside, other=0, cache_modifier=".cg")
            _store_result(
                total,
                a_scale,
                b_scale,
                bias,
                out,
                first_row,
                first_column + column,
                M,
                N,
                stride_om,
                SCALAR_B_SCALE,
                HAS_BIAS,
                RAW_ACCUMULATOR,
                BLOCK_M,
                PART_N,
            )
        tl.store(arrivals + tile, 0)


@triton.jit
def _finish_tile(
    accumulator,
    partial_sums,
    arrivals,
    tile,
    a_scale,
    b_scale,
    bias,
    out,
    first_row,
    first_column,
    M,
    N,
    stride_om,
    SCALAR_B_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAW_ACCUMULATOR: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """What follows the multiplication: the epilogue, after the other splits' sums where there are any."""
    if SPLIT_K > 1:
        _finish_splits(
            accumulator,
            partial_sums,
            arrivals,
            tile,
            a_scale,
            b_scale,
            bias,
            out,
            first_row,
            first_column,
            M,
            N,
            stride_om,
            SCALAR_B_SCALE,
            HAS_BIAS,
            RAW_ACCUMULATOR,
            SPLIT_K,
            PART_N,
            BLOCK_M,
            BLOCK_N,
        )
    else:
        _store_result(
            accumulator,
            a_scale,
            b_scale,
            bias,
            out,
            first_row,
            first_column,
            M,
            N,
            stride_om,
            SCALAR_B_SCALE,
            HAS_BIAS,
            RAW_ACCUMULATOR,
            BLOCK_M,
            BLOCK_N,
        )


@triton.jit
def _int8_gemm_kernel(
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
    SCALAR_B_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAW_ACCUMULATOR: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out[m, n] = (sum_k a[m, k] b[n, k]) a_scale[m] b_scale[n] + bias[n]; with RAW_ACCUMULATOR the int32 sum itself.

    Both operands are K-major, which is what `mma.s8` and int8 `wgmma` want, so neither is ever transposed. With SPLIT_K
    several programs share a tile's K range: `partial_sums` int32 [tiles, SPLIT_K, BLOCK_M, BLOCK_N] is their workspace,
    `arrivals` int32 [tiles] is zero before and after.
    """
    tile = tl.program_id(0)
    first_row, first_column = _tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    # Rows past the edge repeat the last one; the masked store drops what they computed. Only the tile's origin needs
    # 64 bits, which halves the registers that hold addresses.
    a_rows = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - first_row)
    b_rows = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_column)
    k_offsets = tl.arange(0, BLOCK_K)
    a_tile = a + first_row.to(tl.int64) * stride_am + (a_rows[:, None] * stride_am + k_offsets[None, :])
    b_tile = b + first_column.to(tl.int64) * stride_bn + (b_rows[None, :] * stride_bn + k_offsets[:, None])
    begin = 0
    end = K
    if SPLIT_K > 1:
        blocks = tl.cdiv(K, BLOCK_K)
        begin = (blocks * tl.program_id(1) // SPLIT_K) * BLOCK_K
        end = tl.minimum(K, (blocks * (tl.program_id(1) + 1) // SPLIT_K) * BLOCK_K)
        a_tile += begin
        b_tile += begin

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(begin, end, BLOCK_K):
        if EVEN_K:
            a_values = tl.load(a_tile)
            b_values = tl.load(b_tile)
        else:
            a_values = tl.load(a_tile, mask=k_offsets[None, :] < K - start, other=0)
            b_values = tl.load(b_tile, mask=k_offsets[:, None] < K - start, other=0)
        accumulator = tl.dot(a_values, b_values, acc=accumulator, out_dtype=tl.int32)
        a_tile += BLOCK_K
        b_tile += BLOCK_K

    _finish_tile(
        accumulator,
        partial_sums,
        arrivals,
        tile,
        a_scale,
        b_scale,
        bias,
        out,
        first_row,
        first_column,
        M,
        N,
        stride_om,
        SCALAR_B_SCALE,
        HAS_BIAS,
        RAW_ACCUMULATOR,
        SPLIT_K,
        PART_N,
        BLOCK_M,
        BLOCK_N,
    )


@triton.jit
def _int8_gemm_descriptor_kernel(
    a,
    b,
    out_blocks,
    a_scale,
    b_scale,
    bias,
    out,
    partial_sums,
    arrivals,
    M,
    N,
    K,
    stride_om,
    SCALAR_B_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    RAW_ACCUMULATOR: tl.constexpr,
    STORE_BLOCKS: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PART_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """`_int8_gemm_kernel` with `a` and `b` as tensor descriptors of [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K] blocks.

    Hopper's copy engine computes the addresses, fills what lies outside with zeros, and with STORE_BLOCKS writes the tiles
    of `out` too, given as `out_blocks` of [BLOCK_M, BLOCK_N]: no edge needs a mask.
    """
    tile = tl.program_id(0)
    first_row, first_column = _tile_origin(tile, M, N, BLOCK_M, BLOCK_N, GROUP_M)
    begin = 0
    end = K
    if SPLIT_K > 1:
        blocks = tl.cdiv(K, BLOCK_K)
        begin = (blocks * tl.program_id(1) // SPLIT_K) * BLOCK_K
        end = (blocks * (tl.program_id(1) + 1) // SPLIT_K) * BLOCK_K

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(begin, end, BLOCK_K):
        accumulator = tl.dot(
            a.load([first_row, start]), b.load([first_column, start]).T, acc=accumulator, out_dtype=tl.int32
        )

    if STORE_BLOCKS:
        rows = first_row + tl.arange(0, BLOCK_M)
        columns = first_column + tl.arange(0, BLOCK_N)
        result = _epilogue(
            accumulator,
            a_scale,
            b_scale,
            bias,
            rows,
            columns,
            M,
            N,
            out.dtype.element_ty,
            SCALAR_B_SCALE,
            HAS_BIAS,
            RAW_ACCUMULATOR,
        )
        out_blocks.store([first_row, first_column], result)
    else:
        _finish_tile(
            accumulator,
            partial_sums,
            arrivals,
            tile,
            a_scale,
            b_scale,
            bias,
            out,
            first_row,
            first_column,
            M,
            N,
            stride_om,
            SCALAR_B_SCALE,
            HAS_BIAS,
            RAW_ACCUMULATOR,
            SPLIT_K,
            PART_N,
            BLOCK_M,
            BLOCK_N,
        )


_arrivals_of_streams: dict[tuple[torch.device, int], torch.Tensor] = {}


def _arrivals(device: torch.device, tiles: int) -> torch.Tensor:
    """Zeros, int32 [at least tiles], for one launch. Kernels of a stream follow one another and leave the zeros behind.

    So each stream keeps its own, which saves filling them for each launch; a CUDA graph, which may be replayed on any
    stream, fills its own. The interpreter gets new ones too.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    kept = _arrivals_of_streams.get(key)
    if kept is None or kept.numel() < tiles:
        kept = _arrivals_of_streams[key] = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=device)
    return kept


def _fits_descriptors(operand: torch.Tensor) -> bool:
    """Whether the copy engine can address the matrix: base and rows on 16 bytes."""
    row_bytes = operand.stride(0) * operand.element_size()
    return TensorDescriptor is not None and operand.data_ptr() % 16 == 0 and row_bytes % 16 == 0


@dataclass
class _Launch:
    """How one configuration is launched for one shape."""

    launch: RepeatedLaunch
    tiles: int
    descriptors: bool
    store_blocks: bool


# By all that Triton compiles for and all that the grid depends on.
_launches: dict[tuple, _Launch] = {}


def kernel_constants(
    config: GemmConfig, scalar_scale: bool, has_bias: bool, raw: bool, own: dict[str, bool]
) -> dict[str, bool | int]:
    """A kernel's constants in the order of its parameters; `own` is the one that the other kernel does not have."""
    return {
        "SCALAR_B_SCALE": scalar_scale,
        "HAS_BIAS": has_bias,
        "RAW_ACCUMULATOR": raw,
        **own,
        "SPLIT_K": config.split_k,
        "PART_N": config.part_n,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "GROUP_M": config.group_m,
    }


def _prepare(
    config: GemmConfig,
    out: torch.Tensor,
    q: torch.Tensor,
    weight: torch.Tensor,
    raw: bool,
    scalar_scale: bool,
    has_bias: bool,
) -> _Launch:
    (m, k), n = q.shape, weight.shape[0]
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    descriptors = config.pipeline == "descriptors" and _fits_descriptors(q) and _fits_descriptors(weight)
    large = m * n * k >= _STORE_BLOCKS_FROM
    store_blocks = descriptors and large and config.split_k == 1 and _fits_descriptors(out)
    own = {"STORE_BLOCKS": store_blocks} if descriptors else {"EVEN_K": k % config.block_k == 0}
    constants = kernel_constants(config, scalar_scale, has_bias, raw, own)
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    kernel = _int8_gemm_descriptor_kernel if descriptors else _int8_gemm_kernel
    launch = RepeatedLaunch(kernel, (tiles, config.split_k), constants, options)
    return _Launch(launch, tiles, descriptors, store_blocks)


def launch_config(
    config: GemmConfig,
    out: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Launch one configuration into `out` [M, N], with the operands of `launch_gemm` and contiguous scales and bias."""
    (m, k), n = q.shape, weight.shape[0]
    raw = q_scale is None
    scalar_scale = not raw and weight_scale.numel() == 1
    q_scale, weight_scale = (out, out) if raw else (q_scale, weight_scale)
    strides = (q.stride(0), weight.stride(0), out.stride(0))
    bias_or_out = out if bias is None else bias
    key = (config, q.device, m, n, k, strides, out.dtype, raw, scalar_scale, None if bias is None else bias.dtype)
    prepared = remembered(
        _launches,
        key,
        (q, weight, out, q_scale, weight_scale, bias_or_out),
        lambda: _prepare(config, out, q, weight, raw, scalar_scale, bias is not None),
    )

    partial_sums = arrivals = out
    if config.split_k > 1:
        sums = prepared.tiles * config.split_k * config.block_m * config.block_n
        partial_sums = torch.empty(sums, dtype=torch.int32, device=q.device)
        arrivals = _arrivals(q.device, prepared.tiles)
    operands = (q_scale, weight_scale, bias_or_out, out, partial_sums, arrivals, m, n, k)
    if prepared.descriptors:
        a = TensorDescriptor(q, q.shape, q.stride(), [config.block_m, config.block_k])
        b = TensorDescriptor(weight, weight.shape, weight.stride(), [config.block_n, config.block_k])
        out_blocks = out
        if prepared.store_blocks:
            out_blocks = TensorDescriptor(out, out.shape, out.stride(), [config.block_m, config.block_n])
        prepared.launch(a, b, out_blocks, *operands, strides[2])
    else:
        prepared.launch(q, weight, *operands, *strides)


def _candidates(device: torch.device, m: int, n: int, k: int) -> list[GemmConfig]:
    properties = torch.cuda.get_device_properties(device)
    return candidates((properties.major, properties.minor), properties.multi_processor_count, m, n, k)


def launch_gemm(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the kernel on checked, non-empty arguments with the configuration tuned for their shape.

    q int8 [M, K], weight int8 [N, K] -> `out_dtype` [M, N]. With `q_scale` None the int32 accumulator is returned and
    `out_dtype` must be torch.int32.
    """
    q = q if q.stride(1) == 1 else q.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    q_scale = None if q_scale is None else q_scale.contiguous()
    weight_scale = None if weight_scale is None else weight_scale.reshape(-1).contiguous()
    bias = None if bias is None else bias.contiguous()
    (m, k), n = q.shape, weight.shape[0]
    out = torch.empty((m, n), dtype=out_dtype, device=q.device)

    def launch(config: GemmConfig) -> None:
        launch_config(config, out, q, q_scale, weight, weight_scale, bias)

    if not q.is_cuda:  # Triton's interpreter: nothing to tune, and small tiles are the quickest there
        launch(GemmConfig(32, 32, 64, 4, 4, 1))
        return out
    with on_device(q.device):
        key = TuningKey(device_name(q.device.index), m_bucket(m), n, k)
        launch(tuner.choose(key, lambda: _candidates(q.device, m, n, k), launch))
    return out
