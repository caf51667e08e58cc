"""Launching the fused INT8 GEMM: the configuration tuned for a shape, its workspace, its tensor descriptors."""

import functools
import logging
from collections.abc import Sequence

import torch

from ..internals.gluon import HAS_GLUON
from ..internals.triton_runtime import HAS_DESCRIPTORS, MatrixBlocks
from ..memory_plan import unplanned_memory
from .exactness import WrongResult, check_exact
from .gemm_kernel import compile_options, int8_gemm_kernel, kernel_constants
from .launching import Build, Launcher, kept, on_device
from .tiles import PIPELINES, GemmConfig, gemm_candidates
from .tuning import TuningKey, device_name, m_bucket, tuner

logger = logging.getLogger(__name__)

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
    held = _arrivals_of_streams.get(key)
    if held is None or held.numel() < tiles:
        with unplanned_memory():
            held = _arrivals_of_streams[key] = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=device)
    return held


def _on_16_bytes(matrix: torch.Tensor) -> bool:
    """Whether base and rows begin there, as Hopper's copy engine wants it and copies into a ring do."""
    row_bytes = matrix.stride(0) * matrix.element_size()
    return matrix.data_ptr() % 16 == 0 and row_bytes % 16 == 0


def _passes(q: torch.Tensor, weight: torch.Tensor) -> int:
    """How often K is walked: twice for activations of 16 bits, [M, 2K]."""
    return q.shape[1] // weight.shape[1]


def _build(config: GemmConfig, *form) -> Build:
    return kernel_constants(config, *form), compile_options(config)


_GEMM = Launcher(int8_gemm_kernel, _build)


@functools.cache
def _ring_gemm() -> Launcher:
    """That of the ring's kernel, which can be defined where Gluon is as assumed."""
    from .ring_gemm_kernel import ring_constants, ring_gemm_kernel, ring_options

    def build(config: GemmConfig, *form) -> Build:
        return ring_constants(config, *form), ring_options(config)

    return Launcher(ring_gemm_kernel, build)


# Those that can run.
_PIPELINES = tuple(name for name in PIPELINES if name != "ring" or HAS_GLUON)


class PreparedGemm:
    """The launch of one configuration for all numbers of tokens of a `rows_kind`.

    Args:
        config: the configuration.
        out, q, q_scale, weight, weight_scale, bias: like those of the launches: of their dtypes, layouts and alignment.
    """

    def __init__(
        self,
        config: GemmConfig,
        out: torch.Tensor,
        q: torch.Tensor,
        q_scale: torch.Tensor | None,
        weight: torch.Tensor,
        weight_scale: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> None:
        m, (n, k), passes = q.shape[0], weight.shape, _passes(q, weight)
        if not _runs_as_it_is(config, q, weight):
            config = config.by_pointers
        one_scale = weight_scale is not None and weight_scale.numel() == 1
        tensors = operands(out, q, q_scale, weight, weight_scale, bias)
        self._config, self._columns = config, -(-n // config.block_n)
        self._numbers = (n, k, q.stride(0), weight.stride(0), out.stride(0))
        described, self._multiprocessors = config.pipeline == "descriptors", 0
        stored = described and m >= stores_blocks_from(n, k * passes) and config.split_k == 1 and _on_16_bytes(out)
        if config.pipeline == "ring":
            self._multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count
            form = (config.kernel, bias is not None, one_scale)
            self._launch = _ring_gemm().prepared(form, tensors, (m, *self._numbers, 0, 0, 0))
        else:
            form = (config, bias is not None, k % config.block_k == 0, described, stored, passes, one_scale)
            self._launch = _GEMM.prepared(form, tensors, (m, *self._numbers))
        # None where pointers are used.
        self._a_blocks = MatrixBlocks(q, (config.block_m, config.block_k)) if described else None
        self._b_blocks = MatrixBlocks(weight, (config.block_n, config.block_k)) if described else None
        self._out_blocks = MatrixBlocks(out, (config.block_m, config.block_n)) if stored else None

    @property
    def takes_addresses(self) -> bool:
        """Whether the operands may be given as addresses."""
        return self._launch.direct is not None

    def __call__(self, rows: int, q: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, given: Sequence) -> None:
        """Launch into `out` on the current device.

        `given` are the `operands` or their addresses. `q`, `weight` and `out` begin where those do; their shapes are
        not looked at.
        """
        config = self._config
        a, b, a_scale, b_scale, bias, c = given
        tiles = -(-rows // config.block_m) * self._columns
        shared, parts = config.shared_tiles(tiles, self._multiprocessors), config.split_k
        partial_sums = arrivals = c
        if shared:
            sums = shared * parts * config.block_m * config.block_n
            partial_sums = torch.empty(sums, dtype=torch.int32, device=out.device)
            arrivals = _arrivals(out.device, shared)
        elif config.pipeline == "ring" and self._launch.direct is None:
            # Triton compiles for the workspace's dtype, and the same kernel runs where K is shared.
            partial_sums = arrivals = torch.empty(1, dtype=torch.int32, device=out.device)
        if self._a_blocks is not None and self._b_blocks is not None:
            a, b = self._a_blocks.of(q, rows), self._b_blocks.of(weight, self._numbers[0])
        if self._out_blocks is not None:
            c = self._out_blocks.of(out, rows)
        grid, numbers = (tiles, parts), (rows, *self._numbers)
        if config.pipeline == "ring":
            grid = (tiles + shared * (parts - 1), 1)
            numbers = (*numbers, tiles - shared, parts, config.group_m)
        self._launch(grid, a, b, a_scale, b_scale, bias, c, partial_sums, arrivals, *numbers)


def _runs_as_it_is(config: GemmConfig, q: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the copies of a configuration can fetch these operands, here and on this Triton."""
    if config.pipeline == "pointers":
        return True
    aligned = _on_16_bytes(q) and _on_16_bytes(weight)
    if config.pipeline == "descriptors":
        return HAS_DESCRIPTORS and aligned
    return HAS_GLUON and q.is_cuda and aligned and weight.shape[1] % 16 == 0 and _passes(q, weight) == 1


def operands(
    out: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> list[torch.Tensor]:
    """The tensors in the order of the kernel's parameters. What it does not read is `out` again: a pointer like any
    other."""
    return [out if tensor is None else tensor for tensor in (q, weight, q_scale, weight_scale, bias, out)]


def prepared_gemm(
    config: GemmConfig,
    out: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> PreparedGemm:
    """What launches a configuration on operands like these of `launch_gemm`, all scales contiguous; one for all that
    are alike, in the kind of their rows too, and begin on 16 bytes, as nearly all do."""
    given = (out, q, q_scale, weight, weight_scale, bias)
    tensors = operands(*given)
    together = 0
    for tensor in tensors:
        together |= tensor.data_ptr()
    if together & 15:
        return PreparedGemm(config, *given)
    stored = len(q) >= stores_blocks_from(weight.shape[0], q.shape[1])
    strides = q.stride(0), weight.stride(0), out.stride(0)
    one_scale = weight_scale is not None and weight_scale.numel() == 1
    dtypes = tuple([tensor.dtype for tensor in tensors])
    rows = rows_kind(len(q))
    key = (config, q.device, rows, q.shape[1], weight.shape, strides, dtypes, bias is None, one_scale, stored)
    return kept(key, lambda: PreparedGemm(config, *given))


def rows_kind(m: int) -> tuple[bool, bool]:
    """What the kernel is compiled for of M. That M is divisible by 16 saves up to a tenth of its instructions."""
    return m == 1, m % 16 == 0


def stores_blocks_from(n: int, k: int) -> int:
    """From how many tokens on a product with [n, k] is large enough for one more descriptor."""
    return -(-_STORE_BLOCKS_FROM // (n * k))


def _candidates(device: torch.device, m: int, n: int, k: int, passes: int) -> list[GemmConfig]:
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    return gemm_candidates(capability, properties.multi_processor_count, m, n, k, passes, _PIPELINES)


def launch_config(
    config: GemmConfig,
    out: torch.Tensor,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scale: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> None:
    """Launch one configuration into `out` [M, N] with the operands of `launch_gemm`, all scales contiguous.

    Raises ValueError for K split in a configuration that walks it twice.
    """
    if config.split_k > 1 and _passes(q, weight) == 2:
        raise ValueError("K cannot be split with activations of 16 bits")
    given = (out, q, q_scale, weight, weight_scale, bias)
    prepared_gemm(config, *given)(len(q), q, weight, out, operands(*given))


_exact: dict[tuple, bool] = {}


def _is_exact(
    config: GemmConfig, device: torch.device, dtype: torch.dtype, has_bias: bool, weight_scale: torch.Tensor | None
) -> bool:
    """Whether a ring computes exactly here, found out once per process and kernel; too little memory says nothing."""
    one_scale = weight_scale is not None and weight_scale.numel() == 1
    key = (config.kernel, config.split_k > 1, device, dtype, has_bias, one_scale)
    if key not in _exact:
        try:
            check_exact(functools.partial(launch_config, config), device, dtype, has_bias, one_scale)
        except torch.cuda.OutOfMemoryError:
            return False
        except WrongResult:
            text = "INT8 GEMM: a kernel does not compute exactly on %s and is not used there: %s. Please report this."
            logger.warning(text, device_name(device.index), config)
            _exact[key] = False
        else:
            _exact[key] = True
    return _exact[key]


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
        if config.pipeline == "ring" and not _is_exact(config, q.device, out.dtype, bias is not None, weight_scale):
            raise WrongResult
        launch_config(config, out, q, q_scale, weight, weight_scale, bias)

    key = TuningKey(device_name(q.device.index), m_bucket(m), n, k, passes)
    config = tuner.choose(key, lambda: _candidates(q.device, m, n, k, passes), launch)
    return prepared_gemm(config, out, q, q_scale, weight, weight_scale, bias)


def _in_wider_rows(matrix: torch.Tensor, k: int) -> torch.Tensor:
    """int8 [M, K] or [M, 2K] with zeros behind each K, so that rows begin on 16 bytes: Triton fetches others byte by
    byte, which takes 50 times as long."""
    parts = matrix.reshape(len(matrix), -1, k)
    by_eight = k % 8 == 0 and parts.is_contiguous() and parts.data_ptr() % 8 == 0  # which are copied faster
    parts = parts.view(torch.int64 if by_eight else torch.int8)
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[-1] % (2 if by_eight else 16)))
    return padded.flatten(1).view(torch.int8)


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
    if weight.shape[1] % 16:
        q, weight = _in_wider_rows(q, weight.shape[1]), _in_wider_rows(weight, weight.shape[1])
    q_scale = None if q_scale is None else q_scale.contiguous()
    weight_scale = None if weight_scale is None else weight_scale.contiguous()
    bias = None if bias is None else bias.contiguous()
    out = torch.empty((q.shape[0], weight.shape[0]), dtype=out_dtype, device=q.device)
    with on_device(q.device):
        given = (out, q, q_scale, weight, weight_scale, bias)
        tuned_gemm(*given)(len(q), q, weight, out, operands(*given))
    return out
