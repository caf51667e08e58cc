"""How torch.compile sees the kernels: as operators, and for Inductor the quantizer as plain operations.

An opaque quantizer reads its input from memory. Plain operations in the graph would be two readers of it, the largest
magnitude and the rounding. Inductor stores what two readers share if it is computed from more than four tensors, such
as any modulated LayerNorm. So the operations enter below the graph: each reader computes the input, all in one kernel.
"""

import logging
from collections.abc import Callable

import torch

from .internals.torch_functions import dispatch_modes
from .linear.channel_transform import ChannelTransform
from .linear.linear_reference import Quantized, quantize_activations_reference

_log = logging.getLogger(__name__)
_warned_of: set[type[Exception]] = set()
_plain: set[type] = {torch.Tensor, torch.nn.Parameter}


def read_as_plain(cls: type) -> None:
    """Let kernels read tensors of a subclass, which are plain in memory."""
    _plain.add(cls)


def is_dispatched(x: torch.Tensor) -> bool:
    """Whether a call goes through PyTorch's dispatcher: for a compiler, a tensor subclass or a dispatch mode.

    Plain eager calls go straight to the implementations: dispatching to Python takes longer than the checks do.
    """
    return (torch.compiler.is_compiling() and _register_lowering()) or type(x) not in _plain or dispatch_modes() > 0


@torch.compiler.assume_constant_result
def _register_lowering() -> bool:
    """Register the quantizer's lowering with Inductor, once per process; always True.

    That is when a compiler first meets the kernels: importing Inductor takes a second.
    """
    try:
        from .internals.inductor import inline
    except ImportError as error:
        _warn_of(error)
    else:
        inline(torch.ops.int8_dit.quantize_activations.default, _plain_quantizer, _warn_of)
    return True


def _plain_quantizer(
    x: torch.Tensor, smooth: torch.Tensor | None, rotation_group: int | None, activation_bits: int
) -> Callable[..., Quantized] | None:
    """Return the quantizer in plain operations, a function of x and perhaps `smooth`; None where it stays opaque.

    A rotation does: it would be a pass over memory for each base-4 digit of its group. So do 16 bits, whose two halves
    Inductor would write in two kernels, and a matrix without columns.
    """
    if rotation_group is not None or activation_bits != 8 or not x.shape[1]:
        return None
    return lambda x, *smooth: quantize_activations_reference(x, ChannelTransform(*smooth, rotation_group=None))


def _warn_of(error: Exception) -> None:
    """Log the first error of each type, whatever shapes it names."""
    if type(error) not in _warned_of:
        _warned_of.add(type(error))
        _log.warning("INT8: compiled models run slower than they could, as this PyTorch's Inductor raised %r", error)
