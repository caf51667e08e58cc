"""The fused INT8 GEMM: int8 x int8 -> int32 on the tensor cores, dequantization and bias in the epilogue, one launch."""

import torch
import triton
import triton.language as tl

from .tuning import GemmConfig, TuningKey, candidates, device_name, m_bucket, tuner


@triton.jit
def _int8_gemm_kernel(
    a,
    b,
    a_scale,
    b_scale,
    bias,
    out,
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """out[m, n] = (sum_k a[m, k] b[n, k]) a_scale[m] b_scale[n] + bias[n]; with RAW_ACCUMULATOR the int32 sum itself.

    Both operands are K-major, which is what `mma.s8` and int8 `wgmma` want, so neither is ever transposed. Tiles are
    walked in groups of GROUP_M rows so that the tiles in flight share their operands in L2.
    """
    tile = tl.program_id(0)
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles_in_group = GROUP_M * tiles_n
    first_m = (tile // tiles_in_group) * GROUP_M
    group_rows = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + (tile % tiles_in_group) % group_rows
    tile_n = (tile % tiles_in_group) // group_rows

    first_row = tile_m * BLOCK_M
    first_column = tile_n * BLOCK_N
    rows = first_row + tl.arange(0, BLOCK_M)
    columns = first_column + tl.arange(0, BLOCK_N)
    # Rows past the edge repeat the last one; the masked store drops what they computed. Only the tile's origin needs
    # 64 bits, which halves the registers that hold addresses.
    a_rows = tl.minimum(tl.arange(0, BLOCK_M), M - 1 - first_row)
    b_rows = tl.minimum(tl.arange(0, BLOCK_N), N - 1 - first_column)
    k_offsets = tl.arange(0, BLOCK_K)
    a_tile = a + first_row.to(tl.int64) * stride_am + (a_rows[:, None] * stride_am + k_offsets[None, :])
    b_tile = b + first_column.to(tl.int64) * stride_bn + (b_rows[None, :] * stride_bn + k_offsets[:, None])

    accumulator = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.int32)
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            a_values = tl.load(a_tile)
            b_values = tl.load(b_tile)
        else:
            a_values = tl.load(a_tile, mask=k_offsets[None, :] < K - start, other=0)
            b_values = tl.load(b_tile, mask=k_offsets[:, None] < K - start, other=0)
        accumulator = tl.dot(a_values, b_values, acc=accumulator, out_dtype=tl.int32)
        a_tile += BLOCK_K
        b_tile += BLOCK_K

    inside = (rows[:, None] < M) & (columns[None, :] < N)
    out_tile = out + rows[:, None].to(tl.int64) * stride_om + columns[None, :]
    if RAW_ACCUMULATOR:
        tl.store(out_tile, accumulator, mask=inside)
    else:
        token_scale = tl.load(a_scale + rows, mask=rows < M, other=0.0)
        if SCALAR_B_SCALE:
            result = accumulator.to(tl.float32) * token_scale[:, None] * tl.load(b_scale)
        else:
            channel_scale = tl.load(b_scale + columns, mask=columns < N, other=0.0)
            result = accumulator.to(tl.float32) * token_scale[:, None] * channel_scale[None, :]
        if HAS_BIAS:
            result += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
        tl.store(out_tile, result.to(out.dtype.element_ty), mask=inside)


def _launch(
    config: GemmConfig,
    out: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    (m, k), n = q.shape, weight.shape[0]
    raw = q_scale is None
    grid = (triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n),)
    _int8_gemm_kernel[grid](
        q,
        weight,
        out if raw else q_scale,
        out if raw else weight_scale,
        out if bias is None else bias,
        out,
        m,
        n,
        k,
        q.stride(0),
        weight.stride(0),
        out.stride(0),
        SCALAR_B_SCALE=not raw and weight_scale.numel() == 1,
        HAS_BIAS=bias is not None,
        RAW_ACCUMULATOR=raw,
        EVEN_K=k % config.block_k == 0,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        GROUP_M=config.group_m,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


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
        _launch(config, out, q, q_scale, weight, weight_scale, bias)

    if not q.is_cuda:  # Triton's interpreter: nothing to tune, and small tiles are the quickest there
        launch(GemmConfig(32, 32, 64, 4, 4, 1))
        return out
    with torch.cuda.device(q.device):
        key = TuningKey(device_name(q.device.index), m_bucket(m), n, k)
        launch(tuner.choose(key, lambda: candidates(torch.cuda.get_device_capability(q.device), m, n, k), launch))
    return out
