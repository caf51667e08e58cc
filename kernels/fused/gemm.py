"""Launching the fused INT8 GEMM: the configuration tuned for a shape, its workspace, its tensor descriptors."""

from dataclasses import dataclass

import torch

from ..internals.triton_runtime import HAS_DESCRIPTORS, MatrixBlocks
from .gemm_kernel import compile_options, int8_gemm_kernel, kernel_constants
from .launching import RepeatedLaunch, on_device, remembered
from .tiles import GemmConfig, candidates
from .tuning import TuningKey, device_name, m_bucket, tuner

# Multiply-adds from which on it pays to write the result with the copy engine: one more descriptor takes the host
# longer.
_STORE_BLOCKS_FROM = 2**36

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
    return HAS_DESCRIPTORS and operand.data_ptr() % 16 == 0 and row_bytes % 16 == 0


def _passes(q: torch.Tensor, weight: torch.Tensor) -> int:
    """How often K is walked: twice for activations of 16 bits, [M, 2K]."""
    return q.shape[1] // weight.shape[1]


@dataclass(frozen=True)
class PreparedGemm:
    """The launch of one configuration for one shape, with all that repeats from call to call."""

    config: GemmConfig
    launch: RepeatedLaunch
    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]
    tiles: int
    # None where pointers are used.
    a_blocks: MatrixBlocks | None
    b_blocks: MatrixBlocks | None
    out_blocks: MatrixBlocks | None

    def __call__(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        q_scale: torch.Tensor | None,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        """Launch into `out`, on operands like those that it was prepared for."""
        partial_sums = arrivals = out
        if self.config.split_k > 1:
            sums = self.tiles * self.config.split_k * self.config.block_m * self.config.block_n
            partial_sums = torch.empty(sums, dtype=torch.int32, device=q.device)
            arrivals = _arrivals(q.device, self.tiles)
        self.launch(
            q if self.a_blocks is None else self.a_blocks.of(q),
            weight if self.b_blocks is None else self.b_blocks.of(weight),
            # What the kernel does not read is `out` again: a pointer like any other.
            out if q_scale is None else q_scale,
            out if weight_scale is None else weight_scale,
            out if bias is None else bias,
            out if self.out_blocks is None else self.out_blocks.of(out),
            partial_sums,
            arrivals,
            *self.sizes,
            *self.strides,
        )


# By all that Triton compiles for and all that the grid depends on.
_launches: dict[tuple, PreparedGemm] = {}


def _prepare(
    config: GemmConfig, out: torch.Tensor, q: torch.Tensor, weight: torch.Tensor, has_bias: bool
) -> PreparedGemm:
    m, (n, k), passes = q.shape[0], weight.shape, _passes(q, weight)
    tiles = config.tiles(m, n)
    descriptors = config.pipeline == "descriptors" and _fits_descriptors(q) and _fits_descriptors(weight)
    large = m * n * k * passes >= _STORE_BLOCKS_FROM
    store_blocks = descriptors and large and config.split_k == 1 and _fits_descriptors(out)
    constants = kernel_constants(config, has_bias, k % config.block_k == 0, descriptors, store_blocks, passes)
    launch = RepeatedLaunch(int8_gemm_kernel, (tiles, config.split_k), constants, compile_options(config))
    return PreparedGemm(
        config,
        launch,
        (m, n, k),
        (q.stride(0), weight.stride(0), out.stride(0)),
        tiles,
        MatrixBlocks(q.shape, q.stride(), (config.block_m, config.block_k)) if descriptors else None,
        MatrixBlocks(weight.shape, weight.stride(), (config.block_n, config.block_k)) if descriptors else None,
        MatrixBlocks(out.shape, out.stride(), (config.block_m, config.block_n)) if store_blocks else None,
    )


def prepared_gemm(
    config: GemmConfig,
    out: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> PreparedGemm:
    """What launches a configuration on operands like these of `launch_gemm`, scales [M], [N] contiguous."""
    strides = (q.stride(0), weight.stride(0), out.stride(0))
    key = (config, q.device, q.shape, weight.shape, strides, out.dtype, None if bias is None else bias.dtype)
    tensors = [tensor for tensor in (out, q, q_scale, weight, weight_scale, bias) if tensor is not None]
    return remembered(_launches, key, tensors, lambda: _prepare(config, out, q, weight, bias is not None))


def _candidates(device: torch.device, m: int, n: int, k: int, passes: int) -> list[GemmConfig]:
    properties = torch.cuda.get_device_properties(device)
    return candidates((properties.major, properties.minor), properties.multi_processor_count, m, n, k, passes)


def launch_config(
    config: GemmConfig,
    out: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Launch one configuration into `out` [M, N] with the operands of `launch_gemm`, scales [M], [N] contiguous.

    Raises ValueError for K split in a configuration that walks it twice.
    """
    if config.split_k > 1 and _passes(q, weight) == 2:
        raise ValueError("K cannot be split with activations of 16 bits")
    prepared = prepared_gemm(config, out, q, q_scale, weight, weight_scale, bias)
    prepared(out, q, q_scale, weight, weight_scale, bias)


def tuned_gemm(
    out: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> PreparedGemm:
    """What launches the configuration tuned for operands like these on the current device; measures an unknown one."""
    if not q.is_cuda:  # Triton's interpreter: nothing to tune, and small tiles are the quickest there
        return prepared_gemm(GemmConfig(32, 32, 64, 4, 4, 1), out, q, q_scale, weight, weight_scale, bias)
    m, (n, k), passes = q.shape[0], weight.shape, _passes(q, weight)

    def launch(config: GemmConfig) -> None:
        launch_config(config, out, q, q_scale, weight, weight_scale, bias)

    key = TuningKey(device_name(q.device.index), m_bucket(m), n, k, passes)
    config = tuner.choose(key, lambda: _candidates(q.device, m, n, k, passes), launch)
    return prepared_gemm(config, out, q, q_scale, weight, weight_scale, bias)


def launch_gemm(
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Launch the kernel on checked, non-empty arguments with the configuration tuned for their shape.

    q int8 [M, K] or [M, 2K], weight int8 [N, K] -> `out_dtype` [M, N]. For torch.int32 that is the accumulator itself,
    and scales and bias are None.
    """
    q = q if q.stride(1) == 1 else q.contiguous()
    weight = weight if weight.stride(1) == 1 else weight.contiguous()
    q_scale = None if q_scale is None else q_scale.contiguous()
    weight_scale = None if weight_scale is None else weight_scale.reshape(-1).expand(weight.shape[0]).contiguous()
    bias = None if bias is None else bias.contiguous()
    out = torch.empty((q.shape[0], weight.shape[0]), dtype=out_dtype, device=q.device)
    with on_device(q.device):
        prepared = tuned_gemm(out, q, q_scale, weight, weight_scale, bias)
        prepared(out, q, q_scale, weight, weight_scale, bias)
    return out
