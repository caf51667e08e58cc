"""The kinds of attention that a MODEL can have: the ways that each tries, and the call that a way computes."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from importlib.metadata import version
from typing import Any, NamedTuple

import comfy_kitchen
import torch

from ...kernels import FLOAT_DTYPES, exact_attention, fastest_way, int8_attention, int8_attention_obstacle
from ..comfyui.attention import comfyuis_attention, is_pytorch_attention, pytorch_attentions

_comfy_kitchen: Any = comfy_kitchen  # what it has is asked for at run time

AUTO, AS_COMFYUI, INT8, KITCHEN_INT8 = "auto", "as ComfyUI", "INT8", "INT8 (comfy-kitchen)"

KEEPS_EXACT = "int8_dit_exact_attention"
"""The entry of transformer_options that is True inside of blocks whose attention a calibration keeps exact."""

_KITCHEN_VERSION = "0.2.29"  # the first with INT8 attention
_KITCHEN_OLDEST = (7, 5)
_WIDEST_HEAD = 256
_MASK_DTYPES = (torch.bool, *FLOAT_DTYPES)
_MOST_HEADS = 65535  # of all samples together: what a grid of CUDA has room for
_KNOWN_KEYWORDS = {"scale", "enable_gqa", "low_precision_attention", "transformer_options", "_inside_attn_wrapper"}


class AttentionCall(NamedTuple):
    """An attention call. Tensors that do not fit the form below have other axes."""

    q: torch.Tensor  # [batch, heads, tokens, width]
    k: torch.Tensor  # the same with perhaps fewer heads and other tokens, as v
    v: torch.Tensor
    heads: int  # those of q
    mask: torch.Tensor | None  # of four axes
    scale: float | None  # the factor of the logits; None for the width to the power of -1/2
    grouped: bool  # whether several heads of q share one of k and v
    flat_output: bool  # whether the output is [batch, tokens, heads * width]
    attn_precision: torch.dtype | None  # what the layer asks for in the logits
    keywords: Mapping[str, Any]  # the other named arguments of the call, scale and grouping included
    otherwise: Callable[..., torch.Tensor]  # computes what nothing else does, with ComfyUI's arguments


def read_call(
    otherwise: Callable[..., torch.Tensor],
    q: Any,
    k: Any,
    v: Any,
    heads: int,
    mask: torch.Tensor | None = None,
    attn_precision: torch.dtype | None = None,
    skip_reshape: bool = False,
    skip_output_reshape: bool = False,
    **keywords: Any,
) -> AttentionCall:
    """Return the call of ComfyUI's arguments. q, k and v may be in containers, and stay there."""
    tensors = [q, k, v] if isinstance(q, torch.Tensor) else [tensor.peek() for tensor in (q, k, v)]
    q4, k4, v4 = (_by_head(tensor, tensors[0], heads, skip_reshape) for tensor in tensors)
    full_mask = mask if mask is None or mask.ndim > 3 else mask[(None,) * (3 - mask.ndim)].unsqueeze(1)
    computed = q4, k4, v4, heads, full_mask, keywords.get("scale"), bool(keywords.get("enable_gqa"))
    return AttentionCall(*computed, not skip_output_reshape, attn_precision, keywords, otherwise)


def _by_head(tensor: torch.Tensor, q: torch.Tensor, heads: int, skip_reshape: bool) -> torch.Tensor:
    """Reshape an argument of ComfyUI's attention to [b, heads, n, width], which it has with `skip_reshape`.

    It comes as [b, n, heads * width] or (keys and values) [b, n, heads, width]; anything else stays unchanged.
    """
    if skip_reshape:
        return tensor
    width = q.shape[-1] // heads
    if tensor.ndim == 3 and width > 0 and tensor.shape[-1] % width == 0:
        tensor = tensor.unflatten(-1, (-1, width))
    return tensor.transpose(1, 2) if tensor.ndim == 4 else tensor


class Way(NamedTuple):
    """A way to compute attention calls on one device."""

    misfit: Callable[[AttentionCall], str | None]  # why it does not take a call, in words for the user
    attend: Callable[[AttentionCall], torch.Tensor]  # -> [batch, heads, tokens, width]
    # The same in two functions. The second takes what the first returns, which keeps no tensor of the call.
    halves: tuple[Callable[[AttentionCall], Any], Callable[[Any], torch.Tensor]] | None = None


class AttentionKind(NamedTuple):
    """A value of the widget `attention`. ComfyUI's own function computes calls that none of its ways takes."""

    runs: str  # what computes, in words for the user
    obstacle: Callable[[torch.device], str | None]  # why a device cannot have it, in words and with what to do
    ways: Callable[[torch.device], tuple[Way, ...]]  # what it tries on a device, in this order
    # Whether its first way rounds, so that a user has asked for it. It spares the first steps of a sampling and the
    # blocks that a calibration keeps exact, and says where it did not run.
    in_int8: bool


def _chooses_exact(device: torch.device) -> bool:
    """Whether there are exact ways to choose from: on NVIDIA cards where ComfyUI's attention is PyTorch's."""
    is_nvidia = device.type == "cuda" and torch.version.hip is None
    return is_nvidia and is_pytorch_attention(comfyuis_attention, None, pytorch_attentions())


def _exact(device: torch.device) -> tuple[Way, ...]:
    """Return the fastest exact way, which replaces PyTorch's attention and no other; none where there is no choice."""
    known = pytorch_attentions()

    def misfit(call: AttentionCall) -> str | None:
        if not is_pytorch_attention(call.otherwise, call.mask, known):
            return "another attention is chosen"
        if not _is_usual(call, device):
            return "its shapes or options are unusual"
        if fastest_way(call.q, call.k, call.v, call.mask, call.grouped) is None:
            return "what PyTorch chooses is as fast"
        return None

    def attend(call: AttentionCall) -> torch.Tensor:
        return exact_attention(call.q, call.k, call.v, call.mask, call.scale, call.grouped)

    return (Way(misfit, attend),) if _chooses_exact(device) else ()


def int8_way(device: torch.device) -> Way:
    """This pack's INT8 attention."""

    def attend(call: AttentionCall) -> torch.Tensor:
        return int8_attention(call.q, call.k, call.v, call.mask, call.scale)

    return Way(partial(_int8_misfit, device), attend)


def _kitchen(device: torch.device) -> Way:
    """comfy-kitchen's INT8 attention."""
    kernel = _comfy_kitchen.int8_attention
    takes_masks = "attn_mask" in inspect.signature(kernel).parameters
    first = getattr(comfy_kitchen, "prequantize_int8_attention", None)
    second = getattr(comfy_kitchen, "int8_attention_from_prequantized", None)

    def misfit(call: AttentionCall) -> str | None:
        if call.mask is not None and not takes_masks:
            return "it has a mask, which this comfy-kitchen does not take"
        return _int8_misfit(device, call)

    def run(function: Callable[..., Any], call: AttentionCall) -> Any:
        tensors = (x if x.stride(-1) == 1 else x.contiguous() for x in (call.q, call.k, call.v))
        return function(*tensors, scale=call.scale, **({} if call.mask is None else {"attn_mask": call.mask}))

    return Way(misfit, partial(run, kernel), (partial(run, first), second) if first and second else None)


def _kitchen_obstacle(device: torch.device) -> str | None:
    if not hasattr(comfy_kitchen, "int8_attention"):
        return (
            f"comfy-kitchen {version('comfy-kitchen')} is installed, which has no INT8 attention. {_KITCHEN_VERSION} "
            f'has it: run `pip install "comfy-kitchen>={_KITCHEN_VERSION}"` with the Python of ComfyUI'
        )
    if _comfy_kitchen.int8_attention_is_available(device):
        return None
    if device.type != "cuda":
        return f"the model runs on {device.type}, and INT8 attention needs a GPU"
    name, capability = torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < _KITCHEN_OLDEST:
        return f"{name} (sm_{capability[0]}{capability[1]}) is too old for it: it needs an RTX 20 card (sm_75) or newer"
    return (
        f"comfy-kitchen has no GPU code that runs here ({name}, PyTorch {torch.__version__}). On an NVIDIA card "
        f"install a PyTorch for CUDA 13 (cu130), or set attention to {INT8}"
    )


def _int8_misfit(device: torch.device, call: AttentionCall) -> str | None:
    options = call.keywords.get("transformer_options")
    if options is not None and options.get(KEEPS_EXACT) is True:
        return "a calibration keeps attention exact in its block"
    asks_for_more = call.attn_precision == torch.float32 != call.q.dtype
    if asks_for_more or not call.keywords.get("low_precision_attention", True):
        return "the model asks for more precision"
    if call.q.device.type != device.type:
        return f"it runs on {call.q.device.type}"
    if call.q.dtype not in FLOAT_DTYPES or not call.q.dtype == call.k.dtype == call.v.dtype:
        return "its tensors are not all of float16, of bfloat16 or of float32"
    if torch.is_grad_enabled() and (call.q.requires_grad or call.k.requires_grad or call.v.requires_grad):
        return "gradients are asked for"
    if call.q.shape[-1] > _WIDEST_HEAD:
        return f"its heads are wider than {_WIDEST_HEAD}"
    return None if _is_usual(call, device) else "its shapes or options are unusual"


def _is_usual(call: AttentionCall, device: torch.device) -> bool:
    """Whether a call has the shapes and options that kernels know."""
    q, k, v, heads, mask, *_ = call
    if not (q.device.type == device.type and q.ndim == k.ndim == 4 and k.shape == v.shape):
        return False
    (batch, own_heads, tokens, width), (key_batch, key_heads, keys, key_width) = q.shape, k.shape
    usual = (
        (batch, own_heads, width) == (key_batch, heads, key_width)
        and 0 not in (batch, heads, tokens, width, key_heads, keys)
        and (heads % key_heads == 0 if call.grouped else heads == key_heads)
        and batch * heads <= _MOST_HEADS
        and all(name in _KNOWN_KEYWORDS or value is None for name, value in call.keywords.items())
    )
    if not usual or mask is None:
        return usual
    full = (batch, heads, tokens, keys)
    fits = mask.ndim == 4 and all(size in (1, most) for size, most in zip(mask.shape, full, strict=True))
    return fits and mask.dtype in _MASK_DTYPES and mask.device == q.device


ATTENTION_KINDS = {
    AUTO: AttentionKind("the fastest exact way", lambda device: None, _exact, in_int8=False),
    AS_COMFYUI: AttentionKind(AS_COMFYUI, lambda device: None, lambda device: (), in_int8=False),
    INT8: AttentionKind(
        "INT8 where it fits", int8_attention_obstacle, lambda device: (int8_way(device), *_exact(device)), in_int8=True
    ),
    KITCHEN_INT8: AttentionKind(
        f"{KITCHEN_INT8} where it fits", _kitchen_obstacle, lambda device: (_kitchen(device),), in_int8=True
    ),
}
"""By name, in the order of the widget, which is set to the first in a new node."""
