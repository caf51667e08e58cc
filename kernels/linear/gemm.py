"""Launching the fused INT8 GEMM: the configuration of a shape, its workspace, its tensor descriptors."""

import functools
import logging
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..internals.gluon import HAS_GLUON
from ..internals.kitchen import kitchen_gemm
from ..internals.triton_runtime import HAS_DESCRIPTORS, MatrixBlocks
from ..launching.background import Background, beside_calls
from ..launching.launching import Launcher, StandIn, begin_on_16, contiguous, dense, on_device
from ..memory_plan import is_capturing, unplanned_memory
from ..operators import Tensors
from .exactness import WrongResult, check_exact, check_once
from .gemm_kernel import Operands, gemm_build, int8_gemm_kernel
from .tiles import KITCHEN, PIPELINES, GemmConfig, gemm_candidates
from .tuning import device_name, tuner
from .tuning_cache import TuningKey, m_bucket

logger = logging.getLogger(__name__)

# Multiply-adds from which on the copy engine should write the result: one more descriptor costs the host time.
_STORE_BLOCKS_FROM = 2**36

_arrivals_of_streams: dict[tuple[torch.device, int], torch.Tensor] = {}


def _arrivals(device: torch.device, tiles: int) -> torch.Tensor:
    """Return zeros, int32 [at least tiles], for one launch, which leaves zeros behind.

    Kernels of a stream follow one another, so each stream keeps its own, which saves filling them. A CUDA graph may be
    replayed on any stream: it fills its own, and so does the interpreter.
    """
    if device.type != "cuda" or is_capturing(device):
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    held = _arrivals_of_streams.get(key)
    if held is None or held.numel() < tiles:
        with unplanned_memory():
            held = _arrivals_of_streams[key] = torch.zeros(max(tiles, 4096), dtype=torch.int32, device=device)
    return held


def _on_16_bytes(matrix: torch.Tensor) -> bool:
    """Return whether base and rows begin there, as Hopper's copy engine and copies into a ring want it."""
    return matrix.data_ptr() % 16 == 0 and matrix.stride(0) * matrix.element_size() % 16 == 0


_GEMM = Launcher(int8_gemm_kernel, gemm_build)


@functools.cache
def _ring_gemm() -> Launcher:
    """Return the ring's: its kernel can be defined where Gluon is as assumed."""
    from .ring_gemm_kernel import ring_build, ring_gemm_kernel

    return Launcher(ring_gemm_kernel, ring_build)


@functools.cache
def _pipelines() -> tuple[str, ...]:
    """Return those that can run."""
    absent = {"ring": not HAS_GLUON, "kitchen": kitchen_gemm() is None}
    return tuple(name for name in PIPELINES if not absent.get(name))


class GemmLaunch:
    """The launch of one configuration on operands of one layout.

    Args:
        operands: of the shapes, dtypes, strides and alignment of those to launch on; scales are contiguous.

    Raises ValueError for K split in a configuration that walks it twice.
    """

    def __init__(self, config: GemmConfig, operands: Operands) -> None:
        q, weight, _, _, bias, out = operands
        m, (n, k), passes = len(q), weight.shape, operands.passes
        if config.split_k > 1 and passes == 2:
            raise ValueError("K cannot be split with activations of 16 bits")
        if not _runs_as_it_is(config, operands):
            config = config.by_pointers
        ring, described = config.pipeline == "ring", config.pipeline == "descriptors"
        multiprocessors = torch.cuda.get_device_properties(q.device).multi_processor_count if ring else 0
        tiles, parts = config.tiles(m, n), config.split_k
        self._shared = config.shared_tiles(tiles, multiprocessors)
        self._sums = self._shared * parts * config.block_m * config.block_n
        stored = described and m * n * k * passes >= _STORE_BLOCKS_FROM and parts == 1 and _on_16_bytes(out)
        self._ring, self._grid = ring, (tiles, parts)
        self._numbers = (m, n, k, q.stride(0), weight.stride(0), out.stride(0))
        if ring:
            form = (config.kernel, bias is not None, operands.has_one_scale)
            self._launch = _ring_gemm().prepared(form, operands.read, (*self._numbers, 0, 0, 0))
            self._grid = (tiles + self._shared * (parts - 1), 1)
            self._numbers += (tiles - self._shared, parts, config.group_m)
        else:
            form = (config.kernel, bias is not None, k % config.block_k == 0, described, stored, passes)
            self._launch = _GEMM.prepared((*form, operands.has_one_scale), operands.read, (*self._numbers, 0))
            self._numbers += (config.group_m,)
        # None where pointers are used.
        self._a_blocks = MatrixBlocks(q, (config.block_m, config.block_k)) if described else None
        self._b_blocks = MatrixBlocks(weight, (config.block_n, config.block_k)) if described else None
        self._out_blocks = MatrixBlocks(out, (config.block_m, config.block_n)) if stored else None

    def is_compiled(self, operands: Operands, rank: int | None, threads: Background = beside_calls) -> bool:
        """Return whether a launch on such operands is compiled. If not, and with a rank, other threads compile it."""
        if rank is not None and not self._launch.is_compiled:
            q, weight, *others, out = map(StandIn.of, operands.read)
            spare = StandIn((1,), torch.int32, out.device) if self._ring or self._sums else out
            a, b, c = self._blocks(q, weight, out, (q, weight, out))
            self._launch.compile_by(threads, rank, out.device, a, b, *others, c, spare, spare, *self._numbers)
        return self._launch.is_compiled

    def _blocks(self, q: Any, weight: Any, out: Any, given: tuple) -> tuple:
        """Return these three as the kernel reads them: as given, or as descriptors."""
        a, b, c = given
        if self._a_blocks is not None and self._b_blocks is not None:
            a, b = self._a_blocks.of(q), self._b_blocks.of(weight)
        return a, b, c if self._out_blocks is None else self._out_blocks.of(out)

    @property
    def takes_addresses(self) -> bool:
        """Whether the operands may be given as addresses."""
        return self._launch.direct is not None

    def __call__(self, q: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, given: Sequence) -> None:
        """Launch into `out` on the current device.

        `given` are the operands as they are read, or their addresses. `q`, `weight` and `out` begin where those do;
        their shapes are not looked at.
        """
        a, b, a_scale, b_scale, bias, c = given
        partial_sums = arrivals = c
        if self._shared:
            with unplanned_memory():  # another configuration, which asks for more or less, may stay
                partial_sums = torch.empty(self._sums, dtype=torch.int32, device=out.device)
            arrivals = _arrivals(out.device, self._shared)
        elif self._ring and self._launch.direct is None:
            # Triton compiles for the workspace's dtype, and the same kernel runs where K is shared.
            partial_sums = arrivals = torch.empty(1, dtype=torch.int32, device=out.device)
        launch, expansions = self._launch, self._launch.expansions
        if launch.direct is not None and expansions and self._a_blocks is not None and self._b_blocks is not None:
            blocks, a = self._out_blocks, self._a_blocks.at(q.data_ptr(), expansions[0])
            b, c = self._b_blocks.at(weight.data_ptr(), expansions[1]), (c,)
            c = c if blocks is None else blocks.at(out.data_ptr(), expansions[2])
            tail = (partial_sums, arrivals, *self._numbers)
            launch.direct(*self._grid, *a, *b, a_scale, b_scale, bias, *c, *tail)
            return
        a, b, c = self._blocks(q, weight, out, (a, b, c))
        self._launch(self._grid, a, b, a_scale, b_scale, bias, c, partial_sums, arrivals, *self._numbers)


class KitchenLaunch:
    """comfy-kitchen's GEMM on operands like these, in the place of a GemmLaunch."""

    takes_addresses = False

    def __init__(self, operands: Operands) -> None:
        self._has_bias, self._one_scale = operands.bias is not None, operands.has_one_scale
        self._n = len(operands.weight)

    def is_compiled(self, operands: Operands, rank: int | None, threads: Background = beside_calls) -> bool:
        return True

    def __call__(self, q: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, given: Sequence) -> None:
        """Launch as a GemmLaunch does; `given` are tensors. Raises WrongResult where comfy-kitchen has no kernel."""
        _, _, q_scale, weight_scale, bias, _ = given
        if self._one_scale:
            weight_scale = weight_scale.reshape(1).expand(self._n).contiguous()
        run = kitchen_gemm()
        if run is None or not run(q, weight, q_scale, weight_scale, bias if self._has_bias else None, out):
            raise WrongResult


def _runs_as_it_is(config: GemmConfig, operands: Operands) -> bool:
    """Return whether a configuration can read these operands, here and on this Triton."""
    if config.pipeline == "pointers":
        return True
    q, weight, *_, bias, out = operands
    aligned = _on_16_bytes(q) and _on_16_bytes(weight)
    if config.pipeline == "descriptors":
        return HAS_DESCRIPTORS and aligned
    if config.pipeline == "kitchen":
        dense = all(matrix.is_contiguous() for matrix in (q, weight, out))
        floats = out.is_floating_point() and (bias is None or bias.dtype == out.dtype)
        return q.is_cuda and dense and floats and aligned and _on_16_bytes(out) and operands.passes == 1
    return HAS_GLUON and q.is_cuda and aligned and weight.shape[1] % 16 == 0 and operands.passes == 1


def launch_config(config: GemmConfig, operands: Operands) -> None:
    """Launch one configuration on its operands' device, which is the current one. Raises what GemmLaunch does."""
    GemmLaunch(config, operands)(operands.q, operands.weight, operands.out, operands.read)


def _is_exact(config: GemmConfig, operands: Operands) -> bool:
    """Return whether a ring computes exactly here, asked once per kernel."""
    device, form = operands.q.device, (operands.out.dtype, operands.bias is not None, operands.has_one_scale)

    def found() -> bool:
        try:
            check_exact(functools.partial(launch_config, config), device, *form)
        except WrongResult:
            text = "INT8 GEMM: a kernel does not compute exactly on %s and is not used there: %s. Please report this."
            logger.warning(text, device_name(device.index), config)
            return False
        return True

    return check_once((check_exact, config.kernel, config.split_k > 1, device, *form), device, found)


def _own_config(operands: Operands) -> GemmConfig:
    """Return what runs in the place of comfy-kitchen's GEMM where that cannot."""
    ours = (config for config in _candidates(operands) if config != KITCHEN)
    return next(config for config in ours if config.pipeline != "ring" or _is_exact(config, operands))


def _gives_the_same(launch: KitchenLaunch, operands: Operands) -> bool:
    """Return whether a launch gives the bits of the pack's own, asked once per shape and kind of operands. Both add a
    bias of thirds in the place of the operands' own, which may be zeros."""
    q, weight, *_, bias, out = operands

    def found() -> bool:
        with unplanned_memory():
            thirds = None if bias is None else (torch.arange(len(bias), device=bias.device) / 3).to(bias.dtype)
            own = operands._replace(bias=thirds)
            other = own._replace(out=torch.empty_like(out))
            try:
                launch(q, weight, other.out, other.read)
            except torch.cuda.OutOfMemoryError:
                raise
            except (WrongResult, RuntimeError, TypeError, ValueError):  # of others' code: the pack's own runs
                return False
            GemmLaunch(_own_config(operands), own)(q, weight, out, own.read)
            return torch.equal(out, other.out)

    key = (KITCHEN, q.shape, weight.shape, q.device, out.dtype, bias is not None, operands.has_one_scale)
    return check_once(key, q.device, found)


def _candidates(operands: Operands) -> list[GemmConfig]:
    q, (n, k) = operands.q, operands.weight.shape
    card = torch.cuda.get_device_properties(q.device)
    capability, multiprocessors = (card.major, card.minor), card.multi_processor_count
    return gemm_candidates(capability, multiprocessors, len(q), n, k, operands.passes, _pipelines())


def _tuning_key(operands: Operands) -> TuningKey:
    m, (n, k) = len(operands.q), operands.weight.shape
    return TuningKey(device_name(operands.q.get_device()), m_bucket(m), n, k, operands.passes)


def likely_config(operands: Operands) -> GemmConfig:
    """Return the configuration that a first call on such operands launches."""
    config = tuner.likely(_tuning_key(operands), lambda: _candidates(operands))
    return _candidates(operands)[0] if config == KITCHEN else config


def _in_wider_rows(matrix: torch.Tensor, k: int) -> torch.Tensor:
    """Copy int8 [M, K] or [M, 2K] with zeros behind each K, so that rows begin on 16 bytes: Triton fetches others byte
    by byte, which takes 50 times as long."""
    parts = matrix.reshape(len(matrix), -1, k)
    by_eight = k % 8 == 0 and parts.is_contiguous() and parts.data_ptr() % 8 == 0  # which are copied faster
    parts = parts.view(torch.int64 if by_eight else torch.int8)
    padded = torch.nn.functional.pad(parts, (0, -parts.shape[-1] % (2 if by_eight else 16)))
    return padded.flatten(1).view(torch.int8)


class TunedGemm:
    """Launches what stays for tensors of one layout, or what is tried while that is open."""

    def __init__(self) -> None:
        # The first two are of tensors which all begin on 16 bytes.
        self._aligned: GemmLaunch | KitchenLaunch | None = None
        self._passing: GemmLaunch | KitchenLaunch | None = None
        self._left = 0  # calls that launch what passes
        self._tried: dict[GemmConfig, GemmLaunch | KitchenLaunch] = {}
        self._ran: set[GemmConfig] = set()

    def take(self) -> tuple[GemmLaunch | KitchenLaunch, float] | None:
        """Return a launch on addresses that all begin on 16 bytes, and the number of calls that it is for, which this
        object gives up; None while no such launch is known."""
        launch, calls = (self._passing, self._left) if self._aligned is None else (self._aligned, math.inf)
        if launch is None or not launch.takes_addresses or not calls:
            return None
        self._left = 0
        return launch, calls

    def __call__(self, tensors: Tensors, results: Sequence[torch.Tensor]) -> None:
        """Launch on q int8 [M, K] or [M, 2K], q_scale, weight int8 [N, K], weight_scale and bias, to fill [M, N].

        A result in torch.int32 is the accumulator itself; scales and bias are None then.
        """
        q, q_scale, weight, weight_scale, bias = tensors
        q, weight = dense((q, weight))
        if weight.shape[1] % 16:
            q, weight = _in_wider_rows(q, weight.shape[1]), _in_wider_rows(weight, weight.shape[1])
        q_scale, weight_scale, bias = contiguous((q_scale, weight_scale, bias))
        operands = Operands(q, weight, q_scale, weight_scale, bias, results[0])
        read = operands.read
        with on_device(q.device):
            if begin_on_16([tensor.data_ptr() for tensor in read]) is not None:
                TunedGemm()._tune(operands)
                return
            launch = self._aligned
            if launch is None and self._left:
                launch, self._left = self._passing, self._left - 1
            if launch is None:
                self._tune(operands)
            else:
                launch(q, weight, operands.out, read)

    def _tune(self, operands: Operands) -> None:
        """Launch what stays for such operands, or what the tuner tries, on the current device; note what stays, or what
        the next calls launch."""
        q = operands.q

        def made(config: GemmConfig) -> GemmLaunch | KitchenLaunch:
            launch = self._tried.get(config)
            if launch is None:
                is_kitchen = config == KITCHEN and _runs_as_it_is(config, operands)
                launch = self._tried[config] = KitchenLaunch(operands) if is_kitchen else GemmLaunch(config, operands)
            return launch

        def launch(config: GemmConfig) -> None:
            if config.pipeline == "ring" and not _is_exact(config, operands):
                raise WrongResult
            if isinstance(kitchen := made(config), KitchenLaunch) and not _gives_the_same(kitchen, operands):
                self._tried[config] = GemmLaunch(_own_config(operands), operands)
            made(config)(q, operands.weight, operands.out, operands.read)
            self._ran.add(config)

        def is_ready(config: GemmConfig, rank: int | None) -> bool:
            return made(config).is_compiled(operands, rank)

        passing = None
        if q.is_cuda:
            key = _tuning_key(operands)
            tuner.run(key, len(q), lambda: _candidates(operands), launch, is_ready)
            stays = tuner.settled(key)
            if stays is None:
                passing = tuner.passing(key, is_ready)
        else:  # Triton's interpreter: nothing to tune, and small tiles are the quickest there
            stays = GemmConfig(32, 32, 64, 4, 4, 1)
            launch(stays)
        # In the capture of a graph another one may have run.
        self._aligned = made(stays) if stays in self._ran else None
        self._passing = self._tried[passing] if passing in self._ran else None
        self._left = 0 if self._passing is None else tuner.calls_a_try - 1
        if self._aligned is not None:
            self._tried = {}


def launch_int8_gemm(*_: object) -> TunedGemm:
    return TunedGemm()
