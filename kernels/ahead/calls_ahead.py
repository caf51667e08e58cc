"""Compile what a model will launch in background threads, before its weights are there."""

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..call_cache import CACHE, store
from ..card.device import fused_obstacle, takes_kernels
from ..card.machine import triton_available
from ..fused_ops.fused_ops import Norm, activate_quantize, gated_residual, norm_quantize, norm_rope
from ..launching.background import Background, beside_calls, beside_loading
from ..linear.channel_transform import ChannelTransform
from ..linear.int8_linear import quantize_activations
from ..linear.linear_reference import BlockForm, LinearForm
from ..operators import Operator, OperatorCall

# Images of 1024 pixels and texts. Those of 768 and 512 pixels follow in one thread, so many seconds later: weights load
# and first steps begin meanwhile, which would wait for Python's lock.
_TOKENS, _LATER_TOKENS, _SECONDS_LATER = (4096, 512), (2560, 1024), 5.0


def prepare_compiling(device: torch.device) -> None:
    """Run `prepare` in a background thread."""
    beside_loading.submit(0, partial(prepare, device))


def prepare(device: torch.device) -> None:
    """Do what the first kernel of a process waits for on a GPU: Triton's driver, its hash of itself, and imports.

    Does nothing on a device that the kernels are not made for, or without Triton. Raises what Triton does; whether it
    works is asked again by who launches.
    """
    if not (takes_kernels(device) and triton_available()):
        return
    from ..internals.triton_runtime import check_driver, hash_itself

    check_driver()
    hash_itself()
    from ..linear import gemm  # noqa: F401 (Gluon, which the GEMM's kernels need, takes 0.1 s)


def compile_ahead(
    forms: Collection[LinearForm],
    block: BlockForm | None,
    dtype: torch.dtype,
    device: torch.device,
    others: Collection[OperatorCall] = (),
) -> None:
    """Start background compilation of what linears, the fused ops of a block and other calls launch on a GPU.

    Returns at once; equal arguments are compiled once. A call that comes first compiles for itself, or waits for the
    thread that has begun to. Does nothing where the kernels do not run.

    Args:
        forms: of the linears, each once.
        dtype: of their inputs.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (compile_ahead, frozenset(forms), block, dtype, device, frozenset(others))
    if device.type != "cuda" or fused_obstacle(device) is not None or key in CACHE:
        return
    store(key, True)
    beside_loading.submit(0, partial(_compile, tuple(forms), block, dtype, device, tuple(others)))


def _compile(
    forms: Collection[LinearForm],
    block: BlockForm | None,
    dtype: torch.dtype,
    device: torch.device,
    others: Collection[OperatorCall] = (),
) -> None:
    from ..internals.triton_runtime import COMPILES_ALONE
    from ..launching.launching import StandIn

    if not COMPILES_ALONE:
        return

    def new(*shape: int, dtype: torch.dtype = dtype) -> Any:
        return StandIn(shape, dtype, device)

    # Conversions of weights, of rank 0, come before all this.
    known = ((other.operator, other.with_tensors(new)) for other in others)
    for op, arguments in itertools.chain(known, _calls(forms, block, new)):
        op.compile_by(beside_loading, 1, *arguments)
    products = partial(_compile_products, forms, new)
    products(_TOKENS, beside_loading)
    later = partial(beside_calls.submit_later, _SECONDS_LATER, 1, partial(products, _LATER_TOKENS, beside_calls))
    beside_loading.submit(1 + len(_TOKENS), later)  # when nothing else waits there


def _compile_products(
    forms: Collection[LinearForm], new: Callable[..., Any], numbers: Sequence[int], threads: Background
) -> None:
    """Compile what products of these forms launch with each of these numbers of tokens."""
    from ..linear.gemm import GemmLaunch, likely_config
    from ..linear.gemm_kernel import Operands

    for form in forms:
        if form.k % 16:  # rows of others are copied into wider ones
            continue
        width, scales = form.k * form.activation_bits // 8, 1 if form.has_one_scale else form.n
        weight, weight_scale = new(form.n, form.k, dtype=torch.int8), new(scales, dtype=torch.float32)
        bias = new(form.n) if form.has_bias else None
        for rank, tokens in enumerate(numbers, 1):
            q, scale = new(tokens, width, dtype=torch.int8), new(tokens, dtype=torch.float32)
            operands = Operands(q, weight, scale, weight_scale, bias, new(tokens, form.n))
            GemmLaunch(likely_config(operands), operands).is_compiled(operands, rank, threads)


def _calls(
    forms: Collection[LinearForm], block: BlockForm | None, new: Callable[..., Any]
) -> Iterator[tuple[Operator, Sequence[Any]]]:
    """Yield operators and their arguments; `new` makes a tensor of a shape and, if it is not the inputs', a dtype."""
    tokens = 4096

    def quantized(form: LinearForm) -> tuple[ChannelTransform, int]:
        factors = new(form.k, dtype=torch.float32) if form.has_factors else None
        return ChannelTransform(factors, form.rotation_group), form.activation_bits

    def norm(channels: int) -> Norm:
        return Norm("rms", 1e-6, new(channels))

    for form in forms:
        yield quantize_activations, (new(tokens, form.k), *quantized(form))
    if block is None:
        return
    width = block.width
    x, modulation = new(1, tokens, width), new(1, 1, width)
    if block.is_sandwiched:
        yield norm_quantize, (x, norm(width), modulation, None, *quantized(block.enters))
        yield gated_residual, (x, x, modulation, norm(width))
    else:
        yield norm_quantize, (x, Norm("layer", 1e-6), modulation, modulation, *quantized(block.enters))
        yield gated_residual, (x, x, modulation)
    inner = new(1, tokens, block.leaves.k)
    activation = ("silu", inner) if block.is_gated else ("gelu_tanh", None)
    yield activate_quantize, (inner, *activation, None, *quantized(block.leaves))
    if block.head:
        heads, freqs = new(1, tokens, width // block.head, block.head), (1, tokens, 1, block.head // 2, 2, 2)
        for pairs in ("neighbours", "halves"):
            norms = norm(block.head), norm(block.head)
            yield norm_rope, (heads, heads, *norms, new(*freqs, dtype=torch.float32), pairs, (heads, heads))
