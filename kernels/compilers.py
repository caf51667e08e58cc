"""How torch.compile sees the kernels: as operators, and for Inductor the quantizer as plain operations.

As an operator the quantizer is opaque, so that its input goes through memory. As plain operations in the graph it would
be two readers of its input, the largest magnitude and the rounding, and what two read from more than four tensors, such
as any modulated LayerNorm, Inductor stores. So its operations enter below the graph, where each reader computes the
input for itself, and all of it is one kernel.
"""

import logging
from typing import Any

import torch

from .internals.torch_functions import dispatch_modes
from .linear.channel_transform import ChannelTransform
from .linear.linear_reference import quantize_activations_reference

_log = logging.getLogger(__name__)
_warned_of: set[type[Exception]] = set()
_plain: set[type] = {torch.Tensor, torch.nn.Parameter}


def read_as_plain(cls: type) -> None:
    """Let kernels read tensors of a subclass as plain ones: in memory they are."""
    _plain.add(cls)


def is_dispatched(x: torch.Tensor) -> bool:
    """Whether a call goes through PyTorch's dispatcher: for a compiler, a tensor subclass or a dispatch mode.

    Plain eager calls go straight to the implementations: dispatching to Python takes longer than the checks do.
    """
    return (torch.compiler.is_compiling() and _teach_inductor()) or type(x) not in _plain or dispatch_modes() > 0


@torch.compiler.assume_constant_result
def _teach_inductor() -> bool:
    """Tell Inductor, once per process, what the quantizer is. Always true.

    That is when a compiler first meets the kernels: importing Inductor takes a second.
    """
    try:
        from .internals import inductor
    except ImportError as error:
        _warn_of(error)
        return True
    inductor.teach(torch.ops.int8_dit.quantize_activations.default, _lower_quantizer)
    return True


def _lower_quantizer(x: Any, smooth: Any, rotation_group: int | None, activation_bits: int) -> Any:
    """Inductor's nodes of the quantizer's results, for its nodes of `x` and `smooth`.

    A rotation stays opaque: it would be a pass over memory for each base-4 digit of its group. So do 16 bits, whose two
    halves Inductor would write in two kernels, and a matrix without columns.
    """
    from .internals import inductor

    fakes = inductor.tensors_of_call()
    if rotation_group is None and activation_bits == 8 and fakes[0].shape[1]:
        try:
            return inductor.plain(_quantized_rows, [x] if smooth is None else [x, smooth], fakes)
        except Exception as error:  # a PyTorch whose Inductor is made otherwise
            _warn_of(error)
    operator = torch.ops.int8_dit.quantize_activations.default
    return inductor.opaque(operator, x, smooth, rotation_group, activation_bits)


def _quantized_rows(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The quantizer in plain operations, of x and perhaps the factors of a smoothing."""
    return quantize_activations_reference(tensors[0], ChannelTransform(*tensors[1:2], rotation_group=None))


def _warn_of(error: Exception) -> None:
    """Once for errors of a kind, whatever shapes they name."""
    if type(error) not in _warned_of:
        _warned_of.add(type(error))
        _log.warning("INT8: compiled models run slower than they could, as this PyTorch's Inductor raised %r", error)
