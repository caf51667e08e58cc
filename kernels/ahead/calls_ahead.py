"""What a model will launch, compiled before its weights are there."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ..card.device import fused_obstacle, takes_kernels
from ..card.machine import triton_available
from ..fused_ops.fused_ops import Norm, activate_quantize, gated_residual, norm_quantize, norm_rope
from ..kept import KEPT, keep
from ..launching.background import beside_loading
from ..linear.channel_transform import ChannelTransform
from ..linear.int8_linear import quantize_activations
from ..linear.linear_reference import BlockForm, LinearForm
from ..operators import Operator, OperatorCall


def prepare_compiling(device: torch.device) -> None:
    """Have `prepare` done beside other work; returns at once."""
    beside_loading.submit(0, partial(prepare, device))


def prepare(device: torch.device) -> None:
    """Do what the first kernel of a process waits for on a GPU, compiled or not: Triton's driver, its hash of itself,
    and imports.

    Does nothing on a device that the kernels are not made for, or without Triton. Raises what Triton does; whether it
    works is asked again by who launches.
    """
    if not (takes_kernels(device) and triton_available()):
        return
    from ..internals.triton_runtime import check_driver, hash_itself

    check_driver()
    hash_itself()
    from . import products_ahead  # noqa: F401 (Gluon, which the GEMM's kernels need, takes 0.1 s)


def compile_ahead(
    forms: Collection[LinearForm],
    block: BlockForm | None,
    dtype: torch.dtype,
    device: torch.device,
    others: Collection[OperatorCall] = (),
) -> None:
    """Have compiled, beside other work, what linears of these forms launch on a GPU with inputs of a dtype, what the
    fused ops of a block may, and other calls.

    It returns at once; what was asked for before is not looked through again. A call that comes first compiles for
    itself. Does nothing where the kernels do not run.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    key = (compile_ahead, frozenset(forms), block, dtype, device, frozenset(others))
    if device.type != "cuda" or fused_obstacle(device) is not None or key in KEPT:
        return
    keep(key, True)
    beside_loading.submit(0, partial(_compile, tuple(forms), block, dtype, device, tuple(others)))


def _compile(
    forms: Collection[LinearForm],
    block: BlockForm | None,
    dtype: torch.dtype,
    device: torch.device,
    others: Collection[OperatorCall],
) -> None:
    from .products_ahead import compile_for

    compile_for(forms, partial(_calls, forms, block, others=others), dtype, device)


def _calls(
    forms: Collection[LinearForm],
    block: BlockForm | None,
    new: Callable[..., Any],
    others: Collection[OperatorCall] = (),
) -> Iterator[tuple[Operator, Sequence[Any]]]:
    """Ops and their arguments, of which `new` makes a tensor of a shape and perhaps a dtype."""
    tokens = 4096

    def quantized(form: LinearForm) -> tuple[ChannelTransform, int]:
        factors = new(form.k, dtype=torch.float32) if form.has_factors else None
        return ChannelTransform(factors, form.rotation_group), form.activation_bits

    def norm(channels: int) -> Norm:
        return Norm("rms", 1e-6, new(channels))

    for other in others:
        yield other.operator, other.with_tensors(new)
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
